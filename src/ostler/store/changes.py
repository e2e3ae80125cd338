"""What a transaction that changes jobs has to write besides their rows: timeline, depths of queues, heads of limits, errors, counters.

All of it is written in that transaction, so that nothing that is counted or told is ever apart from what was stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ostler.store import limits
from ostler.store.database import Database
from ostler.store.identity import name_of
from ostler.store.live import Counts, Tallies
from ostler.store.reading import ERRORS
from ostler.store.rows import Finish, JobStatus, NewJob, Requeue

QUEUED, SCHEDULED, PROCESSING = "queued", "scheduled", "processing"  # states that are counted
Event = tuple[int, int, int, str, str | None]  # job, seq, at, name, data


class Changes:
    """Of the transaction that is open on one connection."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._tallies = Tallies(db)
        self._unsettled: set[limits.Key] = set()  # limit keys under which it changed what waits
        self._gathered: Counter[tuple[str, str]] | None = None  # moves that are written together
        self._errors: list[tuple[int, int, int, str | None, str]] = []  # job, seq, at, node, data; of runs that it ends

    def forget(self) -> None:
        """The transaction is over, whatever became of it."""
        self._gathered = None
        self._errors = []

    def count_new(self) -> None:
        """Jobs that were stored since the last look are counted, before anything happens to them. Others count them at once."""
        if not self._db.shared and self._db.run("count_new"):
            self._db.run("counted")

    def limited(self, keys: Iterable[tuple[str, str | None]]) -> None:
        """What waits for these queues and limit keys has changed."""
        self._unsettled.update((queue, key) for queue, key in keys if key is not None)

    def settle(self) -> None:
        """Before the transaction ends: the first job of each limit key that it touched is in the ready index."""
        keys, self._unsettled = self._unsettled, set()
        limits.put_heads(self._db, keys)

    def timeline(self, events: Iterable[Event]) -> None:
        batch = list(events)
        if batch:
            self._db.run_many("add_events", batch)

    def gather(self) -> None:
        """From now on moves wait, until `moved_all`."""
        self._gathered = Counter()

    def moved(self, moves: Mapping[tuple[str, str], int]) -> None:
        """So many jobs of a queue entered or left a state."""
        if self._gathered is not None:
            self._gathered.update(moves)
            return
        rows = [(queue, state, n) for (queue, state), n in moves.items() if n and state != JobStatus.DONE]
        if rows:
            self._db.run_many("depth_add", rows)

    def moved_all(self) -> None:
        """Write the moves that were gathered."""
        gathered, self._gathered = self._gathered, None
        self.moved(gathered or {})

    def failed(self, end: Finish | Requeue, seq: int, at: int, node: str) -> None:
        """A run has ended: keep its error, if it had one."""
        if end.failure is not None:
            self._errors.append((end.id, seq, at, name_of(node), end.failure))
            if end.fence > ERRORS:  # it has not had so many runs before
                self._db.tell("errors_old", job=end.id, kept=ERRORS - 1)

    def keep_errors(self) -> None:
        errors, self._errors = self._errors, []
        if errors:
            self._db.run_many("add_errors", errors)

    def tally(self, counts: Counts, now: int) -> None:
        self._tallies.add(counts, now)


def state_of(job: NewJob, now: int) -> str:
    """The counted state of a job that is stored now."""
    return SCHEDULED if job.run_at is not None and job.run_at > now else QUEUED


def state(row: Any) -> str:
    """The counted state of a stored job."""
    return SCHEDULED if row["status"] == QUEUED and row["later"] == 1 else str(row["status"])
