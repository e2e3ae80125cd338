"""What other processes wrote into the store: pauses, cancels, what operators want of this node, jobs that are ready, queues that
nobody serves.

A ring makes the node look at once for what operators want; the rest, and rings that were lost, are found by the poll.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from ostler.config import Settings
from ostler.errors import StoreBusy
from ostler.jobs.dispatcher import Dispatcher
from ostler.lifecycle.control import Control
from ostler.lifecycle.supervisor import Supervisor
from ostler.parts import Tasks
from ostler.store import fleet, now_ms
from ostler.store.lanes import Lane
from ostler.store.store import Store

log = logging.getLogger("ostler.jobs")

_PATIENCE = 1.0  # seconds; the next poll looks again
_RINGS = 0.05  # seconds between two looks that were rung for
_AFTER = (
    0.005  # seconds for the turn of a new job, for which most rings are: two threads that read at once are both slow
)


class _Wanted(NamedTuple):
    """What operators want."""

    enabled: bool
    paused: frozenset[str]
    cancels: list[tuple[int, int]]
    wishes: list[dict[str, Any]]


class _Seen(NamedTuple):
    wanted: _Wanted
    nodes: int
    ready: bool
    depths: dict[str, dict[str, int]]
    served: frozenset[str]
    unserved: list[dict[str, Any]]
    strangers: bool
    needed: list[str]


class Poll:
    """The fallback look into the store, once per `poll_interval`."""

    def __init__(
        self,
        settings: Settings,
        lane: Lane,
        writer: Lane,
        supervisor: Supervisor,
        dispatcher: Dispatcher,
        control: Control,
    ) -> None:
        self._settings, self._lane, self._writer, self._control = settings, lane, writer, control
        self._supervisor, self._dispatcher = supervisor, dispatcher
        self._tasks = Tasks()
        self._rung = asyncio.Event()
        self._later: asyncio.TimerHandle | None = None
        self._granted: dict[int, None] = {}  # wishes that were done; their answers may still be on the way to the store
        self.stranded: list[str] = []
        """In words: queues with jobs that are ready, or will be, and tasks with jobs, that no running node serves."""
        self.unrunnable: Counter[str] = Counter()
        """How many queued jobs of each queue have a task that no running node declares."""
        self.nodes = 1
        """How many nodes live, or died and are missed."""

    async def start(self) -> None:
        """Look once, then again and again."""
        await self.look()
        for complaint in self.stranded:
            log.warning("%s", complaint)
        self._tasks.begin(self._run(), "poll")
        self._tasks.begin(self._answer_rings(), "answer rings")

    async def stop(self) -> None:
        if self._later:
            self._later.cancel()
        await self._tasks.stop()

    def ring(self) -> None:
        """Somebody rang: for a new job, which goes first, or perhaps an operator."""
        self._dispatcher.wake()
        if self._later is None:
            self._later = asyncio.get_running_loop().call_later(_AFTER, self._ring)

    def _ring(self) -> None:
        self._later = None
        self._dispatcher.tell()
        self._rung.set()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._settings.poll_interval)
            await self.look()

    async def _answer_rings(self) -> None:
        while True:
            await self._rung.wait()
            self._rung.clear()
            mark = self._supervisor.pauses.mark()
            with contextlib.suppress(StoreBusy):  # the poll looks again
                if self._heed(mark, await self._lane.call(self._read_wanted(), patience=_PATIENCE)):
                    self._dispatcher.wake()
            await asyncio.sleep(_RINGS)

    def _read_wanted(self) -> Callable[[Store], _Wanted]:
        node = self._supervisor.member.id

        def read(store: Store) -> _Wanted:
            return _Wanted(*store.meta.pauses(), store.jobs.wanted_cancels(node), store.nodes.wishes(node))

        return read

    def _heed(self, mark: int | None, wanted: _Wanted) -> bool:
        """Do what operators want; whether what is paused has changed."""
        changed = self._supervisor.pauses.seen(mark, wanted.enabled, wanted.paused & frozenset(self._supervisor.pools))
        for job, fence in wanted.cancels:
            self._dispatcher.deadlines.cancel(job, fence)
        for wish in wanted.wishes:
            if wish["id"] not in self._granted:
                self._grant(wish["id"], wish["verb"], wish["target"])
        open_wishes = {wish["id"] for wish in wanted.wishes}
        self._granted = {number: None for number in self._granted if number in open_wishes}
        return changed

    def _grant(self, number: int, verb: str, target: str) -> None:
        """Do it once, and have the answer written down."""
        self._granted[number] = None
        log.info("an operator asked through the store: %s %s", verb, target)
        answer = self._control.grant(verb, target)
        self._writer.post(lambda store: store.nodes.grant(number, answer))

    async def look(self) -> None:
        """Read what other processes may have changed, and act on it."""
        queues = self._dispatcher.idle_queues()
        drowsy = {pool.spec.name: pool for pool in self._supervisor.reserving.drowsy() if pool.spec.name not in queues}
        lease_ms, wanted = int(self._settings.node_lease * 1000), self._read_wanted()

        def read(store: Store) -> _Seen:
            return _Seen(
                wanted(store),
                len(fleet.put_together(store.nodes.all(), (), {}, store.now()).nodes) if store.db.shared else 1,
                bool(queues) and store.jobs.ready(queues, now_ms()),
                store.jobs.depths(),
                store.health.served(store.now() - lease_ms),
                store.nodes.unserved(),
                store.nodes.strangers(),
                store.jobs.needed([*drowsy], now_ms()) if drowsy else [],
            )

        mark, pressure = self._supervisor.pauses.mark(), self._dispatcher.pressure
        try:
            if pressure.watermarks:
                await pressure.measure()
            seen = await self._lane.call(read, patience=_PATIENCE)
        except Exception as error:  # noqa: BLE001  the next poll looks again
            log.warning("the store could not be read: %s", error)
            return
        self.nodes = seen.nodes
        waiting = {queue: n.get("queued", 0) for queue, n in seen.depths.items()}
        pressure.press(waiting, time.monotonic())
        changed = self._heed(mark, seen.wanted)
        for queue in seen.needed:
            if not self._supervisor.pauses.holds(queue) and not pressure.holds(queue, time.monotonic()):
                self._supervisor.reserving.rouse(drowsy[queue], max(1, waiting.get(queue, 0)))
        served = seen.served | {name for name, pool in self._supervisor.pools.items() if pool.slots}
        before, self.unrunnable = self.stranded, Counter()
        for row in seen.unserved:
            self.unrunnable[row["queue"]] += row["n"]
        self.stranded = [
            stranded(queue, total)
            for queue, n in sorted(seen.depths.items())
            if queue not in served and (total := n.get("queued", 0) + n.get("scheduled", 0))
        ]
        self.stranded += [unserved(row["task"], row["n"]) for row in seen.unserved if row["queue"] in served]
        if seen.strangers:  # the next look tells of them
            self._writer.post(lambda store: store.nodes.park())
        if self.stranded != before:
            self._dispatcher.ring()  # those who look are told
        elif seen.ready or changed:
            self._dispatcher.wake()


def unserved(task: str, count: int) -> str:
    """The complaint about a task that nobody declares."""
    jobs = "1 job waits" if count == 1 else f"{count} jobs wait"
    return (
        f"{jobs} for task {task!r}, which no running node declares; if the task is new, restart the node (or run it with 'ostler up --reload'); "
        f"otherwise deploy an app that has it, or cancel them with: ostler cancel --task {task}"
    )


def stranded(queue: str, count: int) -> str:
    """The complaint about a queue that nobody serves."""
    jobs = "1 job waits" if count == 1 else f"{count} jobs wait"
    return (
        f"{jobs} in queue {queue!r}, which no running node serves; start a node with --pool {queue}=2; or, if the app declares a job with queue={queue!r} since "
        f"the node was started, restart the node; or cancel them with: ostler cancel --queue {queue}"
    )
