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
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ostler.config import Settings
from ostler.errors import Conflict, NotFound
from ostler.events import Bus, PoolPaused, WorkerMoved
from ostler.lifecycle import family, probe, recycle, restart
from ostler.lifecycle.process import Ended, Launch, Process, oom_kills
from ostler.lifecycle.restart import Again, GiveUp, History, Limits
from ostler.lifecycle.state import Status, move
from ostler.lifecycle.wire import Frame
from ostler.lifecycle.worker import Exit, Pool, PoolSpec, Slot, Worker
from ostler.store import now_ms
from ostler.store.health import NODE
from ostler.store.lanes import Lane
from ostler.store.rows import ExitRow
from ostler.store.store import Store

log = logging.getLogger("ostler.lifecycle")

# Kills that somebody outside the worker wanted and that say nothing against it.
_ON_PURPOSE = frozenset({"job-timeout", "cancelled", "shutdown"})
# The codes of seed 001 that are no process's exit code.
_SEED_CODE = {"silence": -2, "unwell": -2, "protocol": -3, "spawn": -1}


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
        self._lane, self._bus = lane, bus
        self._limits = Limits(settings.restart_limit, settings.restart_window, settings.restart_lifetime, settings.backoff_max)
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._guard: subprocess.Popen[bytes] | None = None
        self._oom_kills = oom_kills()
        self._generation = 0
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
        self._logs.mkdir(parents=True, exist_ok=True)
        await self._lane.call(self._register)
        self._start_guard()
        self._spawn_task(self._run(), "supervisor")

    def _register(self, store: Store) -> None:
        now = now_ms()
        health = store.health
        health.register(self.node, NODE, None, now)
        row = health.get_node(self.node)
        self._generation = row["generation"] + 1 if row else 1
        metadata = {"token": self.token, "boot_id": family.boot_id(), "host": socket.gethostname(), "data": str(self.settings.data_dir)}
        health.mark_starting(self.node, NODE, self._generation, os.getpid(), family.start_time(os.getpid()), now, metadata)
        known = {w["component"]: w for w in health.get_all_workers(self.node)}
        for gone in known.keys() - self.slots.keys():
            health.remove(self.node, gone)
        since = now - int(self.settings.restart_window * 1000)
        for slot in self.slots.values():
            health.register(self.node, slot.component, slot.pool.spec.name, now)
            if row := known.get(slot.component):
                exits = health.counted_exits(self.node, slot.component, since)
                slot.generation = row["generation"]
                slot.history = History(
                    crashes=tuple(at for at, kind in exits if kind == "crash"),
                    clean=tuple(at for at, kind in exits if kind == "clean"),
                    streak=row["streak"],
                    lifetime=row["restart_count"],
                )
                if row["status"] == Status.FAILED:
                    slot.rest = Status.FAILED
        enabled, paused = store.meta.pauses()
        self.apply_pauses(enabled, paused)
        health.prune(now - int(self.settings.exit_retention * 1000))

    def mark_serving(self) -> None:
        """The node is up: its own row becomes healthy."""
        self._post(lambda store: store.health.mark_healthy(self.node, NODE, self._generation, now_ms()))

    async def stop(self) -> None:
        """Drain every worker; those that are not done within their grace get SIGTERM, then SIGKILL. Returns when all are gone."""
        self.stopping = True
        self._post(lambda store: store.health.mark_stopping(self.node, NODE, self._generation, now_ms()))
        for slot in self.slots.values():
            slot.wanted = False
            for worker in slot.all():
                self._leave(worker, by=time.monotonic() + worker.pool.spec.stop_grace)
        while any(slot.all() or slot.sweeping for slot in self.slots.values()):
            self._wake.set()
            await asyncio.sleep(0.01)

    def force(self) -> None:
        """Kill every worker now."""
        for slot in self.slots.values():
            slot.wanted = False
            for worker in slot.all():
                self._kill(worker, "shutdown")

    async def close(self) -> None:
        """End the loop and the guard. Call after `stop`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        row = ExitRow(NODE, self._generation, now_ms(), "stopped", "asked", code=0)
        self._post(lambda store: store.health.mark_stopped(self.node, row, 0))
        guard, self._guard = self._guard, None
        if guard and guard.stdin:
            guard.stdin.close()
            await asyncio.to_thread(guard.wait)

    def _start_guard(self) -> None:
        program = Path(family.__file__)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(program), f"{self.token}/"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

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
                    worker.last_beat += asleep
                    worker.started += asleep
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
        if slot.worker is None and not slot.sweeping:
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
                    self._kill(worker, "startup-deadline")
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
        self._kill(worker, "unwell" if worker.unwell else "silence")
        return True

    def _settle(self, slot: Slot, worker: Worker, now: float) -> None:
        if worker.settled or now < worker.ready_at + self.settings.healthy_after:
            return
        worker.settled = True
        if slot.history.streak:
            slot.history = restart.after_healthy(slot.history)
            self._post(lambda store: store.health.end_streak(self.node, slot.component, worker.generation))

    # ---- spawning

    def _spawn(self, slot: Slot, *, heir: bool = False) -> None:
        """Start the next generation in the slot."""
        spec = slot.pool.spec
        slot.generation += 1
        now = time.monotonic()
        worker = Worker(slot, slot.generation, started=now, last_beat=now, last_beat_ms=now_ms())
        if heir:
            slot.heir = worker
        else:
            self._bus.send(WorkerMoved(slot.component, worker.generation, slot.rest, move(slot.component, slot.rest, Status.STARTING)))
            slot.worker = worker
        places = {"n": str(slot.number), "port": str(_free_port()) if _wants_port(spec) else "0"}
        launch = Launch(
            argv=[_fill(a, places) for a in spec.argv],
            env={**os.environ, **{k: _fill(v, places) for k, v in spec.env.items()}, "OSTLER_COMPONENT": slot.component},
            mark=f"{self.token}/{slot.component}/{worker.generation}/",
            log=self._logs / f"{spec.name}-{slot.number}.log",
            cwd=spec.cwd,
            beat=self.settings.heartbeat_interval if spec.probe is None else None,
        )
        try:
            worker.process = Process(
                launch,
                on_frame=lambda frame: self._heard(worker, frame),
                on_line=lambda line: self._line(worker, line),
                on_end=lambda ended: self._noticed_end(worker, ended),
                on_garbage=lambda what: self._garbage(worker, what),
            )
        except OSError as error:
            log.error("%s cannot be started: %s: %s", slot.component, launch.argv[0], error.strerror or error)
            worker.killing = "spawn"
            worker.ended = Ended(127, now, None)
            self._record_start(slot, worker)
            self._wake.set()
            return
        self._record_start(slot, worker)
        if spec.probe is not None:
            worker.probe = spec.probe.fill(places)
            self._spawn_task(self._watch_probe(worker), f"probe {slot.component}")

    def _record_start(self, slot: Slot, worker: Worker) -> None:
        process, at = worker.process, now_ms()
        pid, started = (process.pid, process.started) if process else (None, None)
        if worker is not slot.heir:
            self._post(lambda store: store.health.mark_starting(self.node, slot.component, worker.generation, pid, started, at))

    async def _watch_probe(self, worker: Worker) -> None:
        """Ask a plain program whether it is ready, and then whether it still is."""
        assert worker.probe is not None
        if worker.probe.kind == "line":
            return  # `_line` announces it
        if worker.probe.kind == "none":
            worker.announced = True
            self._wake.set()
            return
        while worker.ended is None:
            worker.unwell = await probe.ask(worker.probe)
            if worker.unwell is None:
                worker.last_beat, worker.last_beat_ms = time.monotonic(), now_ms()
                if not worker.announced:
                    worker.announced = True
                    self._wake.set()
            await asyncio.sleep(self.settings.heartbeat_interval if worker.announced else 0.1)

    def _healthy(self, slot: Slot, worker: Worker, now: float) -> None:
        if worker is slot.heir:
            self._succeed(slot, worker)
        worker.ready_at = worker.last_beat = now
        worker.last_beat_ms = now_ms()
        self._move(slot, worker, Status.HEALTHY)
        self._recycled(slot)
        slot.pool.spec.tenant.ready(worker)

    def _recycled(self, slot: Slot) -> None:
        """The slot's turn to recycle is over; the next one of the pool may begin."""
        if slot.pool.recycling is slot:
            slot.pool.recycling = None
            self._wake.set()

    def _succeed(self, slot: Slot, heir: Worker) -> None:
        """The warmed replacement takes the slot; the old worker finishes what it has and goes."""
        old, slot.worker, slot.heir = slot.worker, heir, None
        self._record_start(slot, heir)
        if old is not None:
            slot.leaving.append(old)
            self._leave(old)

    # ---- what workers say (callbacks: note the fact, wake the loop)

    def _heard(self, worker: Worker, frame: Frame) -> None:
        if frame[0] == "beat":
            worker.last_beat, worker.last_beat_ms = time.monotonic(), now_ms()
            if worker.process and len(frame) == 3:
                worker.rss_mb = frame[1]
                worker.process.peak_rss_mb = max(worker.process.peak_rss_mb, frame[2])
        elif frame[0] == "ready":
            worker.announced = True
            self._wake.set()
        else:
            worker.pool.spec.tenant.heard(worker, frame)

    def _line(self, worker: Worker, line: str) -> None:
        if worker.probe and worker.probe.kind == "line" and not worker.announced and re.search(worker.probe.target, line):
            worker.announced = True
            self._wake.set()

    def _garbage(self, worker: Worker, what: str) -> None:
        log.error("%s said something that is not the protocol: %s", worker.component, what)
        self._kill(worker, "protocol")

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
        if why is None or slot.pool.recycling is not None or slot.heir is not None or now < slot.spare_recycle_until:
            return
        log.info("%s is recycled: it %s", slot.component, why)
        slot.pool.recycling = slot
        if limits.warm:
            self._spawn(slot, heir=True)
        else:
            self._leave(worker)

    # ---- leaving

    def _leave(self, worker: Worker, by: float | None = None) -> None:
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
            self._kill(worker, "shutdown")

    def _kill(self, worker: Worker, reason: str) -> None:
        """SIGKILL the whole group. The end is then noticed like any other."""
        if worker.killing is None and worker.ended is None:
            worker.killing = reason
            if worker.process:
                worker.process.signal(signal.SIGKILL)

    # ---- ends

    def _ended(self, slot: Slot, worker: Worker, ended: Ended, now: float) -> None:
        end = self._judge(slot, worker, ended)
        job = slot.pool.spec.tenant.gone(worker, end)
        self._sweep(slot, worker)
        if worker is slot.heir or worker in slot.leaving:
            self._side_end(slot, worker, end, now)
            return
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
        code = _SEED_CODE.get(end.reason, end.code)
        slot.worker = None
        if end.kind == "crash":
            self._crashed(slot, worker, row, code)
        else:
            if end.kind == "clean":
                slot.history = restart.after_clean_exit(slot.history, row.at, self._limits)
            slot.rest = move(slot.component, worker.status, Status.STOPPED)
            self._bus.send(WorkerMoved(slot.component, worker.generation, worker.status, slot.rest, reason=end.reason))
            self._post(lambda store: store.health.mark_stopped(self.node, row, code))
            if not slot.wanted:
                self._recycled(slot)

    def _crashed(self, slot: Slot, worker: Worker, row: ExitRow, code: int | None) -> None:
        slot.history, verdict = restart.after_crash(slot.history, row.at, self._limits)
        slot.rest = move(slot.component, worker.status, Status.CRASHED)
        self._recycled(slot)
        delay = verdict.delay if isinstance(verdict, Again) else None
        what = row.signal or f"code {row.code}"
        self._bus.send(WorkerMoved(slot.component, worker.generation, worker.status, slot.rest, reason=f"{row.reason}, {what}", delay=delay))
        self._post(lambda store: store.health.mark_crashed(self.node, row, code))
        match verdict:
            case Again(delay):
                slot.due = time.monotonic() + delay
            case GiveUp(why):
                slot.rest = move(slot.component, slot.rest, Status.FAILED)
                self._bus.send(WorkerMoved(slot.component, worker.generation, Status.CRASHED, slot.rest, reason=why))
                at = now_ms()
                self._post(lambda store: store.health.mark_failed(self.node, slot.component, worker.generation, at))

    def _side_end(self, slot: Slot, worker: Worker, end: Exit, now: float) -> None:
        """A worker that was not (or no longer) the slot's own: it says nothing about the slot, but a failed heir ends the try."""
        if worker in slot.leaving:
            slot.leaving.remove(worker)
            return
        slot.heir = None
        self._recycled(slot)
        slot.spare_recycle_until = now + self.settings.backoff_max
        if not worker.leave:
            log.warning("%s: its replacement did not start (%s, code %s); the old one stays", slot.component, end.reason, end.code)

    def _judge(self, slot: Slot, worker: Worker, ended: Ended) -> Exit:
        """The reason and the kind of an end."""
        if worker.killing is not None:
            kind = "asked" if worker.killing in _ON_PURPOSE else "crash"
            return Exit(worker.killing, kind, ended.code, ended.signal)
        if worker.status is Status.STOPPING:
            return Exit("stopped", "asked", ended.code, ended.signal)
        if ended.code == 0:
            if restart.is_exit_loop(slot.history, now_ms(), self._limits):
                return Exit("exit-loop", "crash", 0, None)
            return Exit("exit", "clean", 0, None)
        if ended.signal == "SIGKILL":
            kills, before = oom_kills(), self._oom_kills
            self._oom_kills = kills
            return Exit("oom" if kills > before else "signal", "crash", ended.code, ended.signal)
        return Exit("signal" if ended.signal else _EXIT_REASONS.get(ended.code, "exit"), "crash", ended.code, ended.signal)

    def _sweep(self, slot: Slot, worker: Worker) -> None:
        """End what the worker left behind, before a replacement can start."""
        if worker.process is None:
            return
        mark, pid = worker.process.mark, worker.process.pid

        async def sweep() -> None:
            try:
                left = await asyncio.to_thread(family.kill, mark, [pid])
                if left:
                    log.info("%s left %d processes behind; they were ended", slot.component, left)
            finally:
                slot.sweeping = False
                self._wake.set()

        slot.sweeping = True
        self._spawn_task(sweep(), f"sweep {slot.component}")

    # ---- what operators ask

    def slot(self, component: str) -> Slot:
        """The slot of that name; raises NotFound with the names that exist."""
        if found := self.slots.get(component):
            return found
        known = ", ".join(self.slots) or "none"
        raise NotFound(f"there is no worker {component!r} on node {self.node}; known are: {known}")

    def pool(self, name: str) -> Pool:
        if found := self.pools.get(name):
            return found
        raise NotFound(f"there is no pool {name!r} on node {self.node}; known are: {', '.join(self.pools) or 'none'}")

    def drain(self, component: str) -> None:
        """Finish what it has, then exit and stay stopped until `restart` or `resume`."""
        slot = self.slot(component)
        if slot.status in (Status.STOPPED, Status.FAILED):
            raise Conflict(f"{component} is {slot.status}; only a running worker can be drained")
        slot.wanted = False
        if slot.status is Status.CRASHED:  # it waits for its restart: it will not come
            slot.rest = move(slot.component, slot.rest, Status.STOPPED)
            at = now_ms()
            self._post(lambda store: store.health.mark_stopped_idle(self.node, slot.component, slot.generation, at))
        for worker in slot.all():
            self._leave(worker)

    def restart(self, component: str) -> None:
        """Reset, then start; a running worker is recycled: it finishes what it has first."""
        slot = self.slot(component)
        self._forget(slot)
        slot.wanted = True
        if slot.worker is not None:
            self._leave(slot.worker)
        self._wake.set()

    def reset(self, component: str) -> None:
        """Forget the crashes. A failed or crashed worker becomes stopped, and stays so until `restart` or `resume`."""
        slot = self.slot(component)
        if slot.rest in (Status.FAILED, Status.CRASHED) and slot.worker is None:
            slot.wanted = False
        self._forget(slot)

    def _forget(self, slot: Slot) -> None:
        slot.history = History()
        if slot.worker is None and slot.rest in (Status.FAILED, Status.CRASHED):
            before, slot.rest = slot.rest, move(slot.component, slot.rest, Status.STOPPED)
            self._bus.send(WorkerMoved(slot.component, slot.generation, before, slot.rest, reason="reset"))
        self._post(lambda store: store.health.reset_restart_count(self.node, slot.component))

    def kill(self, component: str, reason: str = "killed") -> None:
        """SIGKILL it now; what follows is what follows any crash."""
        slot = self.slot(component)
        if not slot.all():
            raise Conflict(f"{component} is {slot.status}; there is no process to kill")
        for worker in slot.all():
            self._kill(worker, reason)

    def end(self, worker: Worker, reason: str) -> None:
        """SIGKILL this very worker because what it serves needs it (a timeout, a cancel)."""
        self._kill(worker, reason)

    def terminate(self, worker: Worker) -> None:
        """SIGTERM to the worker's group: what it serves was cancelled and did not listen."""
        if worker.process:
            worker.process.signal(signal.SIGTERM)

    async def pause(self, pool: str | None, *, paused: bool) -> None:
        """Pause or resume one pool, or all. Resuming starts workers that are stopped, never those that are failed."""
        if pool is None:
            key, value = "worker_enabled", "false" if paused else "true"
            self.enabled = not paused
        else:
            key, value = f"pool_paused:{pool}", "true" if paused else "false"
            self.pool(pool).paused = paused
        self._bus.send(PoolPaused(pool, paused))
        if not paused:
            for slot in self.slots.values() if pool is None else self.pool(pool).slots:
                slot.wanted = True
        self._wake.set()
        await self._lane.call(lambda store: store.meta.set(key, value), patience=self.settings.store_patience)

    def apply_pauses(self, enabled: bool, paused: set[str]) -> None:
        """What the store says: another process may have paused something."""
        self.enabled = enabled
        for pool in self.pools.values():
            pool.paused = pool.spec.name in paused

    # ---- records

    def _move(self, slot: Slot, worker: Worker, status: Status) -> None:
        before, worker.status = worker.status, move(slot.component, worker.status, status)
        if worker in slot.leaving:
            return
        pid = worker.process.pid if worker.process else None
        self._bus.send(WorkerMoved(slot.component, worker.generation, before, status, pid=pid))
        at, verb = now_ms(), f"mark_{status}"
        self._post(lambda store: getattr(store.health, verb)(self.node, slot.component, worker.generation, at))

    def _beat(self) -> None:
        """Write all beats of the node in one statement."""
        if self._guard and self._guard.poll() is not None:
            log.warning("the guard has ended; starting another")
            self._start_guard()
        plain = {w.process.pid: w for s in self.slots.values() for w in s.all() if w.probe is not None and w.process and w.ended is None}
        for worker in plain.values():
            if worker.probe and not worker.probe.repeats:  # alive is all that can be known
                worker.last_beat, worker.last_beat_ms = time.monotonic(), now_ms()
        if plain:
            self._spawn_task(self._measure(plain), "memory")
        beats: list[tuple[str, int, int, float | None]] = [(NODE, self._generation, now_ms(), None)]
        for slot in self.slots.values():
            if slot.worker is not None:
                beats.append((slot.component, slot.worker.generation, slot.worker.last_beat_ms, slot.worker.rss_mb))
        self._post(lambda store: store.health.update_heartbeats(self.node, beats))

    async def _measure(self, plain: dict[int, Worker]) -> None:
        used = await asyncio.to_thread(family.rss_by_session, set(plain))
        for pid, mb in used.items():
            plain[pid].rss_mb = round(mb, 1)
            if process := plain[pid].process:
                process.peak_rss_mb = max(process.peak_rss_mb, round(mb, 1))

    def _post(self, work: Callable[[Store], object]) -> None:
        self._lane.post(work)

    def _spawn_task(self, work: Any, name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("the task %r failed", task.get_name(), exc_info=error)


# What a worker's own exit code means (70 and up, so that they collide with no shell's or signal's).
APP_LOAD = 70
MODEL_LOAD = 71
_EXIT_REASONS = {APP_LOAD: "app-load", MODEL_LOAD: "model-load"}


def _fill(text: str, places: dict[str, str]) -> str:
    for name, value in places.items():
        text = text.replace("{" + name + "}", value)
    return text


def _wants_port(spec: PoolSpec) -> bool:
    return any("{port}" in part for part in (*spec.argv, *spec.env.values()))


def _free_port() -> int:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        return int(probe_socket.getsockname()[1])
