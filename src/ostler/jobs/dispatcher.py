"""The dispatcher: claims jobs for all free workers at once, hands them over, and writes what came of them in batches.

It is the tenant of every job pool. One turn is one transaction: results out, claims in. While a turn is under way the
next one gathers, so the batch grows with the load by itself. It wakes when something happened (a worker is free, a
ring of the doorbell, a due time); the poll is only for a ring that was lost.

A worker gets one job at a time, unless the task is known to be short: then as many as fit into a few milliseconds. A job
that turns out long does not hide the others behind it: they are recalled and go back without a mark.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ostler.config import Settings
from ostler.errors import NodeLost, StoreBusy
from ostler.events import Bus, JobsTouched, Printed
from ostler.jobs import room, verdict
from ostler.jobs.backpressure import Pressure
from ostler.jobs.deadlines import Deadlines
from ostler.jobs.holding import Holding
from ostler.jobs.logs import JobLogs
from ostler.jobs.outbox import REFUSED, Outbox
from ostler.jobs.seat import Seat
from ostler.jobs.verdict import Policy, Ran
from ostler.lifecycle import ends
from ostler.lifecycle.membership import Membership
from ostler.lifecycle.process import Ended
from ostler.lifecycle.supervisor import Supervisor
from ostler.lifecycle.wire import Frame
from ostler.lifecycle.worker import Doing, Exit, Left, Worker
from ostler.store import now_ms
from ostler.store.artifacts import ArtifactRow
from ostler.store.lanes import Lane
from ostler.store.limits import QueueLimit
from ostler.store.rows import Claim, Finish, Note, Requeue, Taken

log = logging.getLogger("ostler.jobs")

_COMMIT = 0.05  # what an enqueue that saw this node busy gets to commit, before an idle node looks for it
_PLENTY = 32  # jobs in hand that last longer than a rest of the channel
_LAST_TURN = 5.0  # what the store gets to take the last results of a node that stops


class Dispatcher:
    """Between the store and the job workers of one node."""

    kind = "jobs"

    def __init__(
        self,
        settings: Settings,
        turns: Lane,
        intake: Lane,
        bus: Bus,
        member: Membership,
        tasks: frozenset[str] | None = None,
        limits: Mapping[str, QueueLimit] | None = None,
        watermarks: Mapping[str, int] | None = None,
    ) -> None:
        self._bus, self._member = bus, member
        self._home = member.home  # where artifacts are, if they are in this data directory
        self._policy = Policy(
            settings.retry_base, settings.retry_max, settings.crash_limit, settings.retry_jitter, settings.crash_delay
        )
        self._seats: dict[Worker, Seat] = {}
        self._by_component: dict[str, Seat] = {}
        self.lost: Callable[[str], None] = lambda _: None
        """Told when the store says that this node was declared dead; set once, by the runtime."""
        self._outbox = Outbox(member, tasks, turns, bus)
        self._bell = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._due: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._holding = Holding(intake, self._home)
        self.limits = limits or {}
        self.deadlines = Deadlines(settings, self._seats)
        self.pressure = Pressure(
            watermarks or {}, settings.load_threshold, settings.backpressure_pause, bus, self._bell.set
        )
        self._room = room.Room(self.pressure, self.limits)
        self._logs = JobLogs(settings.data_dir)

    @property
    def supervisor(self) -> Supervisor:
        """The supervisor of the workers; set once, by the runtime."""
        return self.deadlines.supervisor

    @supervisor.setter
    def supervisor(self, supervisor: Supervisor) -> None:
        self.deadlines.supervisor = supervisor

    # ---- start and stop

    async def start(self) -> None:
        """Begin to claim."""
        self._task = self._loop.create_task(self._run(), name="dispatcher")

    async def stop(self) -> None:
        """Write everything that is still in memory. Call when all workers are gone. What a locked store does not take
        within a few seconds is left to the next start, which requeues those jobs.
        """
        self._closing = True
        self._bell.set()
        if self._task:
            # A turn under way is waited for: what it claims must be given back, not forgotten.
            await asyncio.wait([self._task], timeout=_LAST_TURN)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self.deadlines.stop()
        if self._due:
            self._due.cancel()
        self._outbox.try_again()
        turn = self._outbox.collect({}, self.limits)
        if turn and not self._member.lost:
            try:
                self._outbox.tell(turn, await self._outbox.write(turn, patience=_LAST_TURN))
            except Exception as error:  # noqa: BLE001
                log.warning("the last results could not be written (%s); those jobs run again at the next start", error)

    def wake(self) -> None:
        """Have the next turn look for jobs to claim."""
        self._bell.set()

    def ring(self, *jobs: int) -> None:
        """Something may be there to claim; these jobs have changed, and perhaps others."""
        self._bell.set()
        self.tell(*jobs)

    def tell(self, *jobs: int) -> None:
        """Tell those who look that these jobs have changed, and perhaps others."""
        self._bus.send(JobsTouched(jobs, others=True))

    # ---- the loop

    async def _run(self) -> None:
        while not self._closing:
            await self._bell.wait()
            self._bell.clear()
            try:
                await self._once()
            except Exception:  # the loop must survive whatever one turn does
                log.exception("a turn of the dispatcher failed; continuing")
                await asyncio.sleep(1.0)
                self._bell.set()

    async def _once(self) -> None:
        if self._member.lost:
            return
        turn = self._outbox.collect(self._wants(), self.limits)
        if turn is None:
            return
        try:
            taken = await self._outbox.write(turn)
        except NodeLost:
            self.lost(turn.node)
            return
        except StoreBusy:
            self._outbox.put_back(turn)
            raise
        except Exception:
            log.exception("the store refused a turn; trying its items one by one")
            try:
                await self._outbox.write_one_by_one(turn)
            except NodeLost:
                self.lost(turn.node)
                return
            self._loop.call_later(REFUSED, self._bell.set)
            await asyncio.sleep(1.0)  # whatever it is, it must not make the node spin
            self._bell.set()
            return
        if turn.node != self._member.id or self._member.lost:
            return  # declared dead while it was written: what it claimed is requeued by others
        self._deliver(self._unknown(taken) if taken.replayed else taken)  # first: the workers wait for it
        self._outbox.tell(turn, taken)
        if taken.again:
            self._bell.set()
            asyncio.get_running_loop().call_later(_COMMIT, self._bell.set)
        if taken.claims and len(taken.claims) == sum(map(len, turn.wants.values())):
            self._bell.set()  # there may be more than was asked for

    def _unknown(self, taken: Taken) -> Taken:
        """Of all that the node holds, what nobody here has in hand: its turn was committed, and the answer was lost.

        What has ended since is not among it: the next turn writes that.
        """
        known = {(claim.id, claim.fence) for seat in self._seats.values() for claim in seat.jobs} | self._outbox.ended()
        return replace(taken, claims=[c for c in taken.claims if (c.id, c.fence) not in known])

    def forget(self) -> None:
        """This node was declared dead: its claims are no longer its own."""
        self._outbox.forget()
        for seat in self._seats.values():
            seat.jobs.clear()

    def _wants(self) -> dict[str, list[str]]:
        if self._closing or not self.supervisor.pauses.enabled or self.supervisor.stopping:
            return {}
        return self._room.wants(self._seats.values())

    def _deliver(self, taken: Taken) -> None:
        """Hand the new claims to their workers; what a worker can no longer take goes back."""
        batches: dict[Seat, list[Claim]] = {}
        now, at = time.monotonic(), now_ms()
        for claim in taken.claims:
            seat = self._by_component.get(claim.worker)
            if seat is None or not seat.worker.accepting or not self.supervisor.pauses.enabled:
                why = "its worker left before it could be handed over"
                self._outbox.end(verdict.returned(Ran(claim, at, at), why))
                self._bell.set()
            else:
                batches.setdefault(seat, []).append(claim)
        for seat, claims in batches.items():
            if not seat.jobs:
                seat.next(now, at, begun=False)
            seat.take(claims)
            seat.worker.unhurried = len(seat.jobs) > _PLENTY
            for part in room.frames(claims):
                seat.worker.send("work", [[c.id, c.fence, c.task, c.args, c.attempt, c.crashes] for c in part])
            self.deadlines.arm(seat)
        if self._due:
            self._due.cancel()
            self._due = None
        if taken.next_due is not None:
            self._due = self._loop.call_later(max(0.0, (taken.next_due - now_ms()) / 1000), self._bell.set)

    # ---- the tenant of the job pools

    def ready(self, worker: Worker, info: Mapping[str, Any]) -> None:
        seat = Seat(worker)
        self._seats[worker] = self._by_component[worker.component] = seat
        self._bell.set()

    def beat(self, worker: Worker, facts: Any) -> None:
        """A job worker says nothing with its heartbeats, and is told nothing."""

    def busy(self, worker: Worker) -> bool:
        seat = self._seats.get(worker)
        return seat is not None and bool(seat.jobs)

    def output(self, worker: Worker, label: str, lines: list[bytes]) -> None:
        """What a job printed."""
        if seat := self._seats.get(worker):
            self.deadlines.printed(seat, lines)
            if (title := seat.title(int(label))) is not None:
                lines = [title, *lines]
        self._logs.append(int(label), lines)
        self._bus.send(Printed(f"job:{label}"))

    def pause(self, worker: Worker) -> None:
        """The running job finishes; what has not begun comes back."""
        if seat := self._seats.get(worker):
            self.deadlines.recall(seat)

    def resume(self, worker: Worker) -> None:
        self._bell.set()

    def doing(self, worker: Worker) -> Doing | None:
        seat = self._seats.get(worker)
        return Doing(f"job:{seat.jobs[0].id}", seat.jobs[0].task) if seat and seat.jobs else None

    def drain(self, worker: Worker) -> None:
        """Nothing new; what has not begun comes back; the running job is told."""
        if (seat := self._seats.get(worker)) and seat.jobs:
            worker.send("leaving")
            self.deadlines.recall(seat)

    def heard(self, worker: Worker, frame: Frame) -> None:
        seat = self._seats.get(worker)
        if seat is None:
            return
        match frame:
            case ["done", job, fence, result]:
                if ran := self._at(seat, job, fence):
                    self._end(seat, ran, verdict.done(ran, result))
            case ["begin", job, fence]:
                if seat.is_at(job, fence):
                    seat.begun, seat.began, seat.began_ms = True, time.monotonic(), now_ms()
            case ["fail", job, fence, kind, what, after]:
                if ran := self._at(seat, job, fence):
                    draw = random.uniform(-1, 1)  # noqa: S311
                    self._end(seat, ran, verdict.failure(ran, kind, what, after, self._policy, draw))
            case ["note", job, fence, event, progress, stage, data, *published]:
                text = None if data is None else json.dumps(data)
                artifact = ArtifactRow(job, published[0][0], self._home, *published[0][1:]) if published else None
                self._outbox.note(Note(job, fence, event, now_ms(), progress, stage, text, artifact))
                self._bell.set()
            case ["holds", job, fence, key]:
                self._holding.ask(worker, job, fence, key, self._is_running)
            case ["back", jobs]:
                self._came_back(seat, set(jobs))
            case _:
                log.warning("%s sent an unknown frame %r", worker.component, frame[0])

    def _is_running(self, worker: Worker, job: int, fence: int) -> bool:
        seat = self._seats.get(worker)
        return not self._closing and seat is not None and seat.is_at(job, fence)

    def died(self, worker: Worker, ended: Ended) -> None:
        """Its job goes back when nothing of the old run lives any more: see `gone`."""

    def gone(self, worker: Worker, end: Exit) -> Left:
        """The worker died: the job that it was running bears it, those behind it go back as they were."""
        seat = self._seats.pop(worker, None)
        if seat is None:
            return Left()
        if self._by_component.get(worker.component) is seat:
            del self._by_component[worker.component]
        if not seat.jobs:
            return Left()
        at = now_ms()
        running, *waiting = seat.jobs
        left = Left()
        if not seat.begun:
            waiting = list(seat.jobs)
        else:
            ran, left = Ran(running, seat.began_ms, at), Left(f"job:{running.id}", first=running.crashes == 0)
            self._store_end(ran, self._death(seat, ran, end))
        for claim in waiting:
            self._outbox.end(verdict.returned(Ran(claim, at, at), f"{worker.component} died before it began"))
        self._bell.set()
        return left

    # ---- ends

    def _at(self, seat: Seat, job: int, fence: int) -> Ran | None:
        """The run that the worker tells the end of; None when it was not at that job."""
        if not seat.is_at(job, fence):
            log.error("%s reported job %d, which it was not running; dropped", seat.worker.component, job)
            return None
        return Ran(seat.jobs[0], seat.began_ms, now_ms())

    def _end(self, seat: Seat, ran: Ran, result: Finish | Requeue) -> None:
        """The first job in hand has ended: the next one begins now. The verdict was made before anything is changed here."""
        claim, now = seat.jobs.popleft(), time.monotonic()
        seat.worker.unhurried = len(seat.jobs) > _PLENTY
        self._room.durations.add(claim.queue, claim.task, now - seat.began)
        seat.next(now, ran.ended, begun=True)
        if seat.jobs and seat.jobs[0].timeout is not None:
            self.deadlines.arm(seat)
        self.deadlines.supervisor.finished(seat.worker, idle=not seat.jobs)
        self._store_end(ran, result)

    def _store_end(self, ran: Ran, result: Finish | Requeue) -> None:
        self._outbox.ran(ran, result)
        self._bell.set()

    def _death(self, seat: Seat, ran: Ran, end: Exit) -> Finish | Requeue:
        how = ends.words(end.reason, end.code, end.signal)
        if seat.timed_out:
            return verdict.timed_out(ran, self._policy, seat.last_lines())
        if seat.cancel_by is not None:
            return verdict.cancelled(ran)
        if end.kind == "asked":
            return verdict.aborted(ran, end.reason, how)
        doubtful, printed = seat.worker.pool.doubtful, seat.last_lines()
        return verdict.crashed(ran, end.reason, how, self._policy, printed, doubtful=doubtful)

    def _came_back(self, seat: Seat, jobs: set[int]) -> None:
        at = now_ms()
        back = [c for c in seat.jobs if c.id in jobs]
        if not back:
            return
        first = seat.jobs[0].id in jobs
        seat.jobs = deque(c for c in seat.jobs if c.id not in jobs)
        seat.worker.unhurried = False
        if first:  # it had not begun: whatever was meant for it is over
            seat.next(time.monotonic(), at, begun=False)
        if not seat.jobs:
            self.supervisor.wake()
        for claim in back:
            self._outbox.end(verdict.returned(Ran(claim, at, at), f"{seat.worker.component} was at a long job"))
        self._bell.set()

    # ---- for those who look

    def idle_queues(self) -> list[str]:
        """Queues for which a worker is free."""
        return sorted({s.worker.pool.spec.name for s in self._seats.values() if not s.jobs and s.worker.accepting})

    def running(self) -> int:
        """How many jobs are running on this node now."""
        return sum(bool(seat.jobs) for seat in self._seats.values())
