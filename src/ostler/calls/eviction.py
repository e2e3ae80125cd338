"""Evictions: workers that leave because others need their memory, or an operator says so. The data plane knows whether they may."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ostler.calls.replica import place_of
from ostler.lifecycle.admission import HOST
from ostler.lifecycle.worker import Slot, Worker

if TYPE_CHECKING:
    from ostler.calls.gateway import Gateway

log = logging.getLogger("ostler.calls")

_ANSWER = 5.0  # seconds in which the plane says whether a worker may go


class Evictions:
    """The workers of a node's models that were asked to leave."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._asked: dict[Worker, asyncio.Future[bool]] = {}  # who wants to know whether it goes
        self._short: dict[Worker, str] = {}  # who was told to go, and for which memory

    async def unload(self, slot: Slot) -> bool:
        """Have its worker leave, if nobody is in it: the plane knows. Whether it goes."""
        worker = slot.worker
        if worker is None or not worker.accepting:
            self._gateway.supervisor.stop_slot(slot)
            return True
        if worker in self._gateway.parking.states:
            self._gateway.parking.end(worker)
            return True
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._asked[worker] = answer
        self.evict(worker, HOST)
        try:
            async with asyncio.timeout(_ANSWER):
                return await answer
        except TimeoutError:
            return False

    def evict(self, worker: Worker, short_of: str) -> None:
        """Others need its memory. The plane knows whether anybody is in it, and lets nobody in when it says that it is free."""
        if self._gateway.parking.evict(worker, short_of):
            return
        self._short[worker] = short_of
        if not self._gateway.say("evict", *place_of(worker.slot), worker.generation):
            self.answered("freed", worker)

    def answered(self, said: str, worker: Worker) -> None:
        """The plane has `freed` the worker, or it is `kept`."""
        short_of = self._short.get(worker, HOST)
        self.over(worker, goes=said == "freed")
        if said == "freed":
            self._gateway.records.evicted(worker)
            self._gateway.occupied.discard(worker)
            if short_of == HOST or not self._gateway.parking.begin(worker, hurried=True):
                log.info("%s is unloaded, because others need its memory", worker.component)
                self._gateway.end(worker)
        elif worker.ticket is not None:
            worker.ticket.kept()

    def over(self, worker: Worker, *, goes: bool) -> None:
        """It is decided, or the worker has ended: tell who waits."""
        self._short.pop(worker, None)
        if (asked := self._asked.pop(worker, None)) and not asked.done():
            asked.set_result(goes)
