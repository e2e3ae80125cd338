"""Schedules: a row each, which stores a job when its time has come. A paused one stores none."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterable
from typing import Any

from ostler.errors import NotFound
from ostler.store.database import Database
from ostler.store.flows import job_of
from ostler.store.rows import NewJob

log = logging.getLogger("ostler.store")

_RESUMED_MS = 5000  # while one is paused, a node looks again after so long: anybody may resume it

Following = Callable[[str, str, int], int]  # (spec, zone, now) -> the next time; pure


class Schedules:
    """The schedules that apps declare. `put`, `lock_unique` and `settle` are those of the jobs."""

    def __init__(
        self,
        db: Database,
        put: Callable[[NewJob, int], tuple[int, bool]],
        lock_unique: Callable[[Iterable[str | None]], None],
        settle: Callable[[], None],
    ) -> None:
        self._db, self._put, self._lock_unique, self._settle = db, put, lock_unique, settle

    def all(self) -> list[dict[str, Any]]:
        """All schedules with their next time."""
        return [
            {**dict(row), "step": json.loads(row["step"]), "paused": bool(row["paused"])}
            for row in self._db.run("schedules")
        ]

    def get(self, name: str) -> dict[str, Any]:
        """One of them; raises NotFound."""
        found = self.all()
        for one in found:
            if one["name"] == name:
                return one
        known = ", ".join(one["name"] for one in found[:20])
        raise NotFound(f"there is no schedule {name!r}; " + (f"known are: {known}" if known else "no app declares any"))

    def fire(self, node: str, now: int, following: Following) -> tuple[list[int], int | None]:
        """Store a job for each schedule of the node's app whose time has come; (jobs, the next time).

        Each fires once for all the times that were missed while no node ran: no storm after a long stop. Nodes may race: whoever
        moves the schedule forward stores the job, in the same transaction.
        """
        jobs = []
        if self._db.run("schedule_due", node=node, now=now):
            with self._db.transaction():
                for row in self._db.run("schedule_due", node=node, now=now):
                    try:
                        upcoming = following(row["spec"], row["zone"], now)
                    except Exception:  # one bad schedule does not hold up the others
                        log.exception("schedule %s cannot tell its next time", row["name"])
                        continue
                    if self._db.run("schedule_move", name=row["name"], seen=row["next_at"], next_at=upcoming):
                        job, new = self._store(row, now)
                        jobs += [job] if new else []
                self._settle()
        for row in self._db.run("schedules_of", node=node):
            with contextlib.suppress(Exception):  # told above, when it is due
                self._pull(row, following(row["spec"], row["zone"], now))
        times = [
            now + _RESUMED_MS if row["paused"] else row["next_at"] for row in self._db.run("schedules_of", node=node)
        ]
        return jobs, min(times, default=None)

    def run(self, name: str, now: int) -> tuple[int, bool]:
        """Store its job now, whether it is paused or not: (job, whether it is new: else its unique key was taken by that job). Its next
        time stays. Raises NotFound.
        """
        self.get(name)
        with self._db.transaction():
            job, new = self._store(self._db.run("schedule", name=name)[0], now)
            self._settle()
        return job, new

    def pause(self, name: str, now: int, following: Following, *, paused: bool) -> dict[str, Any]:
        """Paused, it stores nothing until it is resumed; then its next time is the next one from now, and what was missed stays missed.
        Raises NotFound.
        """
        found = self.get(name)
        if found["paused"] != paused:
            upcoming = found["next_at"] if paused else following(found["spec"], found["zone"], now)
            self._db.run("schedule_pause", name=name, paused=int(paused), next_at=upcoming)
        return self.get(name)

    def _store(self, row: Any, now: int) -> tuple[int, bool]:
        step = job_of(json.loads(row["step"]), now)
        self._lock_unique([step.unique_key])
        job, new = self._put(step, now)
        self._db.ring({step.queue})
        self._db.run("schedule_fired", name=row["name"], job=job, now=now)
        return job, new

    def _pull(self, row: Any, upcoming: int) -> None:
        if row["next_at"] > upcoming:
            self._db.run("schedule_pull", name=row["name"], next_at=upcoming)
