"""A declared job: it can be called, enqueued, and used in chains and batches. Loads no third-party module."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack, overload

from ostler import habits, loading
from ostler.errors import BadArguments, ConfigError, NotFound
from ostler.flows import Step
from ostler.handles import JobId, R_co
from ostler.jobs import kinds, signature
from ostler.jobs.handle import Job
from ostler.jobs.options import JobOptions, check, duration_hint, plain
from ostler.jobs.outcome import is_wait

if TYPE_CHECKING:
    from ostler.app import Ostler
    from ostler.store.rows import NewJob

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Task(habits.Hinting, Generic[P, R_co]):
    """A declared job. `enqueue` stores a job for the workers; calling the task runs the plain function in this process.

    Type checkers see the function's parameters and its return type; for an async function, ids and steps have the type that it
    returns when awaited.
    """

    _hints = habits.TASK

    def __init__(
        self,
        app: Ostler,
        function: Callable[..., R_co],
        row: dict[str, Any],
        described: signature.Signature,
        env: str | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self._app = app
        self.function = function
        self.row = row
        self.name: str = row["name"]
        self.queue: str = row["queue"]
        self.env = env
        self.parameters = described.parameters
        self.loads = described.loads  # arguments that are converted; for most tasks none
        self.returns = described.returns
        self._names = list(inspect.signature(function).parameters)[1:]
        self._options: dict[str, Any] = {}

    if TYPE_CHECKING:

        def __call__(self, job: Job, *args: P.args, **kwargs: P.kwargs) -> R_co:
            """Call the plain function, without queue or worker."""

    else:

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if not args or isinstance(args[0], str | int | float | list | dict):  # an argument, not a job handle
                raise TypeError(
                    f"calling task {self.name!r} runs its function here, with a job handle as the first argument. "
                    f"To enqueue a job, use {self.name}.enqueue(…)"
                )
            return self.function(*args, **kwargs)

    @overload
    def enqueue(self: Task[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> JobId[T]: ...
    @overload
    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobId[R_co]: ...
    @overload
    def enqueue(self: Task[P, Coroutine[Any, Any, T]], *args: Any, connection: Any, **kwargs: Any) -> JobId[T]: ...
    @overload
    def enqueue(self, *args: Any, connection: Any, **kwargs: Any) -> JobId[R_co]: ...
    def enqueue(self, *args: Any, **kwargs: Any) -> JobId[Any]:
        """Store a job for the workers. When this returns, the job is on disk. If it raises InputError or StoreBusy, nothing was stored.

        If a unique job with the same key exists, its id is returned. With `connection=`, the job is stored in that connection's
        transaction and becomes visible when you commit. (If the task has a parameter named `connection`, use `options(connection=…)`.)
        """
        return self._step(args, kwargs).enqueue()

    @overload
    def enqueue_many(
        self: Task[P, Coroutine[Any, Any, T]], many: Iterable[dict[str, Any]], *, connection: Any = None
    ) -> list[JobId[T]]: ...
    @overload
    def enqueue_many(self, many: Iterable[dict[str, Any]], *, connection: Any = None) -> list[JobId[R_co]]: ...
    def enqueue_many(self, many: Iterable[dict[str, Any]], *, connection: Any = None) -> list[JobId[Any]]:
        """Store a job for each dict of arguments in one transaction, all or none; with `connection`, in that connection's transaction."""
        prepared, connection = self._many(many, connection)
        stored = self._app.producer.enqueue(prepared, connection) if prepared else []
        return [JobId.of(self._app, job, guest=connection is not None) for job in stored]

    @overload
    async def enqueue_many_async(
        self: Task[P, Coroutine[Any, Any, T]], many: Iterable[dict[str, Any]], *, connection: Any = None
    ) -> list[JobId[T]]: ...
    @overload
    async def enqueue_many_async(
        self, many: Iterable[dict[str, Any]], *, connection: Any = None
    ) -> list[JobId[R_co]]: ...
    async def enqueue_many_async(self, many: Iterable[dict[str, Any]], *, connection: Any = None) -> list[JobId[Any]]:
        """Like `enqueue_many`, without blocking the event loop."""
        loading.refuse()  # here, where the caller's line is known
        prepared, connection = self._many(many, connection)
        stored = await self._app.producer.enqueue_async(prepared, connection) if prepared else []
        return [JobId.of(self._app, job, guest=connection is not None) for job in stored]

    def _many(self, many: Iterable[dict[str, Any]], connection: Any) -> tuple[list[NewJob], Any]:
        options = {**self._options}
        own = options.pop("connection", None)
        prepared = [Step[Any](self._app, self.row, self._plain(args), options).prepared() for args in many]
        return prepared, own if connection is None else connection

    @overload
    def s(self: Task[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> Step[T]: ...
    @overload
    def s(self, *args: P.args, **kwargs: P.kwargs) -> Step[R_co]: ...
    @overload
    def s(self: Task[P, Coroutine[Any, Any, T]], **kwargs: Any) -> Step[T]: ...
    @overload
    def s(self, **kwargs: Any) -> Step[R_co]: ...
    def s(self, *args: Any, **kwargs: Any) -> Step[Any]:
        """Return a step with these arguments, for chains, batches and schedules. Leave out the argument that `into` fills with the
        previous step's result.
        """
        return Step(self._app, self.row, self._bound(args, kwargs), self._options)

    @overload
    def find(self: Task[P, Coroutine[Any, Any, T]], job: int) -> JobId[T]: ...
    @overload
    def find(self, job: int) -> JobId[R_co]: ...
    def find(self, job: int) -> JobId[Any]:
        """Find a job of this task by its id. Like `app.find`, but type checkers know what its `result()` returns. Raises NotFound."""
        found = self._app.find(job)
        if (task := found.info()["task"]) != self.name:
            raise NotFound(f"job {int(job)} is of task {task!r}, not of {self.name!r}")
        return found

    def options(self, **options: Unpack[JobOptions]) -> Task[P, R_co]:
        """Return this task with other options: attempts, timeout, priority, delay, run_at, unique_key, unique_for, limit_key, limit_max,
        and `connection` (the job is stored in its transaction). Times are seconds or a timedelta; `run_at` is a datetime with a time zone
        or milliseconds UTC.
        """
        given = plain(f"task {self.name!r}", options)
        check(f"task {self.name!r}", {name: value for name, value in given.items() if name != "connection"})
        other = copy.copy(self)
        other._options = {**self._options, **given}  # noqa: SLF001
        return other

    @overload
    async def enqueue_async(self: Task[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> JobId[T]: ...
    @overload
    async def enqueue_async(self, *args: P.args, **kwargs: P.kwargs) -> JobId[R_co]: ...
    @overload
    async def enqueue_async(
        self: Task[P, Coroutine[Any, Any, T]], *args: Any, connection: Any, **kwargs: Any
    ) -> JobId[T]: ...
    @overload
    async def enqueue_async(self, *args: Any, connection: Any, **kwargs: Any) -> JobId[R_co]: ...
    async def enqueue_async(self, *args: Any, **kwargs: Any) -> JobId[Any]:
        """Like `enqueue`, without blocking the event loop. A `connection` must be an async one."""
        loading.refuse()  # here, where the caller's line is known
        return await self._step(args, kwargs).enqueue_async()

    def _step(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Step[Any]:
        options = self._options
        if "connection" in kwargs and "connection" not in self._names:
            options = {**options, "connection": kwargs.pop("connection")}
        return Step(self._app, self.row, self._bound(args, kwargs), options)

    def _bound(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        if not args:
            return self._plain(kwargs)
        named = dict(zip(self._names, args, strict=False))
        if len(args) > len(self._names):
            raise BadArguments(f"task {self.name!r} takes {len(self._names)} arguments, found {len(args)}")
        if twice := named.keys() & kwargs.keys():
            raise BadArguments(f"task {self.name!r}: {', '.join(sorted(twice))} given twice")
        return self._plain(named | kwargs)

    def _plain(self, args: dict[str, Any]) -> dict[str, Any]:
        """The arguments as JSON, where the annotations say how."""
        if not self.loads or not isinstance(args, dict):
            return args
        return {name: kinds.plain(value) if name in self.loads else value for name, value in args.items()}

    def __repr__(self) -> str:
        return f"<Task {self.name} queue={self.queue}>"


class Declare:
    """What `@app.job(...)` returns: a decorator that keeps the function's types."""

    def __init__(
        self,
        app: Ostler,
        queue: str,
        name: str | None,
        *,
        options: dict[str, Any],
        policy: dict[str, Any],
        env: str | None,
        cron: tuple[str, str] | None,
        unknown: Mapping[str, Any],
    ) -> None:
        self._app, self._queue, self._name, self._env = app, queue, name, env
        self._options, self._policy, self._cron, self._unknown = options, policy, cron, unknown

    def __call__(self, function: Callable[Concatenate[Job, P], R]) -> Task[P, R]:
        app, queue, name = self._app, self._queue, self._name or function.__name__
        self._check(name)
        app._check_queue(queue, name)  # noqa: SLF001
        described = signature.describe(function)
        parameters = described.parameters
        policy = checked(name, self._policy, parameters)
        row = signature.Row(name=name, queue=queue, **self._options, policy=policy, parameters=parameters)
        row.models = described.models
        task: Task[P, R] = Task(app, function, row, described, self._env)
        app._check_env(queue, self._env, f"job {name!r}", app.pools.get(queue))  # noqa: SLF001
        app.tasks[name] = task
        if self._cron is not None:
            spec, zone = self._cron
            app.cron(name, spec, task.s(), zone=zone)
        return task

    def _check(self, name: str) -> None:
        for option, given in self._unknown.items():
            hint = habits.option(option, given)
            raise ConfigError(f"job {name!r}{loading.line()}: @app.job has no option {option!r}{hint}")
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 200:
            raise ConfigError(f"{name!r} cannot be a job's name; it needs 1 to 200 printable characters")
        if name in self._app.tasks:
            raise ConfigError(f"two jobs are named {name!r}; give one of them another name with @app.job(name=…)")
        try:
            check(f"job {name!r}", self._options)
        except BadArguments as error:
            raise ConfigError(str(error)) from None


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def rate(name: str, text: str) -> float:
    count, _, unit = text.partition("/") if isinstance(text, str) else ("", "", "")
    if not (count.strip().isascii() and count.strip().isdigit()) or int(count) < 1 or unit.strip() not in _UNITS:
        raise ConfigError(f"queue {name!r}: {text!r} is not a rate; write a number per s, m, h or d, such as 100/m")
    return int(count) / _UNITS[unit.strip()]


def checked(task: str, policy: dict[str, Any], parameters: signature.Parameters) -> dict[str, Any]:
    """The policy in the form in which it is stored. Raises ConfigError."""
    names = {p["name"] for p in parameters}
    unique, per, backoff, at_once = (policy[k] for k in ("unique", "per", "backoff", "at_once"))
    if isinstance(unique, str) or unique == []:
        raise ConfigError(f"job {task!r}: unique must be True or a list of parameter names")
    for name in [*(unique if not isinstance(unique, bool) else ()), *([per] if per else ())]:
        if name not in names:
            raise ConfigError(
                f"job {task!r}: {name!r} is not one of its parameters ({', '.join(sorted(names)) or 'none'})"
            )
    seconds = policy["unique_for"]
    for name in ("gpu_mb", "memory_mb"):
        mb = policy[name]
        if isinstance(mb, bool) or not isinstance(mb, int | float) or not 0 <= mb < 1e9:
            raise ConfigError(f"job {task!r}: {name} must be a number of megabytes from 0, found {mb!r}")
    if at_once is not None and (not isinstance(at_once, int) or isinstance(at_once, bool) or at_once < 1):
        raise ConfigError(f"job {task!r}: at_once must be a whole number from 1, found {at_once!r}")
    if per is not None and at_once is None:
        raise ConfigError(f"job {task!r}: per={per!r} needs at_once=…, the number of jobs per value")
    if seconds is not None and (
        isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1e9
    ):
        raise ConfigError(
            f"job {task!r}: unique_for must be more than 0 seconds, found {seconds!r}{duration_hint(seconds)}"
        )
    if seconds is not None and unique is False:
        unique = True
    if backoff is not None and not (
        len(backoff) == 2 and all(map(is_wait, backoff)) and 0 <= backoff[0] <= backoff[1] < 1e9
    ):
        raise ConfigError(
            f"job {task!r}: backoff must be (first, longest) in seconds or as timedeltas, found {backoff!r}"
        )
    found = {**policy, "unique": unique if isinstance(unique, bool) else list(unique)}
    found["backoff"] = None if backoff is None else {"base": backoff[0], "max": backoff[1]}
    return {k: v for k, v in found.items() if v not in (None, False, 0)}
