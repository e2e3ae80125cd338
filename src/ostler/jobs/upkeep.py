"""What a node does now and then: fire schedules, delete what is too old. Guarded and idempotent, so every node may do it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ostler.config import Settings
from ostler.events import Bus, Recovered
from ostler.jobs import results, schedule, scratch
from ostler.jobs.logs import JobLogs
from ostler.store import now_ms
from ostler.store.lanes import Lane
from ostler.store.store import Store

log = logging.getLogger("ostler.jobs")

_LONGEST_SLEEP = 30.0  # clocks are set and other nodes change schedules: look again


class Upkeep:
    """Two loops on the node's own: schedules, and the rest."""

    def __init__(
        self,
        settings: Settings,
        lane: Lane,
        bus: Bus,
        fired: Callable[[], None],
        recover: Callable[[Store], list[int]],
        origin: str = "",
    ) -> None:
        self._settings, self._lane, self._bus, self._fired, self._recover = settings, lane, bus, fired, recover
        self._logs = JobLogs(settings.data_dir)
        self._origin = origin
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(_forever("schedules", self._schedules), name="schedules"),
            loop.create_task(_forever("upkeep", self._clean), name="upkeep"),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _schedules(self) -> None:
        jobs, due = await self._lane.call(lambda store: store.jobs.flows.fire(now_ms(), schedule.following))
        if jobs:
            log.info("schedules have stored jobs %s", ", ".join(map(str, jobs)))
            self._fired()
        wait = _LONGEST_SLEEP if due is None else (due - now_ms()) / 1000
        await asyncio.sleep(min(max(0.05, wait), _LONGEST_SLEEP))

    async def _clean(self) -> None:
        await asyncio.sleep(self._settings.upkeep_interval)
        if back := await self._lane.call(self._recover):
            self._bus.send(Recovered(len(back), "stale"))
            self._fired()
        await self.clean()

    async def clean(self) -> None:
        """Delete jobs, logs and scratch that are too old, once."""
        now, settings = now_ms(), self._settings

        def purge(store: Store) -> list[int]:
            done = now - int(settings.retention * 1000) if settings.retention else None
            failed = now - int(settings.failed_retention * 1000) if settings.failed_retention else None
            store.live.purge(now, now - int(settings.exit_retention * 1000))
            return store.jobs.purge(now, done_before=done, failed_before=failed)

        gone = await self._lane.call(purge)
        live = await self._lane.call(lambda store: store.jobs.live())
        limits: dict[str, Any] = {"max_age": settings.scratch_max_age, "max_bytes": int(settings.scratch_max_mb * 1e6)}
        folders, freed = await asyncio.to_thread(scratch.sweep, settings.data_dir / "scratch", live=live, **limits)
        if folders:
            log.info("scratch of %d ended jobs was deleted (%.1f MB)", folders, freed / 1e6)
        if gone:
            log.info("%d old jobs were deleted", len(gone))
            await asyncio.to_thread(self._forget, gone)

    def _forget(self, jobs: list[int]) -> None:
        """What jobs printed and published goes with them."""
        self._logs.delete(jobs)
        place = results.connect(self._settings.results, self._settings.data_dir)
        for job in jobs:
            try:
                place.forget(job, self._origin)
            except Exception as error:  # noqa: BLE001  the rest goes on
                log.warning("the artifacts of job %d could not be deleted: %s", job, error)


async def _forever(name: str, step: Callable[[], Awaitable[None]]) -> None:
    while True:
        began = time.monotonic()
        try:
            await step()
        except Exception:
            log.exception("%s failed once and goes on", name)
            await asyncio.sleep(max(0.0, 5.0 - (time.monotonic() - began)))
