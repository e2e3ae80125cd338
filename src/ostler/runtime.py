"""The composition root: one node, built by hand, in order, and taken down in reverse. The only file that knows all parts."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import resource
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import uvicorn

from ostler import private
from ostler.app import Ostler
from ostler.check import check_app
from ostler.config import Settings, is_loopback
from ostler.errors import ConfigError
from ostler.events import Backpressure, Bus, Event, JobEnded, PoolPaused, Recovered, StoreAnswers, WorkerMoved
from ostler.jobs import schedule
from ostler.jobs.dispatcher import Dispatcher
from ostler.jobs.intake import Intake
from ostler.jobs.upkeep import Upkeep
from ostler.lifecycle import family, probe
from ostler.lifecycle.control import Control
from ostler.lifecycle.recycle import RecycleLimits
from ostler.lifecycle.supervisor import Supervisor
from ostler.lifecycle.worker import Nothing, PoolSpec, Tenant
from ostler.live.broker import Broker
from ostler.live.incidents import Incidents
from ostler.live.tails import Tails
from ostler.live.watch import Watch
from ostler.store import Store, database_path, now_ms
from ostler.store.doorbell import Doorbell
from ostler.store.lanes import Lane
from ostler.store.limits import QueueLimit
from ostler.store.sweep import recover_dead_nodes
from ostler.web.app import build
from ostler.web.connections import RESERVE, Connection
from ostler.web.context import Context
from ostler.web.metrics import Metrics

log = logging.getLogger("ostler")

_FILES = 65_536  # files that a node may have open, where it is allowed to
_PER_WORKER = 6  # files: channel, output, log and pidfd, and what a start needs for a moment
_CLIENTS = 32  # connections, at the least
_UNSENT = 131_072  # bytes that the kernel holds of what a client has not taken


class Node:
    """One running `ostler up`: a supervisor, a dispatcher and a gateway on one host."""

    def __init__(self, settings: Settings, app: Ostler, target: str) -> None:
        self.settings, self.app, self.target = settings, app, target
        self.url = ""
        self.ready = asyncio.Event()
        self._stop = asyncio.Event()
        self._signals = 0
        self._origin = ""
        self._force: Callable[[], None] = lambda: None

    async def run(self) -> None:
        """Serve until asked to stop. Raises ConfigError before anything was started when it cannot."""
        settings, loop = self.settings, asyncio.get_running_loop()
        with contextlib.ExitStack() as held:
            folder = database_path(settings.store, settings.data_dir).parent
            specs = self._specs_checked()
            self._check_files()
            web_socket = held.enter_context(_listen(settings.host, settings.port))
            self.url = _url(settings.host, web_socket.getsockname()[1])
            held.enter_context(_lock(folder, settings.group))
            _prepare(settings)
            with self._open(durable=True) as store:
                self._origin = store.meta.once("store_id", secrets.token_hex(8))
                store.jobs.declare(
                    (
                        {**t.row, "parameters": json.dumps(t.parameters), "policy": json.dumps(t.row["policy"])}
                        for t in self.app.tasks.values()
                    ),
                    now_ms(),
                )
                store.jobs.flows.declare_schedules(self._schedules())
                recovered = recover_dead_nodes(store, now_ms(), _is_alive, _end)
            doorbell = held.enter_context(contextlib.closing(Doorbell(folder)))

            bus = Bus()
            bus.listen(_tell)

            def answers(lane: str, well: bool) -> None:
                bus.send(StoreAnswers(lane, well))

            writer = Lane("writer", lambda: self._open(durable=False), loop, answers)
            reader = Lane("reader", lambda: self._open(durable=False, read_only=True), loop, answers)
            intake_lane = Lane("intake", lambda: self._open(durable=True), loop, answers)
            lanes = [writer, reader, intake_lane]
            metrics = Metrics(bus)
            incidents = Incidents(settings.node, bus, writer)
            await incidents.load()
            incidents.tell("info", "node", f"node {settings.node} started")
            if recovered:
                bus.send(Recovered(len(recovered), "stale"))
            limits = {
                q: QueueLimit(at_once, rate, max(1.0, rate or 1.0)) for q, (at_once, rate) in self.app.queues.items()
            }
            dispatcher = Dispatcher(settings, writer, reader, bus, limits)
            supervisor = Supervisor(settings, writer, bus, specs(dispatcher))
            dispatcher.supervisor = supervisor
            intake = Intake(intake_lane, settings.store_patience, dispatcher.ring)
            upkeep = Upkeep(settings, intake_lane, bus, dispatcher.ring, self._recover, self._origin)
            tasks = {name: task.row for name, task in self.app.tasks.items()}
            broker = Broker(secrets.token_hex(4), settings.node, settings.event_keepalive)
            queues = sorted({task.queue for task in self.app.tasks.values()})
            watch = Watch(settings, broker, bus, supervisor, dispatcher, reader, lanes, incidents, queues)
            tails = Tails(bus)
            context = Context(
                settings,
                supervisor,
                Control(supervisor),
                dispatcher,
                intake,
                reader,
                intake_lane,
                tasks,
                self.url,
                lanes,
                metrics,
                broker,
                watch,
                tails,
            )
            web = _Web(build(context, self.app.routes), web_socket)

            self._force = supervisor.force
            loop.add_reader(doorbell.fileno(), doorbell.answer, dispatcher.ring)
            await supervisor.start()
            dispatcher.start()
            upkeep.start()
            watch.start()
            await web.start()
            supervisor.mark_serving()
            held.enter_context(_address(folder, self.url))
            log.info(
                "node %s is up: dashboard and API at %s, data in %s, workers: %d, pools: %d",
                settings.node,
                self.url,
                folder,
                len(supervisor.slots),
                len(supervisor.pools),
            )
            self.ready.set()
            try:
                await self._stop.wait()
                log.info(
                    "stopping: workers finish what they have (up to %g s); once more to force", settings.stop_grace
                )
            finally:
                await supervisor.stop()
                await upkeep.close()
                await dispatcher.close()
                tails.close()
                await watch.close()
                await web.stop()
                incidents.close()
                await supervisor.close()
                loop.remove_reader(doorbell.fileno())
                for lane in (intake_lane, reader, writer):
                    await lane.close()
            log.info("node %s has stopped", settings.node)

    def stop(self) -> None:
        """The first time: drain. From the second on: now."""
        self._signals += 1
        if self._signals == 1:
            self._stop.set()
        else:
            log.warning("stopping by force")
            self._force()

    def _open(self, *, durable: bool, read_only: bool = False) -> Store:
        return Store.open(self.settings.store, self.settings.data_dir, durable=durable, read_only=read_only)

    def _recover(self, store: Store) -> list[int]:
        """What other nodes, dead by now, have left: every node looks, the first one to see it acts."""
        stale = now_ms() - int(self.settings.stale_after * 1000)

        def alive(row: dict[str, Any]) -> bool:
            return row["node"] == self.settings.node or _is_alive(row) or row["last_heartbeat"] > stale

        return recover_dead_nodes(store, now_ms(), alive, _end)

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

    def _specs_checked(self) -> Callable[[Dispatcher], list[PoolSpec]]:
        """The pools that the app needs, checked before anything starts."""
        check_app(self.settings, self.app, self.target)
        queues = sorted({task.queue for task in self.app.tasks.values()})
        return lambda dispatcher: [
            *(
                self._spec(q, [sys.executable, "-u", "-m", "ostler.jobs.runner", self.target], dispatcher)
                for q in queues
            ),
            *(self._spec(c.name, c.argv, Nothing()) for c in self.app.commands.values()),
        ]

    def _check_files(self) -> None:
        """Refuse to start where clients would find a node that runs and takes no connection."""
        names = {task.queue for task in self.app.tasks.values()} | self.app.commands.keys()
        workers = sum(self.settings.pool(name, self.app.pools.get(name)).workers or 0 for name in names)
        needed = RESERVE + _PER_WORKER * workers + _CLIENTS
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if allowed != resource.RLIM_INFINITY and allowed < needed:
            raise ConfigError(
                f"this process may have {allowed} files open, and {needed} are needed (workers: {workers}); "
                f"raise the limit: `ulimit -n {max(needed, 1024)}`, or LimitNOFILE= in a systemd unit"
            )

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
        }
        return PoolSpec(
            name=name,
            size=pool.workers,
            argv=argv,
            env={**env, **command.env} if command else env,
            cwd=command.cwd if command else None,
            probe=probe.parse(command.ready) if command else None,
            drain_signal=command.drain_signal if command else signal.SIGTERM,
            startup_deadline=pool.startup_deadline,
            stale_after=pool.stale_after,
            stop_grace=pool.stop_grace,
            term_grace=self.settings.term_grace,
            recycle=RecycleLimits(pool.recycle_count, pool.recycle_age, pool.recycle_rss_mb, pool.recycle_warm),
            tenant=tenant,
        )


def serve(settings: Settings, app: Ostler, target: str) -> None:
    """Run a node in this process until SIGTERM or SIGINT. Raises ConfigError when it cannot start."""
    _logging(settings.log_level)
    _allow_files()
    sys.setswitchinterval(0.001)  # lanes hold the GIL briefly and often; do not let them wait 5 ms for it

    async def main() -> None:
        node = Node(settings, app, target)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, node.stop)
        await node.run()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main())


def _allow_files() -> None:
    """Each client is an open file. The usual soft limit (1024) is for programs that use select(); the hard one is meant to be used."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # then as many as there are
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed."""
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Web(uvicorn.Server):
    """The HTTP server on the node's own loop and socket; signals are the node's business."""

    def __init__(self, app: Any, sock: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=3,
                server_header=False,
            )
        )
        self._sock = sock
        self._serving: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def start(self) -> None:
        self._serving = asyncio.get_running_loop().create_task(self.serve(sockets=[self._sock]), name="web")
        while not self.started:
            if self._serving.done():
                await self._serving
                raise ConfigError("the HTTP server ended at its start")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        self.should_exit = True
        if self._serving:
            await self._serving


@contextlib.contextmanager
def _lock(folder: Path, group: str) -> Iterator[IO[str]]:
    """Only one node per data directory: two would each think the other's workers dead."""
    try:
        if not folder.exists():
            private.prepare(folder, group)
        file = private.open(folder / "node.lock", "a+", encoding="ascii")
    except OSError as error:
        raise ConfigError(
            f"the data directory {folder} cannot be used: {error.strerror}; name another with --data"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise ConfigError(
                f"another node (pid {file.read().strip() or 'unknown'}) already runs on {folder}; stop it, or name another with --data"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield file


def _prepare(settings: Settings) -> None:
    try:
        private.prepare(settings.data_dir, settings.group)
        private.make(settings.data_dir / "logs")
        probe_file = settings.data_dir / ".writable"
        probe_file.touch()
        probe_file.unlink()
    except OSError as error:
        raise ConfigError(
            f"the data directory {settings.data_dir} cannot be used: {error.strerror}; name another with --data"
        ) from error


@contextlib.contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    """The bound socket; taken before anything starts, so that a taken port leaves nothing running."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(kind, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # What a client has not taken stays with us, where it can be replaced by newer, not as megabytes in the kernel.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
        try:
            sock.bind((host.strip("[]"), port))
            sock.listen(1024)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with --port (0 takes any free one)"
            ) from error
        yield sock


@contextlib.contextmanager
def _address(folder: Path, url: str) -> Iterator[None]:
    """`node.json` tells the CLI where the node listens."""
    path = folder / "node.json"
    with private.open(path, "w", encoding="ascii") as file:
        json.dump({"url": url, "pid": os.getpid(), "started": family.start_time(os.getpid())}, file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _url(host: str, port: int) -> str:
    shown = host if is_loopback(host) else ("127.0.0.1" if host in ("0.0.0.0", "::") else host)  # noqa: S104
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


def _is_alive(row: dict[str, Any]) -> bool:
    same_boot = (row["metadata"] or {}).get("boot_id") == family.boot_id()
    return same_boot and row["pid"] != os.getpid() and family.is_alive(row["pid"], row["pid_start"])


def _end(node: dict[str, Any], workers: list[dict[str, Any]]) -> int:
    metadata = node["metadata"] or {}
    if metadata.get("boot_id") != family.boot_id():
        return 0  # another boot of the machine: nothing of it can be alive
    roots = [w["pid"] for w in workers if family.is_alive(w["pid"], w["pid_start"])]
    return family.kill(f"{metadata['token']}/" if metadata.get("token") else "\0", roots)


def _tell(event: Event) -> None:
    """The node's log, in words."""
    if isinstance(event, JobEnded) and event.event != "failed":
        return  # the most frequent one, and nothing to tell
    match event:
        case WorkerMoved(component, generation, _, "crashed", reason=reason, delay=delay, how=how, line=line):
            follows = f"restart in {delay:g} s" if delay is not None else "no restart"
            last = f', last line: "{line}"' if line else ""
            log.warning("%s (generation %d) crashed: %s, %s%s; %s", component, generation, reason, how, last, follows)
        case WorkerMoved(component, _, _, "failed", reason=reason):
            log.error("%s is failed: %s. Look at its log, then: ostler restart %s", component, reason, component)
        case WorkerMoved(component, generation, before, status, pid=pid, reason=reason):
            extra = f" (pid {pid})" if status == "healthy" else (f" ({reason})" if reason else "")
            log.info("%s generation %d: %s -> %s%s", component, generation, before, status, extra)
        case JobEnded(job, task, _, worker, "failed", seconds, code):
            log.warning(
                "job %d (%s) failed on %s after %.1f s: %s; see: ostler jobs %d", job, task, worker, seconds, code, job
            )
        case Backpressure(reason):
            log.warning("claiming pauses: %s", reason)
        case PoolPaused(pool, _, still=True):
            log.warning(
                "%s still paused, as before; to go on: ostler resume%s",
                f"{pool} is" if pool else "all pools are",
                f" {pool}" if pool else "",
            )
        case PoolPaused(pool, paused):
            log.info("%s %s", pool or "all pools", "paused" if paused else "resumed")


def _logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    logging.getLogger("ostler").setLevel(level.upper())
