"""What the web, the live state and metrics see of a node's session pools. The node's side (pools.py) is this and more."""

from __future__ import annotations

from typing import Any, Protocol

# Why a session ended. What each means is in docs/sessions.md.
REASONS = (
    "client",
    "worker",
    "refused",
    "idle",
    "longest",
    "killed",
    "silent",
    "slow",
    "drained",
    "shutdown",
    "worker-lost",
    "worker-hung",
    "relay-lost",
    "node-lost",
    "unused",
    "detached",
)


class Elsewhere(Protocol):
    """What the other nodes of the registry have, at most a second old."""

    async def live(self) -> list[dict[str, Any]]:
        """Their sessions, newest first, in the form of `store.sessions.list`."""
        ...

    def workers(self) -> list[dict[str, Any]]:
        """Their workers: node, name, url, pool, serves, component, status, slots, in_use, free, served, lifetime, versions."""
        ...


class Sessions(Protocol):
    """Session pools by the name that clients connect to, from the node's memory: the data plane tells it once a second. The shapes of
    what is returned are the models of web/sessions.py.
    """

    @property
    def neighbours(self) -> Elsewhere | None:
        """None where this node is the only one."""
        ...

    def capacity(self) -> dict[str, Any]:
        """name -> pools, slots, in_use, free, waiting, workers: each with component, generation, status, serves, slots, in_use, served,
        lifetime, probe_ms, mb, versions, started_at.
        """
        ...

    def live(self) -> list[dict[str, Any]]:
        """Sessions under way on this node."""
        ...

    def lines(self) -> dict[str, Any]:
        """name -> total, and the first of those who wait as (owner, priority, seconds waited)."""
        ...

    def counts(self) -> dict[str, Any]:
        """name -> admitted, refused, left, expired, bytes_in, bytes_out, strikes, since the node started."""
        ...

    def kill(self, session: str, by: str) -> bool:
        """End a session of this node; False when it has none of that id."""
        ...

    async def end_elsewhere(self, session: str) -> bool:
        """Ask the node that has it to end it; False when none is known to."""
        ...

    def view_socket(self, session: str) -> str | None:
        """The path of the socket on which its worker shows it; None when it does not."""
        ...
