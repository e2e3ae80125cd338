"""The watch: turns what happens on the bus into states for the broker.

It marks what may have changed and looks again soon: workers and health from the supervisor's memory, queues, jobs and other nodes
from the store. While nobody follows it does nothing. Looks are paced by what the last one cost, reading and sending together, so
that watching a busy node takes a small share of it: at least `_QUICKEST` apart, and more when more follow.

A walk, from a change to the client's socket: the dispatcher writes a turn -> `_heard` here -> `_look` reads the jobs that the turn
named (one trip on the reader's lane) -> `broker.publish` numbers what is different -> `flush` wakes the clients -> `web/stream.py`
sends each what it has not seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
from ostler.lifecycle.state import Status
from ostler.lifecycle.supervisor import Supervisor
from ostler.live import states
from ostler.live.broker import Broker, Client
from ostler.live.condition import condition
from ostler.live.incidents import KEPT, Incidents
from ostler.live.topics import Pattern
from ostler.sessions.shown import Sessions
from ostler.store import fleet, now_ms
from ostler.store.fleet import Fleet
from ostler.store.lanes import Lane
from ostler.store.live import FINE
from ostler.store.store import Store

log = logging.getLogger("ostler.live")

_PATIENCE = 1.0  # seconds that a look waits for the store
_QUICKEST = 0.02  # between two looks
_SLOWEST = 1.0
_SHARE = 5  # a look that cost x is followed by a rest of so many x
_JOBS = 300  # jobs that are followed at once
_CHANGES = 100  # … that are told in one look; of more that change at once, the newest, and a `resync`
_LOOK_BACK = 10.0  # seconds; ids are given in order, and on a store with many writers they are committed in any
_OVERLAP = 1000  # ids that are looked at once more for that
_NEWEST = 100  # jobs that a snapshot shows beside the running ones
_FLOOD = 0.25  # the rest after a look that could not tell all
_NODES = 1.0  # seconds between two looks at the other nodes
_ABLE = (Status.HEALTHY, Status.STARTING)
_ENDED, _WAITING, _RUNNING = range(3)  # jobs are forgotten in this order


class _Reading(NamedTuple):
    """What one trip to the store brought."""

    depths: dict[str, dict[str, int]]
    totals: dict[str, dict[str, int]]
    averages: dict[str, float]
    newest: dict[str, dict[str, int]]
    running: dict[str, list[int]]
    jobs: list[dict[str, Any]]
    last_id: int
    version: int
    new: list[int]


class Fresh:
    """Which jobs are new. "Above the last id" is not enough where several write: a lower id may be committed later."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int]] = deque()  # when we looked, and the highest id then
        self._known: set[int] = set()  # of those that are looked at again

    def after(self, now: float, last: int) -> int:
        """The id above which to look: the highest one of some seconds ago."""
        while len(self._looks) > 1 and self._looks[1][0] <= now - _LOOK_BACK:
            self._looks.popleft()
        return min(self._looks[0][1], last) if self._looks else last

    def unseen(self, ids: Sequence[int]) -> list[int]:
        return [job for job in ids if job not in self._known]

    def seen(self, now: float, last: int, ids: Sequence[int], *, first: bool) -> None:
        """These were read, the highest first, and `last` is the highest that there is. The first look begins anew."""
        if first:
            self._looks, self._known = deque([(now, ids[-1] - 1 if ids else last)]), set()
        self._looks.append((now, last))
        self._known.update(ids)
        if len(self._known) > 2 * _OVERLAP:
            self._known = {job for job in self._known if job > self._looks[0][1]}


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
        self._supervisor, self._dispatcher, self._incidents, self._declared = supervisor, dispatcher, incidents, queues
        self._polled = poll
        self._dirty = asyncio.Event()
        self._jobs_dirty: dict[int, None] = {}  # in the order in which they were named
        self._overflow = False  # more changed than is followed
        self._recheck = False  # any job that has not ended may have changed, too
        self._everything = False  # … and any that has: somebody may have put it back, or deleted it
        self._store_dirty = True
        self._looked_at_jobs = False
        self._last_id = 0
        self._fresh = Fresh()
        self._version = -1  # of the store, when everything was read last
        self._followed: dict[int, int] = {}  # job -> how soon it may be forgotten, in the order of their last change
        self._fleet: Fleet | None = None  # while other nodes live, or died and are missed
        self._far: dict[str, dict[str, Any]] = {}  # workers and nodes that the broker has, by key: their last state
        self._gone: set[tuple[str, str]] = set()  # … whose end was told; forgotten at the next look
        self._rss: dict[str, float] = {}
        self._queues: dict[str, tuple[Any, dict[str, Any]]] = {}  # queue -> what it was made from, and its state
        self._recent: dict[str, Any] | None = None
        self._looking = asyncio.Lock()
        self._flooded = False
        self._incidents_dirty = True
        self._told: set[str] = set()  # incidents that the broker has
        self._tasks: list[asyncio.Task[None]] = []
        incidents.changed = self._nudge
        bus.listen(self._heard)

    # ---- start and stop

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._run(), name="watch"),
            loop.create_task(self._tick(), name="keep-alive"),
            loop.create_task(self._poll(), name="watch poll"),
            loop.create_task(self._follow_nodes(), name="watch nodes"),
        ]

    async def stop(self) -> None:
        """End the streams, then the watch."""
        self._broker.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def follow(self, patterns: frozenset[Pattern], last_id: str | None, *, ping: bool = False) -> Client:
        """A client whose first `take` is a true snapshot, or what it missed since `last_id`."""
        alone = not self._broker.clients
        client = self._broker.follow(patterns, last_id, ping=ping)
        if alone:  # nobody followed: whatever happened since was not noted
            self._store_dirty = self._incidents_dirty = self._everything = True
        elif not self._looked_at_jobs and client.group.wants("queue:jobs"):
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
                self._recheck |= others  # another process rang, and does not say what it wrote
                self._name(jobs)
                if not jobs and not others:
                    return
            case WorkerMoved() | PoolPaused():
                self._store_dirty = True  # how many can take jobs decides when a queue will be empty
            case StoreAnswers() | Beats() | CallsTouched() | SessionsTouched():
                pass
            case _:
                return
        self._dirty.set()

    def _name(self, jobs: Sequence[int]) -> None:
        """These have changed; of too many, the newest are looked at."""
        for job in jobs[-_CHANGES:]:
            self._jobs_dirty.pop(job, None)
            self._jobs_dirty[job] = None
        self._overflow |= len(jobs) > _CHANGES
        while len(self._jobs_dirty) > _JOBS:
            del self._jobs_dirty[next(iter(self._jobs_dirty))]
            self._overflow = True

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
            rest = min(max(rest, _FLOOD if self._flooded else 0.0), _SLOWEST)
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
                    self._store_dirty = self._everything = True
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
            self._workers()
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
        self._store_dirty = False
        follows_jobs = self._broker.wanted("queue:jobs")
        named, overflow = list(self._jobs_dirty), self._overflow
        fresh, last = not self._looked_at_jobs, self._last_id
        again = self._fresh.after(time.monotonic(), last)
        everything = self._everything or (fresh and follows_jobs)
        # Of too many changes only the newest were noted: what we show as unfinished may be over by now.
        stale = [
            job
            for job, rank in self._followed.items()
            if everything or (rank != _ENDED and (overflow or self._recheck))
        ]
        self._jobs_dirty, self._overflow, self._recheck, self._everything = {}, False, False, False

        def read(store: Store) -> _Reading:
            live = store.live
            version = live.version()  # first: what is written while we read makes us look again
            ids: list[int] = []
            new: list[int] = []
            newest = 0
            if follows_jobs:
                new = live.newest_ids(0 if fresh else again, _NEWEST if fresh else _OVERLAP)
                newest = max(new[0] if new else 0, last)
                told = new if fresh else self._fresh.unseen(new)[:_CHANGES]
                ids = list({*(live.processing_ids(_JOBS) if fresh else ()), *told, *named, *stale})
            now = now_ms()
            return _Reading(
                store.jobs.depths(),
                live.tallies.totals(),
                live.tallies.averages(now),
                live.tallies.newest(now),
                live.running_since(),
                store.jobs.short(ids),
                newest,
                version,
                new,
            )

        try:
            found = await self._reader.call(read, patience=_PATIENCE)
        except Exception:
            self._store_dirty = self._recheck = True
            self._overflow |= overflow
            self._everything |= everything
            self._jobs_dirty = {**dict.fromkeys(named), **self._jobs_dirty}
            raise
        if everything:
            self._version = found.version
        self._queue_states(found)
        if follows_jobs:
            # What came and went while nobody looked, or faster than we look, cannot be told one by one.
            overflow |= found.last_id - last > _CHANGES or (fresh and last > 0)
            self._looked_at_jobs, self._last_id = True, found.last_id
            self._fresh.seen(time.monotonic(), found.last_id, found.new, first=fresh)
            for job in {*stale} - {job["id"] for job in found.jobs}:  # deleted
                self._followed.pop(job, None)
                self._broker.forget("queue:jobs", str(job))
            self._job_states(found.jobs, overflow=overflow)
        else:
            self._looked_at_jobs = False  # whoever wants them next begins anew

    # ---- publishing

    def _job_states(self, jobs: list[dict[str, Any]], *, overflow: bool) -> None:
        for job in sorted(jobs, key=lambda j: j["id"]):
            self._broker.publish("queue:jobs", "job_update", "job", job, key=str(job["id"]))
            self._followed.pop(job["id"], None)
            open_rank = _RUNNING if job["status"] == "processing" else _WAITING
            self._followed[job["id"]] = open_rank if job["finished_at"] is None else _ENDED
        spare = len(self._followed) - _JOBS
        if spare > 0:
            # What was published just now last of all: nobody has been sent it yet. Else the oldest change before the newer.
            now = {job["id"] for job in jobs}
            first = sorted(
                self._followed, key=lambda job: (self._followed[job] == _RUNNING, job in now, self._followed[job])
            )
            for old in first[:spare]:
                del self._followed[old]
                self._broker.forget("queue:jobs", str(old))
        self._flooded = overflow
        if overflow:
            self._broker.missed("queue:jobs", "more jobs changed than are told here; list them again")

    def _workers(self) -> None:
        """Workers of this node from memory, those of others from the store, and the nodes."""
        supervisor, found = self._supervisor, self._fleet
        own, told = supervisor.member.id, dict[str, dict[str, Any]]()
        label = (found and found.label(own)) or supervisor.node
        naming = states.Naming(own, label, bool(found and found.several))
        for slot in supervisor.slots.values():
            doing = slot.pool.spec.tenant.doing(slot.worker) if slot.worker else None
            paused = supervisor.pauses.holds(slot.pool.spec.name)
            state = states.worker(slot, naming, self._memory(slot), doing, paused=paused)
            self._tell_worker(told, state)
        for row in found.workers if found else ():
            if row["node_id"] != own:
                self._tell_worker(told, states.far_worker(row, paused=supervisor.pauses.holds(row["pool"])))
        for node in found.nodes if found else ():
            told[node["id"]] = state = states.node(node)
            self._broker.publish("system:nodes", "node_update", "node", state, key=node["id"])
        self._forget_gone(told)

    def _tell_worker(self, told: dict[str, dict[str, Any]], state: dict[str, Any]) -> None:
        key = f"{state['node_id']}/{state['component']}"
        told[key] = state
        self._broker.publish(f"{state['component']}:status", "worker_update", "worker", state, key=key)

    def _tell_models(self) -> None:
        """The models of this node. The id of one may be any text, so the topic has the name of its task."""
        told = set()
        for name, found in self._models().items():
            task, _, model = name.partition(":")
            state = states.model(self._supervisor.member.id, task, model, found, self._rss.get(found["worker"] or ""))
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

    def _forget_gone(self, told: dict[str, dict[str, Any]]) -> None:
        """Nodes that have left, and their workers: say so once, and forget them a look later."""
        for topic, key in self._gone:
            if key not in told:
                self._broker.forget(topic, key)
        self._gone.clear()
        for key, state in self._far.items():
            if key not in told:
                kind, topic = (
                    ("worker", f"{state['component']}:status") if "component" in state else ("node", "system:nodes")
                )
                last = {**state, "status": "stopped", "gone": True}
                self._broker.publish(topic, f"{kind}_update", kind, last, key=key)
                self._gone.add((topic, key))
        self._far = told

    def _memory(self, slot: Any) -> float | None:
        """The worker's memory; a little more or less is no news."""
        now = slot.worker.rss_mb if slot.worker else None
        if now is None:
            self._rss.pop(slot.component, None)
            return None
        shown = self._rss.get(slot.component)
        if shown is None or abs(now - shown) > max(2.0, 0.05 * shown):
            self._rss[slot.component] = shown = round(now, 1)
        return shown

    def _queue_states(self, found: _Reading) -> None:
        now = now_ms()
        for name in sorted({*self._declared, *found.depths, *found.totals}):
            counts, totals = found.depths.get(name, {}), found.totals.get(name, {})
            workers, paused = self._capacity(name)
            # Averages move with the clock, too; only what happened makes news.
            stuck = self._polled.unrunnable[name]
            made_from = (counts, totals, workers, paused, stuck, found.running.get(name))
            known = self._queues.get(name)
            if known is not None and known[0] == made_from:
                continue
            bucket = found.newest.get(name)
            limit = self._dispatcher.limits.get(name)
            state = states.queue(
                name,
                counts=counts,
                totals=totals,
                average=found.averages.get(name),
                recent=states.recent(bucket, FINE) if bucket else (known[1]["recent"] if known else None),
                running_for=[max(0, now - at) / 1000 for at in found.running.get(name, ())],
                workers=workers,
                paused=paused,
                rate=limit.rate if limit else None,
                stuck=stuck,
            )
            self._queues[name] = (made_from, state)
            self._broker.publish(f"queue:{name}:status", "queue_update", "queue", state)
        if totals_now := _summed(found.newest):
            self._recent = states.recent(totals_now, FINE)
        everything = states.all_queues([state for _, state in self._queues.values()], self._recent)
        self._broker.publish("queue:status", "queue_update", "queue", everything)

    def _capacity(self, queue: str) -> tuple[int, bool]:
        """How many workers of all nodes take jobs of the queue, and whether it is paused."""
        pool, own = self._supervisor.pools.get(queue), self._supervisor.member.id
        able = sum(1 for slot in pool.slots if slot.status in _ABLE) if pool else 0
        for row in self._fleet.workers if self._fleet else ():
            able += row["pool"] == queue and row["node_id"] != own and row["status"] in _ABLE
        limit = self._dispatcher.limits.get(queue)
        if limit is not None and limit.at_once is not None:
            able = min(able, limit.at_once)
        return able, self._supervisor.pauses.holds(queue)

    def _tell_incidents(self) -> None:
        self._incidents_dirty = False
        shown = {f"{incident.node}-{incident.id}": incident for incident in self._incidents.last}
        for key, incident in shown.items():
            self._broker.publish("system:incidents", "incident", "incident", incident.view(), key=key)
        for key in self._told - shown.keys():
            self._broker.forget("system:incidents", key)
        self._told = set(shown)


def _summed(buckets: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """The counters of all queues in one bucket."""
    total: dict[str, int] = {}
    for counts in buckets.values():
        for name, n in counts.items():
            total[name] = n if name == "at" else total.get(name, 0) + n
    return total
