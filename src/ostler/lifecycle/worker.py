"""What the supervisor keeps: pools as data, slots, and the worker (one generation) that fills a slot."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ostler.lifecycle.probe import Probe
from ostler.lifecycle.process import Ended, Process
from ostler.lifecycle.recycle import RecycleLimits
from ostler.lifecycle.restart import History
from ostler.lifecycle.state import Status
from ostler.lifecycle.wire import Frame
from ostler.store.rows import ExitRow


@dataclass(frozen=True, slots=True)
class Exit:
    """Why a worker ended. `kind`: asked, clean (exit 0 that nobody asked for) or crash."""

    reason: str
    kind: str
    code: int
    signal: str | None


class Tenant(Protocol):
    """What a pool's workers serve. The lifecycle knows no more of it than this."""

    def ready(self, worker: Worker) -> None:
        """The worker can serve from now on."""

    def heard(self, worker: Worker, frame: Frame) -> None:
        """The worker said something that is not the lifecycle's."""

    def output(self, worker: Worker, label: str, lines: list[bytes]) -> None:
        """The worker printed lines under a number that it gave (see `process.LABEL`)."""

    def busy(self, worker: Worker) -> bool:
        """Whether the worker still has something to finish."""

    def pause(self, worker: Worker) -> None:
        """The worker's pool was paused: take back what it has not begun."""

    def drain(self, worker: Worker) -> None:
        """The worker is to leave: give it nothing new, and take back what it has not begun."""

    def gone(self, worker: Worker, end: Exit) -> int | None:
        """The worker is no more. Returns the id of the item that it was at, if any."""


class Nothing:
    """The tenant of plain programs: what they serve is their own business."""

    def ready(self, worker: Worker) -> None: ...

    def heard(self, worker: Worker, frame: Frame) -> None: ...

    def output(self, worker: Worker, label: str, lines: list[bytes]) -> None: ...

    def busy(self, worker: Worker) -> bool:
        return False

    def pause(self, worker: Worker) -> None: ...

    def drain(self, worker: Worker) -> None: ...

    def gone(self, worker: Worker, end: Exit) -> int | None:
        return None


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A pool as data: what to exec, how many, and its limits. `probe` None: it speaks the control channel."""

    name: str
    size: int
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)  # places are filled in here and in a program's argv
    given: Mapping[str, str] = field(default_factory=dict)  # as they are: a path may well have {n} in its name
    cwd: str | None = None
    probe: Probe | None = None
    drain_signal: int = signal.SIGTERM
    startup_deadline: float = 60.0
    stale_after: float = 30.0
    stop_grace: float = 10.0
    term_grace: float = 2.0
    recycle: RecycleLimits = field(default_factory=RecycleLimits)
    tenant: Tenant = field(default_factory=Nothing)


@dataclass(slots=True)
class Pool:
    """A pool at run time."""

    spec: PoolSpec
    slots: list[Slot] = field(default_factory=list)
    paused: bool = False
    recycling: Slot | None = None  # workers of one pool recycle one after another
    retiring: Slot | None = None  # due to recycle, but busy: it is given nothing more and recycles when it is done


@dataclass(slots=True)
class Slot:
    """`worker:{pool}:{n}`: stays, while workers come and go in it."""

    component: str
    number: int
    pool: Pool
    rest: Status = Status.STOPPED  # its status while it has no worker
    generation: int = 0
    wanted: bool = True
    history: History = field(default_factory=History)
    due: float = 0.0  # when a crashed one is started again (monotonic)
    due_ms: int | None = None  # … by the wall clock, for those who look
    last_exit: ExitRow | None = None
    worker: Worker | None = None
    heir: Worker | None = None  # being warmed to take over
    leaving: list[Worker] = field(default_factory=list)  # replaced, finishing what it has
    recorded: int = 0  # the generation that the health row is about
    spare_recycle_until: float = 0.0

    @property
    def status(self) -> Status:
        return self.worker.status if self.worker else self.rest

    def all(self) -> list[Worker]:
        return [w for w in (self.worker, self.heir, *self.leaving) if w is not None]


@dataclass(slots=True, eq=False)
class Worker:
    """One process in a slot: one generation."""

    slot: Slot
    generation: int
    started: float
    started_ms: int = 0
    status: Status = Status.STARTING
    process: Process | None = None
    probe: Probe | None = None
    announced: bool = False  # it said ready, or its probe did
    ready_at: float = 0.0
    last_beat: float = 0.0
    last_beat_ms: int = 0
    rss_mb: float | None = None
    served: int = 0
    unwell: str | None = None  # what its probe last complained of
    leave: bool = False  # it shall go
    leave_by: float | None = None  # … by then, or signals follow
    signalled: float | None = None  # SIGTERM was sent at
    killing: str | None = None  # SIGKILL was sent, because of
    parting: str | None = None  # SIGTERM was sent for what it serves, because of
    settled: bool = False  # healthy for long enough
    ended: Ended | None = None
    metadata: dict[str, object] | None = None  # what others want to know of it, such as its port
    sweep: bool | None = None  # its family: None not looked at, False being ended, True gone

    @property
    def component(self) -> str:
        return self.slot.component

    @property
    def pool(self) -> Pool:
        return self.slot.pool

    @property
    def accepting(self) -> bool:
        """Whether it may be given new work now."""
        return (
            self.status is Status.HEALTHY
            and not self.leave
            and self.killing is None
            and self.ended is None
            and not self.pool.paused
            and self.pool.retiring is not self.slot
        )

    def send(self, *frame: object) -> None:
        """Say something to the process over its control channel."""
        if self.process:
            self.process.send(*frame)
