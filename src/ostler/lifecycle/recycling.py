"""Recycling at run time: workers of one pool one after another, never in the middle of an item, warmed where the pool asks for it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from ostler.lifecycle import recycle
from ostler.lifecycle.worker import Slot, Worker

if TYPE_CHECKING:
    from ostler.lifecycle.supervisor import Supervisor

log = logging.getLogger("ostler.lifecycle")


class Spawn(Protocol):
    """Starts the next generation in a slot; an heir is warmed beside the worker that is there."""

    def __call__(self, slot: Slot, *, heir: bool = False) -> None: ...


class Recycling:
    """The supervisor's part for workers that have done enough."""

    def __init__(self, supervisor: Supervisor, spawn: Spawn) -> None:
        self._supervisor, self._spawn = supervisor, spawn

    def consider(self, slot: Slot, worker: Worker, now: float) -> None:
        """Recycle the worker when it has done enough, and it is idle, and it is its turn."""
        pool, limits = slot.pool, slot.pool.spec.recycle
        why = recycle.due(limits, served=worker.served, age=now - worker.ready_at, rss_mb=worker.rss_mb)
        if worker.tired:
            why = f"asked for it: {worker.tired}"
        if why is None or slot.heir is not None or now < slot.spare_recycle_until:
            if why is None and pool.recycling is slot and slot.heir is None:
                self.over(slot)  # it waited for memory for its replacement, and needs none any more
            if pool.retiring is slot:  # its memory has fallen again: it serves on
                pool.retiring = None
                pool.spec.tenant.resume(worker)
            return
        if not limits.warm and pool.spec.tenant.busy(worker):
            # It keeps its turn for itself only when it is idle, or one long job would hold up all others of the pool.
            if pool.retiring is None:
                pool.retiring = slot
            return
        if pool.recycling not in (None, slot):
            return
        if pool.recycling is None:
            log.info("recycling %s: it %s", slot.component, why)
            pool.recycling = slot
        room = self._supervisor.reserving.room_beside(slot, now) if limits.warm else False
        if room:
            self._spawn(slot, heir=True)
        elif room is False:
            self._supervisor.leave(worker)

    def over(self, slot: Slot) -> None:
        """The slot's turn to recycle is over; the next one of the pool may begin."""
        self._supervisor.reserving.withdraw_heir(slot)
        if slot.pool.retiring is slot:
            slot.pool.retiring = None
        if slot.pool.recycling is slot:
            slot.pool.recycling = None
            self._supervisor.wake()
