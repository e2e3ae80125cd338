"""How many calls of a model ended how, and how long they took and waited. Counted in the plane, added up in the node. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

# Upper bounds in seconds of the bins that durations are counted in; the last bin has none.
BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # fmt: skip


class Tally:
    """Calls of one model over some time."""

    __slots__ = ("bytes_in", "bytes_out", "outcomes", "took", "took_s", "waited", "waited_s")

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}
        self.took = [0] * (len(BOUNDS) + 1)
        self.waited = [0] * (len(BOUNDS) + 1)
        self.took_s = self.waited_s = 0.0
        self.bytes_in = self.bytes_out = 0

    def add(self, outcome: str, waited: float, took: float | None, bytes_in: int, bytes_out: int) -> None:
        """Count a call. One that was refused has not waited; one that never reached a worker took no time there."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if outcome != "refused":
            self.waited[bisect_left(BOUNDS, waited)] += 1
            self.waited_s += waited
        if took is not None:
            self.took[bisect_left(BOUNDS, took)] += 1
            self.took_s += took
        self.bytes_in += bytes_in
        self.bytes_out += bytes_out

    def frame(self) -> list[Any]:
        """As it travels to the node."""
        return [self.outcomes, self.took, self.took_s, self.waited, self.waited_s, self.bytes_in, self.bytes_out]

    def merge(self, frame: Sequence[Any]) -> None:
        """Add what another one has counted."""
        outcomes, took, took_s, waited, waited_s, bytes_in, bytes_out = frame
        for outcome, n in outcomes.items():
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + n
        for own, more in ((self.took, took), (self.waited, waited)):
            for number, n in enumerate(more):
                own[number] += n
        self.took_s += took_s
        self.waited_s += waited_s
        self.bytes_in += bytes_in
        self.bytes_out += bytes_out


def percentile(bins: Sequence[int], share: float) -> float | None:
    """The duration in seconds below which this share lies; within a bin, in proportion. None: nothing was counted."""
    left = share * sum(bins)
    if not left:
        return None
    low = 0.0
    for n, high in zip(bins, (*BOUNDS, BOUNDS[-1] * 2), strict=True):
        if n >= left:
            return round(low + (high - low) * left / n, 5)
        left -= n
        low = high
    return None
