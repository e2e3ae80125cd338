"""This node among the others: it registers, beats, finds itself declared dead, and declares others dead.

An outage of the store and being cut off from it look the same from here. Without the store the node claims and publishes nothing
and lets its jobs run. The first write that goes through again is fenced by the node's own row: if the row lives, results are
written and nothing is lost; if another node has declared it dead (`NodeLost`), its jobs run elsewhere by then. It kills its
workers, drops what they did, and registers anew under another id.

After a gap in its own beats a node declares nobody dead for one full lease: the others had the same outage.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ostler.config import Settings
from ostler.errors import StoreBusy
from ostler.events import Bus, NodeDeclaredDead, Recovered
from ostler.lifecycle import predecessor
from ostler.store.identity import new_id
from ostler.store.lanes import Lane
from ostler.store.nodes import NodeRow
from ostler.store.store import Store

if TYPE_CHECKING:
    from ostler.lifecycle.supervisor import Supervisor

log = logging.getLogger("ostler.lifecycle")


class Membership:
    """Who this node is in the store. `id` changes when it was declared dead and registers anew."""

    def __init__(self, settings: Settings, row: NodeRow) -> None:
        self._settings, self.row = settings, row
        self._beat: float | None = None  # when the store last took a beat (monotonic)
        self._patient_until = 0.0  # until then nobody is declared dead
        self.lost = False
        """Declared dead, and not registered anew yet: nothing is claimed and no worker is started."""

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def home(self) -> str:
        return self.row.home or ""

    def took_beat(self) -> None:
        """The store took a beat. After a gap, others may still be trying to reach it."""
        now, before = time.monotonic(), self._beat
        self._beat = now
        if before is not None and now - before > self._settings.node_lease / 2:
            self._patient_until = now + self._settings.node_lease
            log.warning(
                "the store had taken no heartbeat for %.0f s; no other node is declared dead for %g s",
                now - before,
                self._settings.node_lease,
            )

    def may_judge(self) -> bool:
        """Whether this node may declare others dead: its own beats arrive, and have for a while."""
        now = time.monotonic()
        return (
            self._beat is not None and now >= self._patient_until and now - self._beat <= self._settings.node_lease / 2
        )

    def renew(self) -> None:
        """Another id: the old one was declared dead."""
        self.row = replace(self.row, id=new_id(self.row.name))


class Neighbours:
    """Looks after dead nodes, and brings this one back when it was declared dead itself. A part of the node."""

    def __init__(
        self,
        settings: Settings,
        member: Membership,
        lane: Lane,
        bus: Bus,
        supervisor: Supervisor,
        *,
        forget: Callable[[], None],
        declare: Callable[[Store], None],
        requeued: Callable[[], None],
    ) -> None:
        self._settings, self._member, self._lane, self._bus, self._supervisor = settings, member, lane, bus, supervisor
        self._forget, self._declare, self._requeued = forget, declare, requeued
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._spawn(self._run(), "neighbours")

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    # ---- others

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(min(self._settings.heartbeat_interval, self._settings.node_lease / 6, 2.5))
            try:
                await self.look()
            except StoreBusy:
                continue  # the lanes have told
            except Exception:
                log.exception("looking for dead nodes failed once; it goes on")

    async def look(self) -> None:
        """Requeue the jobs of nodes that are dead."""
        if self._member.lost:
            return
        look = partial(predecessor.recover, member=self._member.row, judge=self._member.may_judge())
        back = await self._lane.call(look, patience=self._settings.store_patience)
        if back:
            self._bus.send(Recovered(len(back), "stale"))
            self._requeued()

    # ---- this one

    def lose(self, node: str) -> None:
        """A write was refused because this node was declared dead."""
        if self._member.lost or node != self._member.id or self._supervisor.stopping:
            return
        self._member.lost = True
        log.warning(
            "node %s was declared dead by another node; its jobs run elsewhere. Its workers are killed, and it registers anew",
            node,
        )
        self._bus.send(NodeDeclaredDead(node))
        self._spawn(self._come_back(), "come back")

    async def _come_back(self) -> None:
        self._forget()
        await self._supervisor.abandon()
        self._member.renew()

        def register(store: Store) -> None:
            store.nodes.register(self._member.row)
            self._declare(store)
            store.nodes.mark(self._member.id, "healthy")

        while True:
            try:
                await self._lane.call(register, patience=None)
                break
            except Exception:
                log.exception("the node could not register anew; trying again")
                await asyncio.sleep(1.0)
        self._member.lost = False
        log.warning("the node is back as %s", self._member.id)
        self._supervisor.resume_after_loss()
        self._requeued()

    def _spawn(self, work: object, name: str) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work, name=name)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
