"""The writing verbs about jobs, each one transaction; those that only read are in reading.py.

The timeline is written in the transaction that changes the state.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ostler.errors import Conflict, NotFound
from ostler.store.changes import QUEUED, SCHEDULED, Changes, state_of
from ostler.store.database import Database
from ostler.store.flows import Flows
from ostler.store.reading import JobReading
from ostler.store.retention import Retention
from ostler.store.rows import Existing, JobStatus, NewJob
from ostler.store.schedules import Schedules


class JobRecords(JobReading):
    """Jobs and their timeline in the store."""

    def __init__(self, db: Database, changes: Changes) -> None:
        super().__init__(db)
        self._changes = changes
        self.flows = Flows(db, self._insert, self._put_unique, self._lock_unique, changes.settle)
        self.schedules = Schedules(db, self._put_unique, self._lock_unique, changes.settle)
        self.retention = Retention(db, changes.moved, self.artifacts)

    # ---- producers

    def enqueue(self, jobs: Sequence[NewJob], now: int) -> list[int]:
        """Store all of them or none; when it returns, they survive a power cut (on a durable connection).

        Returns an id for each, in order: as `Existing` that of the job which already holds its unique key, where there is one.
        """
        if len(jobs) == 1 and (job := jobs[0]).unique_key is job.limit_key is job.next is None:  # the usual case
            return self._db.insert("enqueue", [(*job, now)], rings=True)
        return [stored if new else Existing(stored) for stored, new in self.put(jobs, now)]

    def put(self, jobs: Sequence[NewJob], now: int) -> list[tuple[int, bool]]:
        """`enqueue`, telling for each whether it is new."""
        with self._db.transaction():
            if any(job.unique_key for job in jobs):
                self._lock_unique(job.unique_key for job in jobs)
                stored = [self._put_unique(job, now) for job in jobs]
            else:
                stored = [(job, True) for job in self._insert(jobs, now)]
            self._changes.settle()
            self._db.ring({job.queue for job in jobs})
        return stored

    def _lock_unique(self, keys: Iterable[str | None]) -> None:
        self._db.lock(sorted({f"unique:{key}" for key in keys if key is not None}))

    def _put_unique(self, job: NewJob, now: int) -> tuple[int, bool]:
        if job.unique_key is None:
            return self._insert([job], now)[0], True
        for row in self._db.run("unique_holder", key=job.unique_key, now=now):
            if job.next is not None:
                raise Conflict(
                    f"job {row['job']} holds the unique key of the first step of this chain; the chain was not stored"
                )
            return int(row["job"]), False
        stored = self._insert([job], now)[0]
        until = None if job.unique_for is None else now + int(job.unique_for * 1000)
        self._db.tell("unique_set", key=job.unique_key, job=stored, until=until)
        return stored, True

    def _insert(self, jobs: Sequence[NewJob], now: int) -> list[int]:
        """Rows, in the transaction that is open. Each is its own `created` event, number 1 of its timeline."""
        ids = self._db.insert("enqueue", [(*job, now) for job in jobs])
        self._changes.limited((job.queue, job.limit_key) for job in jobs)
        moved: dict[tuple[str, str], int] = {}
        for job, stored in zip(jobs, ids, strict=True):
            key = (job.queue, state_of(job, now))
            moved[key] = moved.get(key, 0) + 1
            if job.next is not None:
                self.flows.begin(stored, json.loads(job.next))
        if self._db.shared:
            self._changes.moved(moved)
        return ids

    def recount(self) -> None:
        """Count the depths anew from the rows; where one node has the store to itself."""
        if not self._db.shared:
            with self._db.transaction():
                self._db.run("depths_clear")
                self._db.run("depths_fill")
                self._db.run("counted")

    # ---- runs

    def hold(self, job: int, fence: int, key: str | None = None, home: str = "") -> bool:
        """Whether this claim is still the job's, and nobody asked to cancel it: asked before what cannot be undone.

        On a durable connection the answer is synced, and with it every commit before it, also those of other connections: no id
        and no fence that a publish is about to put on disk can roll back in a power cut. With the `key` of such a publish, that is
        written down in the same transaction, so that its file goes with the job, whatever becomes of the run.
        """
        if key is None:
            return bool(self._db.run("hold", id=job, fence=fence))
        with self._db.transaction():
            held = bool(self._db.run("hold", id=job, fence=fence))
            if held:
                self.artifacts.begin(job, key, home)
        return held

    # ---- operators

    def cancel(self, job: int, now: int) -> str:
        """A queued job is cancelled at once; a running one is asked to stop. Returns the status found; Conflict when it has ended."""
        with self._db.transaction():
            self._changes.count_new()
            found = self._cancel(job, now)
            self._changes.settle()
        return found

    def _cancel(self, job: int, now: int) -> str:
        for statement, event in (("cancel_queued", "cancelled"), ("cancel_running", "cancel:requested")):
            for row in self._db.run(statement, id=job, now=now):
                self._changes.timeline([(job, row["seq"], now, event, None)])
                self._db.ring_all()
                if event == "cancelled":
                    self._db.tell_ended([job])
                    before = SCHEDULED if row["later"] == 1 else QUEUED
                    self._changes.moved({(row["queue"], before): -1, (row["queue"], event): 1})
                    if row["batch"] is not None:
                        self.flows.ended([row], now)
                    self._changes.limited([(row["queue"], row["limit_key"])])
                    self._changes.tally({(row["queue"], event): 1}, now)
                return str(JobStatus.QUEUED if event == "cancelled" else JobStatus.PROCESSING)
        status = str(self.find(job)["status"])
        if status == JobStatus.PROCESSING:  # asked before: still the same wish
            return status
        raise Conflict(f"job {job} is {status}; only a queued or processing job can be cancelled")

    def retry(self, job: int, now: int) -> str:
        """Put an ended job back into its queue with a fresh budget; returns the queue. Conflict while it is live, or when another
        job holds its unique key.
        """
        with self._db.transaction():
            self._changes.count_new()
            found = self._retry(job, now)
            self._changes.settle()
        return found

    def _retry(self, job: int, now: int) -> str:
        found = self.find(job)
        if found["unique_key"] is not None and found["status"] not in (JobStatus.QUEUED, JobStatus.PROCESSING):
            self._lock_unique([found["unique_key"]])
            for row in self._db.run("unique_holder", key=found["unique_key"], now=now):
                if row["job"] != job:
                    raise Conflict(f"job {job} cannot be retried: job {row['job']} holds its unique key")
            self._db.run("unique_set", key=found["unique_key"], job=job, until=None)
        self._db.run("keep_events", ids=json.dumps([job]))
        for row in self._db.run("retry", id=job):
            self._db.ring({row["queue"]})
            self._changes.timeline([(job, row["seq"], now, "retried", None)])
            self._changes.moved({(row["queue"], found["status"]): -1, (row["queue"], QUEUED): 1})
            if row["batch"] is not None:
                self.flows.put_back(row["batch"], found["status"])
            self._changes.limited([(row["queue"], row["limit_key"])])
            return str(row["queue"])
        raise Conflict(f"job {job} is {found['status']}; only a done, failed or cancelled job can be retried")

    def await_end(self, job: int, until: int) -> None:
        """Somebody waits for the end of this job until then: whoever ends it shall tell (`Database.tell_ended`)."""
        self._db.run("waiters_old", now=self._db.now())
        self._db.run("waiter_add", job=job, until=until)

    def cancel_many(self, now: int, limit: int, **filters: Any) -> dict[int, str]:
        """Cancel the live jobs that the filters fit; the status found of each. What ends meanwhile is passed over."""
        return self._many(filters.pop("status", None) or "live", limit, filters, lambda job: self._cancel(job, now))

    def retry_many(self, now: int, limit: int, status: str, **filters: Any) -> dict[int, str]:
        """Retry the ended jobs that the filters fit; the queue of each. What cannot be retried is passed over."""
        return self._many(status, limit, filters, lambda job: self._retry(job, now))

    def _many(self, status: str, limit: int, filters: dict[str, Any], verb: Callable[[int], str]) -> dict[int, str]:
        done: dict[int, str] = {}
        ids = self.matching(status, limit, **filters)
        for start in range(0, len(ids), 500):  # short transactions: others write too
            with self._db.transaction():
                self._changes.count_new()
                for job in ids[start : start + 500]:
                    with contextlib.suppress(Conflict, NotFound):
                        done[job] = verb(job)
                self._changes.settle()
        return done
