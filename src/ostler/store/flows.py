"""What hangs on the end of a job: the next step of a chain, the callback of a batch. In the transaction of that end, so a
crash can neither lose a step nor store it twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ostler.errors import NotFound
from ostler.store.database import Database
from ostler.store.rows import NewJob

_NEAR = 10  # steps of a chain that are shown on either side of a job

Insert = Callable[[Sequence[NewJob], int], list[int]]


def step_of(job: NewJob, into: str | None = None, delay: float | None = None) -> dict[str, Any]:
    """A prepared job as it waits in a chain, batch or schedule. `into`: the parameter that takes the result before it; `delay`
    (seconds) counts from when it is stored.
    """
    more = {"into": into, "delay": delay}
    return {k: v for k, v in {**job._asdict(), **more}.items() if v is not None}


def job_of(step: dict[str, Any], now: int, result: str | None = None, **more: Any) -> NewJob:
    """The job that a step becomes at `now`; `result` (JSON text) is put into the parameter that waits for it."""
    values = {k: v for k, v in step.items() if k not in ("into", "delay")}
    if "delay" in step:
        values["run_at"] = now + int(step["delay"] * 1000)
    if step.get("into"):
        values["args"] = json.dumps(
            {**json.loads(values["args"]), step["into"]: None if result is None else json.loads(result)}
        )
    return NewJob(**{**values, **more})


class Flows:
    """Chains and batches in the store."""

    def __init__(
        self,
        db: Database,
        insert: Insert,
        put: Callable[[NewJob, int], tuple[int, bool]],
        lock_unique: Callable[[Iterable[str | None]], None],
        settle: Callable[[], None],
    ) -> None:
        self._db, self._insert, self._put, self._lock_unique, self._settle = db, insert, put, lock_unique, settle

    def ended(self, rows: Iterable[Any], now: int) -> None:
        """Jobs have ended, in the transaction that is open: go on with what hangs on them."""
        batches: dict[int, list[int]] = {}
        for row in rows:
            if row["status"] == "done" and self._go_on(row, now) and row["batch"] is not None:
                continue  # the chain goes on inside the batch: its last step ends it
            if row["batch"] is not None:
                count = batches.setdefault(row["batch"], [0, 0])
                count[0] += 1
                count[1] += row["status"] != "done"
        for batch, (ended, failed) in sorted(batches.items()):  # in one order: others change them, too
            self._less(batch, ended, failed, now)

    def begin(self, job: int, following: Sequence[dict[str, Any]]) -> None:
        """The job, just stored, is the first of a chain. Each step is stored once, so a long chain needs no more than its steps."""
        self._db.run("chain_begin", id=job)
        self._db.run_many("add_steps", [(job, n, json.dumps(step)) for n, step in enumerate(following, 1)])

    def _go_on(self, row: Any, now: int) -> bool:
        """A step is done: store the next one, where there is one."""
        chain, number = row["chain"], row["step"]
        if row["next"]:  # stored before chains had steps of their own
            self.begin(row["id"], json.loads(row["next"]))
            chain, number = row["id"], 0
        if chain is None:
            return False
        for step in self._db.run("step", chain=chain, n=number + 1):
            following = job_of(json.loads(step["step"]), now, row["result"])
            self._insert([following._replace(batch=row["batch"], chain=chain, step=number + 1)], now)
            return True
        return False

    def _less(self, batch: int, ended: int, failed: int, now: int) -> None:
        for row in self._db.run("batch_less", id=batch, ended=ended, failed=failed, now=now):
            if row["pending"] <= 0 and row["callback"] and row["callback_job"] is None:
                summary = json.dumps({"batch": batch, "total": row["total"], "failed": row["failed"]})
                job = self._insert([job_of(json.loads(row["callback"]), now, summary)], now)[0]
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
            self._lock_unique(job.unique_key for job in jobs)
            stored = [self._put(job._replace(batch=batch), now) for job in jobs]
            # A unique job that was there already is not the batch's: it does not wait for it.
            strangers = sum(1 for _, new in stored if not new)
            if strangers or not jobs:
                self._less(batch, strangers, 0, now)
            self._settle()
            self._db.ring({job.queue for job in jobs})
        return batch, [job for job, _ in stored]

    def get_batch(self, batch: int) -> dict[str, Any]:
        """How far a batch is; raises NotFound."""
        rows = self._db.run("batch", id=batch)
        if not rows:
            raise NotFound(f"there is no batch {batch}")
        return dict(rows[0])

    def related(self, job: int) -> dict[str, Any]:
        """What belongs to a job; raises NotFound. `chain`: the steps near it, `batch`: the one that it is part of, `follows`: the one whose
        end stored it.
        """
        rows = self._db.run("kin", id=job)
        if not rows:
            raise NotFound(f"there is no job {job}")
        own = rows[0]
        called = self._db.run("batch_of_callback", job=job)
        return {
            "chain": None if own["chain"] is None else self._chain(own["chain"], own["step"]),
            "batch": None if own["batch"] is None else self._batch_if_any(own["batch"]),
            "follows": self._batch_if_any(called[0]["id"]) if called else None,
        }

    def _batch_if_any(self, batch: int) -> dict[str, Any] | None:
        rows = self._db.run("batch", id=batch)
        return dict(rows[0]) if rows else None

    def _chain(self, chain: int, step: int) -> dict[str, Any]:
        """The steps of a chain around one of them. Retention may have deleted jobs of it, and with the last one its steps."""
        low, high = step - _NEAR, step + _NEAR
        stored = {row["step"]: row for row in self._db.run("chain_jobs", chain=chain, low=low, high=high)}
        tasks = {
            row["n"]: json.loads(row["step"])["task"]
            for row in self._db.run("chain_steps", chain=chain, low=low, high=high)
        }
        steps = [
            {"step": n, "task": stored[n]["task"] if n in stored else tasks[n], "job": stored[n]["id"] if n in stored else None,
             "status": stored[n]["status"] if n in stored else None}
            for n in sorted({*stored, *tasks})
        ]  # fmt: skip
        longest = max((self._db.run("chain_length", chain=chain)[0]["n"] or 0) + 1, steps[-1]["step"] + 1)
        broken = any(row["status"] in ("failed", "cancelled") for row in stored.values())
        return {"first": chain, "total": longest, "broken": broken, "steps": steps}
