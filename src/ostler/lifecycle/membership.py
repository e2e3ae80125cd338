"""This node among the others: it registers, beats, finds itself declared dead, and declares others dead.

An outage of the store and being cut off from it look the same from here. Without the store the node claims and publishes nothing
and lets its jobs run. The first write that goes through again is fenced by the node's own row: if the row lives, results are
written and nothing is lost; if another node has declared it dead (`NodeLost`), its jobs run elsewhere by then. It kills its
workers, drops what they did, and registers anew under another id.

After a gap in its own beats, and after its start, a node declares nobody dead for one full lease: the others may have had the
same outage, and are on their way back. A gap by the store's clock counts, too: when that is set, every beat looks old at once.
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
from ostler.parts import Tasks
from ostler.store.identity import new_id
from ostler.store.lanes import Lane
from ostler.store.nodes import NodeRow
from ostler.store.store import Store

if TYPE_CHECKING:
    from ostler.lifecycle.supervisor import Supervisor

log = logging.getLogger("ostler.lifecycle")

_FAREWELL = 5.0  # seconds that the store gets to take the end of a node


class Membership:
    """Who this node is in the store. `id` changes when it was declared dead and registers anew."""

    def __init__(self, settings: Settings, row: NodeRow) -> None:
        self._settings, self.row = settings, row
        self.began: int | None = None  # when the process registered first, by the store's clock
        self._beat: float | None = None  # when the store last took a beat (monotonic)
        self._beat_at = 0  # the same by the store's clock, in milliseconds
        self._patient_until = 0.0  # until then nobody is declared dead
        self.lost = False
        """Declared dead, and not registered anew yet: nothing is claimed and no worker is started."""

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def home(self) -> str:
        return self.row.home or ""

    def took_beat(self, at: int) -> None:
        """The store took a beat, at this time by its clock. After a gap, others may still be trying to reach it."""
        now, before, lease = time.monotonic(), self._beat, self._settings.node_lease
        if before is None:
            self._patient_until = now + lease
        elif now - before > lease / 2 or self._is_far(at):
            self._patient_until = now + lease
            log.warning(
                "the store had accepted no heartbeat for %.1f s (%.1f s by its clock); this node declares no other node dead for %g s",
                now - before,
                (at - self._beat_at) / 1000,
                lease,
            )
        self._beat_at = at
        self._beat = now  # last: who reads it without a lock must not find the gap closed and nobody patient

    def may_judge(self, at: int) -> bool:
        """Whether this node may declare others dead: its own beats arrive, and have for a while. `at` is now by the store's clock."""
        now, beat = time.monotonic(), self._beat
        if beat is None or now - beat > self._settings.node_lease / 2 or self._is_far(at):
            return False
        return now >= self._patient_until

    def _is_far(self, at: int) -> bool:
        """Whether the store's clock has gone further since the last beat than it should have, or back."""
        return abs(at - self._beat_at) > self._settings.node_lease * 500

    def unheard(self) -> float | None:
        """For how many seconds the store has taken no beat, where that is longer than it should be."""
        age = 0.0 if self._beat is None or self.lost else time.monotonic() - self._beat
        return age if age > 3 * self._settings.heartbeat_interval else None

    def renew(self) -> None:
        """Another id: the old one was declared dead."""
        self.row = replace(self.row, id=new_id(self.row.name))


class Leave:
    """The last that a node writes: that it has stopped. A part of the node that stops after all others that write."""

    def __init__(self, member: Membership, lane: Lane) -> None:
        self._member, self._lane = member, lane
        self._started = False

    async def start(self) -> None:
        self._started = True

    async def stop(self) -> None:
        if not self._started or self._member.lost:
            return
        self._started = False
        try:
            await self._lane.call(lambda store: store.nodes.end(self._member.id), patience=_FAREWELL, known=True)
        except Exception as error:  # noqa: BLE001
            log.warning(
                "the node's stop could not be recorded (%s); other nodes will notice when its lease ends", error
            )


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
        self._tasks = Tasks()

    async def start(self) -> None:
        self._tasks.begin(self._run(), "neighbours")

    async def stop(self) -> None:
        await self._tasks.stop()

    # ---- others

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(min(self._settings.heartbeat_interval, self._settings.node_lease / 6, 2.5))
            try:
                await self.look()
            except StoreBusy:
                continue  # the lanes have told
            except Exception:
                log.exception("looking for dead nodes failed; trying again later")

    async def look(self) -> None:
        """Requeue the jobs of nodes that are dead."""
        if self._member.lost:
            return
        member = self._member
        look = partial(predecessor.recover, member=member.row, judge=member.may_judge, since=member.began)
        back = await self._lane.call(look, patience=self._settings.store_patience)
        if back:
            self._bus.send(Recovered(len(back), "stale"))
            self._requeued()

    # ---- this one

    def lose(self, node: str) -> None:
        """A write was refused because this node was declared dead."""
        if self._member.lost or node != self._member.id:
            return
        self._member.lost = True
        log.warning(
            "another node declared node %s dead, and its jobs run elsewhere. Its workers are killed, and %s",
            node,
            "it stops" if self._supervisor.stopping else "it registers again",
        )
        self._bus.send(NodeDeclaredDead(node))
        self._forget()
        if self._supervisor.stopping:
            self._supervisor.force()
        else:
            self._tasks.begin(self._come_back(), "come back")

    async def _come_back(self) -> None:
        await self._supervisor.abandon()
        self._forget()  # what workers said before they died
        while not await self._registered():  # noqa: ASYNC110  nothing tells when the store is back
            await asyncio.sleep(1.0)
        self._member.lost = False
        log.warning("the node is back as %s", self._member.id)
        self._supervisor.resume_after_loss()
        self._requeued()

    async def _registered(self) -> bool:
        """Whether the node could register. Each try is under another id: whether a lost answer was a yes does not matter then."""
        self._member.renew()

        def register(store: Store) -> None:
            store.nodes.register(self._member.row)
            self._declare(store)
            store.nodes.mark(self._member.id, "healthy")

        try:
            await self._lane.call(register)
        except StoreBusy as error:
            log.warning("the node cannot register again yet (%s); retrying", error)
            return False
        except Exception:
            log.exception("the node could not register again; retrying")
            return False
        return True
