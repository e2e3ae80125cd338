"""Steps, chains and batches: jobs that follow other jobs. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ostler import habits
from ostler.errors import BadArguments
from ostler.handles import BatchId, JobId, R_co

if TYPE_CHECKING:
    from ostler.store.rows import NewJob
    from ostler.storing import Storing

T = TypeVar("T")


class Step(habits.Flow, Generic[R_co]):
    """A job that is not stored yet, made by `task.s(…)`. Its arguments are checked when it is stored."""

    _hints = habits.STEP

    def __init__(self, app: Storing, row: Mapping[str, Any], args: dict[str, Any], options: Mapping[str, Any]) -> None:
        self._app, self._row, self._args, self._options = app, row, args, options
        self.connection: Any = None
        if "connection" in options:
            self.connection = options["connection"]
            self._options = {name: value for name, value in options.items() if name != "connection"}

    def then(self, step: Step[T], into: str | None = None) -> Chain[T]:
        """Continue with that step when this one is done. `into` names its parameter that receives this step's result."""
        return Chain([(self, None)]).then(step, into)

    def enqueue(self, connection: Any = None) -> JobId[R_co]:
        """Store it as a job; with `connection`, in that connection's transaction."""
        chosen = _chosen(connection, self.connection)
        stored = self._app.producer.enqueue([self.prepared()], chosen)
        return JobId.of(self._app, stored[0], guest=chosen is not None)

    async def enqueue_async(self, connection: Any = None) -> JobId[R_co]:
        """Like `enqueue`, without blocking the event loop."""
        chosen = _chosen(connection, self.connection)
        stored = await self._app.producer.enqueue_async([self.prepared()], chosen)
        return JobId.of(self._app, stored[0], guest=chosen is not None)

    def prepared(self, into: str | None = None, **more: Any) -> NewJob:
        """The job to store. Raises InputError."""
        producer, row = self._app.producer, self._row
        options = {**self._options, **more} if more else self._options
        return producer.prepare({row["name"]: row}, row["name"], self._args, into=into, **options)

    def waiting(self, into: str | None = None) -> dict[str, Any]:
        """The form in which it waits in a chain, batch or schedule: its delay starts when it is enqueued, not now."""
        from ostler.store.flows import step_of  # noqa: PLC0415

        self.without_connection()
        if self._options.get("run_at") is not None:
            raise BadArguments(
                f"task {self._row['name']!r}: a step that waits for others cannot have run_at, which is a fixed time; use delay"
            )
        self.prepared(into)  # all checks, the delay's too
        return step_of(self.prepared(into, delay=None), into, self._options.get("delay"))

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._args.items())
        return f"{self._row['name']}({given})"

    def without_connection(self) -> Step[R_co]:
        """Itself, as part of a chain, batch or schedule. Raises BadArguments if it has its own connection."""
        if self.connection is not None:
            raise BadArguments(
                f"task {self._row['name']!r}: a step of a chain, batch or schedule cannot have its own connection; "
                "pass it to enqueue(connection=…) or batch(…, connection=…) instead"
            )
        return self


class Chain(habits.Flow, Generic[R_co]):
    """Steps that run one after another. If a step fails for good, the steps after it are not enqueued."""

    _hints = habits.STEP

    def __init__(self, steps: list[tuple[Step[Any], str | None]]) -> None:
        self._steps = steps

    def then(self, step: Step[T], into: str | None = None) -> Chain[T]:
        if not isinstance(step, Step):
            raise BadArguments(f"then() takes one step, such as task.s(…), found {type(step).__name__}")
        return Chain([*self._steps, (step, into)])

    def enqueue(self, connection: Any = None) -> JobId[R_co]:
        """Store the chain and return the id of its first job; its `result()` is the result of the last step. With `connection`, the chain is
        stored in that connection's transaction.
        """
        app, chosen = self._app, _chosen(connection, self._steps[0][0].connection)
        stored = app.producer.enqueue([self.prepared()], chosen)
        return JobId.of(app, stored[0], chain=True, guest=chosen is not None)

    async def enqueue_async(self, connection: Any = None) -> JobId[R_co]:
        """Like `enqueue`, without blocking the event loop."""
        app, chosen = self._app, _chosen(connection, self._steps[0][0].connection)
        stored = await app.producer.enqueue_async([self.prepared()], chosen)
        return JobId.of(app, stored[0], chain=True, guest=chosen is not None)

    @property
    def _app(self) -> Storing:
        return self._steps[0][0]._app  # noqa: SLF001

    def without_connection(self) -> Chain[R_co]:
        """Itself, as part of a batch."""
        self._steps[0][0].without_connection()
        return self

    def prepared(self) -> NewJob:
        following = [step.waiting(into) for step, into in self._steps[1:]]
        return self._steps[0][0].prepared(next=json.dumps(following))


def store_batch(
    app: Storing, steps: Iterable[Step[T] | Chain[T]], then: Step[Any] | None, into: str | None, connection: Any
) -> BatchId[T]:
    """See `Ostler.batch`."""
    parts = [*steps]
    batch, jobs = app.producer.batch(*_prepared(parts, then, into), connection)
    return _batch_id(app, batch, jobs, parts, connection)


async def store_batch_async(
    app: Storing, steps: Iterable[Step[T] | Chain[T]], then: Step[Any] | None, into: str | None, connection: Any
) -> BatchId[T]:
    """See `Ostler.batch_async`."""
    parts = [*steps]
    batch, jobs = await app.producer.batch_async(*_prepared(parts, then, into), connection)
    return _batch_id(app, batch, jobs, parts, connection)


def _prepared(
    steps: list[Step[T] | Chain[T]], then: Step[Any] | None, into: str | None
) -> tuple[list[NewJob], dict[str, Any] | None]:
    if then is not None and not isinstance(then, Step):
        raise BadArguments(f"then must be one step, such as task.s(…), found {type(then).__name__}")
    for step in steps:
        if not isinstance(step, Step | Chain):
            raise BadArguments(f"a batch is made of steps, found {step!r}; write {getattr(step, 'name', 'task')}.s(…)")
    callback = None if then is None else then.waiting(into)
    return [step.without_connection().prepared() for step in steps], callback


def _batch_id(
    app: Storing, batch: int, jobs: list[int], parts: list[Step[T] | Chain[T]], connection: Any
) -> BatchId[T]:
    guest = connection is not None
    made = [
        JobId[T].of(app, job, chain=isinstance(part, Chain), guest=guest) for job, part in zip(jobs, parts, strict=True)
    ]
    return BatchId.of(app, batch, made)


def _chosen(given: Any, own: Any) -> Any:
    """The connection of the call, or else that of the options."""
    return own if given is None else given
