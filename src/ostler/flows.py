"""Steps, chains and batches: jobs that follow on jobs. Standard library alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ostler.errors import BadArguments
from ostler.jobs.producer import prepare

if TYPE_CHECKING:
    from ostler.app import Ostler
    from ostler.store.rows import NewJob


class JobId(int):
    """The id of a stored job; an int that also answers to `.id`."""

    @property
    def id(self) -> int:
        return int(self)


class Step:
    """A job to be: `task.s(…)`. Checked when it is stored."""

    def __init__(self, app: Ostler, row: Mapping[str, Any], args: dict[str, Any], options: Mapping[str, Any]) -> None:
        self._app, self._row, self._args, self._options = app, row, args, dict(options)

    def then(self, step: Step, into: str | None = None) -> Chain:
        """Go on with that step when this one is done; `into` names the parameter that takes this one's result."""
        return Chain([(self, None), (step, into)])

    def enqueue(self) -> JobId:
        """Store it alone."""
        return JobId(self._app.producer.enqueue([self.prepared()])[0])

    def prepared(self, into: str | None = None, **more: Any) -> NewJob:
        """The job to store; raises InputError."""
        options = with_time(self._options)
        limit = self._app.producer.settings.max_payload
        return prepare(
            {self._row["name"]: self._row}, self._row["name"], self._args, limit, into=into, **{**options, **more}
        )


class Chain:
    """Steps one after another. If one fails for good, those behind it are not stored."""

    def __init__(self, steps: list[tuple[Step, str | None]]) -> None:
        self._steps = steps

    def then(self, step: Step, into: str | None = None) -> Chain:
        return Chain([*self._steps, (step, into)])

    def enqueue(self) -> JobId:
        """Store the first step with all that follows; its id."""
        first = self.prepared()
        return JobId(self._steps[0][0]._app.producer.enqueue([first])[0])  # noqa: SLF001

    def prepared(self) -> NewJob:
        from ostler.store.flows import step_of  # noqa: PLC0415

        following = [step_of(step.prepared(into), into) for step, into in self._steps[1:]]
        return self._steps[0][0].prepared(next=json.dumps(following))


class BatchId(int):
    """The id of a batch; `jobs` are the ids of its jobs."""

    jobs: list[JobId]


def store_batch(app: Ostler, steps: Iterable[Step | Chain], then: Step | None, into: str | None) -> BatchId:
    """See `Ostler.batch`."""
    from ostler.store.flows import step_of  # noqa: PLC0415

    callback = None if then is None else step_of(then.prepared(into), into)
    batch, jobs = app.producer.batch([step.prepared() for step in steps], callback)
    stored = BatchId(batch)
    stored.jobs = [JobId(job) for job in jobs]
    return stored


OPTIONS = frozenset(
    {"attempts", "timeout", "priority", "delay", "run_at", "unique_key", "unique_for", "limit_key", "limit_max"}
)


def check_options(task: str, options: Mapping[str, Any]) -> None:
    """Raise BadArguments on an option that does not exist."""
    if unknown := options.keys() - OPTIONS:
        raise BadArguments(f"task {task!r}: {min(unknown)!r} is not an option; known are: {', '.join(sorted(OPTIONS))}")


def with_time(options: Mapping[str, Any]) -> dict[str, Any]:
    """`delay` (seconds from now) as `run_at` (ms)."""
    found = dict(options)
    delay = found.pop("delay", None)
    if delay is not None:
        if not isinstance(delay, int | float) or isinstance(delay, bool) or not 0 <= delay < 1e9:
            raise BadArguments(f"delay must be a number of seconds from 0, found {delay!r}")
        found["run_at"] = time.time_ns() // 1_000_000 + int(delay * 1000)
    return found
