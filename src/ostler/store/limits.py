"""How many jobs may be claimed now: at once per queue and per key, and per time. All counted from rows, inside the claim's
transaction, so no crash can leak a place.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ostler.store.sqlite import SqliteDatabase


class QueueLimit(NamedTuple):
    """What a queue allows over all nodes. `rate` is jobs per second, `burst` how many may be saved up."""

    at_once: int | None = None
    rate: float | None = None
    burst: float = 1.0


class Allowed(NamedTuple):
    """How many may be claimed, and when the next one may be (ms), if a rate is what holds it."""

    many: int
    due: int | None = None


def allowed(db: SqliteDatabase, queue: str, limit: QueueLimit, wanted: int, now: int) -> Allowed:
    """What the queue's limits leave of the wanted claims."""
    count, due = wanted, None
    if limit.at_once is not None:
        count = min(count, max(0, limit.at_once - db.run("running_in_queue", queue=queue)[0]["n"]))
    if limit.rate is not None:
        tokens = _tokens(db, queue, limit, now)
        if tokens < count:
            count = int(tokens)
            due = now + int(1000 * (count + 1 - tokens) / limit.rate) + 1
    return Allowed(count, due)


def spend(db: SqliteDatabase, queue: str, limit: QueueLimit, count: int, now: int) -> None:
    """Take what was claimed out of the queue's bucket."""
    if limit.rate is not None and count:
        db.run("rate_set", queue=queue, tokens=_tokens(db, queue, limit, now) - count, at=now)


def _tokens(db: SqliteDatabase, queue: str, limit: QueueLimit, now: int) -> float:
    rows = db.run("rate_get", queue=queue)
    if not rows:
        return limit.burst
    if rows[0]["at"] > now:  # the clock was set back: count from here, not from a time that is yet to come
        db.run("rate_set", queue=queue, tokens=rows[0]["tokens"], at=now)
    grown = (limit.rate or 0.0) * max(0, now - rows[0]["at"]) / 1000
    return float(min(limit.burst, rows[0]["tokens"] + grown))


class Keys:
    """How many jobs of each limited key run, as counted at the beginning of a turn and raised by what is picked in it."""

    def __init__(self, db: SqliteDatabase) -> None:
        self._db = db
        self._running: dict[str, int] = {}
        self._full: set[str] = set()
        for row in db.run("running_by_key"):
            self._running[row["limit_key"]] = row["n"]
            if row["n"] >= row["most"]:
                self._full.add(row["limit_key"])

    def pick(self, queue: str, count: int) -> list[Any]:
        """The next jobs of the queue, in order, without those whose key is full. Never more of a key than it allows."""
        chosen: dict[int, Any] = {}
        while len(chosen) < count:
            rows = self._db.run("claimable", queue=queue, limit=count, full=json.dumps(sorted(self._full)))
            passed = False
            for row in rows:
                key = row["limit_key"]
                if row["id"] in chosen or len(chosen) == count:
                    continue
                if key is not None:
                    if self._running.get(key, 0) >= row["limit_max"]:
                        self._full.add(key)  # look again without it: others behind may go
                        passed = True
                        continue
                    self._running[key] = self._running.get(key, 0) + 1
                chosen[row["id"]] = row
            if not passed:
                break
        return list(chosen.values())
