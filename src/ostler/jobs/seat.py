"""What the dispatcher keeps of a worker, and how much it may give it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ostler.jobs.execute import shortened
from ostler.lifecycle.worker import Worker
from ostler.store.rows import Claim

_HANDOVER_SECONDS = 0.010  # what a worker may have in hand, by measured durations
_HANDOVER_MOST = 1024  # enough for as long as a turn with as many ends and claims takes
_UNTITLED = 64  # runs whose output may still get its title
_KNOWN_AFTER = 5  # runs until a task's duration counts as measured


@dataclass(slots=True, eq=False)
class Seat:
    """A worker and what it has in hand; the first is running."""

    worker: Worker
    jobs: deque[Claim] = field(default_factory=deque)
    begun: bool = False  # the first is known to have begun
    began: float = 0.0
    began_ms: int = 0
    recalled: bool = False
    timed_out: bool = False
    cancel_by: float | None = None  # SIGTERM then
    kill_by: float | None = None  # SIGKILL then
    _untitled: dict[int, Claim] = field(default_factory=dict)  # runs again that have printed nothing yet, by job

    def next(self, now: float, at: int, *, begun: bool) -> None:
        """Another job is the first one in hand: nothing that was said of the last one holds for it."""
        self.began, self.began_ms, self.begun = now, at, begun
        self.recalled = self.timed_out = False
        self.cancel_by = None
        if self.worker.parting is None:  # after SIGTERM the worker goes, whatever it reports in its last moment
            self.kill_by = None

    def is_at(self, job: int, fence: int) -> bool:
        """Whether this claim is the first in hand."""
        return bool(self.jobs) and (self.jobs[0].id, self.jobs[0].fence) == (job, fence)

    def take(self, claims: Sequence[Claim]) -> None:
        """These are handed to the worker."""
        self.jobs.extend(claims)
        self._untitled.update((claim.id, claim) for claim in claims if claim.fence > 1)
        while len(self._untitled) > _UNTITLED:
            del self._untitled[next(iter(self._untitled))]

    def title(self, job: int) -> bytes | None:
        """The line above the first output of a run of a job that has run before; else None. A run may be over before its output comes."""
        claim = self._untitled.pop(job, None)
        return None if claim is None else f"--- attempt {claim.attempt}, on {claim.worker} ---".encode()

    def last_lines(self) -> str | None:
        """What the run of the first job in hand printed last; None when that was nothing."""
        process = self.worker.process
        said = None if process is None else process.said(str(self.jobs[0].id))
        return None if said is None else shortened(said)


class Durations:
    """Measured durations: per task a running average, per queue the slowest of its tasks."""

    def __init__(self) -> None:
        self._average: dict[str, dict[str, tuple[int, float]]] = {}

    def add(self, queue: str, task: str, seconds: float) -> None:
        tasks = self._average.setdefault(queue, {})
        count, average = tasks.get(task, (0, 0.0))
        tasks[task] = (count + 1, seconds if count == 0 else 0.8 * average + 0.2 * seconds)

    def handover(self, queue: str) -> int:
        """How many jobs of the queue a worker may hold: one when any of its tasks is long or not yet measured."""
        tasks = self._average.get(queue)
        if not tasks or any(count < _KNOWN_AFTER for count, _ in tasks.values()):
            return 1
        slowest = max(average for _, average in tasks.values())
        return max(1, min(_HANDOVER_MOST, int(_HANDOVER_SECONDS / max(slowest, 1e-6))))
