"""Which worker gets a session. Pure.

The least busy one, by the share of its slots that are taken. Of equals the one nearest its lifetime limit, so that workers do not
reach it together. One within `margin` of its limit, or one whose last connection failed, is used only where there is no other; one
at its limit never.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Key = tuple[str, int]  # component and generation
Rank = tuple[bool, bool, bool, float, float, str, int]


@dataclass(slots=True, eq=False)
class Worker:
    """A worker with slots."""

    component: str
    generation: int
    pool: str
    slots: int
    lifetime: int = 0  # sessions that it may serve; 0: no limit
    margin: int = 0
    served: int = 0  # sessions that it has got so far
    in_use: int = 0
    versions: tuple[str, ...] = ()  # of clients that it can serve; none: all
    strikes: int = 0  # connections that failed since the last that did not
    is_open: bool = True  # it takes new sessions
    endpoint: Any = None  # where it is reached; nothing here looks at it

    @property
    def key(self) -> Key:
        return self.component, self.generation

    @property
    def left(self) -> float:
        """Sessions that it may still get."""
        return self.lifetime - self.served if self.lifetime else math.inf

    def serves(self, version: str | None) -> bool:
        return version is None or not self.versions or any(matches(version, own) for own in self.versions)


def matches(version: str, served: str) -> bool:
    """Whether a client's version (1.65.0) is one that is served (1.65)."""
    return version == served or version.startswith(served + ".") or served.startswith(version + ".")


def rank(worker: Worker) -> Rank:
    """The smallest is chosen; the first item is whether it has no place at all."""
    left = worker.left
    return (
        worker.in_use >= worker.slots or left <= 0,
        worker.strikes > 0,
        left <= worker.margin,
        worker.in_use / worker.slots,
        left,
        worker.component,
        worker.generation,
    )


def choose(
    ordered: Iterable[Worker], version: str | None = None, excluded: Collection[Key] = (), pool: str | None = None
) -> Worker | None:
    """The worker for a client; `ordered` by rank."""
    for worker in ordered:
        if worker.in_use >= worker.slots or worker.left <= 0:
            return None  # and so are all that follow
        if (
            (pool is None or worker.pool == pool)
            and (version is None or worker.serves(version))
            and worker.key not in excluded
        ):
            return worker
    return None


class Ready:
    """Workers in the order of their rank: a change costs a binary search, and the choice is at the front."""

    def __init__(self) -> None:
        self._order: list[tuple[Rank, Worker]] = []
        self._ranks: dict[Worker, Rank] = {}

    def __iter__(self) -> Iterator[Worker]:
        return (worker for _, worker in self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, worker: object) -> bool:
        return worker in self._ranks

    def put(self, worker: Worker) -> None:
        """It is new here, or has changed."""
        self.remove(worker)
        self._ranks[worker] = ranked = rank(worker)
        insort(self._order, (ranked, worker), key=_by_rank)

    def remove(self, worker: Worker) -> None:
        """It is not chosen any more."""
        ranked = self._ranks.pop(worker, None)
        if ranked is not None:
            del self._order[bisect_left(self._order, ranked, key=_by_rank)]

    @property
    def has_free(self) -> bool:
        return bool(self._order) and not self._order[0][0][0]


def _by_rank(entry: tuple[Rank, Worker]) -> Rank:
    return entry[0]
