"""The composition root: one node, built by hand, in order, and taken down in reverse. The only file that knows all parts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ostler
from ostler import envs
from ostler import folder as folders
from ostler.app import Ostler
from ostler.calls.address import GIVEN, new_key
from ostler.calls.gateway import Gateway
from ostler.calls.places import Places
from ostler.calls.records import CallLog
from ostler.calls.states import States
from ostler.calls.tenants import PlaneTenant
from ostler.calls.wishes import Wishes
from ostler.check import check_app, env_of, session_spec
from ostler.config import Settings
from ostler.errors import StoreBusy
from ostler.events import Bus, Recovered, StoreAnswers
from ostler.jobs import schedule
from ostler.jobs.dispatcher import Dispatcher
from ostler.jobs.intake import Intake
from ostler.jobs.poll import Poll
from ostler.jobs.upkeep import Upkeep
from ostler.lifecycle import family, predecessor, probe
from ostler.lifecycle.admission import NONE, Need
from ostler.lifecycle.control import Control
from ostler.lifecycle.ledger import Ledger
from ostler.lifecycle.membership import Leave, Membership, Neighbours
from ostler.lifecycle.pauses import PLANE
from ostler.lifecycle.recycle import RecycleLimits
from ostler.lifecycle.reserving import Declared
from ostler.lifecycle.supervisor import LAST, Supervisor
from ostler.lifecycle.worker import Nothing, PoolSpec, Tenant
from ostler.live import log as node_log
from ostler.live.broker import Broker
from ostler.live.incidents import Incidents
from ostler.live.remote import SECRET
from ostler.live.tails import Tails
from ostler.live.waiters import Waiters
from ostler.live.watch import Watch
from ostler.parts import Part, running
from ostler.plane.access import Access
from ostler.plane.entry import allow_files, loop_factory
from ostler.sessions.launch import Launches
from ostler.sessions.neighbours import Neighbours as SessionNeighbours
from ostler.sessions.pools import SessionPools
from ostler.sessions.registry import Registry, StoreRegistry
from ostler.store import Store, home, now_ms
from ostler.store.bell import listener
from ostler.store.database import is_postgres
from ostler.store.identity import new_id
from ostler.store.lanes import Lane
from ostler.store.limits import QueueLimit
from ostler.store.nodes import NodeRow
from ostler.web.app import build
from ostler.web.call_metrics import CallMetrics
from ostler.web.context import Context
from ostler.web.metrics import Metrics
from ostler.web.server import Server, advertised, listen, listen_unix, run_folder, url_of

log = logging.getLogger("ostler")


@dataclass(frozen=True, slots=True)
class _Lanes:
    """The node's connections to the store, one for each purpose: see store/lanes.py. Started and stopped together."""

    turns: Lane
    records: Lane
    intake: Lane
    glance: Lane
    reader: Lane
    upkeep: Lane
    sessions: Lane | None  # where the app has any

    def all(self) -> list[Lane]:
        lanes = [self.turns, self.records, self.intake, self.glance, self.reader, self.upkeep]
        return lanes if self.sessions is None else [*lanes, self.sessions]

    async def start(self) -> None:
        for lane in self.all():
            await lane.start()

    async def stop(self) -> None:
        await asyncio.gather(*(lane.stop() for lane in self.all()))


@dataclass(frozen=True, slots=True)
class _Parts:
    """All that a node starts, in order."""

    supervisor: Supervisor
    in_order: list[Part]


class Node:
    """One running `ostler up`: a supervisor, a dispatcher and an HTTP server on one host."""

    def __init__(self, settings: Settings, app: Ostler, target: str) -> None:
        self.settings, self.app, self.target = settings, app, target
        app.serve(settings)
        self.url = ""
        self.ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._signals = 0
        self._origin = self._secret = ""
        self._is_shared = False  # other nodes may use the store
        self._force: Callable[[], None] = lambda: None
        self._gateway: Gateway | None = None
        self._sessions: SessionPools | None = None
        self._launches: Launches | None = None
        self._clients = -1  # the socket that clients connect to, where the data plane takes them

    async def run(self) -> None:
        """Serve until asked to stop. Raises ConfigError before anything was started when it cannot."""
        settings = self.settings
        folder = home(settings.store, settings.data_dir)
        check_app(settings, self.app, self.target)
        folders.check_files(sum(spec.size for spec in self._specs(Nothing())))
        with (
            folders.lock(folder, settings.group),
            listen(settings.host, settings.port) as clients,
            contextlib.ExitStack() as stack,
        ):
            self.url = url_of(settings.host, clients)
            folders.prepare(settings)
            web_socket = clients
            if self.has_plane:
                web_socket, self._clients = stack.enter_context(listen_unix(settings.data_dir)), clients.fileno()
            self._member = self._membership(folder)
            recovered = await self._await_store()
            if recovered is None:
                return  # asked to stop before the store was there
            parts = self._build(folder, web_socket, recovered)
            self._force = parts.supervisor.force
            async with running(parts.in_order):
                with folders.address(folder, self.url, own_token=not settings.token):
                    self._serve(parts.supervisor, folder)
                    await self._stop.wait()
                    log.info(
                        "stopping: running work may finish (up to %g s); signal again to stop at once",
                        settings.stop_grace,
                    )
                    await parts.supervisor.drain()
        log.info("node %s has stopped", settings.node)

    def _serve(self, supervisor: Supervisor, folder: Path) -> None:
        supervisor.mark_serving()
        log.info(
            "node %s is up: dashboard and API at %s, data in %s, workers: %d, pools: %d",
            self.settings.node,
            self.url,
            folder,
            sum(slot.pool.spec.tenant.kind != PLANE for slot in supervisor.slots.values()),
            sum(pool.spec.tenant.kind != PLANE for pool in supervisor.pools.values()),
        )
        self.ready.set()

    def stop(self) -> None:
        """The first time: drain. From the second on: now."""
        self._signals += 1
        if self._signals == 1:
            self._stop.set()
        else:
            log.warning("stopping at once")
            self._force()

    @property
    def has_plane(self) -> bool:
        """Whether the data plane takes the clients' connections."""
        return bool(self.app.models or self.app.session_pools)

    # ---- building

    async def _await_store(self) -> list[int] | None:
        """`_open_store`, when the store's server is there: until then the node waits, and says so. None when it is asked to stop."""
        delay = 0.5
        while not self._stop.is_set():
            try:
                return self._open_store()
            except StoreBusy as error:
                if not is_postgres(self.settings.store):
                    raise
                log.warning("waiting for the store: %s", error)
                self._member.renew()  # whether a lost answer was a yes does not matter then
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), delay)
            delay = min(2 * delay, 5.0)
        return None

    def _open_store(self) -> list[int]:
        """Bring the store up to date with the app; returns the jobs that dead nodes had left."""
        with self._open(durable=True) as store:
            self._origin = store.meta.once("store_id", secrets.token_hex(8))
            store.jobs.recount()
            predecessor.end_leftovers(store, self._member.row)
            self._secret, self._is_shared = store.meta.once(SECRET, secrets.token_hex(32)), store.db.shared
            back = predecessor.recover(store, self._member.row)
            store.nodes.register(self._member.row)
            self._declare(store)
            return back

    def _declare(self, store: Store) -> None:
        tasks = (
            {**t.row, "parameters": json.dumps(t.parameters), "policy": json.dumps(t.row["policy"])}
            for t in self.app.tasks.values()
        )
        store.nodes.declare(self._member.id, tasks, self._schedules())

    def _membership(self, folder: Path) -> Membership:
        """Who this node is. Its id holds for this start, its name is for people."""
        settings, pid = self.settings, os.getpid()
        row = NodeRow(
            id=new_id(settings.node),
            name=settings.node,
            lease_ms=int(settings.node_lease * 1000),
            host=socket.gethostname(),
            home=folders.identity(folder),
            boot_id=family.boot_id(),
            pid=pid,
            pid_start=family.start_time(pid),
            token=secrets.token_hex(8),
            url=advertised(settings, self.url),
            version=ostler.__version__,
        )
        return Membership(settings, row)

    def _build(self, folder: Path, web_socket: socket.socket, recovered: list[int]) -> _Parts:
        settings = self.settings
        bus = Bus()
        bus.listen(node_log.tell)
        bus.listen(node_log.JobLines().tell)
        lanes = self._lanes(bus)
        metrics = Metrics(bus)
        incidents = Incidents(settings.node, bus, lanes.records)
        incidents.tell("info", "node", f"node {settings.node} started")
        if recovered:
            bus.send(Recovered(len(recovered), "stale"))
        limits = {q: QueueLimit(at_once, rate, max(1.0, rate or 1.0)) for q, (at_once, rate) in self.app.queues.items()}
        member = self._member
        tasks = frozenset(self.app.tasks)
        dispatcher = Dispatcher(settings, lanes.turns, lanes.intake, bus, member, tasks, limits, self._watermarks())
        calls = CallLog(self.app.models, lanes.records, bus, lambda: member.id)
        self._gateway = self._calls(calls) if self.has_plane else None
        if lanes.sessions is not None:
            registry = self._registry(lanes.sessions, lanes.glance)
            specs = {name: session_spec(settings, self.app, name) for name in self.app.session_pools}
            self._sessions = SessionPools(specs, registry, bus, beat=settings.heartbeat_interval)
            self._launches = Launches(settings, self.app, self.target, self.url)
        ledger = Ledger(
            headroom=Need(settings.memory_headroom_mb, settings.gpu_headroom_mb),
            exclusive=settings.gpu_exclusive,
            patience=settings.memory_patience,
            lane=lanes.records,
        )
        supervisor = Supervisor(settings, lanes.records, lanes.intake, bus, self._specs(dispatcher), member, ledger)
        dispatcher.supervisor = supervisor
        if self._gateway is not None:
            self._gateway.supervisor, calls.pools = supervisor, supervisor.pools
        sessions = self._seat_sessions(supervisor)
        neighbours = Neighbours(
            settings,
            member,
            lanes.upkeep,
            bus,
            supervisor,
            forget=dispatcher.forget,
            declare=self._declare,
            requeued=dispatcher.ring,
        )
        dispatcher.lost = supervisor.lost = neighbours.lose
        control = Control(supervisor)
        poll = Poll(settings, lanes.glance, lanes.records, supervisor, dispatcher, control)
        intake = Intake(lanes.intake, settings.store_patience, dispatcher.ring)
        upkeep = Upkeep(
            settings, lanes.upkeep, lanes.intake, bus, dispatcher.ring, lambda: member.id, self._origin, member.home
        )
        broker = Broker(secrets.token_hex(4), settings.node, settings.event_keepalive)
        models = States(self._gateway, self.app.models) if self._gateway else dict
        watch = Watch(
            settings,
            broker,
            bus,
            supervisor,
            dispatcher,
            poll,
            lanes.glance,
            lanes.all(),
            incidents,
            self._queues(),
            models,
            sessions=self._sessions,
        )
        tails = Tails(bus)
        waiters = Waiters(bus, lanes.glance, settings.poll_interval)
        places: Places | None = None
        if self._gateway and self._is_shared:
            places = Places(self._gateway, models, lanes.records, member, self._secret)
            self._gateway.plane_began = places.forget
        context = Context(
            settings=settings,
            supervisor=supervisor,
            control=control,
            dispatcher=dispatcher,
            poll=poll,
            intake=intake,
            glance=lanes.glance,
            reader=lanes.reader,
            writer=lanes.intake,
            lanes=lanes.all(),
            tasks={name: task.row for name, task in self.app.tasks.items()},
            url=self.url,
            metrics=metrics,
            broker=broker,
            watch=watch,
            tails=tails,
            waiters=waiters,
            secret=self._secret,
            models=models,
            calls=calls,
            gpu_lock=self._gateway.gpu_lock if self._gateway else lambda: None,
            wishes=Wishes(self._gateway) if self._gateway else None,
            elsewhere=lambda: places.elsewhere if places else [],
            sessions=self._sessions,
            envs=lambda: [envs.shown(env) for env in envs.listing(settings, self.app)],
        )
        metrics.registry.register(CallMetrics(calls, context.models, ledger))
        web = Server(build(context, self.app.routes), web_socket)

        def rung() -> None:
            dispatcher.ring()
            poll.ring()

        bell = listener(settings.store, folder, rung)
        order: list[Part]
        leave = Leave(member, lanes.records)  # after the dispatcher's last turn: who has stopped writes nothing
        order = [
            lanes,
            incidents,
            calls,
            *([places] if places else []),
            *sessions,
            leave,
            dispatcher,
            ledger,
            supervisor,
            neighbours,
            poll,
            bell,
            upkeep,
            web,
            watch,
            tails,
            waiters,
        ]
        return _Parts(supervisor, order)

    def _lanes(self, bus: Bus) -> _Lanes:
        loop, patience = asyncio.get_running_loop(), self.settings.store_patience

        def answers(which: str, well: bool) -> None:
            bus.send(StoreAnswers(which, well))

        def lane(name: str, patience: float | None = patience, **how: Any) -> Lane:
            # It waits for a lock for a second at most: then the lane looks whether it may go on trying.
            return Lane(
                name,
                lambda: self._open(busy_timeout=1.0, **how),
                loop,
                answers,
                patience,
                reads=how.get("read_only", False),
            )

        return _Lanes(
            turns=lane("turns", None, durable=False, cache_mb=16),
            records=lane("records", None, durable=False),
            intake=lane("intake", durable=True),
            glance=lane("glance", read_only=True),
            reader=lane("reader", read_only=True),
            upkeep=lane("upkeep", durable=False),
            sessions=lane("sessions", told_again=True) if self.app.session_pools else None,
        )

    def _open(self, **how: Any) -> Store:
        return Store.open(self.settings.store, self.settings.data_dir, **how)

    def _queues(self) -> list[str]:
        return sorted({task.queue for task in self.app.tasks.values()})

    def _watermarks(self) -> dict[str, int]:
        return {q: self.settings.pool(q, self.app.pools.get(q)).high_watermark or 0 for q in self._queues()}

    def _schedules(self) -> list[dict[str, Any]]:
        now = now_ms()
        return [
            {
                "name": name,
                "spec": spec,
                "zone": zone,
                "step": step.waiting(),
                "next_at": schedule.following(spec, zone, now),
            }
            for name, (spec, zone, step) in self.app.schedules.items()
        ]

    # ---- pools

    def _specs(self, dispatcher: Tenant) -> list[PoolSpec]:
        """The pools that the app needs."""
        return [
            *(self._spec(queue, self._runner(queue), dispatcher) for queue in self._queues()),
            *(self._spec(c.name, c.argv, Nothing()) for c in self.app.commands.values()),
            *([self._plane(self._gateway), *self._gateway.specs()] if self._gateway else []),
            *(self._launches.pool_specs(self._sessions) if self._launches and self._sessions else []),
        ]

    def _calls(self, records: CallLog) -> Gateway:
        settings, run = self.settings, run_folder(self.settings.data_dir)
        key = new_key(run)

        def interpreter(env: str | None) -> Path:
            return Path(sys.executable) if env is None else envs.interpreter(settings, self.app, env)

        def access() -> dict[str, Any]:
            return Access.of(settings, self._secret, key).frame()

        return Gateway(settings, self.app.models, self.target, run, interpreter, access, records)

    def _plane(self, gateway: Gateway) -> PoolSpec:
        return PoolSpec(
            tenant=PlaneTenant(gateway, {"sessions": self._sessions} if self._sessions else {}),
            name=PLANE,
            size=1,
            argv=[sys.executable, "-u", "-P", "-m", "ostler.plane", str(run_folder(self.settings.data_dir).resolve())],
            given={"OSTLER_DATA": str(self.settings.data_dir)},
            descriptors={"LISTEN": self._clients},
            outlasts=LAST,
            startup_deadline=self.settings.startup_deadline,
            stale_after=self.settings.stale_after,
            stop_grace=self.settings.stop_grace,
            term_grace=self.settings.term_grace,
        )

    def _runner(self, queue: str) -> Any:
        """What runs a queue's jobs. An environment is looked up at each start: it may have been built again meanwhile."""
        env = env_of(self.settings, self.app, queue)
        if env is None:
            return [sys.executable, "-u", "-m", "ostler.jobs.runner", self.target]
        return lambda _: envs.command(self.settings, self.app, env, "ostler.jobs.runner", self.target)

    def _spec(self, name: str, argv: Any, tenant: Tenant) -> PoolSpec:
        pool: Any = self.settings.pool(name, self.app.pools.get(name))
        command = self.app.commands.get(name)
        # Workers see the node's own settings, so that a job which enqueues another finds the same store.
        env = {
            "OSTLER_STORE": self.settings.store,
            "OSTLER_DATA": str(self.settings.data_dir),
            "OSTLER_MAX_PAYLOAD": str(self.settings.max_payload),
            "OSTLER_RESULTS": self.settings.results,
            "OSTLER_ORIGIN": self._origin,
            GIVEN: self.url,
        }
        if (named := env_of(self.settings, self.app, name)) is not None:
            env |= envs.variables(self.settings, named)
        return PoolSpec(
            name=name,
            size=pool.workers,
            argv=argv,
            env=command.env if command else {},
            given=env,
            cwd=command.cwd if command else None,
            probe=probe.parse(command.ready) if command else None,
            drain_signal=command.drain_signal if command else signal.SIGTERM,
            startup_deadline=pool.startup_deadline,
            stale_after=pool.stale_after,
            stop_grace=pool.stop_grace,
            term_grace=self.settings.term_grace,
            recycle=RecycleLimits(pool.recycle_count, pool.recycle_age, pool.recycle_rss_mb, pool.recycle_warm),
            tenant=tenant,
            need=self._need(name),
            nice=self.settings.job_nice if self._gateway and not command else 0,
        )

    def _seat_sessions(self, supervisor: Supervisor) -> list[Part]:
        """The parts for sessions, in order."""
        pools, launches = self._sessions, self._launches
        if pools is None or launches is None:
            return []
        pools.supervisor, pools.removed, pools.address = supervisor, launches.removed, launches.address
        if not self._is_shared and not self.settings.registry:
            return [launches.scratch, pools]
        pools.neighbours = SessionNeighbours(pools, self._member, self._secret, self._adopt)
        return [launches.scratch, pools, pools.neighbours]

    def _adopt(self, secret: str) -> None:
        """The nodes of the registry of sessions know each other by another secret than this store's."""
        self._secret = secret
        if self._gateway is not None:
            self._gateway.tell_catalog()

    def _registry(self, lane: Lane, glance: Lane) -> Registry:
        """Where session workers are registered: the store, or Redis."""
        member, settings = self._member, self.settings
        if not settings.registry:
            return StoreRegistry(lane, glance, lambda: member.id)
        from ostler.sessions.redis_registry import RedisRegistry  # noqa: PLC0415  an extra

        return RedisRegistry(settings, lane, lambda: member.id, member.row.url)

    def _need(self, queue: str) -> Declared | None:
        """The largest need of the queue's tasks, where one of them declares any."""
        policies = [task.row["policy"] for task in self.app.tasks.values() if task.queue == queue]
        needs = [Need(policy.get("memory_mb", 0.0), policy.get("gpu_mb", 0.0)) for policy in policies]
        largest = functools.reduce(Need.largest, needs, NONE)
        return None if largest == NONE else Declared(queue, largest)


def serve(settings: Settings, app: Ostler, target: str) -> None:
    """Run a node in this process until SIGTERM or SIGINT. Raises ConfigError when it cannot start."""
    node_log.configure(settings.log_level, settings.log_format)
    allow_files()
    sys.setswitchinterval(0.001)  # lanes hold the GIL briefly and often; do not let them wait 5 ms for it

    async def main() -> None:
        node = Node(settings, app, target)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, node.stop)
        await node.run()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main())
