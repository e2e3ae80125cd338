"""What enqueueing returns: the id of a job or batch, an int with methods to read its state and results. Standard library only."""

from __future__ import annotations

import contextlib
import time
import typing
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, cast, overload

from ostler import habits
from ostler.errors import BadArguments, ConfigError, Conflict, JobFailed, JobTimeout, NotFound

if TYPE_CHECKING:
    from ostler.jobs.artifacts import Artifact
    from ostler.store.store import Store
    from ostler.storing import Storing

R_co = TypeVar("R_co", covariant=True)
Timeout = float | timedelta | None
Status = Literal["queued", "processing", "done", "failed", "cancelled"]
_PAGE = 200  # jobs or events that are read at once
_MOST = 1000  # jobs that are listed at once


class JobId(int, habits.Hinting, Generic[R_co]):
    """The id of a job: an int with methods to read the job's state and to wait for its result.

    The id of a chain is that of its first job and stands for the whole chain: `result` is the last step's, everything else describes
    the newest step.
    """

    _hints = habits.ID
    _app: Storing | None = None
    _is_chain = False
    _is_guest = False  # stored in a transaction of the caller
    _is_listed = False  # of a batch that was found by its number
    is_new: bool = True
    """False if a job with the same unique key already existed: nothing was stored, and this is the id of that job. Always True in a
    PostgreSQL transaction of your own."""

    @classmethod
    def of(cls, app: Storing, job: int, *, chain: bool = False, guest: bool = False) -> Self:
        made = cls(job)
        made._app = app
        if chain:
            made._is_chain = True
        if guest:
            made._is_guest = True
        if not getattr(job, "is_new", True):
            made.is_new = False
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or pickled id is a plain number, without its app."""
        return JobId, (int(self),)

    @property
    def id(self) -> int:
        return int(self)

    def result(self, timeout: Timeout = None) -> R_co:
        """Wait until the job has ended, and return what it returned. `timeout`: seconds or a timedelta.

        Raises JobFailed, JobCancelled or JobTimeout, or NotFound if there is no such job, for example because the transaction that
        enqueued it has not been committed. Inside another job, a timeout is required, even if the job has already ended (0 is enough then).
        """
        __tracebackhide__ = True  # pytest shows the caller's line
        until, awaiting = self._until(timeout), self._known.awaiting
        with self._in_words():
            job = self._newest()
            while True:
                view = awaiting.ended(job, until)
                before, job = job, self._newest()
                if job == before or view["status"] != "done":
                    return cast("R_co", self._outcome(view, timeout))

    async def result_async(self, timeout: Timeout = None) -> R_co:  # noqa: ASYNC109  the job goes on, nothing is cancelled
        """Like `result`, without blocking the event loop."""
        import asyncio  # noqa: PLC0415

        __tracebackhide__ = True  # pytest shows the caller's line
        until, awaiting = self._until(timeout), self._known.awaiting
        with self._in_words():
            job = await asyncio.to_thread(self._newest) if self._is_chain else self.id
            while True:
                view = await awaiting.ended_async(job, until)
                before, job = job, await asyncio.to_thread(self._newest) if self._is_chain else job
                if job == before or view["status"] != "done":
                    return cast("R_co", self._outcome(view, timeout))

    def info(self) -> dict[str, Any]:
        """The current state of the job: all fields of `GET /api/v1/jobs/{id}` except the timeline. Raises NotFound."""
        with self._in_words():
            return self._known.awaiting.look(self._newest(), errors=True)

    def status(self) -> Status:
        """The status: queued, processing, done, failed or cancelled."""
        return cast("Status", self.info()["status"])

    def progress(self) -> float | None:
        """The percentage that the job last reported, or None."""
        return cast("float | None", self.info()["progress"])

    def errors(self) -> list[dict[str, Any]]:
        """The errors of all failed runs, oldest first, including those before a retry: `attempt`, `at`, `worker`, `node`, `kind`, `code`,
        `message`, `traceback`, `duration_ms`. The newest 20 are kept.
        """
        return cast("list[dict[str, Any]]", self.info()["errors"])

    def events(self) -> Iterator[dict[str, Any]]:
        """Iterate over the job's timeline, oldest first. Reads page by page."""
        producer, job = self._known.producer, int(self.info()["id"])
        after: int | None = 0
        while after is not None:
            page, after = producer.read(partial(_events, job=job, after=after))
            yield from page

    def artifacts(self) -> list[Artifact]:
        """The files that the job has published, sorted by key, including those of failed runs. Raises NotFound."""
        from ostler.jobs.artifacts import Reader  # noqa: PLC0415

        with self._in_words():
            producer = self._known.producer
            return Reader(producer.settings, producer.read).of(self._newest())

    def cancel(self) -> None:
        """Cancel the job. A queued job ends at once; a running one is asked to stop, then killed. Raises Conflict if it has already ended."""
        with self._in_words():
            self._known.producer.cancel(self._newest())

    def retry(self) -> None:
        """Run an ended job again, with all its attempts. Raises Conflict if it has not ended, or if another job has its unique key."""
        with self._in_words():
            self._known.producer.retry(self._newest())

    @property
    def _known(self) -> Storing:
        if self._app is None:
            raise ConfigError(
                f"job {int(self)}: this id has no app (it was copied or pickled); use app.find({int(self)})"
            )
        return self._app

    def _until(self, timeout: Timeout) -> float | None:
        """Until when to wait. Whether a job may wait without a timeout must not depend on how fast the other one is, so it never may, except
        for the jobs of a batch that it has found: a callback reads them, and they have ended.
        """
        from ostler.jobs.awaiting import deadline, refuse_endless  # noqa: PLC0415

        if timeout is None and not self._is_listed:
            refuse_endless(int(self))
        return deadline(timeout)

    def _outcome(self, view: dict[str, Any], timeout: Timeout) -> Any:
        """The result, as the type that the function is annotated with. One that does not fit the annotation stays JSON."""
        from ostler.jobs import kinds  # noqa: PLC0415
        from ostler.jobs.awaiting import outcome  # noqa: PLC0415

        __tracebackhide__ = True
        value, task = outcome(view, timeout), self._known.tasks.get(view["task"])
        if task is None or (load := task.returns.load) is None or not kinds.fits(task.returns.kind, value):
            return value
        return load(value)

    def _newest(self) -> int:
        """The job that it currently stands for."""
        if not self._is_chain:
            return int(self)
        return self._known.producer.read(lambda store: store.jobs.newest_step(int(self)))

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except NotFound as missing:
            if not self._is_guest:
                raise
            raise NotFound(
                f"{missing}: it was enqueued with connection=…, and that transaction has not been committed, or was rolled back; commit first"
            ) from None


class BatchId(int, habits.Hinting, Generic[R_co]):
    """The id of a batch: an int with methods to read its jobs and their results."""

    _hints = habits.BATCH
    _app: Storing | None = None
    _jobs: Sequence[JobId[Any]] | None = None  # where they are known

    @classmethod
    def of(cls, app: Storing, batch: int, jobs: Sequence[JobId[R_co]] | None = None) -> Self:
        made = cls(batch)
        made._app, made._jobs = app, jobs
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or pickled id is a plain number, without its app."""
        return BatchId, (int(self),)

    @property
    def id(self) -> int:
        return int(self)

    @property
    def jobs(self) -> list[JobId[R_co]]:
        """The jobs of the batch, in the order in which they were given. A chain counts as one."""
        return [*self._each()]

    @overload
    def results(self, timeout: Timeout = None, *, return_exceptions: Literal[False] = False) -> Iterator[R_co]: ...
    @overload
    def results(self, timeout: Timeout = None, *, return_exceptions: bool) -> Iterator[R_co | JobFailed]: ...
    def results(self, timeout: Timeout = None, *, return_exceptions: bool = False) -> Iterator[R_co | JobFailed]:
        """Iterate over the results of the jobs in order, waiting for each. Only one is in memory at a time.

        `timeout` is for all of them together. A failed or cancelled job raises its exception; with `return_exceptions`, the exception
        is yielded instead.
        """
        left = _clock(timeout)
        for job in self._each():
            try:
                yield job.result(left())
            except JobFailed as error:
                if not return_exceptions:
                    raise
                yield error

    @overload
    def results_async(
        self, timeout: Timeout = None, *, return_exceptions: Literal[False] = False
    ) -> AsyncIterator[R_co]: ...
    @overload
    def results_async(self, timeout: Timeout = None, *, return_exceptions: bool) -> AsyncIterator[R_co | JobFailed]: ...
    async def results_async(
        self,
        timeout: Timeout = None,  # noqa: ASYNC109  the jobs go on, nothing is cancelled
        *,
        return_exceptions: bool = False,
    ) -> AsyncIterator[R_co | JobFailed]:
        """Like `results`, without blocking the event loop."""
        import asyncio  # noqa: PLC0415

        left, jobs = _clock(timeout), self._each()
        while (job := await asyncio.to_thread(next, jobs, None)) is not None:
            try:
                yield await job.result_async(left())
            except JobFailed as error:
                if not return_exceptions:
                    raise
                yield error

    def info(self) -> dict[str, Any]:
        """The state of the batch: `total`, `pending`, `failed`, `finished_at`, `callback_job` and more. Raises NotFound."""
        return self._known.producer.read(lambda store: store.jobs.flows.get_batch(int(self)))

    def callback(self, timeout: Timeout = None) -> JobId[Any]:
        """The job that `then` became. Waits until all jobs of the batch have ended, for `timeout` seconds (or a timedelta) at most.

        Raises JobTimeout, and NotFound where the batch has no callback.
        """
        left = _clock(timeout)
        for job in self._each():
            with contextlib.suppress(JobFailed):
                job.result(left())
        while (found := self.info())["callback_job"] is None:
            if found["pending"] <= 0:
                raise NotFound(f"batch {int(self)} has no callback: it was stored without then=…")
            if (rest := left()) is not None and rest <= 0:
                message = f"batch {int(self)} has not ended: {found['pending']} of {found['total']} jobs are pending"
                raise JobTimeout(int(self), "batch", "pending", message)
            time.sleep(0.05)  # a job of it is being retried
        return JobId.of(self._known, found["callback_job"])

    async def callback_async(self, timeout: Timeout = None) -> JobId[Any]:  # noqa: ASYNC109
        """Like `callback`, without blocking the event loop."""
        import asyncio  # noqa: PLC0415

        return await asyncio.to_thread(self.callback, timeout)

    def cancel(self) -> int:
        """Cancel all jobs of the batch that have not ended; how many. Running ones are stopped by their node. The callback is still enqueued."""
        cancelled = 0
        for job in self._each():
            with contextlib.suppress(Conflict, NotFound):  # it has ended, or is deleted
                job.cancel()
                cancelled += 1
        return cancelled

    @property
    def _known(self) -> Storing:
        if self._app is None:
            raise ConfigError(
                f"batch {int(self)}: this id has no app (it was copied or pickled); use app.find_batch({int(self)})"
            )
        return self._app

    def _each(self) -> Iterator[JobId[R_co]]:
        if self._jobs is not None:
            yield from self._jobs
            return
        app, after = self._known, 0
        while page := app.producer.read(partial(_jobs, batch=int(self), after=after)):
            for job, chain in page:
                found = JobId[R_co].of(app, job, chain=chain)
                found._is_listed = True  # noqa: SLF001
                yield found
            after = page[-1][0]


def _events(store: Store, job: int, after: int) -> tuple[list[dict[str, Any]], int | None]:
    return store.jobs.event_page(job, after, _PAGE)


def _jobs(store: Store, batch: int, after: int) -> list[tuple[int, bool]]:
    return store.jobs.of_batch(batch, after, _PAGE)


def listed(
    app: Storing, status: str | None, task: str | None, queue: str | None, limit: int, before: int | None
) -> Any:
    """See `Ostler.jobs`."""
    if status is not None and status not in typing.get_args(Status):
        raise BadArguments(f"status must be one of {', '.join(typing.get_args(Status))}, found {status!r}")
    if not isinstance(limit, int) or not 1 <= limit <= _MOST:
        raise BadArguments(f"limit must be a whole number from 1 to {_MOST}, found {limit!r}; read on with before=…")
    wanted: dict[str, Any] = {"status": status, "task": task, "queue": queue, "limit": limit, "cursor": before}
    page, _ = app.producer.read(lambda store: store.jobs.list(**wanted))
    return [JobId.of(app, row["id"]) for row in page]


def _clock(timeout: Timeout) -> Callable[[], float | None]:
    """What is left of the time."""
    from ostler.jobs.awaiting import deadline  # noqa: PLC0415

    until = deadline(timeout)
    return lambda: None if until is None else max(0.0, until - time.monotonic())
