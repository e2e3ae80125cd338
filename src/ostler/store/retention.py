"""Deleting what is too old, in short steps: each is one transaction of a few milliseconds, so that claims and enqueues go on in
between. Whoever calls leaves a pause after each step.

The files of a job (its log, its artifacts) go after its row. `purged` remembers them from the transaction that deletes the row
until they are gone, so a crash in between leaks nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ostler.store.artifacts import Artifacts
from ostler.store.database import Database

_EVENTS = 2_000  # timeline rows that one step deletes


class Purged(NamedTuple):
    """The jobs that a step deleted, and whether there is more to do."""

    jobs: list[int]
    more: bool


class Retention:
    """The steps. None of them depends on an earlier one; each finds for itself what is too old."""

    def __init__(
        self, db: Database, moved: Callable[[Mapping[tuple[str, str], int]], None], artifacts: Artifacts
    ) -> None:
        self._db, self._moved, self._artifacts = db, moved, artifacts

    def purge(self, *, done_before: int | None, failed_before: int | None, most: int = 200) -> Purged:
        """Delete jobs that ended before these times (done and cancelled ones; failed ones). None: they are kept."""
        rows = self._db.run("old_jobs", done=done_before, failed=failed_before, limit=most)
        chosen: list[int] = []
        events = 0
        for row in rows:
            events += row["seq"]
            if chosen and events > _EVENTS:
                break
            chosen.append(row["id"])
        if not chosen:
            return Purged([], more=False)
        if rows[0]["seq"] > _EVENTS and self._trim(chosen[0]):
            return Purged([], more=True)
        with self._db.transaction():
            gone = self._delete(chosen)
        return Purged(gone, more=len(rows) == most or len(chosen) < len(rows))

    def _trim(self, job: int) -> bool:
        """Delete the oldest part of a long timeline before the rest goes with the job. False when what is left is short."""
        with self._db.transaction():
            return len(self._db.run("trim_events", job=job, most=_EVENTS)) == _EVENTS

    def _delete(self, jobs: list[int]) -> list[int]:
        rows = self._db.run("purge_jobs", ids=json.dumps(jobs))
        gone = json.dumps([row["id"] for row in rows])
        self._moved({key: -n for key, n in Counter((row["queue"], row["status"]) for row in rows).items()})
        self._db.run("purge_events", ids=gone)
        self._db.run("purge_errors", ids=gone)
        self._db.run("purged_add", ids=gone)
        if rows:
            self._artifacts.mark_gone([row["id"] for row in rows])
        if chains := {row["chain"] for row in rows if row["chain"] is not None}:
            self._db.run("purge_steps", chains=json.dumps(sorted(chains)))
        return [row["id"] for row in rows]

    def files(self, after: int = 0, most: int = 500) -> list[int]:
        """Deleted jobs whose files are still to be deleted, from the oldest on."""
        return [row["job"] for row in self._db.run("purged", after=after, limit=most)]

    def sync(self) -> None:
        """Make sure that no power cut brings back the rows whose files are about to go."""
        with self._db.synced():
            self._db.run("meta_set", key="purged", value="synced")

    def files_gone(self, jobs: list[int]) -> None:
        """Their files are deleted."""
        self._db.run("purged_done", ids=json.dumps(jobs))

    def purge_keys(self, now: int, after: str = "", most: int = 500) -> str | None:
        """Delete unique keys that hold nothing any more; where to go on, or None at the end."""
        rows = self._db.run("old_uniques", now=now, after=after, limit=most)
        if dead := [row["key"] for row in rows if row["dead"]]:
            self._db.run("purge_uniques", now=now, keys=json.dumps(dead))
        return rows[-1]["key"] if len(rows) == most else None

    def purge_batches(self, before: int, most: int = 200) -> bool:
        """Delete batches that ended before this time and have no job left; whether there may be more."""
        ids = [row["id"] for row in self._db.run("old_batches", before=before, limit=most)]
        if ids:
            self._db.run("purge_batches", ids=json.dumps(ids))
        return len(ids) == most

    def wait_no_longer(self, now: int) -> int:
        """Retries never wait longer than they were meant to, also when the clock was days ahead when they began to wait."""
        ids = [row["id"] for row in self._db.run("waits_too_long", now=now)]
        if ids:
            self._db.run("wait_no_longer", now=now, ids=json.dumps(ids))
        return len(ids)
