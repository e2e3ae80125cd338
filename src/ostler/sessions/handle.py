"""The objects that session code receives: its worker, and the sessions that it serves. Standard library only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class SessionWorker:
    """The worker process that the code runs in.

    `socket` is the path of a Unix socket to listen on, `scratch` a directory for this worker. Both are removed when the worker ends, even
    after a crash. Other users can enter `scratch` but not list it; its subdirectory `private` is only for the worker's user.
    """

    name: str  # worker:chromium:0
    generation: int
    socket: str
    scratch: Path
    slots: int
    _say: Callable[..., None] = field(repr=False)
    log: logging.Logger = field(default=logging.getLogger("ostler.sessions"), repr=False)

    def lost(self, why: str) -> None:
        """Report that what this worker serves has died. Its clients are told `why`, and the worker is replaced."""
        self._say("lost", str(why)[:200])


@dataclass(frozen=True, slots=True)
class Session:
    """One client's session."""

    id: str
    owner: str  # token:NAME or user:UID
    client: str  # its address
    agent: str  # its User-Agent
    path: str  # the requested path after the pool's name
    key: str | None  # the key with which the client can reconnect
    _say: Callable[..., None] = field(repr=False)

    def lost(self, why: str) -> None:
        """Report that what serves this session has died. Its client is told `why`."""
        self._say("ended", self.id, str(why)[:200])

    @classmethod
    def of(cls, session: str, about: dict[str, Any], say: Callable[..., None]) -> Session:
        """As the node describes it."""
        owner, client, agent, path = (str(about.get(name) or "") for name in ("owner", "client", "agent", "path"))
        return cls(session, owner, client, agent, path, about.get("key"), say)
