"""What the live state is made of: counters over time, incidents in words, and which jobs are new or run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from ostler.store.database import Database

# Upper bounds in milliseconds of the bins that durations are counted in, eight to a decade up to two hours; the last bin has none.
BOUNDS = tuple(sorted({round(10 ** (k / 8)) for k in range(56)}))

FINE, COARSE, EVER = 10, 600, 0  # widths of buckets in seconds
_KEPT = {FINE: 2 * 3600, COARSE: 8 * 86_400}
_EVER_NAMES = frozenset({"done", "failed", "cancelled", "run_ms"})

Counts = dict[tuple[str, str], int]  # (queue, name) -> how many


def bin_of(ms: int) -> int:
    """The number of the bin that a duration falls into."""
    return bisect_left(BOUNDS, ms)


class Tallies:
    """Counters per queue: in buckets of ten seconds for two hours, of ten minutes for eight days, and for ever."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def add(self, counts: Mapping[tuple[str, str], int], now: int) -> None:
        """Count, in the transaction that is open: what is counted and what was written are never apart."""
        second = now // 1000
        rows: list[tuple[Any, ...]] = []
        for (queue, name), n in counts.items():
            rows.append((FINE, second - second % FINE, queue, name, n))
            rows.append((COARSE, second - second % COARSE, queue, name, n))
            if name in _EVER_NAMES:
                rows.append((EVER, 0, queue, name, n))
        if rows:
            self._db.run_many("tally", rows)

    def totals(self) -> dict[str, dict[str, int]]:
        """Per queue, since ever: done, failed, cancelled, run_ms."""
        found: dict[str, dict[str, int]] = {}
        for row in self._db.run("totals"):
            found.setdefault(row["queue"], {})[row["name"]] = row["n"]
        return found

    def averages(self, now: int) -> dict[str, float]:
        """Seconds that a run of each queue took, over the last hour."""
        sums: dict[str, dict[str, int]] = {}
        for row in self._db.run("sum_tallies", step=COARSE, since=now // 1000 - 3600, now=now // 1000):
            sums.setdefault(row["queue"], {})[row["name"]] = row["n"]
        return {q: s.get("run_ms", 0) / s["done"] / 1000 for q, s in sums.items() if s.get("done")}

    def newest(self, now: int) -> dict[str, dict[str, int]]:
        """The newest bucket of ten seconds: per queue its counters, and `at`. One from before the clock was set back is not it."""
        found: dict[str, dict[str, int]] = {}
        for row in self._db.run("newest_tallies", step=FINE, now=now // 1000):
            found.setdefault(row["queue"], {"at": row["at"]})[row["name"]] = row["n"]
        return found

    def series(
        self, width: int, since: int, queue: str | None = None, until: int | None = None
    ) -> list[dict[str, int]]:
        """Buckets of `width` seconds that have anything in them, oldest first. A multiple of COARSE, or of FINE.

        `until` leaves out what was counted while the clock was ahead.
        """
        step = COARSE if width % COARSE == 0 else FINE
        found: dict[int, dict[str, int]] = {}
        for row in self._db.run("series", step=step, width=width, since=since, queue=queue, until=until):
            found.setdefault(row["at"], {"at": row["at"]})[row["name"]] = row["n"]
        return list(found.values())

    def purge(self, now: int) -> bool:
        """Drop old buckets, a few at a time; whether there may be more."""
        steps = [self._db.run("purge_tallies", step=step, before=now // 1000 - kept) for step, kept in _KEPT.items()]
        return any(steps)


class LiveRecords:
    """Incidents, and which jobs are new or run."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self.tallies = Tallies(db)

    def put_incident(self, incident: Mapping[str, Any]) -> None:
        """Store it, or rewrite the one of the same node and id."""
        self._db.run("put_incident", **incident)

    def incidents(self, limit: int = 50, before: int | None = None) -> list[dict[str, Any]]:
        """The newest first."""
        return [dict(row) for row in self._db.run("incidents", limit=limit, before=before)]

    def purge(self, now: int, incidents_before: int) -> bool:
        """Drop counters and incidents that are too old, a few at a time; whether there may be more."""
        with self._db.transaction():
            self._db.run("purge_incidents", before=incidents_before)
            self._db.run("fold_depths")
            return self.tallies.purge(now)

    def running_since(self) -> dict[str, list[int]]:
        """Per queue, when each of its running jobs began."""
        found: dict[str, list[int]] = {}
        for row in self._db.run("running_since"):
            found.setdefault(row["queue"], []).append(row["started_at"])
        return found

    def newest_ids(self, after: int, limit: int) -> list[int]:
        """The newest jobs with an id above `after`, newest first."""
        return [row["id"] for row in self._db.run("newest_ids", after=after, limit=limit)]

    def processing_ids(self, limit: int) -> list[int]:
        return [row["id"] for row in self._db.run("processing_ids", limit=limit)]

    def version(self) -> int:
        """A number that changes when another connection has written."""
        return self._db.changed()
