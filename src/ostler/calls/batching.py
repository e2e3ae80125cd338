"""When a batch begins: at once while the model is idle; under load it waits for one more call where that pays. Pure; Python 3.9.

A batch costs a fixed part and a part for each call: both are measured (a straight line through the times of the last batches). One
more call in this batch saves the fixed part of a later one, and costs those who are here the time until it comes, as calls came lately.
"""

from __future__ import annotations

_KEEPS = 0.9  # of what was known stays, with each new batch or call
_SOON = 1.5  # a call that has not come within so many of the usual gaps is not waited for


class Batching:
    """Decides for one worker. Times are seconds of any steady clock, given with each verb."""

    def __init__(self, most: int, wait: float) -> None:
        self.most, self.wait = most, wait
        self._weight = self._n = self._t = self._nn = self._nt = 0.0  # sums of a fading straight line
        self._gap: float | None = None  # between two calls
        self._came: float | None = None
        self._last = 1  # calls of the last batch

    def came(self, now: float) -> None:
        """A call is here."""
        if self._came is not None:
            gap = max(0.0, now - self._came)
            self._gap = gap if self._gap is None else _KEEPS * self._gap + (1 - _KEEPS) * gap
        self._came = now

    def ran(self, calls: int, seconds: float) -> None:
        """A batch was run."""
        self._last = calls
        for name, value in (
            ("_weight", 1.0),
            ("_n", calls),
            ("_t", seconds),
            ("_nn", calls * calls),
            ("_nt", calls * seconds),
        ):
            setattr(self, name, _KEEPS * getattr(self, name) + value)

    @property
    def fixed(self) -> float:
        """Seconds that a batch costs whatever is in it; all of it while only one size was seen."""
        if not self._weight:
            return 0.0
        spread = self._weight * self._nn - self._n * self._n
        mean = self._t / self._weight
        if spread <= 1e-9:
            return mean
        slope = (self._weight * self._nt - self._n * self._t) / spread
        return min(max(0.0, mean - max(0.0, slope) * self._n / self._weight), mean)

    def patience(self, waiting: int, first: float, now: float) -> float:
        """For how many seconds a batch of so many calls, the first of which is here since `first`, waits for one more; 0: it begins."""
        if self._last <= 1 or waiting >= self.most or self._gap is None:
            return 0.0  # idle, full, or nothing is known
        left = first + self.wait - now
        if left <= 0 or self._gap * waiting >= self.fixed:
            return 0.0
        return min(left, _SOON * self._gap)
