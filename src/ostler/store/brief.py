"""The brief turn: an idle node that only claims does so in one statement, which is one trip to the server.

It is for stores where several write (`Database.shared`), and for what most turns of an idle node are: nothing to write, queues without
limits, no job that is due, no job with a limit key. Everything else takes the turn that asks step by step (turns.py).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from ostler.store.database import Database
from ostler.store.frontier import Frontier
from ostler.store.live import BOUNDS
from ostler.store.rows import Claim, Turn

_KEYED_FOR = 10_000  # milliseconds after a job with a limit key: a try in vain costs a commit
_MOST = 16  # jobs of a queue in one turn: an idle node finds few, and asks again where there are more
_BOUNDS = f"{{{','.join(map(str, BOUNDS))}}}"


class Claimed(NamedTuple):
    """What a brief turn claimed, and when the next scheduled job is due. `more`: there may be more than it asked for."""

    claims: list[Claim]
    due: int | None
    more: bool


class Brief:
    """Brief turns of one connection, and when they are worth a try."""

    def __init__(self, db: Database, frontier: Frontier) -> None:
        self._db, self._frontier = db, frontier
        self._due: int | None = None
        self._keyed: dict[str, int] = {}  # a queue in which a job with a limit key was met -> until when that counts

    def next_due(self, due: int | None) -> None:
        """A longer turn found that the next scheduled job is due then."""
        self._due = due

    def met_keys(self, queues: AbstractSet[str], now: int) -> None:
        """A longer turn met jobs with limit keys in these queues."""
        self._keyed.update(dict.fromkeys(queues, now + _KEYED_FOR))

    def fits(self, turn: Turn) -> bool:
        """Whether the turn only claims, and nothing is known that takes more."""
        if not (self._db.shared and turn.number and turn.wants) or turn.notes or turn.finishes or turn.requeues:
            return False
        if self._due is not None and self._due <= turn.now:
            return False
        return not any(queue in turn.limits or self._keyed.get(queue, 0) > turn.now for queue in turn.wants)

    def take(self, turn: Turn) -> Claimed | None:
        """Claim, in a transaction of its own; None when it takes more than that: then nothing was written."""
        starts = {queue: self._frontier.start(queue) for queue in turn.wants}
        wants = [(queue, *starts[queue], len(workers), workers[:_MOST]) for queue, workers in turn.wants.items()]
        tasks = None if turn.tasks is None else json.dumps(sorted(turn.tasks))
        values = {
            "now": turn.now,
            "beat": self._db.now(),
            "wants": json.dumps(wants),
            "tasks": tasks,
            "bounds": _BOUNDS,
        }
        rows = self._db.alone("turn_alone", id=turn.node, turn=turn.number, **values)
        if not rows:
            return None
        for queue, took, priority, place in rows[0]["reads"]:
            self._frontier.read(queue, starts[queue], [] if place is None else [(-priority, place)], took)
        self._due = rows[0]["due"]
        lines = {queue: n for n, queue in enumerate(turn.wants)}
        found = [row for row in rows if row["id"] is not None]
        found.sort(key=lambda row: (lines[row["queue"]], -row["priority"], row["place"], row["id"]))
        more = any(n == _MOST < len(turn.wants[queue]) for queue, n in Counter(row["queue"] for row in found).items())
        return Claimed([Claim(*row[:11]) for row in found], self._due, more)
