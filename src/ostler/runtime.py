"""The composition root: one node, built by hand, in order, and taken down in reverse. The only file that knows all parts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostler import envs
from ostler import folder as folders
from ostler.app import Ostler
from ostler.calls.address import new_key
from ostler.calls.gateway import Gateway
from ostler.calls.places import Places
from ostler.calls.records import CallLog
from ostler.calls.states import States
from ostler.calls.tenants import PlaneTenant
from ostler.calls.wishes import Wishes
from ostler.check import check_app, session_spec
from ostler.config import Settings
from ostler.events import Bus, Recovered, StoreAnswers
from ostler.jobs.dispatcher import Dispatcher
from ostler.jobs.intake import Intake
from ostler.jobs.poll import Poll
from ostler.jobs.upkeep import Upkeep
from ostler.lifecycle.admission import Need
from ostler.lifecycle.control import Control
from ostler.lifecycle.ledger import Ledger
from ostler.lifecycle.membership import Leave, Neighbours
from ostler.lifecycle.pauses import PLANE
from ostler.lifecycle.supervisor import Supervisor
from ostler.lifecycle.worker import PoolSpec
from ostler.live import log as node_log
from ostler.live.broker import Broker
from ostler.live.incidents import Incidents
from ostler.live.tails import Tails
from ostler.live.waiters import Waiters
from ostler.live.watch import Watch
from ostler.parts import Part, running
from ostler.plane.access import Access
from ostler.plane.entry import allow_files, loop_factory
from ostler.pools import Pools, plane
from ostler.registration import Registration
from ostler.sessions.launch import Launches
from ostler.sessions.neighbours import Neighbours as SessionNeighbours
from ostler.sessions.pools import SessionPools
from ostler.sessions.registry import Registry, StoreRegistry
from ostler.store import home
from ostler.store.bell import listener
from ostler.store.lanes import Lane, Lanes
from ostler.store.limits import QueueLimit
from ostler.web.app import build
from ostler.web.call_metrics import CallMetrics
from ostler.web.context import Context
from ostler.web.metrics import Metrics
from ostler.web.server import Server, listen, listen_unix, run_folder, url_of

log = logging.getLogger("ostler")


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
        self._force: Callable[[], None] = lambda: None
        self._pools = Pools(settings, app, target)
        self._registration: Registration  # made in `run`
        self._gateway: Gateway | None = None
        self._sessions: SessionPools | None = None
        self._launches: Launches | None = None
        self._clients = -1  # the socket that clients connect to, where the data plane takes them

    async def run(self) -> None:
        """Serve until asked to stop. Raises ConfigError before anything was started when it cannot."""
        settings = self.settings
        folder = home(settings.store, settings.data_dir)
        check_app(settings, self.app, self.target)
        folders.check_files(self._pools.size())
        with folders.lock(folder, settings.group), self._listen() as web_socket:
            self._registration = Registration(settings, self.app, folder, self.url)
            if not await self._registration.wait(self._stop):
                return  # asked to stop before the store was there
            parts = self._build(folder, web_socket)
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

    @contextlib.contextmanager
    def _listen(self) -> Iterator[socket.socket]:
        """Listen for clients, in a directory that is ready; the web server's socket, which is another if the data plane takes the clients."""
        settings = self.settings
        with listen(settings.host, settings.port) as clients:
            self.url = url_of(settings.host, clients)
            folders.prepare(settings)
            if not self.has_plane:
                yield clients
                return
            self._clients = clients.fileno()
            with listen_unix(settings.data_dir) as own:
                yield own

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

    def _build(self, folder: Path, web_socket: socket.socket) -> _Parts:
        settings, registration = self.settings, self._registration
        member = registration.member
        bus = Bus()
        bus.listen(node_log.tell)
        bus.listen(node_log.JobLines().tell)
        lanes = Lanes.of(
            settings, lambda which, well: bus.send(StoreAnswers(which, well)), sessions=bool(self.app.session_pools)
        )
        metrics = Metrics(bus)
        incidents = Incidents(settings.node, bus, lanes.records)
        incidents.tell("info", "node", f"node {settings.node} started")
        if registration.recovered:
            bus.send(Recovered(len(registration.recovered), "stale"))
        dispatcher = self._dispatcher(lanes, bus)
        calls = CallLog(self.app.models, lanes.records, bus, lambda: member.id)
        self._gateway = self._calls(calls) if self.has_plane else None
        if lanes.sessions is not None:
            registry = self._registry(lanes.sessions, lanes.glance)
            declared = {name: session_spec(settings, self.app, name) for name in self.app.session_pools}
            self._sessions = SessionPools(declared, registry, bus, beat=settings.heartbeat_interval)
            self._launches = Launches(settings, self.app, self.target, self.url)
        ledger = Ledger(
            headroom=Need(settings.memory_headroom_mb, settings.gpu_headroom_mb),
            exclusive=settings.gpu_exclusive,
            patience=settings.memory_patience,
            lane=lanes.records,
        )
        specs = self._specs(dispatcher)
        supervisor = Supervisor(settings, lanes.records, lanes.intake, bus, specs, member, ledger)
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
            declare=registration.declare,
            requeued=dispatcher.ring,
        )
        dispatcher.lost = supervisor.lost = neighbours.lose
        control = Control(supervisor)
        poll = Poll(settings, lanes.glance, lanes.records, supervisor, dispatcher, control)
        intake = Intake(lanes.intake, settings.store_patience, dispatcher.ring)
        upkeep = Upkeep(
            settings,
            lanes.upkeep,
            lanes.intake,
            bus,
            dispatcher.ring,
            lambda: member.id,
            registration.origin,
            member.home,
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
            self._pools.queues,
            models,
            sessions=self._sessions,
        )
        tails = Tails(bus)
        waiters = Waiters(bus, lanes.glance, settings.poll_interval)
        places: Places | None = None
        if self._gateway and registration.is_shared:
            places = Places(self._gateway, models, lanes.records, member, registration.secret)
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
            secret=registration.secret,
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

        bell = listener(settings.store, folder, poll.ring)
        leave = Leave(member, lanes.records)  # after the dispatcher's last turn: who has stopped writes nothing
        order: list[Part] = [
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

    def _dispatcher(self, lanes: Lanes, bus: Bus) -> Dispatcher:
        app, member, watermarks = self.app, self._registration.member, self._pools.watermarks()
        limits = {q: QueueLimit(at_once, rate, max(1.0, rate or 1.0)) for q, (at_once, rate) in app.queues.items()}
        tasks = frozenset(app.tasks)
        return Dispatcher(self.settings, lanes.turns, lanes.intake, bus, member, tasks, limits, watermarks)

    def _specs(self, dispatcher: Dispatcher) -> list[PoolSpec]:
        """The pools that the app needs."""
        gateway, sessions, origin = self._gateway, self._sessions, self._registration.origin
        specs = self._pools.specs(dispatcher, self.url, origin, self.settings.job_nice if gateway else 0)
        if gateway is not None:
            tenant = PlaneTenant(gateway, {"sessions": sessions} if sessions else {})
            specs += [plane(self.settings, tenant, self._clients), *gateway.specs()]
        if self._launches and sessions:
            specs += self._launches.pool_specs(sessions)
        return specs

    def _calls(self, records: CallLog) -> Gateway:
        settings, run = self.settings, run_folder(self.settings.data_dir)
        key = new_key(run)

        def interpreter(env: str | None) -> Path:
            return Path(sys.executable) if env is None else envs.interpreter(settings, self.app, env)

        def access() -> dict[str, Any]:
            return Access.of(settings, self._registration.secret, key).frame()

        return Gateway(settings, self.app.models, self.target, run, interpreter, access, records)

    def _seat_sessions(self, supervisor: Supervisor) -> list[Part]:
        """The parts for sessions, in order."""
        pools, launches = self._sessions, self._launches
        if pools is None or launches is None:
            return []
        pools.supervisor, pools.removed, pools.address = supervisor, launches.removed, launches.address
        registration = self._registration
        if not registration.is_shared and not self.settings.registry:
            return [launches.scratch, pools]
        pools.neighbours = SessionNeighbours(pools, registration.member, registration.secret, self._adopt)
        return [launches.scratch, pools, pools.neighbours]

    def _adopt(self, secret: str) -> None:
        """The nodes of the registry of sessions know each other by another secret than this store's."""
        self._registration.secret = secret
        if self._gateway is not None:
            self._gateway.tell_catalog()

    def _registry(self, lane: Lane, glance: Lane) -> Registry:
        """Where session workers are registered: the store, or Redis."""
        member, settings = self._registration.member, self.settings
        if not settings.registry:
            return StoreRegistry(lane, glance, lambda: member.id)
        from ostler.sessions.redis_registry import RedisRegistry  # noqa: PLC0415  an extra

        return RedisRegistry(settings, lane, lambda: member.id, member.row.url)


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
