"""Averages, percentiles and the time until a queue is empty, from measured durations. Pure."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ostler.store.live import BOUNDS

_EXACT = 1000  # jobs whose order is worked through one by one; of more, the sum is close enough


def percentile(counts: Mapping[str, int], kind: str, share: float) -> float | None:
    """The duration in seconds below which this share of the `kind:N` bins lies; within a bin, in proportion. None: nothing counted."""
    bins = sorted((int(name.partition(":")[2]), n) for name, n in counts.items() if name.startswith(f"{kind}:"))
    total = sum(n for _, n in bins)
    if not total:
        return None
    left = share * total
    for number, n in bins:
        low = BOUNDS[number - 1] if number else 0
        high = BOUNDS[number] if number < len(BOUNDS) else BOUNDS[-1] * 2
        if n >= left:
            return round((low + (high - low) * left / n) / 1000, 4)
        left -= n
    return None


def merged(buckets: Iterable[Mapping[str, int]], since: int) -> dict[str, int]:
    """Buckets of counters as one that begins at `since`: percentiles come from the sum of the bins."""
    found: Counter[str] = Counter()
    for bucket in buckets:
        found.update(bucket)
    return {**found, "at": since}


def eta(
    pending: int,
    elapsed: Sequence[float],
    average: float | None,
    workers: int,
    *,
    rate: float | None = None,
) -> float | None:
    """Seconds until the last of the waiting and running jobs has ended.

    `elapsed`: how long each running job has run. `average`: of a run. `workers`: how many run at once. `rate`: the most that may
    begin in a second. None when nobody can tell: no worker takes jobs, no run was ever measured, or the last job already runs much
    longer than the others did.
    """
    if not pending and not elapsed:
        return 0.0
    if workers < 1 or average is None:
        return None
    if not pending and max(elapsed) > 2 * average + 1:
        return None
    left = sorted((max(0.0, average - e) for e in elapsed), reverse=True)
    # Claims that wait in a worker's hands count as waiting.
    pending += max(0, len(left) - workers)
    free = left[:workers] + [0.0] * (workers - len(left))
    if pending > _EXACT:
        last = (sum(free) + pending * average) / workers
    else:
        heapq.heapify(free)
        last = max(free)
        for _ in range(pending):
            end = heapq.heappop(free) + average
            last = max(last, end)
            heapq.heappush(free, end)
    if rate:
        last = max(last, pending / rate)
    return round(last, 3)
