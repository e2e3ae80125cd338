"""The values that cross the border between the store and the rest: small, immutable, without behaviour.

Those that are made for every single job are named tuples, which cost a third of a frozen dataclass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ostler.store.artifacts import ArtifactRow
    from ostler.store.limits import QueueLimit


class JobStatus(StrEnum):
    """Where a job is. `done`, `failed` and `cancelled` are ends; only `retry` leads out of them."""

    QUEUED = "queued"
    PROCESSING = "processing"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset({JobStatus.DONE, JobStatus.FAILED, JobStatus.CANCELLED})


class Existing(int):
    """The id of a job that held the unique key already: nothing was stored."""

    is_new = False


class NewJob(NamedTuple):
    """A job that was checked and can be stored. `args`, `backoff` and `next` are JSON text; `unique_for` None: while it is live.

    `next` is the list of steps that follow when it is done; a job that is such a step names its `chain` and its number there.
    """

    task: str
    queue: str
    args: str
    attempts: int = 3
    timeout: float | None = None
    priority: int = 0
    run_at: int | None = None
    backoff: str | None = None
    limit_key: str | None = None
    limit_max: int | None = None
    batch: int | None = None
    next: str | None = None
    unique_key: str | None = None
    unique_for: float | None = None
    chain: int | None = None
    step: int | None = None


class Claim(NamedTuple):
    """One job in the hands of one worker. (id, fence) is what every later write must still hold.

    `attempt` is which of the `attempts` this run is, from 1. Runs that did not count have the number of the one that follows them.
    """

    id: int
    fence: int
    worker: str
    task: str
    queue: str
    args: str
    attempt: int
    attempts: int
    crashes: int
    timeout: float | None
    backoff: str | None = None


class Finish(NamedTuple):
    """The end of a claim that is also the end of the job. `event` is the timeline row's name.

    `failure` is how this run failed, as it is kept in the job's errors (JSON); None: it did not.
    """

    id: int
    fence: int
    status: str
    started_at: int
    finished_at: int
    event: str
    result: str | None = None
    error: str | None = None
    crash: int = 0
    progress: float | None = None
    data: str | None = None
    failure: str | None = None


class Requeue(NamedTuple):
    """The end of a claim that sends the job back. `refund` takes the attempt back: it never began. `excused`: it counts for nothing.

    `failure` is as in `Finish`.
    """

    id: int
    fence: int
    event: str
    at: int
    run_at: int | None = None
    refund: int = 0
    crash: int = 0
    excused: int = 0
    error: str | None = None
    data: str | None = None
    last: int = 0  # 1: to the end of its queue
    failure: str | None = None


class Note(NamedTuple):
    """Something that a running job reported: progress, or a named event."""

    id: int
    fence: int
    event: str
    at: int
    progress: float | None = None
    stage: str | None = None
    data: str | None = None
    artifact: ArtifactRow | None = None  # what it has published


@dataclass(frozen=True, slots=True)
class Turn:
    """What one transaction of the dispatcher writes, and what it wants: for each queue the workers to fill, in order.

    `number` grows with each turn of a node: a turn that was committed is not written again, and one of a node that was declared
    dead is not written at all. 0 is for those who are no node. `tasks` are those that may be claimed; None: all.
    """

    node: str
    now: int
    notes: list[Note] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)
    requeues: list[Requeue] = field(default_factory=list)
    wants: dict[str, list[str]] = field(default_factory=dict)
    limits: Mapping[str, QueueLimit] = field(default_factory=dict)
    number: int = 0
    tasks: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """What came of a turn: the new claims, and the ids whose claim was lost (their result was dropped).

    `replayed`: the turn had been committed before, and `claims` are all that the node holds. `again`: look once more at once.
    """

    claims: list[Claim]
    lost: list[int]
    next_due: int | None
    missed: int = 0  # picked, but no longer to be had
    replayed: bool = False
    again: bool = False


@dataclass(frozen=True, slots=True)
class ExitRow:
    """One end of a worker process, as it is kept in the history. `item` is what it was doing, as its tenant names it ('job:7').

    A crash that is not `counted` is not the worker's fault: it is kept, and no restart limit sees it.
    """

    component: str
    generation: int
    at: int
    reason: str
    kind: str
    code: int | None = None
    signal: str | None = None
    peak_rss_mb: float | None = None
    item: str | None = None
    log: list[str] = field(default_factory=list)
    counted: bool = True
