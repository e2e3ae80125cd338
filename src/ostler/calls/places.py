"""Models on many nodes: what this node's are like goes to the store, and what others say goes to the data plane."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ostler.calls.placing import CROWDED, NEVER, NOW
from ostler.errors import OstlerError
from ostler.store.lanes import Lane
from ostler.store.places import PlaceRow
from ostler.store.store import Store

if TYPE_CHECKING:
    from ostler.calls.gateway import Gateway
    from ostler.lifecycle.membership import Membership

log = logging.getLogger("ostler.calls")

_LOOK = 1.0  # seconds between two looks at the others
_AGAIN = 10.0  # seconds after which rows are written anew though nothing changed: somebody may have cleared them


class Places:
    """A part of the node, where the store has many. Its data is at most a few seconds old, so a node that is asked may refuse."""

    def __init__(
        self,
        gateway: Gateway,
        states: Callable[[], dict[str, dict[str, Any]]],
        lane: Lane,
        member: Membership,
        secret: str,
    ) -> None:
        self._gateway, self._states, self._lane, self._member, self._secret = gateway, states, lane, member, secret
        self.elsewhere: list[dict[str, Any]] = []
        """The models of the other living nodes, as they last said."""
        self._written: tuple[str, list[PlaceRow]] | None = None
        self._left = 0.0
        self._told: Any = None
        self._is_deaf = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="places")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
                self._is_deaf = False
            except OstlerError as error:
                if not self._is_deaf:
                    log.warning("where other nodes have models cannot be read now; calls stay here: %s", error)
                self._is_deaf = True
            except Exception:
                log.exception("the places of models could not be looked at; it goes on")
            await asyncio.sleep(_LOOK)

    async def _look(self) -> None:
        rows, node = self._rows(), self._member.id
        self._left -= _LOOK
        writes = self._written != (node, rows) or self._left <= 0

        def exchange(store: Store) -> list[dict[str, Any]]:
            if writes:
                store.places.put(node, rows)
            return store.places.all()

        found = await self._lane.call(exchange)
        if writes:
            self._written, self._left = (node, rows), _AGAIN
        self.elsewhere = [row for row in found if row["node"] != node]
        self._tell(node, rows)

    def _tell(self, node: str, rows: list[PlaceRow]) -> None:
        here = {f"{row.task}\n{row.model}": [row.state, row.free, row.waiting, row.fits] for row in rows}
        peers: dict[str, dict[str, Any]] = {}
        for row in self.elsewhere:
            if row["url"]:
                peer = peers.setdefault(row["node"], {"url": row["url"], "models": {}})
                peer["models"][f"{row['task']}\n{row['model']}"] = [
                    row["state"],
                    row["free"],
                    row["waiting"],
                    row["fits"],
                ]
        told = {"own": node, "secret": self._secret, "here": here, "peers": peers}
        if told != self._told and self._gateway.tell_peers(told):
            self._told = told

    def forget(self) -> None:
        """A new plane knows nothing yet."""
        self._told = None

    def _rows(self) -> list[PlaceRow]:
        memory = self._gateway.supervisor.ledger.snapshot() if self._gateway.supervisor.ledger else {}
        stopping = self._gateway.supervisor.stopping
        rows = []
        for name, state in self._states().items():
            task, model = name.split(":", 1)
            options = self._gateway.models[task].options(model)
            free = max(0, state["workers"] * options.connections - state["in_flight"] - state["waiting"])
            is_warm = state["state"] in ("READY", "BUSY") and not stopping
            shown = "TERMINATED" if stopping else state["state"]
            fits = room(memory, options.memory_mb, options.gpu_mb)
            rows.append(PlaceRow(task, model, shown, free if is_warm else 0, state["waiting"], fits))
        return rows


def room(memory: Mapping[str, Any], host_mb: float, gpu_mb: float) -> int:
    """Whether that much could be had: never, if others leave, now."""
    host, devices = memory.get("host"), memory.get("devices") or []
    if host is None:
        return NOW
    if gpu_mb and not devices:
        host_mb, gpu_mb = host_mb + gpu_mb, 0.0
    needs = [(host_mb, [host])] if host_mb else []
    needs += [(gpu_mb, devices)] if gpu_mb else []
    if any(all(mb > m["total_mb"] - m["headroom_mb"] for m in where) for mb, where in needs):
        return NEVER
    return NOW if all(any(mb <= m["room_mb"] for m in where) for mb, where in needs) else CROWDED
