"""What happened, as values, and the bus that carries them inside the node. Logs, metrics and live state only listen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

log = logging.getLogger("ostler.events")


@dataclass(frozen=True, slots=True)
class WorkerMoved:
    """A worker slot changed its status. After an exit: why, how, what it had in hand, its last line, when it is started again."""

    component: str
    generation: int
    before: str
    status: str
    pid: int | None = None
    reason: str | None = None
    delay: float | None = None
    how: str | None = None  # how it ended, in words that follow its name
    item: str | None = None  # what it had in hand, such as job:12
    counted: bool = True  # whether a crash counts against the worker
    line: str | None = None


@dataclass(frozen=True, slots=True)
class PoolPaused:
    """A pool (None: all of them) was paused or resumed; `still`: it was before the node started, too."""

    pool: str | None
    paused: bool
    still: bool = False


class JobEnded(NamedTuple):
    """A run of a job ended in any other way than done."""

    job: int
    task: str
    queue: str
    worker: str
    event: str
    seconds: float
    code: str | None = None
    message: str | None = None  # of the error
    attempt: int = 1
    attempts: int = 1


class JobTook(NamedTuple):
    """A run of a job ended as done, after more than a second."""

    job: int
    task: str
    worker: str
    seconds: float


class RunsDone(NamedTuple):
    """Runs that ended as done since the last turn, as (task, queue, seconds): one event for all, there may be many."""

    runs: Sequence[tuple[str, str, float]]


@dataclass(frozen=True, slots=True)
class ClaimLost:
    """A late result was dropped: the job has another owner, or was cancelled."""

    job: int


@dataclass(frozen=True, slots=True)
class ClaimMissed:
    """Jobs that were picked for a claim and were not to be had any more."""

    count: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """Jobs of a dead node went back to the queue."""

    jobs: int
    reason: str


@dataclass(frozen=True, slots=True)
class NodeDeclaredDead:
    """Another node declared this one dead."""

    node: str


@dataclass(frozen=True, slots=True)
class Beats:
    """The node wrote the beats of so many workers."""

    count: int


@dataclass(frozen=True, slots=True)
class Backpressure:
    """Claims of one queue are held for a while."""

    queue: str
    reason: str


class JobsTouched(NamedTuple):
    """The store has new states of jobs: those named, and (`others`) perhaps some that other processes wrote."""

    jobs: Sequence[int]
    others: bool = False


class CallsTouched(NamedTuple):
    """The plane has told of its models or calls, or a model's state has changed."""


class SessionsTouched(NamedTuple):
    """Slots, sessions or lines of session pools have changed."""


class SessionBegan(NamedTuple):
    """A session was given a slot, after so many seconds in line. `pool` is the name that clients connect to."""

    pool: str
    waited: float


class SessionEnded(NamedTuple):
    """A session ended, for one reason. `by`: the operator who ended it."""

    session: str
    pool: str
    worker: str
    owner: str
    reason: str
    seconds: float
    by: str | None = None


class WorkerBroken(NamedTuple):
    """What a session worker serves does not answer (`hung`) or is dead (`lost`): it is killed, and so many sessions end with it."""

    worker: str
    pool: str
    what: str
    text: str
    sessions: int


class WorkerDrained(NamedTuple):
    """A session worker has drained: how long that took, and how many sessions its drain limit ended."""

    worker: str
    pool: str
    seconds: float
    cut: int


class Printed(NamedTuple):
    """Something was printed: `worker:{pool}:{n}`, or `job:{id}`."""

    subject: str


class StoreAnswers(NamedTuple):
    """A lane lost the store, or has it again."""

    lane: str
    answers: bool


Event = (
    ClaimMissed
    | Recovered
    | Beats
    | NodeDeclaredDead
    | Backpressure
    | WorkerMoved
    | PoolPaused
    | JobEnded
    | RunsDone
    | JobTook
    | ClaimLost
    | JobsTouched
    | CallsTouched
    | SessionsTouched
    | SessionBegan
    | SessionEnded
    | WorkerBroken
    | WorkerDrained
    | Printed
    | StoreAnswers
)
Listener = Callable[[Any], None]


class Bus:
    """Calls every listener at once, on the node's loop. A listener that fails is logged and does not disturb the others."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def send(self, event: Event) -> None:
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                log.exception("a listener failed on %s", event)
