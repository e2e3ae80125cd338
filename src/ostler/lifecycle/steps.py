"""One worker, one step: what the supervisor's loop does with a worker, from starting to the end of its family."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostler.events import WorkerMoved
from ostler.lifecycle import leaving, restart
from ostler.lifecycle.ending import Endings
from ostler.lifecycle.orphans import Orphans
from ostler.lifecycle.recycling import Recycling
from ostler.lifecycle.state import Status, move
from ostler.lifecycle.worker import Worker
from ostler.store import now_ms

if TYPE_CHECKING:
    from ostler.lifecycle.supervisor import Supervisor


class Steps:
    """The supervisor's part for workers that are there."""

    def __init__(self, supervisor: Supervisor, recycling: Recycling, orphans: Orphans, endings: Endings) -> None:
        self._supervisor, self._recycling = supervisor, recycling
        self._orphans, self._endings = orphans, endings

    def take(self, worker: Worker, now: float) -> None:
        """The next step that its facts call for."""
        tenant = worker.pool.spec.tenant
        if worker.ended is not None:
            # Its family goes first: what it was at must not run again while parts of the old run still live.
            if worker.sweep is None:
                self._sweep(worker)
            if worker.sweep:
                self._endings.ended(worker.slot, worker, worker.ended, now)
            return
        if worker.killing is not None:
            return  # SIGKILL is on its way; its end will wake us
        match worker.status:
            case Status.STARTING:
                if worker.leave:
                    self._begin_stop(worker, now)
                elif worker.announced:
                    self._healthy(worker, now)
                elif now >= worker.startup_ends:
                    self._supervisor.kill(worker, "startup-deadline")
            case Status.HEALTHY:
                if worker.leave:
                    self._move(worker, Status.DRAINING)
                    tenant.drain(worker)
                    self.take(worker, now)
                elif not self._silent(worker, now):
                    self._settle(worker, now)
                    self._recycling.consider(worker.slot, worker, now)
            case Status.DRAINING:
                if not tenant.busy(worker) or (worker.leave_by is not None and now >= worker.leave_by):
                    self._begin_stop(worker, now)
                else:
                    self._silent(worker, now)
            case Status.STOPPING:
                leaving.escalate(worker, now)

    def _silent(self, worker: Worker, now: float) -> bool:
        if now < worker.last_beat + worker.pool.spec.stale_after:
            return False
        self._supervisor.kill(worker, "unwell" if worker.unwell else "silence")
        return True

    def _settle(self, worker: Worker, now: float) -> None:
        slot = worker.slot
        if worker.settled or now < worker.ready_at + self._supervisor.settings.healthy_after:
            return
        worker.settled = True
        if slot.history.streak:
            slot.history = restart.after_healthy(slot.history)
            self._supervisor.records.settled(worker)

    def _healthy(self, worker: Worker, now: float) -> None:
        slot = worker.slot
        if worker is slot.heir:
            self._succeed(worker)
        worker.ready_at = worker.last_beat = now
        worker.last_beat_ms = now_ms()
        self._move(worker, Status.HEALTHY)
        self._supervisor.beat_by(now + 0.2)  # its memory is known: show it soon
        self._recycling.over(slot)
        self._supervisor.reserving.ready(worker)
        slot.pool.spec.tenant.ready(worker, worker.info)

    def _succeed(self, heir: Worker) -> None:
        """The warmed replacement takes the slot; the old worker finishes what it has and goes."""
        slot = heir.slot
        old, slot.worker, slot.heir = slot.worker, heir, None
        self._supervisor.records.starting(heir)
        if old is not None:
            slot.leaving.append(old)
            self._supervisor.leave(old)

    def _begin_stop(self, worker: Worker, now: float) -> None:
        self._move(worker, Status.STOPPING)
        leaving.request(worker, now)

    def _sweep(self, worker: Worker) -> None:
        """End what the worker left behind, beside the loop."""
        if worker.process is None:
            worker.sweep = True
            return
        worker.sweep = False

        async def sweep() -> None:
            try:
                await self._orphans.sweep(worker)
            finally:
                worker.sweep = True
                self._supervisor.wake()

        self._supervisor.spawn_task(sweep(), f"sweep {worker.component}")

    def _move(self, worker: Worker, status: Status) -> None:
        slot = worker.slot
        before, worker.status = worker.status, move(slot.component, worker.status, status)
        if worker in slot.leaving:
            return
        pid = worker.process.pid if worker.process else None
        self._supervisor.bus.send(WorkerMoved(slot.component, worker.generation, before, status, pid=pid))
        self._supervisor.records.moved(worker)
