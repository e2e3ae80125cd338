"""What a node does now and then: fire schedules, delete what is too old. Guarded and idempotent, so every node may do it.

Schedules store jobs, so they use the durable lane. Everything else has a lane of its own and works in short steps with a pause
after each: a claim, an enqueue or a publish never waits longer than one step. What is old is decided by the store's clock: a node
whose own is wrong must not delete what the others keep.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from ostler.config import Settings
from ostler.errors import StoreBusy
from ostler.events import Bus
from ostler.jobs import results, schedule, scratch
from ostler.jobs.logs import JobLogs
from ostler.parts import Tasks
from ostler.store.artifacts import Gone
from ostler.store.lanes import Lane
from ostler.store.store import Store

log = logging.getLogger("ostler.jobs")
P = ParamSpec("P")
T = TypeVar("T")

_LONGEST_SLEEP = 30.0  # clocks are set and other nodes change schedules: look again
_TASKS = "tasks that no node declares"
_STEP = 0.004  # seconds that one step of a purge should take
_AWAY_MS = 7 * 86_400_000  # for so long it is remembered that a node which is away has artifacts to delete
_PARTS_EVERY = 3600.0  # how often the results are searched for files that a killed publish left


class Upkeep:
    """Two loops on the node's own: schedules, and the rest."""

    def __init__(
        self,
        settings: Settings,
        lane: Lane,
        intake: Lane,
        bus: Bus,
        fired: Callable[[], None],
        node: Callable[[], str],
        origin: str = "",
        home: str = "",
    ) -> None:
        self._settings, self._lane, self._intake, self._bus = settings, lane, intake, bus
        self._fired, self._node = fired, node
        self._logs = JobLogs(settings.data_dir)
        self._origin, self._home = origin, home
        self._most = 100  # jobs that the next step of a purge deletes
        self._parts_due = 0.0
        self._begins = True
        self._tasks = Tasks()

    async def start(self) -> None:
        self._tasks.begin(_forever("schedules", self._schedules), "schedules")
        self._tasks.begin(_forever("upkeep", self._rounds), "upkeep")

    async def stop(self) -> None:
        await self._tasks.stop()

    async def _schedules(self) -> None:
        patience = self._settings.store_patience
        jobs, wait = await self._intake.call(partial(_fire, node=self._node()), patience=patience)
        if jobs:
            log.info("enqueued by schedules that were due: %s", ", ".join(f"job {job}" for job in jobs))
            self._fired()
        await asyncio.sleep(min(max(0.05, wait), _LONGEST_SLEEP))

    async def _rounds(self) -> None:
        if self._begins:  # jobs that wait for this node's tasks wait no longer
            self._begins = False
            await self._all({_TASKS: self._undeclared})
        await asyncio.sleep(self._settings.upkeep_interval)
        await self.clean()

    async def clean(self) -> None:
        """One round. Each part stands alone: one that fails is logged, and the others go on."""
        parts: dict[str, Callable[[], Awaitable[None]]] = {
            _TASKS: self._undeclared,
            "retries after a change of the clock": self._clock,
            "deleting old jobs": self._old_jobs,
            "deleting the files of deleted jobs": self._files,
            "deleting the artifacts of deleted jobs": self._artifacts,
            "deleting old keys and batches": self._leftovers,
            "deleting old counters and incidents": self._counters,
            "deleting old rows of the call log": self._calls,
            "deleting rows of old sessions": self._sessions,
            "deleting unfinished artifacts": self._parts,
            "sweeping scratch": self._scratch,
        }
        await self._all(parts)

    async def _all(self, parts: Mapping[str, Callable[[], Awaitable[None]]]) -> None:
        for name, part in parts.items():
            try:
                await part()
            except StoreBusy as error:
                log.warning("upkeep, %s: %s", name, error)
            except Exception:
                log.exception("upkeep, %s: failed; continuing with the rest", name)

    async def _step(self, work: Callable[Concatenate[Store, P], T], *values: P.args, **more: P.kwargs) -> T:
        """One short piece of work on the lane, and a pause as long as it took: others write, too."""

        def timed(store: Store) -> tuple[T, float]:
            """What came of it, and for how long it kept others from writing."""
            before = store.db.held
            return work(store, *values, **more), store.db.held - before

        value, took = await self._lane.call(timed, patience=self._settings.store_patience)
        await asyncio.sleep(max(took, 0.001))
        if took > 2 * _STEP:
            self._most = max(10, self._most // 2)
        elif took < _STEP / 2:
            self._most = min(2000, self._most * 2)
        return value

    async def _now(self) -> int:
        return await self._lane.call(lambda store: store.now(), patience=self._settings.store_patience)

    async def _undeclared(self) -> None:
        """Jobs of tasks that are gone leave the line, and come back with the task. Rows of ended nodes go after a while."""
        await self._step(lambda store: store.nodes.drop_undeclared())
        while await self._step(lambda store: store.nodes.park()):
            pass
        kept = int(self._settings.exit_retention * 1000)
        await self._step(lambda store: store.nodes.forget(store.now() - kept))

    async def _clock(self) -> None:
        while await self._step(lambda store: store.jobs.retention.wait_no_longer(store.now())):
            self._fired()

    async def _old_jobs(self) -> None:
        now, settings, deleted = await self._now(), self._settings, 0
        done = now - int(settings.retention * 1000) if settings.retention else None
        failed = now - int(settings.failed_retention * 1000) if settings.failed_retention else None
        more = True
        while more:
            found = await self._step(
                lambda s, most: s.jobs.retention.purge(done_before=done, failed_before=failed, most=most), self._most
            )
            deleted, more = deleted + len(found.jobs), found.more
        if deleted:
            log.info("deleted %d old jobs", deleted)

    async def _files(self) -> None:
        """What deleted jobs printed and published. What cannot be deleted now is tried again in the next round."""
        after = 0
        while jobs := await self._step(lambda store, last: store.jobs.retention.files(last), after):
            await self._step(lambda store: store.jobs.retention.sync())
            gone = await asyncio.to_thread(self._forget, jobs)
            await self._step(lambda store, jobs: store.jobs.retention.files_gone(jobs), gone)
            after = jobs[-1]

    def _forget(self, jobs: list[int]) -> list[int]:
        """Delete the files of these jobs; those whose files are gone."""
        self._logs.delete(jobs)
        place = results.connect(self._settings.results, self._settings.data_dir)
        gone = []
        for job in jobs:
            try:
                place.forget(job, self._origin)
                gone.append(job)
            except Exception as error:  # noqa: BLE001  the rest goes on
                log.warning("the artifacts of job %d could not be deleted: %s; trying again later", job, error)
        return gone

    async def _artifacts(self) -> None:
        """What deleted jobs have published under any key. Of nodes that do not share their results, each deletes its own; the files of
        one that does not come back within a week stay there.
        """
        after: Gone | None = None
        while found := await self._step(lambda store, last: store.jobs.artifacts.gone(last), after):
            await self._step(lambda store: store.jobs.retention.sync())
            gone = await asyncio.to_thread(self._remove, found, await self._now() - _AWAY_MS)
            await self._step(lambda store, publishes: store.jobs.artifacts.forget(publishes), gone)
            after = found[-1]

    def _remove(self, publishes: list[Gone], before: int) -> list[Gone]:
        """Delete the files of these publishes, unless another job has published there since; those that need no other look."""
        place = results.connect(self._settings.results, self._settings.data_dir)
        gone = []
        for one in publishes:
            try:
                is_removed = place.remove(one.key, one.job, self._origin)
            except Exception as error:  # noqa: BLE001  the rest goes on
                log.warning("artifact %s could not be deleted: %s; trying again later", one.key, error)
                continue
            is_own = one.home == self._home or not isinstance(place, results.LocalResults)
            if is_removed or is_own or one.since < before:
                gone.append(one)
        return gone

    async def _leftovers(self) -> None:
        now, settings = await self._now(), self._settings
        after: str | None = ""
        while after is not None:
            after = await self._step(lambda store, last: store.jobs.retention.purge_keys(now, last), after)
        kept = [seconds for seconds in (settings.retention, settings.failed_retention) if seconds]
        before = now - int(max(kept, default=0.0) * 1000)
        more = bool(kept)
        while more:
            more = await self._step(lambda store: store.jobs.retention.purge_batches(before))

    async def _counters(self) -> None:
        now = await self._now()
        while await self._step(lambda store: store.live.purge(now, now - int(self._settings.exit_retention * 1000))):
            pass

    async def _calls(self) -> None:
        settings = self._settings
        await self._rows(lambda store, *how: store.calls.purge(*how), settings.calls_retention, settings.calls_kept)

    async def _sessions(self) -> None:
        settings = self._settings
        keep = settings.sessions_retention, settings.sessions_kept
        await self._rows(lambda store, *how: store.sessions.purge(*how), *keep)

    async def _rows(self, purge: Callable[[Store, int | None, int, int], bool], retention: float, kept: int) -> None:
        """Of a log: those older than so many seconds, and all but so many; 0: no limit."""
        before = await self._now() - int(retention * 1000) if retention else None
        if before is not None or kept:
            while await self._step(purge, before, kept, self._most):
                pass

    async def _parts(self) -> None:
        if time.monotonic() < self._parts_due:
            return
        self._parts_due = time.monotonic() + _PARTS_EVERY
        place = results.connect(self._settings.results, self._settings.data_dir)
        if found := await asyncio.to_thread(place.sweep):
            log.info("deleted %d unfinished artifacts of killed runs", found)

    async def _scratch(self) -> None:
        settings, root = self._settings, self._settings.data_dir / "scratch"
        ids = await asyncio.to_thread(_folders, root)
        live = await self._step(lambda store: store.jobs.live(ids))
        limits: dict[str, Any] = {"max_age": settings.scratch_max_age, "max_bytes": int(settings.scratch_max_mb * 1e6)}
        folders, freed = await asyncio.to_thread(scratch.sweep, root, live=live, **limits)
        if folders:
            log.info("deleted the scratch directories of %d ended jobs (%.1f MB)", folders, freed / 1e6)


def _fire(store: Store, node: str) -> tuple[list[int], float]:
    """The jobs of the schedules that were due, and the seconds until the next one is, by the store's clock."""
    jobs, due = store.jobs.schedules.fire(node, store.now(), schedule.following)
    return jobs, _LONGEST_SLEEP if due is None else (due - store.now()) / 1000


def _folders(root: Path) -> list[int]:
    """The jobs that have scratch."""
    return [int(name) for name in os.listdir(root) if scratch.is_of_job(name)] if root.is_dir() else []  # noqa: PTH208  names alone


async def _forever(name: str, step: Callable[[], Awaitable[None]]) -> None:
    while True:
        began = time.monotonic()
        try:
            await step()
        except Exception:
            log.exception("%s failed; continuing", name)
            await asyncio.sleep(max(0.0, 5.0 - (time.monotonic() - began)))
