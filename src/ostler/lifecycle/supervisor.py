"""The supervisor: one loop that alone owns the state of all workers.

Callbacks (a frame, a line, an end, a request) only note facts and wake the loop; the loop looks at every slot and takes
the next step that the facts call for. What is decided comes from `state`, `restart` and `recycle`, which are pure.

A crash, from SIGKILL to restart: process.py sees the pidfd -> `_ended` here names the reason, tells the tenant (its job
goes back to the queue) and counts -> restart.py gives the delay or gives up -> `_rest` spawns the next generation, once
the family of the dead one is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import signal
import subprocess
import sys
import time
from typing import Any

from ostler import private
from ostler.config import Settings
from ostler.events import Beats, Bus, PoolPaused, Printed, WorkerMoved
from ostler.lifecycle import ends, family, launch, plain, recycle, restart
from ostler.lifecycle.process import Ended, Process, oom_kills
from ostler.lifecycle.record import Records
from ostler.lifecycle.restart import Again, GiveUp, History, Limits
from ostler.lifecycle.state import Status, move
from ostler.lifecycle.wire import Frame
from ostler.lifecycle.worker import Exit, Pool, PoolSpec, Slot, Worker
from ostler.store import now_ms
from ostler.store.lanes import Lane
from ostler.store.rows import ExitRow

log = logging.getLogger("ostler.lifecycle")


class Supervisor:
    """Starts, watches, drains, recycles and restarts the workers of all pools."""

    def __init__(self, settings: Settings, lane: Lane, bus: Bus, specs: list[PoolSpec]) -> None:
        self.settings = settings
        self.node = settings.node
        self.enabled = True
        self.stopping = False
        self.pools: dict[str, Pool] = {}
        self.slots: dict[str, Slot] = {}
        self.token = secrets.token_hex(8)
        self.pause_epoch = 0  # grows when a pause begins or ends to be written: what was read before is outdated
        self.bus = bus
        self.records = Records(settings, lane, self.token)
        self._limits = Limits(
            settings.restart_limit, settings.restart_window, settings.restart_lifetime, settings.backoff_max
        )
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._guard: subprocess.Popen[bytes] | None = None
        self._oom_kills = oom_kills()
        self._next_beat = 0.0
        self._last_look = time.monotonic()
        self._logs = settings.data_dir / "logs"
        for spec in specs:
            pool = self.pools[spec.name] = Pool(spec)
            for n in range(spec.size):
                slot = Slot(f"worker:{spec.name}:{n}", n, pool)
                pool.slots.append(slot)
                self.slots[slot.component] = slot

    # ---- start and stop

    async def start(self) -> None:
        """Load what is known of the slots, register the node, and begin. Workers start in the order of their pools."""
        private.make(self._logs)
        self.apply_pauses(*await self.records.load(self.slots), still=True)
        if not family.adopt_orphans():
            log.info("orphans cannot be adopted on this system; families are found by their mark alone")
        self._start_guard()
        self._spawn_task(self._run(), "supervisor")

    def mark_serving(self) -> None:
        """The node is up: its own row becomes healthy."""
        self.records.node_moved(Status.HEALTHY)

    async def stop(self) -> None:
        """Drain every worker; those that are not done within their grace get SIGTERM, then SIGKILL. Returns when all are gone."""
        self.stopping = True
        self.records.node_moved(Status.STOPPING)
        for slot in self.slots.values():
            slot.wanted = False
            if slot.worker is None and slot.rest is Status.CRASHED:
                self.give_up_waiting(slot)
            for worker in slot.all():
                self.leave(worker, by=time.monotonic() + worker.pool.spec.stop_grace)
        while any(slot.all() for slot in self.slots.values()):
            self._wake.set()
            await asyncio.sleep(0.01)

    def force(self) -> None:
        """Kill every worker now."""
        for slot in self.slots.values():
            slot.wanted = False
            for worker in slot.all():
                self.kill(worker, "shutdown")

    async def close(self) -> None:
        """End the loop and the guard. Call after `stop`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.records.node_stopped()
        guard, self._guard = self._guard, None
        if guard and guard.stdin:
            guard.stdin.close()
            await asyncio.to_thread(guard.wait)

    def _start_guard(self) -> None:
        argv = [sys.executable, "-I", "-S", family.__file__, f"{self.token}/"]
        self._guard = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)

    # ---- the loop

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                self._look()
            except Exception:
                log.exception("the supervisor's loop failed once and goes on")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), max(0.001, self._next_look() - time.monotonic()))

    def _look(self) -> None:
        now = time.monotonic()
        asleep = now - self._last_look - self.settings.heartbeat_interval
        if asleep > 1.0:
            # The node itself was stopped or starved: what looks like the workers' silence is its own.
            log.warning("the node's loop was away for %.1f s; its workers are not blamed for that", asleep)
            for slot in self.slots.values():
                for worker in slot.all():
                    worker.last_beat = min(now, worker.last_beat + asleep)
                    worker.started = min(now, worker.started + asleep)
        self._last_look = now
        for slot in self.slots.values():
            try:
                self._advance(slot, now)
            except Exception:
                log.exception("%s: a step failed; the other workers go on", slot.component)
        if now >= self._next_beat:
            self._next_beat = now + self.settings.heartbeat_interval
            self._beat()

    def _next_look(self) -> float:
        moments = [self._next_beat]
        for slot in self.slots.values():
            spec = slot.pool.spec
            if slot.worker is None and slot.rest is Status.CRASHED:
                moments.append(slot.due)
            for worker in slot.all():
                if worker.killing:
                    continue
                if worker.status is Status.STARTING:
                    moments.append(worker.started + spec.startup_deadline)
                elif worker.status in (Status.HEALTHY, Status.DRAINING):
                    moments.append(worker.last_beat + spec.stale_after)
                    if spec.recycle.age:
                        moments.append(worker.ready_at + spec.recycle.age)
                    if not worker.settled:
                        moments.append(worker.ready_at + self.settings.healthy_after)
                if worker.leave_by is not None:
                    moments.append(worker.leave_by if worker.signalled is None else worker.signalled + spec.term_grace)
        # Moments that have passed were seen by the last look; what they wait for will wake the loop by itself.
        return min(moment for moment in moments if moment > self._last_look)

    def _advance(self, slot: Slot, now: float) -> None:
        for worker in slot.all():
            self._step(slot, worker, now)
        if slot.worker is None and slot.heir is None:
            self._rest(slot, now)

    def _rest(self, slot: Slot, now: float) -> None:
        """A slot without a worker: start one when it is wanted and its time has come."""
        if self.stopping or not slot.wanted:
            return
        if slot.rest is Status.STOPPED or (slot.rest is Status.CRASHED and now >= slot.due):
            self._spawn(slot)

    def _step(self, slot: Slot, worker: Worker, now: float) -> None:
        """One worker: take the next step that its facts call for."""
        spec = slot.pool.spec
        if worker.ended is not None:
            # Its family goes first: what it was at must not run again while parts of the old run still live.
            if worker.sweep is None:
                self._sweep(worker)
            if worker.sweep:
                self._ended(slot, worker, worker.ended, now)
            return
        if worker.killing is not None:
            return  # SIGKILL is on its way; its end will wake us
        match worker.status:
            case Status.STARTING:
                if worker.leave:
                    self._begin_stop(slot, worker, now)
                elif worker.announced:
                    self._healthy(slot, worker, now)
                elif now >= worker.started + spec.startup_deadline:
                    self.kill(worker, "startup-deadline")
            case Status.HEALTHY:
                if worker.leave:
                    self._move(slot, worker, Status.DRAINING)
                    spec.tenant.drain(worker)
                    self._step(slot, worker, now)
                elif not self._silent(worker, now):
                    self._settle(slot, worker, now)
                    self._maybe_recycle(slot, worker, now)
            case Status.DRAINING:
                if not spec.tenant.busy(worker) or (worker.leave_by is not None and now >= worker.leave_by):
                    self._begin_stop(slot, worker, now)
                else:
                    self._silent(worker, now)
            case Status.STOPPING:
                self._escalate(worker, now)

    def _silent(self, worker: Worker, now: float) -> bool:
        if now < worker.last_beat + worker.pool.spec.stale_after:
            return False
        self.kill(worker, "unwell" if worker.unwell else "silence")
        return True

    def _settle(self, slot: Slot, worker: Worker, now: float) -> None:
        if worker.settled or now < worker.ready_at + self.settings.healthy_after:
            return
        worker.settled = True
        if slot.history.streak:
            slot.history = restart.after_healthy(slot.history)
            self.records.settled(worker)

    # ---- spawning

    def _spawn(self, slot: Slot, *, heir: bool = False) -> None:
        """Start the next generation in the slot."""
        spec = slot.pool.spec
        slot.generation += 1
        now = time.monotonic()
        at = now_ms()
        worker = Worker(slot, slot.generation, started=now, started_ms=at, last_beat=now, last_beat_ms=at)
        if heir:
            slot.heir = worker
        else:
            before, status = slot.rest, move(slot.component, slot.rest, Status.STARTING)
            self.bus.send(WorkerMoved(slot.component, worker.generation, before, status))
            slot.worker = worker
        try:
            filled = launch.places(spec, slot)
            beat = self.settings.heartbeat_interval
            worker.process = Process(
                launch.prepare(spec, slot, worker.generation, filled, self.token, self._logs, beat),
                on_frame=lambda frame: self._heard(worker, frame),
                on_line=lambda line: self._line(worker, line),
                on_labelled=lambda label, lines: spec.tenant.output(worker, label, lines),
                on_printed=lambda: self.bus.send(Printed(slot.component)),
                on_end=lambda ended: self._noticed_end(worker, ended),
                on_garbage=lambda what: self._garbage(worker, what),
            )
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            log.error("%s cannot be started: %s: %s", slot.component, spec.argv[0], why)  # noqa: TRY400
            filled = {}
            self.kill(worker, "spawn")
        if filled.get("port", "0") != "0":
            worker.metadata = {"port": int(filled["port"])}
        if not heir:
            self.records.starting(worker)
        if spec.probe is not None and worker.process is not None:
            worker.probe = spec.probe.fill(filled)
            watching = plain.watch(worker, self.settings.heartbeat_interval, self._wake.set)
            self._spawn_task(watching, f"probe {slot.component}")

    def _healthy(self, slot: Slot, worker: Worker, now: float) -> None:
        if worker is slot.heir:
            self._succeed(slot, worker)
        worker.ready_at = worker.last_beat = now
        worker.last_beat_ms = now_ms()
        self._move(slot, worker, Status.HEALTHY)
        self._next_beat = min(self._next_beat, now + 0.2)  # its memory is known: show it soon
        self._recycled(slot)
        slot.pool.spec.tenant.ready(worker)

    def _recycled(self, slot: Slot) -> None:
        """The slot's turn to recycle is over; the next one of the pool may begin."""
        if slot.pool.retiring is slot:
            slot.pool.retiring = None
        if slot.pool.recycling is slot:
            slot.pool.recycling = None
            self._wake.set()

    def _succeed(self, slot: Slot, heir: Worker) -> None:
        """The warmed replacement takes the slot; the old worker finishes what it has and goes."""
        old, slot.worker, slot.heir = slot.worker, heir, None
        self.records.starting(heir)
        if old is not None:
            slot.leaving.append(old)
            self.leave(old)

    # ---- what workers say (callbacks: note the fact, wake the loop)

    def _heard(self, worker: Worker, frame: Frame) -> None:
        if frame[0] == "beat":
            _, rss, peak = frame
            worker.last_beat, worker.last_beat_ms = time.monotonic(), now_ms()
            worker.rss_mb = float(rss)
            if worker.process:
                worker.process.peak_rss_mb = max(worker.process.peak_rss_mb, float(peak))
        elif frame[0] == "ready":
            worker.announced = True
            self._wake.set()
        else:
            worker.pool.spec.tenant.heard(worker, frame)

    def _line(self, worker: Worker, line: str) -> None:
        if (
            worker.probe
            and worker.probe.kind == "line"
            and not worker.announced
            and re.search(worker.probe.target, line)
        ):
            worker.announced = True
            self._wake.set()

    def _garbage(self, worker: Worker, what: str) -> None:
        log.error("%s said something that is not the protocol: %s", worker.component, what)
        self.kill(worker, "protocol")

    def _noticed_end(self, worker: Worker, ended: Ended) -> None:
        worker.ended = ended
        self._wake.set()

    def wake(self) -> None:
        """Have the loop look again soon: a tenant finished something."""
        self._wake.set()

    # ---- recycling

    def _maybe_recycle(self, slot: Slot, worker: Worker, now: float) -> None:
        limits = slot.pool.spec.recycle
        why = recycle.due(limits, served=worker.served, age=now - worker.ready_at, rss_mb=worker.rss_mb)
        if why is None or slot.heir is not None or now < slot.spare_recycle_until:
            return
        if not limits.warm and slot.pool.spec.tenant.busy(worker):
            # It keeps its turn for itself only when it is idle, or one long job would hold up all others of the pool.
            if slot.pool.retiring is None:
                slot.pool.retiring = slot
            return
        if slot.pool.recycling is not None:
            return
        log.info("%s is recycled: it %s", slot.component, why)
        slot.pool.recycling = slot
        if limits.warm:
            self._spawn(slot, heir=True)
        else:
            self.leave(worker)

    # ---- leaving

    def leave(self, worker: Worker, by: float | None = None) -> None:
        worker.leave = True
        if by is not None:
            worker.leave_by = by if worker.leave_by is None else min(by, worker.leave_by)
        self._wake.set()

    def _begin_stop(self, slot: Slot, worker: Worker, now: float) -> None:
        self._move(slot, worker, Status.STOPPING)
        if worker.leave_by is None:
            worker.leave_by = now + slot.pool.spec.stop_grace
        if now >= worker.leave_by:
            self._escalate(worker, now)
        elif slot.pool.spec.probe is None:
            worker.send("stop")
        elif worker.process:
            worker.process.signal(slot.pool.spec.drain_signal)

    def _escalate(self, worker: Worker, now: float) -> None:
        """The steps of a stop: request, grace, SIGTERM, a moment, SIGKILL to the group."""
        if worker.signalled is None:
            if worker.leave_by is not None and now >= worker.leave_by and worker.process:
                log.warning("%s did not stop within its grace: SIGTERM", worker.component)
                worker.signalled = now
                worker.process.signal(signal.SIGTERM)
        elif now >= worker.signalled + worker.pool.spec.term_grace:
            log.warning("%s did not heed SIGTERM: SIGKILL", worker.component)
            self.kill(worker, "shutdown")

    def kill(self, worker: Worker, reason: str) -> None:
        """SIGKILL the whole group. The end is then noticed like any other."""
        if worker.killing is None and worker.ended is None:
            worker.killing = reason
            if worker.process:
                worker.process.signal(signal.SIGKILL)
            else:  # it never became a process
                worker.ended = Ended(127, time.monotonic(), None)
            self._wake.set()

    # ---- ends

    def _ended(self, slot: Slot, worker: Worker, ended: Ended, now: float) -> None:
        kills, before = oom_kills(), self._oom_kills
        self._oom_kills = kills
        end = ends.judge(worker, ended, slot.history, now_ms(), self._limits, memory_ran_out=kills > before)
        try:
            job = slot.pool.spec.tenant.gone(worker, end)
        except Exception:
            log.exception("%s: what it served could not be told of its end", slot.component)
            job = None
        row = ExitRow(
            component=slot.component,
            generation=worker.generation,
            at=now_ms(),
            reason=end.reason,
            kind=end.kind,
            code=end.code,
            signal=end.signal,
            peak_rss_mb=ended.peak_rss_mb,
            job=job,
            log=list(worker.process.tail)[-20:] if worker.process else [],
        )
        if worker is slot.heir or worker in slot.leaving:
            self._side_end(slot, worker, row, now)
            return
        slot.worker, slot.last_exit = None, row
        self._own_end(slot, worker, row, end)
        if slot.heir is not None:
            self._inherit(slot, slot.heir)

    def _own_end(self, slot: Slot, worker: Worker, row: ExitRow, end: Exit) -> None:
        if end.kind == "crash":
            self._crashed(slot, worker, row, ends.recorded_code(end))
            return
        if end.kind == "clean":
            slot.history = restart.after_clean_exit(slot.history, row.at, self._limits)
        slot.rest = move(slot.component, worker.status, Status.STOPPED)
        self.bus.send(WorkerMoved(slot.component, worker.generation, worker.status, slot.rest, reason=end.reason))
        self.records.stopped(row, ends.recorded_code(end))
        if not slot.wanted:
            self._recycled(slot)

    def _crashed(self, slot: Slot, worker: Worker, row: ExitRow, code: int | None) -> None:
        slot.history, verdict = restart.after_crash(slot.history, row.at, self._limits)
        slot.rest = move(slot.component, worker.status, Status.CRASHED)
        self._recycled(slot)
        delay = verdict.delay if isinstance(verdict, Again) else None
        slot.due, slot.due_ms = time.monotonic() + (delay or 0.0), None if delay is None else row.at + int(delay * 1000)
        self.bus.send(
            WorkerMoved(
                slot.component,
                worker.generation,
                worker.status,
                slot.rest,
                reason=row.reason,
                delay=delay,
                how=row.signal or f"code {row.code}",
                job=row.job,
                line=next((line.strip()[:160] for line in reversed(row.log) if line.strip()), None),
            )
        )
        self.records.crashed(row, code)
        match verdict:
            case Again():
                pass
            case GiveUp(why):
                slot.rest = move(slot.component, slot.rest, Status.FAILED)
                self.bus.send(WorkerMoved(slot.component, worker.generation, Status.CRASHED, slot.rest, reason=why))
                self.records.failed(slot)
        if not slot.wanted and slot.rest is Status.CRASHED:
            self.give_up_waiting(slot)

    def _inherit(self, slot: Slot, heir: Worker) -> None:
        """The old worker ended before its replacement was ready: the heir is the slot's worker now, unless none is wanted."""
        if slot.rest is Status.FAILED or not slot.wanted:
            self.kill(heir, "shutdown")
            return
        slot.worker, slot.heir = heir, None
        self.records.starting(heir)

    def _side_end(self, slot: Slot, worker: Worker, row: ExitRow, now: float) -> None:
        """A worker that was not (or no longer) the slot's own: it says nothing about the slot, but a failed heir ends the try."""
        self.records.side_end(row)
        if worker in slot.leaving:
            slot.leaving.remove(worker)
            return
        slot.heir = None
        self._recycled(slot)
        slot.spare_recycle_until = now + self.settings.backoff_max
        if not worker.leave and worker.killing != "shutdown":
            what = f"{row.reason}, {row.signal or f'code {row.code}'}"
            log.warning("%s: its replacement did not start (%s); the old one stays", slot.component, what)

    def _sweep(self, worker: Worker) -> None:
        """End what the worker left behind."""
        if worker.process is None:
            worker.sweep = True
            return
        worker.sweep = False
        mark, pid = worker.process.mark, worker.process.pid

        async def sweep() -> None:
            try:
                left = await asyncio.to_thread(family.kill, mark, [pid])
                # On the loop, where all workers are spawned: a child that is not known here is nobody's but an orphan.
                left += family.end_adopted(self._own_children())
                if left:
                    log.info("%s left %d processes behind; they were ended", worker.component, left)
            finally:
                worker.sweep = True
                self._wake.set()

        self._spawn_task(sweep(), f"sweep {worker.component}")

    def _own_children(self) -> set[int]:
        known = {w.process.pid for slot in self.slots.values() for w in slot.all() if w.process}
        return known | ({self._guard.pid} if self._guard else set())

    # ---- what others ask

    def forget(self, slot: Slot) -> None:
        """Forget the slot's crashes; failed and crashed become stopped."""
        slot.history = History()
        if slot.worker is None and slot.rest in (Status.FAILED, Status.CRASHED):
            before, slot.rest = slot.rest, move(slot.component, slot.rest, Status.STOPPED)
            self.bus.send(WorkerMoved(slot.component, slot.generation, before, slot.rest, reason="reset"))
        self.records.reset(slot)

    def give_up_waiting(self, slot: Slot) -> None:
        """A crashed slot that waits for its restart will not be started."""
        slot.rest = move(slot.component, slot.rest, Status.STOPPED)
        self.bus.send(WorkerMoved(slot.component, slot.generation, Status.CRASHED, slot.rest, reason="drained"))
        self.records.stopped_waiting(slot)

    def terminate(self, worker: Worker, reason: str) -> None:
        """SIGTERM to the worker's group for the sake of what it serves; if it ends by that, nobody is blamed."""
        worker.parting = reason
        if worker.process:
            worker.process.signal(signal.SIGTERM)

    def apply_pauses(self, enabled: bool, paused: frozenset[str], *, still: bool = False) -> None:
        """What the store says: another process may have paused something."""
        if enabled != self.enabled:
            self.enabled = enabled
            self.bus.send(PoolPaused(None, not enabled, still))
        for name, pool in self.pools.items():
            if pool.paused != (name in paused):
                pool.paused = name in paused
                self.bus.send(PoolPaused(name, pool.paused, still))

    # ---- records

    def _move(self, slot: Slot, worker: Worker, status: Status) -> None:
        before, worker.status = worker.status, move(slot.component, worker.status, status)
        if worker in slot.leaving:
            return
        pid = worker.process.pid if worker.process else None
        self.bus.send(WorkerMoved(slot.component, worker.generation, before, status, pid=pid))
        self.records.moved(worker)

    def _beat(self) -> None:
        """Write all beats of the node in one statement."""
        if self._guard and self._guard.poll() is not None:
            log.warning("the guard has ended; starting another")
            self._start_guard()
        programs = [w for slot in self.slots.values() for w in slot.all() if w.probe and w.process and w.ended is None]
        if programs:
            self._spawn_task(plain.look(programs), "programs")
        self.bus.send(Beats(sum(1 for slot in self.slots.values() if slot.worker is not None)))
        self.records.beats([slot.worker for slot in self.slots.values() if slot.worker is not None])

    def _spawn_task(self, work: Any, name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("the task %r failed", task.get_name(), exc_info=error)
