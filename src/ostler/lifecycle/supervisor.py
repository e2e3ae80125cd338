"""The supervisor: one loop that alone owns the state of all workers.

Callbacks (a frame, a line, an exit, a request) only note facts and wake the loop; the loop looks at every slot and takes
the next step that the facts call for (steps.py). What is decided comes from `state`, `restart` and `recycle`, which are pure.
What follows from an exit is in ending.py, what a worker leaves behind in orphans.py, what is paused in pauses.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import time
from collections.abc import Callable, Iterable

from ostler.config import Settings
from ostler.events import Beats, Bus, WorkerMoved
from ostler.lifecycle import leaving, plain, recycle, restart
from ostler.lifecycle.ending import Endings
from ostler.lifecycle.ledger import Ledger
from ostler.lifecycle.membership import Membership
from ostler.lifecycle.orphans import Orphans
from ostler.lifecycle.pauses import Pauses
from ostler.lifecycle.record import Records
from ostler.lifecycle.recycle import RecycleLimits
from ostler.lifecycle.recycling import Recycling
from ostler.lifecycle.reserving import Reserving
from ostler.lifecycle.restart import History, Limits
from ostler.lifecycle.starting import Starts
from ostler.lifecycle.state import Status, move
from ostler.lifecycle.steps import Steps
from ostler.lifecycle.worker import Pool, PoolSpec, Slot, Worker
from ostler.parts import Tasks
from ostler.store.lanes import Lane

log = logging.getLogger("ostler.lifecycle")

_NEVER = RecycleLimits()
LAST = 2  # `outlasts` of a pool that stays to the very end


class Supervisor:
    """Starts, watches, drains, recycles and restarts the workers of all pools."""

    def __init__(
        self,
        settings: Settings,
        lane: Lane,
        durable: Lane,
        bus: Bus,
        specs: list[PoolSpec],
        member: Membership,
        ledger: Ledger | None = None,
    ) -> None:
        self.settings, self.member, self.ledger = settings, member, ledger
        self.node = settings.node
        self.lost: Callable[[str], None] = lambda _: None
        """Told when the store says that this node was declared dead; set once, by the runtime."""
        self.stopping = False
        self._leaves = -1  # while it stops: pools up to this `outlasts` start nothing any more
        self.pools: dict[str, Pool] = {spec.name: Pool(spec, doubtful_at=settings.restart_limit) for spec in specs}
        self.slots: dict[str, Slot] = {}
        self.token = member.row.token or secrets.token_hex(8)
        self.bus = bus
        self.records = Records(settings, lane, member, self._told_lost)
        self.pauses = Pauses(self.pools, durable, settings.store_patience, bus)
        self.pauses.changed = self._paused
        limits = Limits(
            settings.restart_limit, settings.restart_window, settings.restart_lifetime, settings.backoff_max
        )
        self.reserving = Reserving(self, ledger)
        self._starts = Starts(self)
        self._recycling = Recycling(self, self._starts.spawn)
        folders = sorted({spec.folder for spec in specs if spec.folder})
        self._orphans = Orphans(self.token, lambda: [w for w in self._workers() if w.sweep is not True], folders)
        self._steps = Steps(self, self._recycling, self._orphans, Endings(self, self._recycling, limits))
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks = Tasks()
        self.spawn_task = self._tasks.begin
        self._next_beat = 0.0
        self._last_look = time.monotonic()
        for pool in self.pools.values():
            for n in range(0 if pool.spec.on_demand else pool.spec.size):
                self._add_slot(pool, n)

    def _add_slot(self, pool: Pool, number: int, key: str | None = None) -> Slot:
        slot = Slot(f"worker:{pool.spec.name}:{number}", number, pool, key, wanted=key is None)
        pool.slots.append(slot)
        self.slots[slot.component] = slot
        return slot

    def _workers(self) -> Iterable[Worker]:
        return (worker for slot in self.slots.values() for worker in slot.all())

    # ---- start and stop

    async def start(self) -> None:
        """Load what is known of the slots, and begin. Workers start in the order of their pools."""
        self._loop = asyncio.get_running_loop()
        mark = self.pauses.mark()
        enabled, paused = await self.records.load(self.slots, self._known_slot)
        self.pauses.seen(mark, enabled, paused, still=True)
        for slot in self.slots.values():
            if slot.rest is Status.FAILED:
                self.bus.send(
                    WorkerMoved(slot.component, slot.generation, slot.rest, slot.rest, reason="still failed, as before")
                )
        await self._orphans.start()
        self.spawn_task(self._run(), "supervisor")

    def _known_slot(self, pool: str, number: int, key: str) -> Slot | None:
        """A slot that was opened on demand in an earlier life of the node; None when its pool is no more."""
        found = self.pools.get(pool)
        return self._add_slot(found, number, key) if found and found.spec.on_demand else None

    def mark_serving(self) -> None:
        """The node is up: its own row becomes healthy."""
        self.records.node_moved(Status.HEALTHY)

    async def drain(self, *, entirely: bool = False) -> None:
        """Drain the workers; those that are not done within their grace get SIGTERM, then SIGKILL. Returns when they are gone.

        Pools that outlast others leave after them. Those that outlast all stay, unless it is to be `entirely`.
        """
        if not self.stopping:
            self.stopping = True
            self.records.node_moved(Status.STOPPING)
        for level in sorted({pool.spec.outlasts for pool in self.pools.values()}):
            if level == LAST and not entirely:
                continue
            self._leaves = max(self._leaves, level)  # none is opened or started any more
            slots = [slot for slot in self.slots.values() if slot.pool.spec.outlasts == level]
            for slot in slots:
                self.stop_slot(slot, slot.pool.spec.stop_grace)
            while any(slot.all() for slot in slots):
                self._wake.set()
                await asyncio.sleep(0.01)

    def force(self) -> None:
        """Kill every worker now."""
        for slot in self.slots.values():
            slot.wanted = False
            for worker in slot.all():
                self.kill(worker, "shutdown", on_purpose=True)

    def _told_lost(self, node: str) -> None:
        """In a lane's thread: the store refused a heartbeat."""
        if self._loop:
            self._loop.call_soon_threadsafe(lambda: self.lost(node))

    async def abandon(self) -> None:
        """Kill every worker, because this node was declared dead; returns when all are gone. No exit blames anybody."""
        while workers := [*self._workers()]:
            for worker in workers:
                if worker.killing is None:
                    self.kill(worker, "node-lost", on_purpose=True)
            self._wake.set()
            await asyncio.sleep(0.01)

    def resume_after_loss(self) -> None:
        """The node is registered anew: its slots are written down under its new id, and their workers start."""
        for slot in self.slots.values():
            self.records.opened(slot)
        self._wake.set()

    async def stop(self) -> None:
        """Drain, then end the loop and the guard. Before a start, and a second time, it does nothing."""
        if self._tasks.begun:
            await self.drain(entirely=True)
            await self._tasks.stop()
        await self._orphans.stop()

    # ---- what tenants ask

    def open(self, pool: str, key: str) -> Slot:
        """The slot of a pool on demand that is for this key; its number, and so its history, stays with the key."""
        found = self.pools[pool]
        for slot in found.slots:
            if slot.key == key:
                return slot
        slot = self._add_slot(found, max((s.number for s in found.slots), default=-1) + 1, key)
        self.records.opened(slot)
        return slot

    def start_slot(self, slot: Slot) -> None:
        """Have a worker run in the slot. A failed slot stays failed."""
        slot.wanted = True
        self._wake.set()

    def stop_slot(self, slot: Slot, grace: float | None = None) -> None:
        """Nobody wants a worker in the slot: drain it, within `grace` seconds where given. That is no fault of the worker."""
        slot.wanted = False
        if slot.worker is None and slot.rest is Status.CRASHED:
            self.give_up_waiting(slot)
        for worker in slot.all():
            self.leave(worker, by=None if grace is None else time.monotonic() + grace)

    def later(self, action: Callable[[], None]) -> None:
        """Do this when what happens now is over: for a tenant that has to know what came of a worker's end."""
        asyncio.get_running_loop().call_soon(action)

    def began(self, worker: Worker, number: int = 1) -> None:
        """The worker has taken an item that counts from its beginning: its tenant says `finished(counts=False)` at the end of it."""
        worker.served += number
        if self._has_done_enough(worker):
            self._wake.set()

    def finished(self, worker: Worker, *, idle: bool, counts: bool = True) -> None:
        """The worker finished an item: it counts, forgives, and wakes the loop where that matters."""
        slot = worker.slot
        worker.served += counts
        slot.pool.finished()
        if slot.history.marked and worker is slot.worker:
            slot.history = restart.after_finished(slot.history)
            self.records.forgiven(worker)
        if idle and (worker.leave or worker.tired or slot.pool.retiring is slot or self._has_done_enough(worker)):
            self._wake.set()

    def _has_done_enough(self, worker: Worker) -> bool:
        limits = worker.pool.spec.recycle
        if limits == _NEVER:
            return False
        age = time.monotonic() - worker.ready_at
        return recycle.due(limits, served=worker.served, age=age, rss_mb=worker.rss_mb) is not None

    # ---- the loop

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                self._look()
            except Exception:
                log.exception("the supervisor's loop failed; continuing")
            # Not `wait_for`: it drops a cancel that comes together with what it waits for, and this loop would never end.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.001, self._next_look() - time.monotonic())):
                    await self._wake.wait()

    def _look(self) -> None:
        now = time.monotonic()
        asleep = now - self._last_look - self.settings.heartbeat_interval
        if asleep > 1.0:
            # The node itself was stopped or starved: what looks like the workers' silence is its own.
            log.warning("the node was suspended for %.1f s; missed heartbeats in that time do not count", asleep)
            for worker in self._workers():
                worker.last_beat = min(now, worker.last_beat + asleep)
                worker.started = min(now, worker.started + asleep)
        self._last_look = now
        for slot in list(self.slots.values()):
            try:
                self._advance(slot, now)
            except Exception:
                log.exception("%s: a step failed; the other workers continue", slot.component)
        if now >= self._next_beat:
            self._next_beat = now + self.settings.heartbeat_interval
            self._beat()

    def _next_look(self) -> float:
        moments = [self._next_beat]
        for slot in self.slots.values():
            if slot.worker is None and slot.rest is Status.CRASHED:
                moments.append(slot.due)
            if slot.ask_again:
                moments.append(slot.ask_again)
            for worker in slot.all():
                moments += leaving.moments(worker, self.settings.healthy_after)
        # Moments that have passed were seen by the last look; what they wait for will wake the loop by itself.
        return min((m for m in moments if m > self._last_look), default=self._last_look + 1.0)

    def _advance(self, slot: Slot, now: float) -> None:
        for worker in slot.all():
            self._steps.take(worker, now)
        if slot.worker is None and slot.heir is None:
            self._rest(slot, now)

    def _rest(self, slot: Slot, now: float) -> None:
        """A slot without a worker: start one when it is wanted and its time has come."""
        if slot.pool.spec.outlasts <= self._leaves or not slot.wanted or self.member.lost:
            if slot.ticket or slot.waiting:
                self.reserving.withdraw(slot)
            return
        due = slot.rest is Status.STOPPED or (slot.rest is Status.CRASHED and now >= slot.due)
        if due and self.reserving.may_start(slot, now):
            self._starts.spawn(slot)

    # ---- leaving

    def leave(self, worker: Worker, by: float | None = None) -> None:
        """Ask the worker to finish what it has and exit; with `by`, or where its pool says within what time, signals follow then."""
        within = worker.pool.spec.leaves_within
        if by is None and within is not None and not worker.leave:
            by = time.monotonic() + within
        leaving.ask(worker, by)
        self.reserving.leaving(worker)
        self._wake.set()

    def kill(self, worker: Worker, reason: str, *, on_purpose: bool = False) -> None:
        """SIGKILL the whole group. The exit is then noticed like any other; `on_purpose`: it says nothing against the worker."""
        leaving.kill(worker, reason, on_purpose=on_purpose)
        self.reserving.leaving(worker)
        self._wake.set()

    def terminate(self, worker: Worker, reason: str) -> None:
        """SIGTERM to the worker's group for the sake of what it serves: it leaves, and its exit blames nobody."""
        worker.parting = reason
        if worker.process:
            worker.process.signal(signal.SIGTERM)
        self.leave(worker)

    # ---- what operators ask (see control.py)

    def forget(self, slot: Slot) -> None:
        """Forget the slot's crashes; failed and crashed become stopped."""
        slot.history = History()
        if slot.worker is None and slot.rest in (Status.FAILED, Status.CRASHED):
            before, slot.rest = slot.rest, move(slot.component, slot.rest, Status.STOPPED)
            self.bus.send(WorkerMoved(slot.component, slot.generation, before, slot.rest, reason="reset"))
        self.records.reset(slot)

    def give_up_waiting(self, slot: Slot, why: str = "drained") -> None:
        """A crashed slot that waits for its restart will not be started, or not now."""
        slot.rest = move(slot.component, slot.rest, Status.STOPPED)
        self.bus.send(WorkerMoved(slot.component, slot.generation, Status.CRASHED, slot.rest, reason=why))
        self.records.stopped_waiting(slot)

    def wake(self) -> None:
        """Have the loop look again soon: there is news of a worker."""
        self._wake.set()

    def _paused(self, pools: Iterable[Pool]) -> None:
        for pool in pools:
            tell = pool.spec.tenant.pause if self.pauses.holds(pool.spec.name) else pool.spec.tenant.resume
            for worker in (w for slot in pool.slots for w in slot.all()):
                tell(worker)

    # ---- heartbeats

    def beat_by(self, moment: float) -> None:
        """Write the next heartbeats no later than that (monotonic)."""
        self._next_beat = min(self._next_beat, moment)

    def _beat(self) -> None:
        """Write all heartbeats of the node in one statement."""
        self._orphans.keep_guard()
        self._orphans.look()
        programs = [w for w in self._workers() if w.probe and w.process and w.ended is None]
        if programs:
            self.spawn_task(plain.look(programs), "programs")
        beating = [slot.worker for slot in self.slots.values() if slot.worker is not None]
        self.bus.send(Beats(len(beating)))
        self.records.beats(beating)
