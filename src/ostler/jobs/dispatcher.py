"""The dispatcher: claims jobs for all free workers at once, hands them over, and writes what came of them in batches.

It is the tenant of every job pool. One turn is one transaction: results out, claims in. While a turn is under way the
next one gathers, so the batch grows with the load by itself. It wakes when something happened (a worker is free, a
ring of the doorbell, a due time); the poll is only for a ring that was lost.

A worker gets one job at a time, unless the task is known to be short: then as many as fit into a few milliseconds. A job
that turns out long does not hide the others behind it: they are recalled and go back without a mark.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from ostler.config import Settings
from ostler.errors import StoreBusy
from ostler.events import Backpressure, Bus, ClaimLost, ClaimMissed, JobEnded, JobsTouched, Printed
from ostler.jobs import backpressure, verdict
from ostler.jobs.logs import JobLogs
from ostler.jobs.seat import Durations, Seat
from ostler.jobs.verdict import Policy, Ran
from ostler.lifecycle.recycle import RecycleLimits
from ostler.lifecycle.supervisor import Supervisor
from ostler.lifecycle.wire import Frame
from ostler.lifecycle.worker import Exit, Worker
from ostler.store import now_ms
from ostler.store.lanes import Lane
from ostler.store.limits import QueueLimit
from ostler.store.rows import Claim, Finish, Note, Requeue, Taken, Turn
from ostler.store.store import Store

log = logging.getLogger("ostler.jobs")

_NEVER = RecycleLimits()

_GATHER = 0.003  # a turn waits so long for more results, while every worker still has enough in hand
_LAST_TURN = 5.0  # what the store gets to take the last results of a node that stops
_FRAME_BYTES = 4_000_000  # of arguments in one frame
_RECALL_AFTER = 0.050  # a running job that lasts longer gives back what waits behind it


class Dispatcher:
    """Between the store and the job workers of one node."""

    def __init__(
        self,
        settings: Settings,
        writer: Lane,
        reader: Lane,
        bus: Bus,
        limits: Mapping[str, QueueLimit] | None = None,
        durable: Lane | None = None,
    ) -> None:
        self._durable = durable or writer  # what is answered there survives a power cut
        self._settings, self._writer, self._reader, self._bus = settings, writer, reader, bus
        self._policy = Policy(settings.retry_base, settings.retry_max, settings.crash_limit, settings.retry_jitter)
        self._node = settings.node
        self._seats: dict[Worker, Seat] = {}
        self._by_component: dict[str, Seat] = {}
        self._durations = Durations()
        self._finishes: list[Finish] = []
        self._requeues: list[Requeue] = []
        self._notes: list[Note] = []
        self._bell = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._due: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self._answers: set[asyncio.Task[None]] = set()
        self._limits = limits or {}
        self._logs = JobLogs(settings.data_dir)
        self._held_until = 0.0
        self.pauses = 0
        self.pressure: str | None = None  # why claiming pauses
        self.supervisor: Supervisor  # set by the runtime, once it exists

    # ---- start and stop

    def start(self) -> None:
        self._tasks = [
            self._loop.create_task(self._run(), name="dispatcher"),
            self._loop.create_task(self._poll(), name="poll"),
        ]

    async def close(self) -> None:
        """Write everything that is still in memory. Call when all workers are gone. What a locked store does not take
        within a few seconds is left to the next start, which sends those jobs back.
        """
        self._closing = True
        self._bell.set()
        # A turn under way is waited for: what it claims must be given back, not forgotten.
        await asyncio.wait(self._tasks[:1], timeout=_LAST_TURN)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for handle in (self._timer, self._due):
            if handle:
                handle.cancel()
        turn = self._collect(claim=False)
        if turn:
            try:
                await self._turn(turn, patience=_LAST_TURN)
            except Exception as error:  # noqa: BLE001
                log.warning("the last results could not be written (%s); the next start runs those jobs again", error)

    def ring(self, *jobs: int) -> None:
        """Something may be there to claim; these jobs have changed, and perhaps others."""
        self._bell.set()
        self._bus.send(JobsTouched(jobs, others=True))

    # ---- the loop

    async def _run(self) -> None:
        while not self._closing:
            await self._bell.wait()
            if self._unhurried():
                await asyncio.sleep(_GATHER)
            self._bell.clear()
            try:
                await self._once()
            except Exception:  # the loop must survive whatever one turn does
                log.exception("a turn of the dispatcher failed; it goes on")
                await asyncio.sleep(1.0)
                self._bell.set()

    async def _once(self) -> None:
        turn = self._collect(claim=not self._closing)
        if turn is None:
            return
        try:
            taken = await self._turn(turn)
        except StoreBusy:
            self._put_back(turn)
            raise
        except Exception:
            log.exception("the store refused a turn; its items are tried one by one")
            await self._one_by_one(turn)
            await asyncio.sleep(1.0)  # whatever it is, it must not make the node spin
            self._bell.set()
            return
        self._deliver(taken)
        if taken.claims and len(taken.claims) == sum(map(len, turn.wants.values())):
            self._bell.set()  # there may be more than was asked for

    async def _one_by_one(self, turn: Turn) -> None:
        """One item that the store refuses must not hold up all others for ever: its job fails with a code that says so."""
        for note in turn.notes:
            with contextlib.suppress(Exception):  # logged with the turn; a timeline can do without it
                await self._turn(Turn(turn.node, turn.now, notes=[note]))
        alone = [(f.id, f.fence, Turn(turn.node, turn.now, finishes=[f])) for f in turn.finishes]
        alone += [(r.id, r.fence, Turn(turn.node, turn.now, requeues=[r])) for r in turn.requeues]
        for job, fence, one in alone:
            try:
                await self._turn(one)
            except Exception as error:
                log.exception("job %d: the end of its run could not be stored", job)
                what = verdict.error("INTERNAL", f"the end of its run could not be stored: {error}")
                failed = Finish(job, fence, "failed", turn.now, turn.now, "failed", error=what)
                with contextlib.suppress(Exception):  # then it stays claimed, and the next start sends it back
                    await self._turn(Turn(turn.node, turn.now, finishes=[failed]))

    def _unhurried(self) -> bool:
        """Whether all workers have so much in hand that the next turn may gather a larger batch first."""
        return all(len(seat.jobs) > 8 for seat in self._seats.values()) and bool(self._seats)

    async def _turn(self, turn: Turn, patience: float | None = None) -> Taken:
        taken = await self._writer.call(lambda store: store.jobs.turn(turn), patience=patience)
        if taken.missed:
            self._bus.send(ClaimMissed(taken.missed))
        for job in taken.lost:
            log.warning("job %d: a late result was dropped, its claim was lost", job)
            self._bus.send(ClaimLost(job))
        self._bus.send(
            JobsTouched([row.id for rows in (turn.notes, turn.finishes, turn.requeues, taken.claims) for row in rows])
        )
        return taken

    def _collect(self, *, claim: bool = True) -> Turn | None:
        wants = self._wants() if claim else {}
        if not (wants or self._finishes or self._requeues or self._notes):
            return None
        turn = Turn(self._node, now_ms(), self._notes, self._finishes, self._requeues, wants, self._limits)
        self._notes, self._finishes, self._requeues = [], [], []
        return turn

    def _put_back(self, turn: Turn) -> None:
        self._notes = turn.notes + self._notes
        self._finishes = turn.finishes + self._finishes
        self._requeues = turn.requeues + self._requeues

    def _wants(self) -> dict[str, list[str]]:
        """For each queue the workers with room, the emptiest first, one place after another."""
        rooms: dict[str, list[tuple[int, int, str]]] = {}
        if not self.supervisor.enabled or self.supervisor.stopping:
            return {}
        now = time.monotonic()
        if now < self._held_until:
            return {}
        for seat in self._seats.values():
            if not seat.worker.accepting or seat.cancel_by is not None or seat.timed_out:
                continue
            if seat.jobs and (seat.recalled or now > seat.began + _RECALL_AFTER):
                continue  # it is at a long one: nothing is put behind that
            queue, held = seat.worker.pool.spec.name, len(seat.jobs)
            # Where places or a rate are counted, none is held by a job that waits behind another.
            depth = 1 if queue in self._limits else self._durations.handover(queue)
            limit = seat.worker.pool.spec.recycle.count
            # Never more in hand than the worker may still serve; a warmed replacement comes by itself, so it serves on.
            if limit and not seat.worker.pool.spec.recycle.warm:
                depth = min(depth, limit - seat.worker.served)
            if held <= depth // 2 and held < depth:
                rooms.setdefault(queue, []).extend((place, held, seat.worker.component) for place in range(held, depth))
        return {queue: [component for _, _, component in sorted(places)] for queue, places in rooms.items()}

    def _deliver(self, taken: Taken) -> None:
        """Hand the new claims to their workers; what a worker can no longer take goes back."""
        batches: dict[Seat, list[Claim]] = {}
        now, at = time.monotonic(), now_ms()
        for claim in taken.claims:
            seat = self._by_component.get(claim.worker)
            if seat is None or not seat.worker.accepting or not self.supervisor.enabled:
                self._requeues.append(
                    verdict.returned(Ran(claim, at, at), "its worker left before it could be handed over")
                )
                self._bell.set()
            else:
                batches.setdefault(seat, []).append(claim)
        for seat, claims in batches.items():
            if not seat.jobs:
                seat.next(now, at, begun=False)
            seat.jobs.extend(claims)
            for part in _parts(claims):
                seat.worker.send("work", [[c.id, c.fence, c.task, c.args, c.attempt, c.crashes] for c in part])
            self._arm(seat)
        if self._due:
            self._due.cancel()
            self._due = None
        if taken.next_due is not None:
            self._due = self._loop.call_later(max(0.0, (taken.next_due - now_ms()) / 1000), self._bell.set)

    async def _poll(self) -> None:
        """The fallback: what other processes wrote, when no ring came through."""
        while True:
            await asyncio.sleep(self._settings.poll_interval)
            await self.look()

    async def look(self) -> None:
        """Read what other processes may have changed: pauses, cancels, jobs that are ready."""
        queues = sorted({s.worker.pool.spec.name for s in self._seats.values() if not s.jobs and s.worker.accepting})

        def read(store: Store) -> tuple[bool, frozenset[str], list[tuple[int, int]], bool, int]:
            return (
                *store.meta.pauses(),
                store.jobs.wanted_cancels(self._node),
                bool(queues) and store.jobs.ready(queues, now_ms()),
                store.jobs.depth_up_to(self._settings.high_watermark + 1),
            )

        epoch = self.supervisor.pause_epoch
        try:
            enabled, paused, cancels, ready, depth = await self._reader.call(read, patience=1.0)
        except Exception as error:  # noqa: BLE001  the next poll looks again
            log.warning("the store could not be read: %s", error)
            return
        self._press(depth)
        paused &= frozenset(self.supervisor.pools)
        known = frozenset(name for name, pool in self.supervisor.pools.items() if pool.paused)
        # What was read before a pause of our own was written must not undo it. An odd epoch: it is being written.
        if (
            epoch == self.supervisor.pause_epoch
            and epoch % 2 == 0
            and (enabled, paused) != (self.supervisor.enabled, known)
        ):
            self.supervisor.apply_pauses(enabled, paused)
            ready = True
        for job, fence in cancels:
            self.cancel(job, fence)
        if ready:
            self._bell.set()

    def _press(self, depth: int) -> None:
        """Backpressure: pause the claiming for a while when too much waits and the machine is too busy."""
        if time.monotonic() < self._held_until:
            return
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        settings = self._settings
        self.pressure = backpressure.reason(
            depth, load, high_watermark=settings.high_watermark, load_threshold=settings.load_threshold
        )
        if self.pressure is not None:
            self.pauses += 1
            self._held_until = time.monotonic() + settings.backpressure_pause
            self._loop.call_later(settings.backpressure_pause + 0.01, self._bell.set)
            self._bus.send(Backpressure(self.pressure))

    # ---- the tenant of the job pools

    def ready(self, worker: Worker) -> None:
        seat = Seat(worker)
        self._seats[worker] = self._by_component[worker.component] = seat
        self._bell.set()

    def busy(self, worker: Worker) -> bool:
        seat = self._seats.get(worker)
        return seat is not None and bool(seat.jobs)

    def output(self, worker: Worker, label: str, lines: list[bytes]) -> None:
        """What a job printed."""
        self._logs.append(int(label), lines)
        self._bus.send(Printed(f"job:{label}"))

    def pause(self, worker: Worker) -> None:
        """The running job finishes; what has not begun comes back."""
        if seat := self._seats.get(worker):
            self._recall(seat)

    def drain(self, worker: Worker) -> None:
        """Nothing new; what has not begun comes back; the running job is told."""
        if (seat := self._seats.get(worker)) and seat.jobs:
            worker.send("leaving")
            self._recall(seat)

    def heard(self, worker: Worker, frame: Frame) -> None:
        seat = self._seats.get(worker)
        if seat is None:
            return
        match frame:
            case ["begin", job, fence]:
                if seat.jobs and (seat.jobs[0].id, seat.jobs[0].fence) == (job, fence):
                    seat.begun, seat.began, seat.began_ms = True, time.monotonic(), now_ms()
            case ["done", job, fence, result]:
                if ran := self._at(seat, job, fence):
                    self._end(seat, ran, verdict.done(ran, result))
            case ["fail", job, fence, kind, what, after]:
                if ran := self._at(seat, job, fence):
                    self._end(seat, ran, self._failure(ran, kind, what, after))
            case ["note", job, fence, event, progress, stage, data]:
                self._notes.append(
                    Note(job, fence, event, now_ms(), progress, stage, None if data is None else json.dumps(data))
                )
                self._bell.set()
            case ["holds", job, fence]:
                answer = self._loop.create_task(self._answer(worker, job, fence))
                self._answers.add(answer)
                answer.add_done_callback(self._answers.discard)
            case ["back", jobs]:
                self._came_back(seat, set(jobs))
            case _:
                log.warning("%s sent an unknown frame %r", worker.component, frame[0])

    async def _answer(self, worker: Worker, job: int, fence: int) -> None:
        """A worker asks whether it still owns its job, before it does what cannot be undone. The store decides."""
        try:
            holds = await self._durable.call(lambda store: store.jobs.hold(job, fence), patience=30.0)
        except Exception as error:  # noqa: BLE001
            log.warning("job %d: its claim could not be looked up (%s); it may not publish", job, error)
            holds = False
        worker.send("held", job, fence, holds)

    def gone(self, worker: Worker, end: Exit) -> int | None:
        """The worker died: the job that it was at bears it, those behind it go back as they were."""
        seat = self._seats.pop(worker, None)
        if seat is None:
            return None
        if self._by_component.get(worker.component) is seat:
            del self._by_component[worker.component]
        if not seat.jobs:
            return None
        at = now_ms()
        running, *waiting = seat.jobs
        if not seat.begun:
            waiting, blamed = list(seat.jobs), None
        else:
            ran, blamed = Ran(running, seat.began_ms, at), running.id
            self._store_end(ran, self._death(seat, ran, end))
        self._requeues += [
            verdict.returned(Ran(c, at, at), f"{worker.component} died before it began") for c in waiting
        ]
        self._bell.set()
        return blamed

    # ---- ends

    def _at(self, seat: Seat, job: int, fence: int) -> Ran | None:
        """The run that the worker tells the end of; None when it was not at that job."""
        if not seat.jobs or (seat.jobs[0].id, seat.jobs[0].fence) != (job, fence):
            log.error("%s reported job %d, which it was not running; dropped", seat.worker.component, job)
            return None
        return Ran(seat.jobs[0], seat.began_ms, now_ms())

    def _end(self, seat: Seat, ran: Ran, result: Finish | Requeue) -> None:
        """The first job in hand has ended: the next one begins now. The verdict was made before anything is changed here."""
        claim, now = seat.jobs.popleft(), time.monotonic()
        self._durations.add(claim.queue, claim.task, now - seat.began)
        seat.next(now, ran.ended, begun=True)
        worker = seat.worker
        worker.served += 1
        if seat.jobs:
            if seat.jobs[0].timeout is not None:
                self._arm(seat)
        elif worker.leave or worker.pool.spec.recycle != _NEVER:
            self.supervisor.wake()
        self._store_end(ran, result)

    def _store_end(self, ran: Ran, result: Finish | Requeue) -> None:
        if isinstance(result, Finish):
            self._finishes.append(result)
        else:
            self._requeues.append(result)
        self._bell.set()
        claim = ran.claim
        seconds = (ran.ended - ran.began) / 1000
        code = json.loads(result.error)["code"] if result.error else None
        self._bus.send(JobEnded(claim.id, claim.task, claim.queue, claim.worker, result.event, seconds, code))

    def _failure(self, ran: Ran, kind: str, what: dict[str, Any], after: float | None) -> Finish | Requeue:
        match kind:
            case "permanent":
                return verdict.failed(ran, what)
            case "cancelled":
                return verdict.cancelled(ran)
            case "snooze":
                return verdict.snoozed(ran, after or 0.0)
            case _:
                return verdict.transient(ran, what, self._policy, after, draw=random.uniform(-1, 1))  # noqa: S311

    def _death(self, seat: Seat, ran: Ran, end: Exit) -> Finish | Requeue:
        if seat.timed_out:
            return verdict.timed_out(ran, self._policy)
        if seat.cancel_by is not None:
            return verdict.cancelled(ran)
        if end.kind == "asked":
            return verdict.aborted(ran)
        return verdict.crashed(ran, end.reason, end.signal or f"exit code {end.code}", self._policy)

    def _came_back(self, seat: Seat, jobs: set[int]) -> None:
        at = now_ms()
        back = [c for c in seat.jobs if c.id in jobs]
        if not back:
            return
        first = seat.jobs[0].id in jobs
        seat.jobs = deque(c for c in seat.jobs if c.id not in jobs)
        if first:  # it had not begun: whatever was meant for it is over
            seat.next(time.monotonic(), at, begun=False)
        if not seat.jobs:
            self.supervisor.wake()
        self._requeues += [verdict.returned(Ran(c, at, at), f"{seat.worker.component} was at a long job") for c in back]
        self._bell.set()

    # ---- deadlines of running jobs

    def cancel(self, job: int, fence: int | None = None) -> None:
        """Somebody wants this running job cancelled: ask it, then signals. Harmless when asked twice."""
        for seat in self._seats.values():
            held = next((c for c in seat.jobs if c.id == job and fence in (None, c.fence)), None)
            if held is None:
                continue
            if held is not seat.jobs[0]:
                self._recall(seat)  # not begun: it comes back, and the store ends it there
            elif seat.cancel_by is None:
                seat.worker.send("cancel", job)
                seat.cancel_by = time.monotonic() + self._settings.cancel_grace
                self._arm(seat)

    def _recall(self, seat: Seat) -> None:
        if len(seat.jobs) > 1:
            seat.recalled = True
            seat.worker.send("recall")

    def _moments(self, seat: Seat) -> list[float]:
        """When the seat must be looked at again."""
        if not seat.jobs or seat.worker.killing:
            return []
        moments = [m for m in (seat.kill_by or seat.cancel_by,) if m is not None]
        if seat.jobs[0].timeout is not None:
            moments.append(seat.began + seat.jobs[0].timeout)
        if len(seat.jobs) > 1 and not seat.recalled:
            moments.append(seat.began + _RECALL_AFTER)
        return moments

    def _arm(self, seat: Seat) -> None:
        """See to it that the clock looks at the seat in time. The loop's clock is the monotonic one."""
        moment = min(self._moments(seat), default=None)
        if moment is None or (self._timer is not None and self._timer_at <= moment):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = self._loop.call_at(moment, self._tick), moment

    def _tick(self) -> None:
        self._timer = None
        now = time.monotonic()
        for seat in list(self._seats.values()):
            if not seat.jobs or seat.worker.killing:
                continue
            timeout = seat.jobs[0].timeout
            overran = timeout is not None and now >= seat.began + timeout
            if overran and seat.cancel_by is None:
                log.warning(
                    "job %d ran longer than its %g s: %s is killed", seat.jobs[0].id, timeout, seat.worker.component
                )
                seat.timed_out = True
                self.supervisor.kill(seat.worker, "job-timeout")
            elif overran or (seat.kill_by is not None and now >= seat.kill_by):
                self.supervisor.kill(seat.worker, "cancelled")
            elif seat.kill_by is None and seat.cancel_by is not None and now >= seat.cancel_by:
                self.supervisor.terminate(seat.worker, "cancelled")
                seat.kill_by = now + self._settings.term_grace
            if len(seat.jobs) > 1 and not seat.recalled and now >= seat.began + _RECALL_AFTER:
                self._recall(seat)
            self._arm(seat)

    # ---- for those who look

    @property
    def limits(self) -> Mapping[str, QueueLimit]:
        """The limits of queues that have any."""
        return self._limits

    def current(self, component: str) -> tuple[int, str] | None:
        """(id, task) of what the worker is at."""
        seat = self._by_component.get(component)
        return (seat.jobs[0].id, seat.jobs[0].task) if seat and seat.jobs else None

    def running(self) -> int:
        """How many jobs are running on this node now."""
        return sum(1 for seat in self._seats.values() if seat.jobs)


def _parts(claims: list[Claim]) -> Iterator[list[Claim]]:
    """The claims in frames of bounded size."""
    part: list[Claim] = []
    size = 0
    for claim in claims:
        if part and size + len(claim.args) > _FRAME_BYTES:
            yield part
            part, size = [], 0
        part.append(claim)
        size += len(claim.args)
    yield part
