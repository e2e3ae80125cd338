"""The app: what a user's file declares (jobs, models, sessions, pools, commands). Importing it starts nothing and loads no third-party module."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Never, Self, TypeVar, Unpack

from ostler import habits, loading
from ostler.calls import model as models_of
from ostler.calls.calling import Calling
from ostler.calls.model import Options
from ostler.declarations import Declarations
from ostler.errors import ConfigError
from ostler.flows import Step
from ostler.jobs.outcome import in_seconds
from ostler.names import pool_name
from ostler.storing import Storing
from ostler.task import Declare
from ostler.task import rate as rate_of

# Loaded where they are needed: every model's worker imports this module, and should start fast.
if TYPE_CHECKING:
    from ostler.sessions.spec import Options as SessionOptions

C = TypeVar("C", bound=type)
S = TypeVar("S", bound=Callable[..., Any])


class Ostler(Declarations, Storing, Calling, habits.Hinting):
    """An app: everything that one file declares. `store` and `data` are defaults; ostler.toml, OSTLER_* variables and flags override them."""

    _hints: ClassVar = habits.APP

    if not TYPE_CHECKING:

        def __new__(cls, *given: Any, **options: Any) -> Self:
            """Refuse what is no store and no option here, where the caller's line is known."""
            if unknown := options.keys() - {"store", "data"}:
                raise _unknown("Ostler(…)", min(unknown), habits.APP_OPTIONS, ["store", "data"])
            store = given[0] if given else options.get("store")
            if (
                store
                and not str(store).startswith(("sqlite:///", "postgresql://", "postgres://"))
                and store != "sqlite"
            ):
                raise ConfigError(
                    f"Ostler({store!r}){loading.line()}: {store!r} is not the URL of a store; write Ostler() for SQLite in the data directory, "
                    "or a store such as postgresql://user@host/database. An app has no name"
                )
            return super().__new__(cls)

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
        **unknown: Never,
    ) -> Declare:
        """Declare a job: a plain or async function whose first parameter is the job handle.

        Times are seconds or a timedelta.

        - `attempts`: how often it may run; a job that raises is retried until they are used up.
        - `timeout`: how long one attempt may take; then the worker's process group is killed.
        - `priority`: higher runs first.
        - `backoff`: (first, longest) delay between attempts; it doubles in between.
        - `unique`: enqueueing a job with the same arguments (or the same values of the named ones) returns the existing job until
          that has ended, or for `unique_for`.
        - `at_once`: how many may run at the same time across all nodes; with `per`, for each value of that parameter.
        - `cron`: a cron expression that enqueues it, in time zone `zone`.
        - `env`: the environment (`app.env`) that the queue's workers run in; the same for all jobs of a queue.
        - `gpu_mb`, `memory_mb`: memory in MB that is reserved before a worker of the queue starts. It is not a limit.
        """
        if callable(queue):
            raise ConfigError("write @app.job() with parentheses")
        steps = backoff if isinstance(backoff, tuple | list | None) else (backoff,)
        waits = None if steps is None else tuple(in_seconds(wait) for wait in steps)
        timeout, unique_for = in_seconds(timeout), in_seconds(unique_for)
        policy = {"backoff": waits, "unique": unique, "unique_for": unique_for, "at_once": at_once, "per": per}
        policy |= {"gpu_mb": gpu_mb, "memory_mb": memory_mb}
        return Declare(
            self,
            queue,
            name,
            options={"attempts": attempts, "timeout": timeout, "priority": priority},
            policy=policy,
            env=env,
            cron=None if cron is None else (cron, zone),
            unknown=unknown,
        )

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
        """Declare a virtual environment for jobs and models that cannot use the node's own; returns its name.

        `ostler env build NAME --app APP` builds it. Relative paths are relative to the directory of the calling file. Keys of a table
        `[env.<name>]` in ostler.toml override what is given here.
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
        """Enqueue the step whenever the cron expression matches in the time zone: once, however many nodes there are. If runs were missed
        because no node was running, one run makes up for all of them.
        """
        if name in self.schedules:
            raise ConfigError(f"two schedules are named {name!r}")
        self.schedules[name] = (spec, zone, step)
        self._places[f"schedule {name!r}"] = loading.line()

    def queue(self, name: str, *, at_once: int | None = None, rate: str | None = None) -> None:
        """Limit a queue across all nodes: how many jobs run at the same time, and how many start per time ("10/s", "100/m", "1000/h")."""
        if at_once is not None and (not isinstance(at_once, int) or isinstance(at_once, bool) or at_once < 1):
            raise ConfigError(f"queue {name!r}: at_once must be a whole number from 1, found {at_once!r}")
        self.queues[pool_name(name)] = (at_once, None if rate is None else rate_of(name, rate))

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
        **unknown: Never,
    ) -> None:
        """Set the number and limits of the workers of a queue or command, and the environment of a queue's workers. ostler.toml,
        environment variables and flags override them. docs/settings.md explains each one.
        """
        from ostler.config import PoolSettings  # noqa: PLC0415

        if unknown:
            known = [*inspect.signature(self.pool).parameters][1:-1]
            raise _unknown(f"app.pool({name!r}, …)", min(unknown), habits.POOL_OPTIONS, known)
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
        """Keep any program running as a worker.

        `ready` says when it is ready: tcp://host:port, http://host:port/path, line:REGEX for a line of its output, or None for as soon as
        it runs. The first two are also checked afterwards, as health checks. `{port}` in argv, env and ready is replaced by a free port for each
        worker, `{n}` by its number. `limits` are those of `app.pool`.
        """
        from ostler.lifecycle import command as commands_of  # noqa: PLC0415

        declared = commands_of.declare(name, argv, ready, drain_signal=drain_signal, env=env, cwd=cwd)
        self._check_free(name)
        self.commands[name] = declared
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
        """Declare a model: a class with `load(model_id)` and `infer(payload)`. The first call loads it, and it stays loaded for further calls.

        `models` lists the model ids that the class serves, or maps ids to options; the default is one id, `name`. `any_model` accepts every id,
        with at most `max_models` loaded at once. docs/models.md explains the options: env, gpu_mb, memory_mb, idle, pinned, preload, batch,
        batch_wait, concurrency, workers, queue, startup, timeout, kill_on_cancel, park, files.
        """

        def declare(target: C) -> C:
            self._check_free(name)
            self.models[name] = models_of.declare(
                name, target, options, models, any_model=any_model, max_models=max_models
            )
            return target

        if not isinstance(name, str):
            raise ConfigError('write @app.model("name"): the model needs a name')
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
        """Declare a model that is served by an HTTP server program such as llama-server, vLLM or TEI, with the options of `app.model`.

        In argv, variables and ready, `{port}` is replaced by a free port, `{socket}` by the path of a Unix socket, `{model}` by the model id
        and `{n}` by the worker's number. `ready` is http:/path or tcp: on that port or socket, or one of the probes of `app.command`. `variables` are
        added to its environment. Calls are posted to `path`; `/api/v1/calls/NAME/any/path` reaches any other path.
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
        """Declare a pool whose workers serve sessions: long-lived connections that clients open at `ws://NODE/sessions/NAME`.

        Decorate a class with `start(self, worker)`, which returns the worker's endpoint, and optionally `open`, `close`, `probe`, `view` and
        `stop`; or, for short, an async function that yields its endpoint. docs/sessions.md explains the options: slots,
        lifetime, margin, line, line_wait, idle, longest, ping, drain, probe, slow_ms, sticky, redirect, protocol, serves, versions,
        product, memory_mb, env. `limits` are those of `app.pool`, such as `recycle_age`.
        """
        from ostler.sessions import spec as sessions_of  # noqa: PLC0415

        def declare(target: S) -> S:
            self._check_free(name)
            self.session_pools[name] = sessions_of.declare(name, target, options)
            self.pool(name, workers=workers, **(limits or {}))
            return target

        if not isinstance(name, str):
            raise ConfigError('write @app.sessions("name"): the pool needs a name')
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
        """Declare a pool of sessions that are served by any program that speaks WebSocket or TCP, with the options of `app.sessions`.

        In argv, variables and ready, `{port}` is replaced by a free port, `{socket}` by the path of a Unix socket and `{n}` by the worker's
        number. `ready` is http:/path or tcp: on that port or socket, or one of the probes of `app.command`. `path` is where the program accepts
        the WebSocket upgrade.
        """
        from ostler.sessions import spec as sessions_of  # noqa: PLC0415

        self._check_free(name)
        self.session_pools[name] = sessions_of.declare_program(
            name, argv, ready, options, variables=variables, cwd=cwd, path=path
        )
        self.pool(name, workers=workers, **(limits or {}))

    def on_start(self, queue: str | None = None) -> Callable[[S], S]:
        """Run the function once in each worker of the queue (None: of every queue) before its first job, for example to load a model or open
        a connection pool. It may be async. If it raises, the worker does not become ready, which counts as a crash.
        """
        return self.hooks.adding(self.hooks.starting, queue, "on_start")

    def on_stop(self, queue: str | None = None) -> Callable[[S], S]:
        """Run the function once in each worker of the queue (None: of every queue) before it exits or is replaced, but not when it is killed
        or crashes. It may be async. Exceptions are logged.
        """
        return self.hooks.adding(self.hooks.stopping, queue, "on_stop")

    def web(self, factory: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Add your own routes to the node's HTTP server: decorate a function that takes an `ostler.web.extend.NodeApi` and returns a
        FastAPI `APIRouter`. It is called once, in the node, before the node listens, and by `ostler check`; workers never call it.
        """
        self.routes.append(factory)
        return factory


def _unknown(where: str, option: str, hints: Mapping[str, str], known: list[str]) -> ConfigError:
    hint = f"use {hints[option]}" if option in hints else f"known are: {', '.join(known)}"
    return ConfigError(f"{where}{loading.line()} has no option {option!r}; {hint}")


def load(target: str) -> Ostler:
    """Load the app from `path/to/file.py`, `package.module` or either with `:name`. Raises ConfigError with the cause.

    Loading must not enqueue anything: a call of `enqueue` at the top level of the file raises ConfigError.
    """
    found = loading.find(target, Ostler)
    found.target = target
    return found
