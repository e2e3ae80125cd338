"""How many jobs may be claimed now: at once per queue and per key, and per time. All counted from rows, inside the claim's
transaction, so no crash can leak a place.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from ostler.store.database import Database
from ostler.store.frontier import Frontier

_SET_BACK_MS = 30_000  # a time so far ahead of ours was not left by another node's turn
Key = tuple[str, str]  # a queue, and a limit key of jobs in it


class QueueLimit(NamedTuple):
    """What a queue allows over all nodes. `rate` is jobs per second, `burst` how many may be saved up."""

    at_once: int | None = None
    rate: float | None = None
    burst: float = 1.0


class Allowed(NamedTuple):
    """How many may be claimed, and when the next one may be (ms), if a rate is what holds it."""

    many: int
    due: int | None = None


def allowed(db: Database, queue: str, limit: QueueLimit, wanted: int, now: int) -> Allowed:
    """What the queue's limits leave of the wanted claims."""
    count, due = wanted, None
    if limit.at_once is not None:
        count = min(count, max(0, limit.at_once - db.run("running_in_queue", queue=queue)[0]["n"]))
    if limit.rate is not None:
        tokens, _ = _tokens(db, queue, limit, now)
        if tokens < count:
            count = int(tokens)
            due = now + int(1000 * (count + 1 - tokens) / limit.rate) + 1
    return Allowed(count, due)


def next_token(db: Database, queue: str, limit: QueueLimit, now: int) -> int | None:
    """When the queue's rate allows the next job (ms); None when it does now. Reads only."""
    rows = db.run("rate_get", queue=queue)
    if limit.rate is None or not rows:
        return None
    tokens = min(limit.burst, rows[0]["tokens"] + limit.rate * max(0, now - rows[0]["at"]) / 1000)
    return None if tokens >= 1 else now + int(1000 * (1 - tokens) / limit.rate) + 1


def spend(db: Database, queue: str, limit: QueueLimit, count: int, now: int) -> None:
    """Take what was claimed out of the queue's bucket."""
    if limit.rate is not None and count:
        tokens, at = _tokens(db, queue, limit, now)
        db.tell("rate_set", queue=queue, tokens=tokens - count, at=at)


def _tokens(db: Database, queue: str, limit: QueueLimit, now: int) -> tuple[float, int]:
    """What is in the queue's bucket, and at what time.

    A turn that waited for another node's has an older time than that one left here. It must not count the same moment twice.
    """
    rows = db.run("rate_get", queue=queue)
    if not rows:
        return limit.burst, now
    tokens, at = rows[0]["tokens"], rows[0]["at"]
    if at > now + _SET_BACK_MS:  # the clock was set back: count from here, not from a time that is yet to come
        db.run("rate_set", queue=queue, tokens=tokens, at=now)
        at = now
    grown = (limit.rate or 0.0) * max(0, now - at) / 1000
    return float(min(limit.burst, tokens + grown)), max(now, at)


def put_heads(db: Database, keys: AbstractSet[Key]) -> None:
    """In the transaction that added or took waiting jobs of these keys: the first of each is in the ready index, the others are not.

    The ready index then has all jobs without a limit and one job for each queue and key that waits. A key can only be full while
    jobs of it run, so a claim passes over no more jobs than are running, however many wait. Whoever changes what waits under a key
    does so under its lock.
    """
    if keys:
        db.lock(sorted({_lock(key) for _, key in keys}))
        batch = json.dumps(sorted(keys))
        db.tell("demote_heads", batch=batch)
        db.tell("promote_heads", batch=batch)


def _lock(key: str) -> str:
    return f"key:{key}"


class Keys:
    """How many jobs of each limited key run, as counted in a turn before the first of them is picked, and raised by what is picked.

    Where others claim at the same time, a key is counted anew under its lock before its first job is picked; a key that another
    node is busy with is passed over in this turn.
    """

    def __init__(self, db: Database, frontier: Frontier, tasks: str | None = None) -> None:
        self._db, self._frontier, self._tasks = db, frontier, tasks
        self._mine: set[str] = set()  # keys whose lock this turn has
        self._running: dict[str, int] = {}
        self._full: set[str] = set()
        self._counted = False
        self.met: set[str] = (
            set()
        )  # queues in which jobs with limit keys wait; all that are looked at after the first of them
        self.picked: set[Key] = set()  # keys whose first waiting job was picked
        self.passed_over = False  # another node was busy with a key: look again soon

    def _count(self) -> None:
        self._counted = True
        for row in self._db.run("running_by_key"):
            self._running[row["limit_key"]] = row["n"]
            if row["n"] >= row["most"]:
                self._full.add(row["limit_key"])

    def pick(self, queue: str, count: int) -> list[Any]:
        """The next jobs of the queue, in order, without those whose key is full. Never more of a key than it allows."""
        rows, are_keyed = self._heads(queue, count)
        if not are_keyed:  # the usual case
            return rows
        line = [(_place(row), row) for row in rows]  # sorted, so it is a heap
        chosen: list[Any] = []
        spent: set[str] = set()
        while line and len(chosen) < count:
            row = heapq.heappop(line)[1]
            if row["limit_key"] is not None and not self._take(queue, row, count - len(chosen), line, spent):
                continue
            chosen.append(row)
        return chosen

    def _heads(self, queue: str, count: int) -> tuple[list[Any], bool]:
        """The first jobs of the ready index, none of which has a full key; and whether any has a key."""
        while True:
            rows = self._claimable(queue, count)
            keyed = [row for row in rows if row["limit_key"] is not None]
            if keyed or self._counted:
                self.met.add(queue)
            if keyed and not self._counted:  # most turns meet none
                self._count()
                if self._full:
                    continue
            blocked = {row["limit_key"] for row in keyed if self._running.get(row["limit_key"], 0) >= row["limit_max"]}
            if not blocked:
                return rows, bool(keyed)
            self._full |= blocked  # look again without them: others behind may go

    def _claimable(self, queue: str, count: int) -> list[Any]:
        start = self._frontier.start(queue)
        full, began = json.dumps(sorted(self._full)), time.perf_counter()
        rows = self._db.run(
            "claimable", queue=queue, limit=count, full=full, tasks=self._tasks, rank=start.rank, low=start.place
        )
        self._frontier.read(
            queue, start, [(-row["priority"], row["place"]) for row in rows[:1]], time.perf_counter() - began
        )
        return rows

    def _take(self, queue: str, row: Any, count: int, line: list[Any], spent: set[str]) -> bool:
        """Whether the key has room for this job. With the first of a key those that wait behind it join the line."""
        key = row["limit_key"]
        if key not in spent and not self._hold(key):
            spent.add(key)
        room = row["limit_max"] - self._running.get(key, 0)
        if key in spent or room <= 0:
            spent.add(key)
            return False
        self._running[key] = self._running.get(key, 0) + 1
        if (queue, key) not in self.picked:
            self.picked.add((queue, key))
            more = min(count, room) - 1
            for behind in self._behind(queue, key, more) if more else ():
                heapq.heappush(line, (_place(behind), behind))
        return True

    def _behind(self, queue: str, key: str, count: int) -> list[Any]:
        return self._db.run("waiting_by_key", queue=queue, key=key, limit=count, tasks=self._tasks)

    def _hold(self, key: str) -> bool:
        """Take the lock of the key and count it, where others may claim meanwhile; False when another one has it."""
        if not self._db.shared or key in self._mine:
            return True
        if not self._db.try_lock(_lock(key)):
            self.passed_over = True
            return False
        self._mine.add(key)
        self._running[key] = self._db.run("running_of_key", key=key)[0]["n"]
        return True


def _place(row: Any) -> tuple[int, int, int]:
    return -row["priority"], row["place"], row["id"]
