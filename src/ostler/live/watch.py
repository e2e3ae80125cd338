"""The watch: turns what happens on the bus into states for the broker.

It marks what may have changed and looks again soon: workers and health from the supervisor's memory, queues, jobs and other nodes
from the store. While nobody follows it does nothing. Looks are paced by what the last one cost, reading and sending together, so
that watching a busy node takes a small share of it: at least `_QUICKEST` apart, and more when more follow.

A walk, from a change to the client's socket: the dispatcher writes a turn -> `_heard` here -> `_look` reads the jobs that the turn
named (jobs.py, one trip on the reader's lane) -> `broker.publish` numbers what is different -> `flush` wakes the clients -> `web/stream.py`
sends each what it has not seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from ostler.config import Settings
from ostler.errors import StoreBusy
from ostler.events import (
    Beats,
    Bus,
    CallsTouched,
    JobEnded,
    JobsTouched,
    PoolPaused,
    SessionsTouched,
    StoreAnswers,
    WorkerMoved,
)
from ostler.jobs.dispatcher import Dispatcher
from ostler.jobs.poll import Poll
from ostler.lifecycle.supervisor import Supervisor
from ostler.live import states
from ostler.live.broker import Broker, Client
from ostler.live.condition import condition
from ostler.live.incidents import KEPT, Incidents
from ostler.live.jobs import TOPIC, Found, Jobs
from ostler.live.queues import Counts, Queues
from ostler.live.topics import Pattern
from ostler.live.workers import Workers
from ostler.parts import Tasks
from ostler.sessions.shown import Sessions
from ostler.store import fleet
from ostler.store.fleet import Fleet
from ostler.store.lanes import Lane
from ostler.store.store import Store

log = logging.getLogger("ostler.live")

_PATIENCE = 1.0  # seconds that a look waits for the store
_QUICKEST = 0.02  # between two looks
_SLOWEST = 1.0
_SHARE = 5  # a look that cost x is followed by a rest of so many x
_FLOOD = 0.25  # the rest after a look that could not tell all
_NODES = 1.0  # seconds between two looks at the other nodes


class Watch:
    """Between the bus and the broker. One task; all on the node's loop."""

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        bus: Bus,
        supervisor: Supervisor,
        dispatcher: Dispatcher,
        poll: Poll,
        reader: Lane,
        lanes: list[Lane],
        incidents: Incidents,
        queues: list[str],
        models: Callable[[], Mapping[str, Mapping[str, Any]]] = dict,
        sessions: Sessions | None = None,
    ) -> None:
        self._models, self._sessions = models, sessions
        self._called: set[tuple[str, str]] = set()  # models that the broker has: topic and key
        self._settings, self._broker, self._reader, self._lanes = settings, broker, reader, lanes
        self._supervisor, self._dispatcher, self._polled, self._incidents = supervisor, dispatcher, poll, incidents
        self._jobs, self._workers = Jobs(broker), Workers(broker, supervisor)
        self._queues = Queues(broker, supervisor, dispatcher, poll, queues)
        self._dirty = asyncio.Event()
        self._store_dirty = True
        self._version = -1  # of the store, when everything was read last
        self._fleet: Fleet | None = None  # while other nodes live, or died and are missed
        self._looking = asyncio.Lock()
        self._incidents_dirty = True
        self._told: set[str] = set()  # incidents that the broker has
        self._tasks = Tasks()
        incidents.changed = self._nudge
        bus.listen(self._heard)

    # ---- start and stop

    async def start(self) -> None:
        self._tasks.begin(self._run(), "watch")
        self._tasks.begin(self._tick(), "keep-alive")
        self._tasks.begin(self._poll(), "watch poll")
        self._tasks.begin(self._follow_nodes(), "watch nodes")

    async def stop(self) -> None:
        """End the streams, then the watch."""
        self._broker.close()
        await self._tasks.stop()

    async def follow(self, patterns: frozenset[Pattern], last_id: str | None, *, ping: bool = False) -> Client:
        """A client whose first `take` is a true snapshot, or what it missed since `last_id`."""
        alone = not self._broker.clients
        client = self._broker.follow(patterns, last_id, ping=ping)
        if alone:  # nobody followed: whatever happened since was not noted
            self._store_dirty = self._incidents_dirty = self._jobs.everything = True
        elif not self._jobs.looked and client.group.wants(TOPIC):
            self._store_dirty = True
        try:
            if alone:
                with contextlib.suppress(StoreBusy):  # this node can be told of without it
                    await self._read_fleet()
            await self._look()
        except BaseException:
            self._broker.leave(client)
            raise
        return client

    # ---- what happened

    def _heard(self, event: Any) -> None:
        if not self._broker.clients:
            return
        match event:
            case JobEnded():
                return  # the turn that writes it follows
            case JobsTouched(jobs, others):
                self._store_dirty = True
                self._jobs.recheck |= others  # another process rang, and does not say what it wrote
                self._jobs.name(jobs)
                if not jobs and not others:
                    return
            case WorkerMoved() | PoolPaused():
                self._store_dirty = True  # how many can take jobs decides when a queue will be empty
            case StoreAnswers() | Beats() | CallsTouched() | SessionsTouched():
                pass
            case _:
                return
        self._dirty.set()

    def _nudge(self) -> None:
        self._incidents_dirty = True
        if self._broker.clients:
            self._dirty.set()

    # ---- the loops

    async def _run(self) -> None:
        while True:
            await self._dirty.wait()
            began = time.perf_counter()
            try:
                await self._look()
            except Exception:  # the loop must survive one bad look
                log.exception("the live state could not be read; trying again")
                await asyncio.sleep(_SLOWEST)
            cost = time.perf_counter() - began
            await asyncio.sleep(0)  # the clients send now; what that cost is in `spent` after the rest
            await asyncio.sleep(_QUICKEST)
            rest = _SHARE * (cost + self._broker.spent) - _QUICKEST
            rest = min(max(rest, _FLOOD if self._jobs.flooded else 0.0), _SLOWEST)
            if rest > 0:
                await asyncio.sleep(rest)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._settings.event_keepalive)
            self._broker.tick()

    async def _poll(self) -> None:
        """For what other processes wrote without ringing."""
        while True:
            await asyncio.sleep(self._settings.poll_interval)
            if not self._broker.clients:
                continue
            with contextlib.suppress(StoreBusy):  # that is told elsewhere; the next poll looks again
                if await self._reader.call(lambda store: store.live.version(), patience=_PATIENCE) != self._version:
                    self._store_dirty = self._jobs.everything = True
            if self._store_dirty:
                self._dirty.set()

    async def _follow_nodes(self) -> None:
        """Other nodes tell what they do by the store alone: it is read about once a second while there are any."""
        while True:
            await asyncio.sleep(_NODES)
            if self._broker.clients and (self._polled.nodes > 1 or self._fleet is not None):
                with contextlib.suppress(StoreBusy):  # that is told elsewhere
                    await self._read_fleet()
                    self._dirty.set()

    async def _read_fleet(self) -> None:
        if self._polled.nodes < 2:
            self._fleet = None
            return

        def read(store: Store) -> tuple[Fleet, list[dict[str, Any]]]:
            return fleet.read(store), store.live.incidents(KEPT)

        self._fleet, incidents = await self._reader.call(read, patience=_PATIENCE)
        self._incidents_dirty |= self._incidents.merge(incidents)

    # ---- one look

    async def _look(self) -> None:
        async with self._looking:
            self._dirty.clear()
            if not self._broker.clients:
                return  # the last one has just left; the next begins with a look
            if self._store_dirty:
                try:
                    await self._read()
                except StoreBusy as error:  # the rest can be told without it; the poll looks again
                    log.debug("the live state of queues and jobs waits: %s", error)
            self._workers.tell(self._fleet)
            self._tell_models()
            self._tell_sessions()
            status, errors = condition(
                self._supervisor,
                self._lanes,
                self._dispatcher.pressure,
                self._polled.stranded,
                self._fleet,
                self._sessions,
            )
            self._broker.publish("system:health", "health_update", "health", {"status": status, "errors": errors})
            if self._incidents_dirty:
                self._tell_incidents()
            self._broker.flush()

    async def _read(self) -> None:
        """Queues and jobs, in one trip to the store."""
        self._store_dirty = False
        look = self._jobs.begin()

        def read(store: Store) -> tuple[int, Counts, Found]:
            version = store.live.version()  # first: what is written while we read makes us look again
            return version, self._queues.read(store), self._jobs.read(store, look)

        try:
            version, counts, jobs = await self._reader.call(read, patience=_PATIENCE)
        except Exception:
            self._store_dirty = True
            self._jobs.put_back(look)
            raise
        if look.everything:
            self._version = version
        self._queues.tell(counts, self._fleet)
        self._jobs.tell(look, jobs)

    # ---- publishing

    def _tell_models(self) -> None:
        """The models of this node. The id of one may be any text, so the topic has the name of its task."""
        told = set()
        for name, found in self._models().items():
            task, _, model = name.partition(":")
            state = states.model(
                self._supervisor.member.id, task, model, found, self._workers.memory.get(found["worker"] or "")
            )
            topic = f"call:{task}:status"
            told.add((topic, model))
            self._broker.publish(topic, "call_update", "call", state, key=model)
        for topic, key in self._called - told:
            self._broker.forget(topic, key)
        self._called = told

    def _tell_sessions(self) -> None:
        """The session pools of this node, by the name that clients connect to: as many as the app declares."""
        for name, found in self._sessions.capacity().items() if self._sessions else ():
            state = states.session_pool(self._supervisor.member.id, name, found)
            self._broker.publish(f"session:{name}:status", "session_update", "session", state)

    def _tell_incidents(self) -> None:
        self._incidents_dirty = False
        shown = {f"{incident.node}-{incident.id}": incident for incident in self._incidents.last}
        for key, incident in shown.items():
            self._broker.publish("system:incidents", "incident", "incident", incident.view(), key=key)
        for key in self._told - shown.keys():
            self._broker.forget("system:incidents", key)
        self._told = set(shown)
