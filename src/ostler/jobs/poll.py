"""What other processes wrote into the store: pauses, cancels, jobs that are ready, queues that nobody serves.

Rings of the doorbell make the node look at once; this poll is for a ring that was lost, and for what nobody rings for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, NamedTuple

from ostler.config import Settings
from ostler.jobs.dispatcher import Dispatcher
from ostler.lifecycle.supervisor import Supervisor
from ostler.store import now_ms
from ostler.store.lanes import Lane
from ostler.store.store import Store

log = logging.getLogger("ostler.jobs")

_PATIENCE = 1.0  # seconds; the next poll looks again


class _Seen(NamedTuple):
    enabled: bool
    paused: frozenset[str]
    cancels: list[tuple[int, int]]
    ready: bool
    depths: dict[str, dict[str, int]]
    served: frozenset[str]
    unserved: list[dict[str, Any]]


class Poll:
    """The fallback look into the store, once per `poll_interval`."""

    def __init__(self, settings: Settings, lane: Lane, supervisor: Supervisor, dispatcher: Dispatcher) -> None:
        self._settings, self._lane, self._supervisor, self._dispatcher = settings, lane, supervisor, dispatcher
        self._task: asyncio.Task[None] | None = None
        self.stranded: list[str] = []
        """In words: queues with jobs that are ready, or will be, and tasks with jobs, that no running node serves."""

    async def start(self) -> None:
        """Look once, then again and again."""
        await self.look()
        for complaint in self.stranded:
            log.warning("%s", complaint)
        self._task = asyncio.get_running_loop().create_task(self._run(), name="poll")

    async def stop(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._settings.poll_interval)
            await self.look()

    async def look(self) -> None:
        """Read what other processes may have changed, and act on it."""
        queues = self._dispatcher.idle_queues()
        node, lease_ms = self._supervisor.member.id, int(self._settings.node_lease * 1000)

        def read(store: Store) -> _Seen:
            return _Seen(
                *store.meta.pauses(),
                store.jobs.wanted_cancels(node),
                bool(queues) and store.jobs.ready(queues, now_ms()),
                store.jobs.depths(),
                store.health.served(store.now() - lease_ms),
                store.nodes.unserved(),
            )

        mark, pressure = self._supervisor.pauses.mark(), self._dispatcher.pressure
        try:
            if pressure.watermarks:
                await pressure.measure()
            seen = await self._lane.call(read, patience=_PATIENCE)
        except Exception as error:  # noqa: BLE001  the next poll looks again
            log.warning("the store could not be read: %s", error)
            return
        waiting = {queue: n.get("queued", 0) for queue, n in seen.depths.items()}
        pressure.press(waiting, time.monotonic())
        changed = self._supervisor.pauses.seen(mark, seen.enabled, seen.paused & frozenset(self._supervisor.pools))
        for job, fence in seen.cancels:
            self._dispatcher.deadlines.cancel(job, fence)
        served = seen.served | {name for name, pool in self._supervisor.pools.items() if pool.slots}
        self.stranded = [
            stranded(queue, total)
            for queue, n in sorted(seen.depths.items())
            if queue not in served and (total := n.get("queued", 0) + n.get("scheduled", 0))
        ]
        self.stranded += [unserved(row["task"], row["n"]) for row in seen.unserved if row["queue"] in served]
        if seen.ready or changed:
            self._dispatcher.wake()


def unserved(task: str, count: int) -> str:
    """The complaint about a task that nobody declares."""
    jobs = "1 job waits" if count == 1 else f"{count} jobs wait"
    return (
        f"{jobs} for task {task!r}, which no running node declares; deploy an app that has it, or cancel them with: "
        f"ostler cancel --task {task}"
    )


def stranded(queue: str, count: int) -> str:
    """The complaint about a queue that nobody serves."""
    jobs = "1 job waits" if count == 1 else f"{count} jobs wait"
    return (
        f"{jobs} in queue {queue!r}, which no running node serves; give its pool workers, declare a job with "
        f"queue={queue!r} again, or cancel them with: ostler cancel --queue {queue}"
    )
