"""Memory of workers: a slot asks the ledger before its worker is started, and gives back what it had when the family is gone."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ostler.lifecycle.admission import HOST, Need
from ostler.lifecycle.ledger import Ledger
from ostler.lifecycle.state import Status
from ostler.lifecycle.ticket import Demand, Standing, Ticket
from ostler.lifecycle.worker import Needs, Pool, Slot, Worker
from ostler.store.footprints import Kind

if TYPE_CHECKING:
    from ostler.lifecycle.supervisor import Supervisor

log = logging.getLogger("ostler.lifecycle")

_IDLE = 1.0  # seconds without a job after which a job worker may go: one that has just become ready has none yet
_REFUSED = 30.0  # seconds until a slot that was refused memory asks again
_TELL = 5.0  # seconds between two records of why a slot waits: its figures change all the time
_BESIDE = (
    10.0  # seconds that a replacement waits for memory beside the worker that it replaces; then that one leaves first
)
_MADE_ROOM = "starts again when there is work; others needed its memory"


class Declared:
    """The need of a pool whose workers serve one item after another: the largest that its tasks declare.

    An idle one goes when others need memory; a busy one is asked to leave after its item when others have waited long.
    """

    def __init__(self, pool: str, need: Need) -> None:
        self._demand = Demand(need, kind=Kind(f"pool:{pool}"), declared_only=True, group=pool, eager=False)
        self._quiet: dict[str, tuple[tuple[int, int], float]] = {}  # component -> what it had served, since when

    def demand(self, slot: Slot) -> Demand:
        return self._demand

    def standing(self, worker: Worker) -> Standing:
        now, served = time.monotonic(), (worker.generation, worker.served)
        busy = worker.pool.spec.tenant.busy(worker)
        before, since = self._quiet.get(worker.component, (None, now))
        if busy or before != served:
            since = now
        self._quiet[worker.component] = served, since
        reload = max(0.1, worker.ready_at - worker.started)
        return Standing(busy=busy or now - since < _IDLE, yields=True, reload_s=reload)

    def evict(self, worker: Worker, short_of: str) -> bool:
        return False

    def waits(self, slot: Slot, why: str) -> None: ...

    def refused(self, slot: Slot, why: str) -> None: ...


class Reserving:
    """The supervisor's part for memory. Without a ledger every worker may start."""

    def __init__(self, supervisor: Supervisor, ledger: Ledger | None) -> None:
        self._supervisor, self._ledger = supervisor, ledger
        self._told: dict[str, float] = {}  # component -> when its reason was last recorded

    # ---- before there is a worker

    def may_start(self, slot: Slot, now: float) -> bool:
        """Whether the slot's worker may be started now; where it needs memory, it is asked for."""
        need = slot.pool.spec.need
        if self._ledger is None or need is None:
            return True
        if slot.resting or now < slot.ask_again:
            return False
        if slot.ticket is None:
            slot.ticket = self._ask(self._ledger, slot, need)
        elif slot.insists:
            slot.ticket.insist()
        return slot.ticket.granted

    def _ask(self, ledger: Ledger, slot: Slot, need: Needs) -> Ticket:
        ticket = ledger.reserve(
            slot.component,
            need.demand(slot),
            granted=lambda _: self._supervisor.wake(),
            refused=lambda _, why: self._refused(slot, need, why),
            waiting=lambda _, why: self._waits(slot, need, why),
            standing=lambda: self._standing(slot, need),
            evict=lambda short_of: self._evict(slot, need, short_of),
        )
        if slot.insists:
            ticket.insist()
        return ticket

    def _waits(self, slot: Slot, need: Needs, why: str) -> None:
        if slot.ticket is not None:
            if slot.waiting is None:
                log.info("%s waits for memory: %s", slot.component, why)
            if slot.rest is Status.CRASHED:  # its delay is over, and it is not started yet
                self._supervisor.give_up_waiting(slot, "waits for memory")
            self._tell(slot, f"waits for memory: {why}")
            need.waits(slot, why)

    def _refused(self, slot: Slot, need: Needs, why: str) -> None:
        slot.ticket, slot.ask_again = None, time.monotonic() + _REFUSED
        if slot.rest is Status.CRASHED:
            self._supervisor.give_up_waiting(slot, "cannot get its memory")
        if slot.waiting != (text := f"cannot be started: {why}"):
            log.error("%s %s", slot.component, text)
        self._tell(slot, text)
        need.refused(slot, why)

    def room_beside(self, slot: Slot, now: float) -> bool | None:
        """Whether a replacement may be started beside the slot's worker; None: it waits for memory, and the loop is woken."""
        need = slot.pool.spec.need
        if self._ledger is None or need is None:
            return True
        if slot.heir_ticket is None:
            slot.heir_since = now
            slot.heir_ticket = self._ledger.reserve(
                slot.component,
                replace(need.demand(slot), eager=False),
                granted=lambda _: self._supervisor.wake(),
                refused=lambda _, __: self._no_room_beside(slot),
                standing=lambda: Standing(busy=True) if slot.heir else self._standing(slot, need),
                evict=lambda short_of: self._evict(slot, need, short_of),
            )
        if slot.heir_ticket is None or (not slot.heir_ticket.granted and now >= slot.heir_since + _BESIDE):
            log.info("stopping %s before its replacement is ready: there is not enough memory for both", slot.component)
            self.withdraw_heir(slot)
            return False
        return True if slot.heir_ticket.granted else None

    def _no_room_beside(self, slot: Slot) -> None:
        slot.heir_ticket, slot.heir_since = None, -_BESIDE
        self._supervisor.wake()

    def withdraw_heir(self, slot: Slot) -> None:
        """No replacement is started beside the slot's worker."""
        if slot.heir_ticket is not None:
            slot.heir_ticket.release()
            slot.heir_ticket = None

    def withdraw(self, slot: Slot) -> None:
        """Nobody wants a worker in the slot: it leaves the line, or gives back what was granted."""
        if slot.ticket is not None:
            slot.ticket.release()
            slot.ticket = None
        slot.insists, slot.ask_again = False, 0.0
        self._tell(slot, None)

    # ---- while there is one

    def started(self, slot: Slot, worker: Worker) -> None:
        """The slot's worker, or its replacement, was started: it holds the memory from now on."""
        if worker is slot.heir:
            worker.ticket, slot.heir_ticket = slot.heir_ticket, None
        else:
            worker.ticket, slot.ticket, slot.insists = slot.ticket, None, False
            slot.waiting = None  # the record of a new generation says nothing of it either
        if worker.ticket is not None and worker.process is not None:
            worker.ticket.running(worker.process.pid)

    def ready(self, worker: Worker) -> None:
        """The worker is ready: what it has loaded shows on the device."""
        if worker.ticket is not None:
            worker.ticket.settled(load_ms=int((worker.ready_at - worker.started) * 1000))

    def leaving(self, worker: Worker) -> None:
        """The worker goes: its memory will come back, and nobody else need go for that."""
        if worker.ticket is not None:
            worker.ticket.claimed = True

    def ended(self, worker: Worker, reason: str) -> None:
        """The worker has exited, and its family is gone."""
        ticket, worker.ticket = worker.ticket, None
        if ticket is not None:
            if reason == "oom":
                ticket.ran_out(HOST)
            ticket.release()

    # ---- when others need memory

    def _standing(self, slot: Slot, need: Needs) -> Standing:
        worker = slot.worker
        if worker is None or worker.status is not Status.HEALTHY:
            return Standing(busy=True)
        return need.standing(worker)

    def _evict(self, slot: Slot, need: Needs, short_of: str) -> None:
        worker = slot.worker
        if worker is None or need.evict(worker, short_of):
            return
        slot.resting = True
        self._tell(slot, _MADE_ROOM)
        self._supervisor.leave(worker)

    def drowsy(self) -> list[Pool]:
        """Pools with slots that would be started, or insist on their memory, if there were work for them."""
        return [
            pool
            for pool in self._supervisor.pools.values()
            if pool.spec.need is not None
            and any(slot.wanted and slot.worker is None and not slot.insists for slot in pool.slots)
        ]

    def rouse(self, pool: Pool, count: int) -> None:
        """There is work for so many workers of the pool: they are needed."""
        slots = [s for s in pool.slots if s.wanted and s.worker is None and s.rest is not Status.FAILED]
        for slot in slots[:count]:
            slot.resting, slot.insists = False, True
        if slots:
            self._supervisor.wake()

    def _tell(self, slot: Slot, why: str | None) -> None:
        """Note it, and record it where others see it: at once when it begins or ends, else now and then."""
        before, slot.waiting = slot.waiting, why
        now = time.monotonic()
        due = (before is None) != (why is None) or now >= self._told.get(slot.component, 0.0) + _TELL
        if before != why and due:
            self._told[slot.component] = now
            self._supervisor.records.waits(slot)
