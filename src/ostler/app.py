"""What a user's file declares: jobs, models, sessions, pools and commands. Importing it starts nothing and loads no third-party module."""

from __future__ import annotations

import signal as signals
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack

from ostler import loading
from ostler.calls import model as models_of
from ostler.calls.calling import Calling
from ostler.calls.model import ModelSpec, Options
from ostler.errors import BadArguments, ConfigError
from ostler.flows import Chain, Step, store_batch, store_batch_async
from ostler.handles import BatchId, JobId
from ostler.jobs import signature
from ostler.jobs.hooks import Hooks
from ostler.jobs.options import check
from ostler.jobs.outcome import in_seconds
from ostler.names import pool_name
from ostler.sessions import spec as sessions_of
from ostler.sessions.spec import Options as SessionOptions
from ostler.sessions.spec import SessionSpec
from ostler.task import Declare, Task, checked
from ostler.task import rate as rate_of

# Loaded where they are needed: each model's worker imports this module, and is to be there soon.
if TYPE_CHECKING:
    from ostler.config import EnvSettings, PoolSettings, Settings
    from ostler.jobs.awaiting import Awaiting
    from ostler.jobs.producer import Producer

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)
S = TypeVar("S", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Command:
    """A program that knows nothing of Ostler, kept running under the same lifecycle."""

    name: str
    argv: tuple[str, ...]
    ready: str | None
    drain_signal: int
    env: dict[str, str]
    cwd: str | None


@dataclass(eq=False)
class Ostler(Calling):
    """An app: the declarations of one file. `store` and `data` are defaults; ostler.toml, OSTLER_* and flags overrule them."""

    store: str | None = None
    data: str | None = None
    tasks: dict[str, Task[..., Any]] = field(default_factory=dict, init=False)
    commands: dict[str, Command] = field(default_factory=dict, init=False)
    models: dict[str, ModelSpec] = field(default_factory=dict, init=False)
    session_pools: dict[str, SessionSpec] = field(default_factory=dict, init=False)
    pools: dict[str, PoolSettings] = field(default_factory=dict, init=False)
    envs: dict[str, EnvSettings] = field(default_factory=dict, init=False)
    target: str = field(default="", init=False)  # by what name it was loaded
    schedules: dict[str, tuple[str, str, Step[Any]]] = field(default_factory=dict, init=False, repr=False)
    queues: dict[str, tuple[int | None, float | None]] = field(default_factory=dict, init=False, repr=False)
    routes: list[Callable[[Any], Any]] = field(default_factory=list, init=False, repr=False)
    hooks: Hooks = field(default_factory=Hooks, init=False, repr=False)
    _producer: Producer | None = field(default=None, init=False, repr=False)
    _awaiting: Awaiting | None = field(default=None, init=False, repr=False)
    _node: Settings | None = field(default=None, init=False, repr=False)

    def job(
        self,
        queue: str = "default",
        *,
        name: str | None = None,
        attempts: int = 3,
        timeout: float | timedelta | None = None,
        priority: int = 0,
        backoff: tuple[float | timedelta, float | timedelta] | None = None,
        unique: bool | Sequence[str] = False,
        unique_for: float | timedelta | None = None,
        at_once: int | None = None,
        per: str | None = None,
        cron: str | None = None,
        zone: str = "UTC",
        env: str | None = None,
        gpu_mb: float = 0,
        memory_mb: float = 0,
    ) -> Declare:
        """Declare a job: a plain or async function whose first parameter is the job handle.

        `attempts` is how many attempts a job that raises gets; `timeout` (seconds) kills its worker's process group;
        higher `priority` runs first. `backoff` is (first, longest) delay between runs. `unique` makes one job of all that have the
        same arguments (or the same of those named) while it is live, or for `unique_for` seconds. `at_once` bounds how many run at
        once over all nodes, `per` value of that parameter. Times may be timedeltas. `cron` fires it, in time zone `zone`. `env` names the environment
        (`app.env`) that the queue's workers run in; all jobs of a queue have the same. `gpu_mb` and `memory_mb` are the GPU and
        host memory (MB) that the job needs: a worker of its queue is started when so much is reserved for it. It is no limit.
        """
        if callable(queue):
            raise ConfigError("write @app.job() with parentheses")
        waits = None if backoff is None else tuple(in_seconds(wait) for wait in backoff)
        timeout, unique_for = in_seconds(timeout), in_seconds(unique_for)
        policy = {"backoff": waits, "unique": unique, "unique_for": unique_for, "at_once": at_once, "per": per}
        policy |= {"gpu_mb": gpu_mb, "memory_mb": memory_mb}
        core = {"queue": queue, "name": name, "attempts": attempts, "timeout": timeout, "priority": priority}
        return Declare(self, {**core, "policy": policy, "cron": cron, "zone": zone, "env": env})

    def _declare(
        self,
        function: Callable[..., Any],
        *,
        queue: str,
        name: str | None,
        policy: dict[str, Any],
        cron: str | None,
        zone: str,
        env: str | None,
        **options: Any,
    ) -> Task[Any, Any]:
        called = name or function.__name__
        if not isinstance(called, str) or not called.isprintable() or not 0 < len(called) <= 200:
            raise ConfigError(f"{called!r} is not usable as a job's name: 1 to 200 printable characters, please")
        if called in self.tasks:
            raise ConfigError(f"two jobs are named {called!r}; give one of them another name with @app.job(name=…)")
        try:
            check(f"job {called!r}", options)
        except BadArguments as error:
            raise ConfigError(str(error)) from None
        pool_name(queue)
        if kind := self._taken(queue):
            raise ConfigError(f"{queue!r} is already the name of {kind}; a job's queue needs another name")
        parameters = signature.describe(function)
        row = {
            "name": called,
            "queue": queue,
            **options,
            "policy": checked(called, policy, parameters),
            "parameters": parameters,
        }
        task: Task[..., Any] = Task(self, function, row, env)
        self._check_env(queue, env, f"job {called!r}", self.pools.get(queue))
        self.tasks[called] = task
        if cron is not None:
            self.cron(called, cron, task.s(), zone=zone)
        return task

    def _check_env(self, queue: str, env: str | None, what: str, pool: PoolSettings | None) -> None:
        """The workers of a queue run in one environment: refuse a second one."""
        others = [(f"job {task.name!r}", task.env) for task in self.tasks.values() if task.queue == queue]
        named = pool.env if pool else None
        if named is not None:  # it speaks for jobs that name none
            others = [(f"the pool {queue!r}", named), *((who, has or named) for who, has in others)]
            env = env or named
        for who, has in others:
            if has != env:
                raise ConfigError(
                    f"{what} of queue {queue!r} has {_named(env)}, but {who} has {_named(has)}: the workers of a queue run in one "
                    "environment; give all jobs of the queue the same env, or the job another queue"
                )

    def env_of(self, queue: str) -> str | None:
        """The environment that the code names for a queue's workers, on its pool or on its jobs."""
        pool = self.pools.get(queue)
        named = (task.env for task in self.tasks.values() if task.queue == queue and task.env)
        return (pool.env if pool else None) or next(named, None)

    def env(
        self,
        name: str,
        *,
        python: str | None = None,
        requirements: str | Path | Sequence[str] | None = None,
        constraints: str | Path | None = None,
        no_deps: str | Sequence[str] | None = None,
        index: str | None = None,
        extra_index: str | Sequence[str] | None = None,
        installer: str | None = None,
        path: str | Path | None = None,
    ) -> str:
        """Describe a virtual environment for jobs and models that cannot share the node's own; returns its name.

        `ostler env build NAME --app APP` builds it. Relative paths count from the directory of the calling file. A table
        `[env.<name>]` in ostler.toml overrules what is given here, key by key.
        """
        if name in self.envs:
            raise ConfigError(f"two environments are named {name!r}")
        caller = Path(sys._getframe(1).f_code.co_filename).absolute().parent  # noqa: SLF001
        table = {"python": python, "requirements": requirements, "constraints": constraints}
        table |= {"no_deps": no_deps, "index": index, "extra_index": extra_index, "installer": installer, "path": path}
        from ostler import config  # noqa: PLC0415

        self.envs[name] = config.described(name, table, caller, f"app.env({name!r})")
        return name

    def cron(self, name: str, spec: str, step: Step[Any], *, zone: str = "UTC") -> None:
        """Store that step whenever the cron expression fires in the time zone. Several nodes fire it once; what was missed while none
        ran is made up for once.
        """
        if name in self.schedules:
            raise ConfigError(f"two schedules are named {name!r}")
        self.schedules[name] = (spec, zone, step)

    def queue(self, name: str, *, at_once: int | None = None, rate: str | None = None) -> None:
        """Limits of a queue over all nodes: how many run at once, and how many begin per time ("10/s", "100/m", "1000/h")."""
        if at_once is not None and (not isinstance(at_once, int) or isinstance(at_once, bool) or at_once < 1):
            raise ConfigError(f"queue {name!r}: at_once must be a whole number from 1, found {at_once!r}")
        self.queues[pool_name(name)] = (at_once, None if rate is None else rate_of(name, rate))

    def batch(
        self,
        steps: Iterable[Step[R] | Chain[R]],
        *,
        then: Step[Any] | None = None,
        into: str | None = None,
        connection: Any = None,
    ) -> BatchId[R]:
        """Store jobs that belong together, all or none. When the last of them has ended, `then` is stored once; its parameter `into`
        gets {"batch", "total", "failed"}: `find_batch` reads the results by that number. `connection`: in its transaction.
        """
        return store_batch(self, steps, then, into, connection)

    async def batch_async(
        self,
        steps: Iterable[Step[R] | Chain[R]],
        *,
        then: Step[Any] | None = None,
        into: str | None = None,
        connection: Any = None,
    ) -> BatchId[R]:
        """`batch` without blocking the event loop."""
        return await store_batch_async(self, steps, then, into, connection)

    def find(self, job: int) -> JobId[Any]:
        """The job with this id, of whichever task, to ask for its status or wait for its result. Raises NotFound."""
        found = JobId[Any].of(self, job)
        found.info()
        return found

    def find_batch(self, batch: int) -> BatchId[Any]:
        """The batch with this number, to read the results of its jobs. Raises NotFound."""
        found = BatchId[Any].of(self, batch)
        found.info()
        return found

    def wake(self) -> None:
        """Let the nodes look for jobs now. After the commit of an SQLite transaction in which jobs were stored with `connection=`:
        there nobody is told by the commit, and the node would find them with its next poll.
        """
        self.producer.wake()

    def pool(
        self,
        name: str,
        *,
        workers: int | None = None,
        startup_deadline: float | None = None,
        stale_after: float | None = None,
        stop_grace: float | None = None,
        recycle_count: int | None = None,
        recycle_age: float | None = None,
        recycle_rss_mb: float | None = None,
        recycle_warm: bool | None = None,
        high_watermark: int | None = None,
        env: str | None = None,
    ) -> None:
        """Size and limits of the workers of a queue (or command), and the environment that a queue's workers run in; ostler.toml,
        environment and flags overrule them.
        """
        from ostler.config import PoolSettings  # noqa: PLC0415

        declared = PoolSettings(
            workers=workers,
            startup_deadline=startup_deadline,
            stale_after=stale_after,
            stop_grace=stop_grace,
            recycle_count=recycle_count,
            recycle_age=recycle_age,
            recycle_rss_mb=recycle_rss_mb,
            recycle_warm=recycle_warm,
            high_watermark=high_watermark,
            env=env,
        )
        if env is not None:
            self._check_env(name, env, "the pool", declared)
        self.pools[pool_name(name)] = declared

    def command(
        self,
        name: str,
        argv: Sequence[str],
        *,
        workers: int = 1,
        ready: str | None = None,
        drain_signal: str = "SIGTERM",
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        **limits: Any,
    ) -> None:
        """Keep a program running that knows nothing of Ostler.

        `ready` is tcp://host:port, http://host:port/path, line:REGEX of its output, or None: alive is ready. The first two also
        tell about its health from then on. `{port}` in argv, env and ready is a free port for each worker, `{n}` its number.
        `limits` are those of `app.pool`.
        """
        from ostler.lifecycle import probe  # noqa: PLC0415

        probe.parse(ready)
        if not argv or isinstance(argv, str) or not all(isinstance(a, str) for a in argv):
            raise ConfigError(f"command {name!r}: argv must be a list of strings, found {argv!r}")
        pool_name(name)
        self._check_free(name)
        try:
            number = signals.Signals[drain_signal].value
        except KeyError:
            raise ConfigError(
                f"command {name!r}: {drain_signal!r} is not a signal; write a name such as SIGTERM"
            ) from None
        self.commands[name] = Command(name, tuple(argv), ready, number, dict(env or {}), cwd)
        self.pool(name, workers=workers, **limits)

    def model(
        self,
        name: str,
        *,
        models: Iterable[str] | Mapping[str, Options] | None = None,
        any_model: bool = False,
        max_models: int = 8,
        **options: Unpack[Options],
    ) -> Callable[[C], C]:
        """Declare a model: a class with `load(model_id)` and `infer(payload)`, which is loaded with the first call and stays warm.

        `models` lists the ids that it serves, or gives options by id; without it the one id is `name`. `any_model` takes every id,
        at most `max_models` of them at once. docs/models.md explains the options: env, gpu_mb, memory_mb, idle, pinned, batch,
        batch_wait, concurrency, workers, queue, startup, timeout, kill_on_cancel.
        """

        def declare(target: C) -> C:
            self._check_free(name)
            self.models[name] = models_of.declare(
                name, target, options, models, any_model=any_model, max_models=max_models
            )
            return target

        if not isinstance(name, str):
            raise ConfigError('write @app.model("name") with the name of the model')
        return declare

    def server(
        self,
        name: str,
        argv: Sequence[str],
        *,
        ready: str | None = "tcp:",
        models: Iterable[str] | Mapping[str, Options] | None = None,
        any_model: bool = False,
        max_models: int = 8,
        variables: Mapping[str, str] | None = None,
        cwd: str | None = None,
        path: str = "/",
        **options: Unpack[Options],
    ) -> None:
        """Declare a model that any HTTP server program serves (llama-server, vLLM, TEI…), with the options of `app.model`.

        `{port}` in argv, variables and ready is a free port, `{socket}` the path of a Unix socket, `{model}` the model's id, `{n}` the
        worker's number. `ready` is http:/path or tcp: there, or one of the probes of `app.command`. `variables` are put into its environment.
        A call is posted to its `path`; `/api/v1/calls/NAME/any/path` reaches any other.
        """
        self._check_free(name)
        self.models[name] = models_of.declare_server(
            name,
            argv,
            ready,
            options,
            models,
            any_model=any_model,
            max_models=max_models,
            variables=variables,
            cwd=cwd,
            path=path,
        )

    def sessions(
        self,
        name: str,
        *,
        workers: int | None = None,
        limits: Mapping[str, Any] | None = None,
        **options: Unpack[SessionOptions],
    ) -> Callable[[S], S]:
        """Declare a pool whose workers hold sessions: long-lived connections, which clients open at `ws://NODE/sessions/NAME`.

        The decorated class has `start(self, worker)`, which returns the worker's endpoint, and where needed `open`, `close`, `probe`,
        `view` and `stop`; an async function that yields its endpoint is the short form. docs/sessions.md explains the options: slots,
        lifetime, margin, line, line_wait, idle, longest, ping, drain, probe, slow_ms, sticky, redirect, protocol, serves, versions,
        product, memory_mb, env. `limits` are those of `app.pool`, such as `recycle_age`.
        """

        def declare(target: S) -> S:
            self._check_free(name)
            self.session_pools[name] = sessions_of.declare(name, target, options)
            self.pool(name, workers=workers, **(limits or {}))
            return target

        if not isinstance(name, str):
            raise ConfigError('write @app.sessions("name") with the name of the pool')
        return declare

    def endpoint(
        self,
        name: str,
        argv: Sequence[str],
        *,
        ready: str | None = "tcp:",
        workers: int | None = None,
        variables: Mapping[str, str] | None = None,
        cwd: str | None = None,
        path: str = "/",
        limits: Mapping[str, Any] | None = None,
        **options: Unpack[SessionOptions],
    ) -> None:
        """Declare a pool of sessions that any program serves over WebSocket (or TCP), with the options of `app.sessions`.

        `{port}` in argv, variables and ready is a free port, `{socket}` the path of a Unix socket, `{n}` the worker's number. `ready` is
        http:/path or tcp: there, or one of the probes of `app.command`. `path` is where it takes the upgrade.
        """
        self._check_free(name)
        self.session_pools[name] = sessions_of.declare_program(
            name, argv, ready, options, variables=variables, cwd=cwd, path=path
        )
        self.pool(name, workers=workers, **(limits or {}))

    def _check_free(self, name: str) -> None:
        """A name of a pool is used once: by a queue, a command, a model or sessions."""
        if kind := self._taken(name):
            raise ConfigError(f"{name!r} is already the name of {kind}")
        if any(task.queue == name for task in self.tasks.values()):
            raise ConfigError(f"{name!r} is already the name of a job's queue")

    def _taken(self, name: str) -> str | None:
        taken: dict[str, Mapping[str, Any]] = {
            "a command": self.commands,
            "a model": self.models,
            "sessions": self.session_pools,
        }
        return next((kind for kind, names in taken.items() if name in names), None)

    def on_start(self, queue: str | None = None) -> Callable[[S], S]:
        """Run the function once in each worker of the queue (None: of every queue) before its first job: load a model, open a pool of
        connections. Plain or async. A worker whose function raises does not become ready, which counts as a crash.
        """
        return self.hooks.adding(self.hooks.starting, queue, "on_start")

    def on_stop(self, queue: str | None = None) -> Callable[[S], S]:
        """Run the function once in each worker of the queue (None: of every queue) before it exits, also when it is recycled; not when
        it is killed. Plain or async. What it raises is logged.
        """
        return self.hooks.adding(self.hooks.stopping, queue, "on_stop")

    def web(self, factory: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Add routes of the app's own to the node's HTTP server: a function that takes an `ostler.web.extend.NodeApi` and returns a
        FastAPI `APIRouter`. It is called once, in the node, before the node listens; workers never call it.
        """
        self.routes.append(factory)
        return factory

    @property
    def producer(self) -> Producer:
        """Stores jobs for this app; made when it is first used. Raises ConfigError while an app is loaded."""
        loading.refuse()
        if self._producer is None:
            from ostler.jobs.producer import Producer  # noqa: PLC0415

            self._producer = Producer(self.settings())
        return self._producer

    @property
    def awaiting(self) -> Awaiting:
        """Waits for jobs of this app; made when it is first used."""
        producer = self.producer
        if self._awaiting is None or self._awaiting.producer is not producer:
            from ostler.jobs.awaiting import Awaiting  # noqa: PLC0415

            self._awaiting = Awaiting(producer)
        return self._awaiting

    def serve(self, settings: Settings) -> None:
        """In a node: what routes of the app's own enqueue, find and call is this node's, whatever flags it was started with."""
        self._node = settings

    def settings(self, flags: dict[str, Any] | None = None, file: Path | None = None) -> Settings:
        """The settings as this process sees them."""
        if self._node is not None and flags is None and file is None:
            return self._node
        from ostler import config  # noqa: PLC0415

        return config.load(flags, code={"store": self.store, "data": self.data}, file=file)


def _named(env: str | None) -> str:
    return "no env" if env is None else f"env {env!r}"


def load(target: str) -> Ostler:
    """The app that `path/to/file.py`, `package.module` or either with `:name` names; raises ConfigError with the cause.

    Loading stores nothing: a call of `enqueue` in the file itself is a ConfigError.
    """
    found = loading.find(target, Ostler)
    found.target = target
    return found
