"""What the supervisor keeps: pools as data, slots, the worker (one generation) that fills a slot, and the tenant it serves.

The lifecycle does not know what a worker serves. What it was doing, its labels, its reasons to be killed and what it said
when it became ready are the tenant's business and pass through here untouched.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ostler.lifecycle import restart
from ostler.lifecycle.probe import Probe
from ostler.lifecycle.process import Ended, Process
from ostler.lifecycle.recycle import RecycleLimits
from ostler.lifecycle.restart import History
from ostler.lifecycle.state import Status
from ostler.lifecycle.ticket import Demand, Standing, Ticket
from ostler.lifecycle.wire import Frame
from ostler.store.rows import ExitRow


@dataclass(frozen=True, slots=True)
class Exit:
    """Why a worker ended. `kind`: asked, clean (exit 0 that nobody asked for) or crash."""

    reason: str
    kind: str
    code: int
    signal: str | None


class Doing(NamedTuple):
    """What a worker has in hand: `item` is its name in records (`job:12`), `title` what people call it (the task)."""

    item: str
    title: str = ""


class Left(NamedTuple):
    """What a worker had in hand when it ended. `first`: the item had never taken a worker down before."""

    item: str | None = None
    first: bool = True


class Tenant(Protocol):
    """What a pool's workers serve. The lifecycle knows no more of it than this. All calls come on the node's loop."""

    kind: str
    """What listings call its pools: jobs, command, …"""

    def ready(self, worker: Worker, info: Mapping[str, Any]) -> None:
        """The worker can serve from now on; `info` is what it said with `ready`."""

    def beat(self, worker: Worker, facts: Any) -> Any:
        """A heartbeat came, with the worker's own facts. What is returned goes back as `["wanted", …]`; None: nothing does."""

    def heard(self, worker: Worker, frame: Frame) -> None:
        """The worker sent a frame that is not the lifecycle's."""

    def output(self, worker: Worker, label: str, lines: list[bytes]) -> None:
        """The worker printed lines under a label that it gave."""

    def busy(self, worker: Worker) -> bool:
        """Whether the worker still has something to finish."""

    def doing(self, worker: Worker) -> Doing | None:
        """What the worker is working on now."""

    def pause(self, worker: Worker) -> None:
        """The worker's pool was paused: take back what it has not begun."""

    def resume(self, worker: Worker) -> None:
        """The worker may be given work again: its pool was resumed, or it need not be recycled after all."""

    def drain(self, worker: Worker) -> None:
        """The worker leaves: give it nothing new, and take back what it has not begun."""

    def died(self, worker: Worker, ended: Ended) -> None:
        """The worker's process has exited; its family may still live, so nothing of it may run again yet."""

    def gone(self, worker: Worker, end: Exit) -> Left:
        """The worker has exited, and its family is gone. Returns what it had in hand."""


class Nothing:
    """The tenant of plain programs: what they serve is their own business."""

    kind = "command"

    def ready(self, worker: Worker, info: Mapping[str, Any]) -> None: ...

    def beat(self, worker: Worker, facts: Any) -> Any: ...

    def heard(self, worker: Worker, frame: Frame) -> None: ...

    def output(self, worker: Worker, label: str, lines: list[bytes]) -> None: ...

    def busy(self, worker: Worker) -> bool:
        return False

    def doing(self, worker: Worker) -> Doing | None: ...

    def pause(self, worker: Worker) -> None: ...

    def resume(self, worker: Worker) -> None: ...

    def drain(self, worker: Worker) -> None: ...

    def died(self, worker: Worker, ended: Ended) -> None: ...

    def gone(self, worker: Worker, end: Exit) -> Left:
        return Left()


class Needs(Protocol):
    """What the workers of a pool need of memory, and how they go when others need it. All calls come on the node's loop."""

    def demand(self, slot: Slot) -> Demand:
        """What a worker in the slot needs. It is started when the ledger has granted that."""

    def standing(self, worker: Worker) -> Standing:
        """Whether the worker could go now, and what that would cost. Asked only of a worker that is ready."""

    def evict(self, worker: Worker, short_of: str) -> bool:
        """The worker must go, because others need memory (of the host, or of that device). True: the tenant sees to it, and stops the
        slot or says `worker.ticket.kept()`. False: the supervisor drains it, and its slot rests until it is roused.
        """

    def waits(self, slot: Slot, why: str) -> None:
        """The slot waits for memory, because."""

    def refused(self, slot: Slot, why: str) -> None:
        """The slot can never have its memory, because; it is asked for again after a while."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A pool as data: what to exec, how many, and its limits. `probe` None: it speaks the control channel.

    `argv` may depend on the slot. A pool that is `on_demand` begins without slots; its tenant opens, starts and stops them.
    """

    name: str
    size: int
    argv: Sequence[str] | Callable[[Slot], Sequence[str]]
    env: Mapping[str, str] = field(default_factory=dict)  # places are filled in here and in a program's argv
    given: Mapping[str, str] = field(default_factory=dict)  # as they are: a path may well have {n} in its name
    fills: Callable[[Slot], Mapping[str, str]] = lambda _: {}  # places of a program beside {n} and {port}
    cwd: str | None = None
    probe: Probe | None = None
    drain_signal: int = signal.SIGTERM
    startup_deadline: float | Callable[[Slot], float] = 60.0
    stale_after: float = 30.0
    stop_grace: float = 10.0
    term_grace: float = 2.0
    recycle: RecycleLimits = field(default_factory=RecycleLimits)
    tenant: Tenant = field(default_factory=Nothing)
    on_demand: bool = False
    # Open files of the node that its workers inherit, by name.
    descriptors: Mapping[str, int] = field(default_factory=dict)
    outlasts: int = 0  # when the node drains, pools with a lower number leave first: these serve them until then
    need: Needs | None = None  # None: its workers are started without asking for memory
    nice: int = 0  # added to the node's own niceness: the system prefers others to its workers
    folder: str | None = None  # what its workers have on disk: the guard removes it when the node has died
    leaves_within: float | None = (
        None  # seconds in which a worker that was asked to leave goes; None: when it has finished
    )


@dataclass(slots=True)
class Pool:
    """A pool at run time."""

    spec: PoolSpec
    slots: list[Slot] = field(default_factory=list)
    paused: bool = False  # set by Pauses alone
    credit: int = 0  # first crashes that are forgiven, see restart.blame
    forgiven: set[str] = field(default_factory=set)  # items whose first crash took credit, since one was finished
    crashed: set[str] = field(default_factory=set)  # other items that took a worker down since then
    doubtful_at: int = 5  # so many of them, and no credit: the environment may be broken
    recycling: Slot | None = None  # workers of one pool recycle one after another
    retiring: Slot | None = None  # due to recycle, but busy: it is given nothing more and recycles when it is done

    @property
    def doubtful(self) -> bool:
        """Whether nothing finishes here, so that no item can be blamed."""
        return self.credit <= 0 and len(self.crashed) >= self.doubtful_at

    def finished(self) -> None:
        """One of its workers finished an item."""
        self.credit = restart.CREDIT
        if self.crashed or self.forgiven:
            self.crashed.clear()
            self.forgiven.clear()

    def blames(self, item: str | None, *, first: bool) -> bool:
        """Whether a crash with this item in hand counts for the worker. An item that took credit is no reason for doubt later."""
        counted, self.credit = restart.blame(item, first, self.credit, doubtful=self.doubtful)
        if item is None or item in self.forgiven:
            return counted
        if first and not counted:
            self.forgiven.add(item)
        elif len(self.crashed) < self.doubtful_at:
            self.crashed.add(item)
        return counted


@dataclass(slots=True, eq=False)
class Slot:
    """`worker:{pool}:{n}`: stays, while workers come and go in it."""

    component: str
    number: int
    pool: Pool
    key: str | None = None  # what a slot that was opened on demand is for; its number stays with it
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
    ticket: Ticket | None = None  # its claim to memory, until there is a worker that holds it
    heir_ticket: Ticket | None = None  # … for a replacement beside the worker that is there
    heir_since: float = 0.0  # since when that one waits (monotonic)
    waiting: str | None = None  # why it has no worker, where that is for want of memory
    resting: bool = False  # its worker left for others' sake; it is started again when it is needed
    insists: bool = False  # it is needed: others may have to leave for it
    ask_again: float = 0.0  # not before then (monotonic), after it was refused memory

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
    info: Mapping[str, Any] = field(default_factory=dict)  # what it said with ready
    ready_at: float = 0.0
    last_beat: float = 0.0
    last_beat_ms: int = 0
    rss_mb: float | None = None
    served: int = 0
    unhurried: bool = False  # its tenant can wait a moment for what it says
    unwell: str | None = None  # what its probe last complained of
    tired: str | None = None  # why it asked to be recycled
    leave: bool = False  # asked to leave
    leave_by: float | None = None  # … by then, or signals follow
    signalled: float | None = None  # SIGTERM was sent at
    killing: str | None = None  # SIGKILL was sent, because of
    parting: str | None = None  # SIGTERM was sent for what it serves, because of; it does not come back from that
    on_purpose: bool = False  # the kill says nothing against the worker
    settled: bool = False  # healthy for long enough
    ended: Ended | None = None
    metadata: dict[str, object] | None = None  # what others want to know of it, such as its port
    ticket: Ticket | None = None  # its memory
    sweep: bool | None = None  # its family: None not looked at, False being ended, True gone

    @property
    def component(self) -> str:
        return self.slot.component

    @property
    def pool(self) -> Pool:
        return self.slot.pool

    @property
    def startup_ends(self) -> float:
        """When it must be ready (monotonic)."""
        deadline = self.pool.spec.startup_deadline
        return self.started + (deadline(self.slot) if callable(deadline) else deadline)

    @property
    def accepting(self) -> bool:
        """Whether it may be given new work now."""
        return (
            self.status is Status.HEALTHY
            and not self.leave
            and self.killing is None
            and self.parting is None
            and self.tired is None
            and self.ended is None
            and not self.pool.paused
            and self.pool.retiring is not self.slot
        )

    def send(self, *frame: object) -> None:
        """Say something to the process over its control channel."""
        if self.process:
            self.process.send(*frame)
