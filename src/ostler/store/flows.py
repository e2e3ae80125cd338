"""What hangs on the end of a job: the next step of a chain, the callback of a batch. In the transaction of that end, so a
crash can neither lose a step nor store it twice. And schedules, which store a job when their time has come.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ostler.errors import NotFound
from ostler.store.rows import NewJob
from ostler.store.sqlite import SqliteDatabase

Insert = Callable[[Sequence[NewJob], int], list[int]]


def step_of(job: NewJob, into: str | None = None) -> dict[str, Any]:
    """A prepared job as it waits in a chain, batch or schedule. `into`: the parameter that takes the result before it."""
    return {**{k: v for k, v in job._asdict().items() if v is not None}, **({"into": into} if into else {})}


def job_of(step: dict[str, Any], result: str | None = None, **more: Any) -> NewJob:
    """The job that a step becomes; `result` (JSON text) is put into the parameter that waits for it."""
    values = {k: v for k, v in step.items() if k != "into"}
    if step.get("into"):
        values["args"] = json.dumps(
            {**json.loads(values["args"]), step["into"]: None if result is None else json.loads(result)}
        )
    return NewJob(**{**values, **more})


class Flows:
    """Chains, batches and schedules in the store."""

    def __init__(self, db: SqliteDatabase, insert: Insert) -> None:
        self._db, self._insert = db, insert

    def ended(self, rows: Iterable[Any], now: int) -> None:
        """Jobs have ended, in the transaction that is open: go on with what hangs on them."""
        batches: dict[int, list[int]] = {}
        for row in rows:
            if row["status"] == "done" and row["next"]:
                first, *rest = json.loads(row["next"])
                batch = row["batch"]
                following = job_of(first, row["result"], next=json.dumps(rest) if rest else None, batch=batch)
                self._insert([following], now)
                if batch is not None:
                    continue  # the chain goes on inside the batch: its last step ends it
            if row["batch"] is not None:
                count = batches.setdefault(row["batch"], [0, 0])
                count[0] += 1
                count[1] += row["status"] != "done"
        for batch, (ended, failed) in batches.items():
            self._less(batch, ended, failed, now)

    def _less(self, batch: int, ended: int, failed: int, now: int) -> None:
        for row in self._db.run("batch_less", id=batch, ended=ended, failed=failed, now=now):
            if row["pending"] <= 0 and row["callback"] and row["callback_job"] is None:
                summary = json.dumps({"batch": batch, "total": row["total"], "failed": row["failed"]})
                job = self._insert([job_of(json.loads(row["callback"]), summary)], now)[0]
                self._db.run("batch_called", id=batch, job=job)

    def put_back(self, batch: int, status: str) -> None:
        """An ended job of a batch was retried by hand."""
        self._db.run("batch_more", id=batch, failed=int(status != "done"))

    def batch(self, jobs: Sequence[NewJob], callback: dict[str, Any] | None, now: int) -> tuple[int, list[int]]:
        """Store the jobs and what follows when all have ended; (batch, jobs). An empty batch has ended at once."""
        with self._db.transaction():
            batch = self._db.run(
                "batch_new", total=len(jobs), callback=json.dumps(callback) if callback else None, now=now
            )[0]["id"]
            ids = self._insert([job._replace(batch=batch) for job in jobs], now)
            if not jobs:
                self._less(batch, 0, 0, now)
        return batch, ids

    def get_batch(self, batch: int) -> dict[str, Any]:
        """How far a batch is; raises NotFound."""
        rows = self._db.run("batch", id=batch)
        if not rows:
            raise NotFound(f"there is no batch {batch}")
        return dict(rows[0])

    # ---- schedules

    def declare_schedules(self, schedules: Sequence[dict[str, Any]]) -> None:
        """What the app declares; what it no longer declares is dropped. A schedule that did not change keeps its next time."""
        with self._db.transaction():
            for schedule in schedules:
                self._db.run("schedule_put", **{**schedule, "step": json.dumps(schedule["step"])})
            self._db.run("schedule_drop", names=json.dumps([s["name"] for s in schedules]))

    def schedules(self) -> list[dict[str, Any]]:
        """All schedules with their next time."""
        return [{**dict(r), "step": json.loads(r["step"])} for r in self._db.run("schedules")]

    def fire(self, now: int, following: Callable[[str, str, int], int]) -> tuple[list[int], int | None]:
        """Store a job for each schedule whose time has come; (jobs, the next time). `following(spec, zone, now)` is pure.

        Each fires once for all the times that were missed while no node ran: no storm after a long stop. Nodes may race: whoever
        moves the schedule forward stores the job, in the same transaction.
        """
        jobs = []
        if self._db.run("schedule_due", now=now):
            with self._db.transaction():
                for row in self._db.run("schedule_due", now=now):
                    upcoming = following(row["spec"], row["zone"], now)
                    if self._db.run("schedule_move", name=row["name"], seen=row["next_at"], next_at=upcoming, now=now):
                        job = self._insert([job_of(json.loads(row["step"]))], now)[0]
                        self._db.run("schedule_fired", name=row["name"], job=job)
                        jobs.append(job)
        times = [row["next_at"] for row in self._db.run("schedules")]
        return jobs, min(times, default=None)
