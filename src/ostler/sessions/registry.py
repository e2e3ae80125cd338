"""The registry of sessions: which workers take them, which session has which slot, and how each one ended.

A worker's slots are given out by its own node alone, so the node's memory is exact. The registry is the guard and the record: it
admits no session beyond a worker's slots and lifetime, whatever anybody believes; and it tells other nodes where there is room.
There are two, with one conformance suite: the store (here), and Redis or Valkey (redis_registry.py).

Trouble of the registry never ends a session. What it could not be told is kept here and told later; what it has forgotten is put
back by the next heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from ostler.errors import StoreBusy
from ostler.store.lanes import Lane
from ostler.store.sessions import (
    AVAILABLE,
    DRAIN,
    DRAINING,
    SERVE,
    Admission,
    Beat,
    Ended,
    Lost,
    SessionRow,
    Verdict,
    WorkerEntry,
    WorkerKey,
)
from ostler.store.store import Store, now_ms

__all__ = [
    "AVAILABLE", "DRAIN", "DRAINING", "SERVE", "Admission", "Beat", "Ended", "Memory", "Registered", "Registry", "SessionRow",
    "StoreRegistry", "Swept", "Verdict", "WorkerEntry", "WorkerKey",
]  # fmt: skip

log = logging.getLogger("ostler.sessions")

PATIENCE = 3.0  # seconds that a turn or a heartbeat waits for the registry
_SWEEP = 10.0  # seconds; nodes that are declared dead are released at once, so this finds only what they wrote later
_LISTED = 1000  # live sessions that are listed at most
T = TypeVar("T")


class Registered(NamedTuple):
    """A worker of a living node, as the registry has it."""

    node: str
    name: str
    url: str | None
    pool: str
    serves: str
    component: str
    generation: int
    address: str
    slots: int
    lifetime: int
    served: int
    in_use: int
    status: str
    wanted: str
    versions: tuple[str, ...]
    started_at: int
    beat_at: int

    @property
    def worker(self) -> WorkerKey:
        return WorkerKey(self.component, self.generation)

    @property
    def free(self) -> int:
        """Sessions that it could take now."""
        if self.status != AVAILABLE or self.wanted != SERVE:
            return 0
        left = self.lifetime - self.served if self.lifetime else self.slots
        return max(0, min(self.slots - self.in_use, left))


class Swept(NamedTuple):
    """What a sweep removed: a worker whose node is gone, and the sessions that ended with it."""

    worker: str
    node: str
    pool: str
    silent: float
    """Seconds since its last heartbeat."""
    sessions: tuple[str, ...]


class Registry(Protocol):
    """What the node's session pools use. All on the node's loop. Raises StoreBusy when the registry does not answer in time."""

    rung: Callable[[], None]
    """Called when somebody may want something of this node: then `beat` and `orders` are worth asking at once."""

    sweep_every: float
    """Seconds between two sweeps of a node."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def announce(self, worker: WorkerEntry) -> None:
        """The worker is ready. A second time changes nothing."""

    async def turn(self, ended: Sequence[Ended], wanted: Sequence[Admission]) -> list[Verdict]:
        """One atomic step: these sessions are over, then these are admitted, each or refused, in their order.

        An end is never lost: where this raises, it is told with the next turn or heartbeat. A session whose turn raised is not
        admitted; if it was stored all the same, the next heartbeat ends it.
        """

    async def beat(self, workers: Sequence[Beat]) -> dict[WorkerKey, str]:
        """The workers are there; what is wanted of each: `serve` or `drain`. Puts back what the registry has lost."""

    async def leave(self, worker: WorkerKey, reason: str, text: str) -> None:
        """The worker is no more; sessions that it still had ended for this reason."""

    async def workers(self) -> list[Registered]:
        """The workers of all living nodes."""

    async def live(self) -> list[dict[str, Any]]:
        """Live sessions of all nodes (at most 1000), newest first, in the form of `store.sessions.list`."""

    async def sweep(self) -> list[Swept]:
        """End what nodes that are gone have left. Every node does this; a second time finds nothing."""

    async def orders(self) -> list[str]:
        """Sessions of this node that somebody asked to end."""

    async def secret(self, own: str) -> str:
        """What the nodes of this registry know each other by; `own` where none has said yet."""

    async def end(self, session: str) -> bool:
        """Ask the node that has the session to end it; False when there is no such live session."""

    async def want(self, worker: Registered, state: str) -> bool:
        """Have a worker of any node serve or drain; False when it is gone."""


class Memory:
    """What this node has told the registry, and what it still has to. The truth about its own workers and sessions."""

    def __init__(self) -> None:
        self.workers: dict[WorkerKey, WorkerEntry] = {}
        self.live: dict[str, SessionRow] = {}
        self.owed: dict[str, Ended] = {}

    def announced(self, entry: WorkerEntry) -> None:
        before = self.workers.get(entry.worker)
        self.workers[entry.worker] = (
            entry if before is None else entry._replace(served=max(entry.served, before.served))
        )

    def ended(self, ended: Iterable[Ended]) -> list[SessionRow]:
        """These are over, and the registry is to be told; the rows of those that were live, as they end."""
        rows = []
        for one in ended:
            self.owed[one.id] = one
            if row := self.live.pop(one.id, None):
                rows.append(row.over(one, now_ms()))
        return rows

    def told(self, ended: Iterable[Ended]) -> None:
        for one in ended:
            self.owed.pop(one.id, None)

    def admitted(self, node: str, wanted: Sequence[Admission], verdicts: Sequence[Verdict]) -> None:
        for about, verdict in zip(wanted, verdicts, strict=True):
            if verdict.ok and about.id not in self.live:
                self.live[about.id] = SessionRow.begun(node, about, now_ms())
                if entry := self.workers.get(about.worker):
                    self.counted(about.worker, entry.served + 1)

    def counted(self, worker: WorkerKey, served: int) -> None:
        """The registry has counted so many sessions of a worker."""
        if entry := self.workers.get(worker):
            self.workers[worker] = entry._replace(served=max(entry.served, served))

    def beaten(self, beats: Iterable[Beat]) -> list[SessionRow]:
        """The workers are as they say; the sessions that have moved bytes since the last time."""
        moved = []
        for beat in beats:
            if entry := self.workers.get(beat.worker):
                self.workers[beat.worker] = entry._replace(status=beat.status)
                self.counted(beat.worker, beat.served)
            for id_, (bytes_in, bytes_out) in beat.live.items():
                row = self.live.get(id_)
                if row is not None and (row.bytes_in, row.bytes_out) != (bytes_in, bytes_out):
                    self.live[id_] = row._replace(bytes_in=bytes_in, bytes_out=bytes_out, seen_at=now_ms())
                    moved.append(self.live[id_])
        return moved

    def of(self, worker: WorkerKey) -> Iterator[SessionRow]:
        """Its live sessions."""
        return (row for row in self.live.values() if (row.component, row.generation) == worker)

    def left(self, worker: WorkerKey, reason: str, text: str) -> list[SessionRow]:
        """The worker is gone; the rows of the sessions that ended with it."""
        self.workers.pop(worker, None)
        ended = [Ended(row.id, reason, text, None, row.bytes_in, row.bytes_out) for row in self.of(worker)]
        rows = self.ended(ended)
        self.told(ended)
        return rows


class StoreRegistry:
    """The registry in the store, for one node and for many. `lane` writes (one of its own, so that nothing slow stands before an
    admission), `glance` reads. `node` gives the node's id, which changes when it was declared dead and came back.
    """

    def __init__(self, lane: Lane, glance: Lane, node: Callable[[], str], patience: float = PATIENCE) -> None:
        self._lane, self._glance, self._node, self._patience = lane, glance, node, patience
        self.rung: Callable[[], None] = lambda: None  # (the store's bell rings)
        self._memory = Memory()
        self.sweep_every = _SWEEP
        # What is in memory when the next one begins is what the last one left in the store.
        self._order = asyncio.Lock()

    async def start(self) -> None:
        """The store is there already."""

    async def stop(self) -> None:
        """Tell what is still to be told."""
        if owed := [*self._memory.owed.values()]:
            node = self._node()
            self._lane.post(lambda store: store.sessions.turn(node, owed, []))

    async def announce(self, worker: WorkerEntry) -> None:
        self._memory.announced(worker)
        async with self._order:
            node = self._node()
            await self._write(lambda store: store.sessions.announce(node, [worker]))

    async def turn(self, ended: Sequence[Ended], wanted: Sequence[Admission]) -> list[Verdict]:
        self._memory.ended(ended)
        async with self._order:
            node, owed = self._node(), [*self._memory.owed.values()]
            verdicts = await self._write(lambda store: store.sessions.turn(node, owed, wanted))
            self._memory.told(owed)
            self._memory.admitted(node, wanted, verdicts)
        return verdicts

    async def beat(self, workers: Sequence[Beat]) -> dict[WorkerKey, str]:
        async with self._order:
            memory, node = self._memory, self._node()
            memory.beaten(workers)
            owed, known, live = [*memory.owed.values()], [*memory.workers.values()], [*memory.live.values()]

            def work(store: Store) -> dict[WorkerKey, str]:
                if owed:
                    store.sessions.turn(node, owed, [])
                return store.sessions.beat(node, workers, known, live)

            wanted = await self._write(work)
            memory.told(owed)
        return wanted

    async def leave(self, worker: WorkerKey, reason: str, text: str) -> None:
        self._memory.left(worker, reason, text)
        node = self._node()
        async with self._order:
            self._lane.post(lambda store: store.sessions.leave(node, worker, reason, text))

    async def workers(self) -> list[Registered]:
        rows = await self._glance.call(lambda store: store.sessions.workers())
        return [Registered(**{**row, "versions": tuple(row["versions"])}) for row in rows]

    async def live(self) -> list[dict[str, Any]]:
        return await self._glance.call(lambda store: store.sessions.list(state="live", limit=_LISTED)[0])

    async def sweep(self) -> list[Swept]:
        lost, now = await self._write(lambda store: (store.sessions.sweep(), store.now()))
        found = [_swept(one, now) for one in lost]
        for one in found:
            tell_swept(one)
        return found

    async def orders(self) -> list[str]:
        node = self._node()
        return await self._glance.call(lambda store: store.sessions.orders(node))

    async def secret(self, own: str) -> str:
        return own  # it is the store's own already

    async def end(self, session: str) -> bool:
        return await self._write(lambda store: store.sessions.end(session))

    async def want(self, worker: Registered, state: str) -> bool:
        return await self._write(lambda store: store.sessions.want(worker.node, worker.worker, state))

    async def _write(self, work: Callable[[Store], T]) -> T:
        """All of it is the same when it comes twice, so a commit in doubt is tried again."""
        try:
            async with asyncio.timeout(2 * self._patience):
                return await self._lane.call(work, patience=self._patience, known=True)
        except TimeoutError:
            raise StoreBusy(
                f"the store has not answered about sessions within {2 * self._patience:g} s; try again"
            ) from None


def tell_swept(swept: Swept) -> None:
    """Log it: one line for each worker."""
    log.warning(
        "reaped stale worker %s of pool %s: its node %s was last heard %.0f s ago; %d sessions ended with it",
        swept.worker,
        swept.pool or "?",
        swept.node,
        swept.silent,
        len(swept.sessions),
    )


def _swept(lost: Lost, now: int) -> Swept:
    silent = max(0, now - lost.beat_at) / 1000 if lost.beat_at else 0.0
    name = f"{lost.component} generation {lost.generation}" if lost.component else "(gone already)"
    return Swept(name, lost.node, lost.pool, silent, lost.sessions)
