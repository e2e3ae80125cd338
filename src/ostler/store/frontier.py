"""Where a claim begins to read the line of a queue.

While somebody holds an old snapshot open, PostgreSQL keeps the index entries of jobs that were claimed long ago, and a claim that
begins at the first of them passes over all. So once reading from the beginning took long, claims begin where that found its first
job. What becomes ready before that place (requeued, committed late, of a higher priority) is found by the next reading from the
beginning, which comes after a quarter of a second, or after ten times what it costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

_LONG = 0.005  # seconds: reading from the beginning is this slow only where it passes over much
_TIMES = 3  # in a row: a busy machine makes one reading slow
_PAUSE = 0.25


class Start(NamedTuple):
    """The first (-priority, place) that is read."""

    rank: int
    place: int


BEGINNING = Start(-(2**31), 0)


class Frontier:
    """For each queue the place where claims begin. `whole` is for databases that leave nothing behind: always the beginning."""

    def __init__(self, *, whole: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._whole, self._clock = whole, clock
        self._starts: dict[str, Start] = {}
        self._again: dict[str, float] = {}  # when to read from the beginning again
        self._slow: dict[str, int] = {}  # readings from the beginning in a row that took long

    def start(self, queue: str) -> Start:
        """Where to begin now."""
        if queue in self._starts and self._clock() >= self._again[queue]:
            del self._starts[queue]
        return self._starts.get(queue, BEGINNING)

    def read(self, queue: str, start: Start, first: Sequence[tuple[int, int]], took: float) -> None:
        """A claim began there, found this first job, if any, and took so many seconds."""
        if self._whole or start != BEGINNING:
            return
        self._slow[queue] = self._slow.get(queue, 0) + 1 if took >= _LONG else 0
        if self._slow[queue] < _TIMES:
            return
        self._starts[queue] = Start(*first[0]) if first else start
        self._again[queue] = self._clock() + max(_PAUSE, 10 * took)

    def forget(self, queue: str) -> None:
        """Something may be ready before the place where claims begin."""
        self._starts.pop(queue, None)

    def wait(self, queue: str) -> float | None:
        """Seconds until the queue is read from the beginning again; None when it is anyway."""
        return max(0.0, self._again[queue] - self._clock()) if queue in self._starts else None
