"""Test your jobs: run them inside the test, with a clock that you control and with simulated crashes.

    from ostler.testing import Bench, kill_at

    def test_a_clip_survives_a_crash():
        with Bench(app) as bench:
            job = bench.enqueue(cut, source="a.mp4", start=0, end=2)
            with kill_at("source:ready"):
                bench.run()                     # dies there, as if the worker had been killed
            assert job.result() == {"seconds": 2}
            assert job.info()["crashes"] == 1

The store is a real one, in a temporary directory. Jobs are run and their outcomes decided by the same code as on a node, except that
the function runs in the test's own process.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, cast, overload

from ostler.app import Ostler
from ostler.errors import BadArguments, JobTimeout
from ostler.flows import Chain, Step
from ostler.handles import JobId
from ostler.jobs import execute, handle, producer, schedule, verdict
from ostler.jobs.awaiting import Awaiting, refuse_endless
from ostler.jobs.handle import Job
from ostler.jobs.outcome import in_seconds
from ostler.jobs.verdict import Policy, Ran
from ostler.jobs.waiting import Facts, reason
from ostler.store import Store
from ostler.store.artifacts import ArtifactRow
from ostler.store.limits import QueueLimit, next_token
from ostler.store.nodes import NodeRow
from ostler.store.rows import ENDED, Claim, Finish, Note, Requeue, Turn
from ostler.task import Task
from ostler.testing.models import Models

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

__all__ = ["Bench", "Killed", "kill_at"]

P = ParamSpec("P")
R = TypeVar("R")
_NODE, _WORKER = "bench", "worker:bench:0"
_MOST = 1000  # jobs that are run at once; one may enqueue itself without end
# In a job: held while a job that it waits for runs.
_inner: ContextVar[threading.Lock | None] = ContextVar("inner", default=None)


class Killed(BaseException):
    """Raised inside the job by `kill_at`. A BaseException, so that the job does not catch it by accident."""


_deaths: list[str] = []


@contextlib.contextmanager
def kill_at(event: str) -> Iterator[None]:
    """Simulate a crash of the next job that reports this event, or this stage with `job.progress`."""
    _deaths.append(event)
    try:
        yield
    finally:
        if event in _deaths:
            _deaths.remove(event)


class _Here(Awaiting):
    """Waits for a job in a test by running what is ready until the job has ended. Never waits in real time."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench.app.producer)
        self._bench = bench

    def ended(self, job: int, until: float | None) -> dict[str, Any]:
        found = self.look(job)
        for _ in range(_MOST):
            if found["status"] in ENDED or (until is not None and until <= time.monotonic()):
                return found
            if until is None:
                refuse_endless(job)
            did_run = self._bench._run_for(job, until)  # noqa: SLF001
            found = self.look(job)
            if not did_run:
                break
        if found["status"] not in ENDED:
            raise self._stuck(found)
        return found

    def _stuck(self, found: dict[str, Any]) -> JobTimeout:
        """Why the job cannot run now, what it raised before, and what the test can do: waiting would not help, with or without a timeout."""
        job, task, status = found["id"], found["task"], found["status"]
        after = f" after {found['last_error']}" if found.get("last_error") else ""
        stuck = JobTimeout(job, task, status, f"job {job} ({task}) is {status}{after}: {self._bench._why(found)}")  # noqa: SLF001
        errors = self.look(job, errors=True)["errors"]
        if errors and (trace := errors[-1]["traceback"]):
            stuck.add_note(f"\nIn the job:\n{trace.rstrip()}")
        return stuck

    async def ended_async(self, job: int, until: float | None) -> dict[str, Any]:
        return await asyncio.to_thread(self.ended, job, until)


def _wait(work: Coroutine[Any, Any, Any]) -> Any:
    """Run an async job to its end; in a thread of its own where this one is on an event loop already, as in an async test."""
    if asyncio._get_running_loop() is None:  # noqa: SLF001
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, asyncio.run, work).result()


class Bench:
    """Runs an app's jobs without a node. `now` is the clock in seconds; `advance` moves it forward."""

    def __init__(self, app: Ostler, *, now: float = 1_700_000_000.0, crash_limit: int = 2) -> None:
        self.app, self.now = app, now
        self._policy = Policy(crash_limit=crash_limit)
        self._limits = {
            q: QueueLimit(at_once, rate, max(1.0, rate or 1.0)) for q, (at_once, rate) in app.queues.items()
        }
        self._folder = tempfile.TemporaryDirectory(prefix="ostler-bench-")
        self._saved: dict[str, str | None] = {}
        self._models = Models(app)
        self._lock = threading.Lock()  # held while a job runs

    def __enter__(self) -> Self:
        folder = Path(self._folder.name)
        for name, value in {"OSTLER_DATA": str(folder), "OSTLER_STORE": "", "OSTLER_RESULTS": ""}.items():
            self._saved[name] = os.environ.get(name)
            os.environ[name] = value
        self._producer, self.app._producer = self.app._producer, None  # noqa: SLF001
        # What it replaces is put back at its end, also that of a Bench around it.
        # What the code under test enqueues is stored at the bench's time, too.
        self._clock, producer.clock = producer.clock, self._ms
        self._awaiting, self.app._awaiting = self.app._awaiting, _Here(self)  # noqa: SLF001
        self._caller, self.app._caller = self.app._caller, cast("Any", self._models)  # noqa: SLF001
        self.store = Store.open("", folder, durable=False)
        schedules = [
            {
                "name": n,
                "spec": s,
                "zone": z,
                "step": step.waiting(),
                "next_at": schedule.following(s, z, self._ms()),
            }
            for n, (s, z, step) in self.app.schedules.items()
        ]
        self.store.nodes.register(NodeRow(_NODE, _NODE, lease_ms=10**12))
        self.store.nodes.declare(_NODE, [], schedules)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.app._producer is not None:  # noqa: SLF001
            self.app.producer.close()
        self.app._producer, self.app._awaiting = self._producer, self._awaiting  # noqa: SLF001
        self.app._caller = self._caller  # noqa: SLF001
        producer.clock = self._clock
        self.store.close()
        for name, value in self._saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._folder.cleanup()

    def _ms(self) -> int:
        return int(self.now * 1000)

    # ---- what a test does

    @overload
    def enqueue(self, task: Task[P, Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs) -> JobId[R]: ...
    @overload
    def enqueue(self, task: Task[P, R], *args: P.args, **kwargs: P.kwargs) -> JobId[R]: ...
    def enqueue(self, task: Task[..., Any], *args: Any, **kwargs: Any) -> JobId[Any]:
        """Enqueue a job at the bench's time."""
        return self.put(task.s(*args, **kwargs))

    def put(self, step: Step[R] | Chain[R]) -> JobId[R]:
        """Enqueue a step or a chain at the bench's time."""
        if isinstance(step, Chain):
            return step.enqueue()
        job = step.prepared()
        return JobId.of(self.app, self.store.jobs.enqueue([job], self._ms())[0])

    def model(self, task: str, answer: Callable[[Any], Any]) -> None:
        """Have calls to this model answered by a function of the payload: `bench.model("tagger", lambda payload: ["cat"])`. Models
        without one are loaded and called in the test's own process.
        """
        if task not in self.app.models:
            known = ", ".join(sorted(self.app.models)) or "none"
            raise BadArguments(f"the app declares no model {task!r}; declared are: {known}")
        self._models.answers[task] = answer

    def client(self) -> TestClient:
        """A client (FastAPI's TestClient, which needs httpx2) of the routes that the app declares with `@app.web`. Their `NodeApi` uses this
        bench: jobs that a route enqueues are run by `bench.run()`, or by the route itself if it waits for their result.
        """
        from ostler.testing.routes import client  # noqa: PLC0415

        return client(self, self._models)

    def advance(self, seconds: float | timedelta) -> None:
        """Move the clock forward by seconds or a timedelta; schedules that are due enqueue their jobs."""
        self.now += in_seconds(seconds)
        self.store.jobs.schedules.fire(_NODE, self._ms(), schedule.following)

    def run(self, most: int = _MOST) -> int:
        """Run the ready jobs one after another, until none is left or one is killed by `kill_at`. Returns how many ran."""
        for count in range(most):
            if not self.step():
                return count
        return most

    def step(self) -> bool:
        """Run the next ready job. Returns False if there is none, or if it was killed."""
        with self._alone(None):
            return self._next(sorted({task.queue for task in self.app.tasks.values()}))

    def enqueued(self, task: Task[..., Any] | None = None) -> list[dict[str, Any]]:
        """The arguments of all waiting jobs (of one task), oldest first. To test code that enqueues:
        `assert bench.enqueued(send_mail) == [{"to": "ada@example.org"}]`.
        """
        found: list[int] = []
        cursor: int | None = None
        while True:
            page, cursor = self.store.jobs.list(
                status="queued", task=None if task is None else task.name, limit=500, cursor=cursor
            )
            found += [job["id"] for job in page]
            if cursor is None:
                return [self.store.jobs.find(job)["args"] for job in sorted(found)]

    def job(self, job: int) -> dict[str, Any]:
        """The job with its timeline, as `GET /api/v1/jobs/{id}` shows it."""
        return self.store.jobs.get(job)

    def events(self, job: int) -> list[str]:
        """The names of the job's events, oldest first."""
        return [event["name"] for event in self.store.jobs.events(job)]

    # ---- how it is run

    def _run_for(self, job: int, until: float | None) -> bool:
        """Run the next ready job of that job's queue, until it is that job's turn. Returns False if there is none, or if it was killed."""
        with self._alone(until) as alone:
            found = self.store.jobs.find(job)
            return found["status"] in ENDED or (alone and self._next([found["queue"]]))

    @contextlib.contextmanager
    def _alone(self, until: float | None) -> Iterator[bool]:
        """Jobs run one after another, whichever threads wait for them. Only a job that waits for another one has it run meanwhile."""
        lock = _inner.get() or self._lock
        alone = lock.acquire(timeout=-1 if until is None else max(0.0, until - time.monotonic()))
        try:
            yield alone
        finally:
            if alone:
                lock.release()

    def _next(self, queues: list[str]) -> bool:
        for queue in queues:
            taken = self.store.turns.take(Turn(_NODE, self._ms(), wants={queue: [_WORKER]}, limits=self._limits))
            if taken.claims:
                outer, token = handle.running, _inner.set(threading.Lock())
                try:
                    return self._one(taken.claims[0])
                finally:
                    handle.running = outer
                    _inner.reset(token)
        return False

    def _why(self, found: dict[str, Any]) -> str:
        """Why a job that has not ended cannot run now, and what the test can do."""
        now, queue = self._ms(), found["queue"]
        stands = self.store.jobs.standing(found["id"], 1)
        if stands is None:
            return "it is running, and waits for this"
        limit = self._limits.get(queue, QueueLimit())
        facts = Facts(
            now=now, queue=queue, nodes=1, paused=False, workers={"healthy": 1},
            run_at=stands["run_at"] if stands["later"] == 1 else None,
            running=stands["running_queue"], at_once=limit.at_once,
            key=stands["limit_key"], key_running=stands["running_key"], key_most=stands["limit_max"] or 0,
            next_token=next_token(self.store.db, queue, limit, now),
        )  # fmt: skip
        because = reason(facts)
        if "until" in because:
            return f"{because['text']}; call bench.advance({math.ceil((because['until'] - now) / 1000)}) first"
        return because["text"] if because["reason"] == "limit" else "call bench.run() to go on"

    def _one(self, claim: Claim) -> bool:
        notes: list[Note] = []
        began = self._ms()

        def say(
            _kind: str,
            job: int,
            fence: int,
            event: str,
            progress: float | None,
            stage: str | None,
            data: Any,
            published: list[Any] | None = None,
        ) -> None:
            artifact = ArtifactRow(job, published[0], "", *published[1:]) if published else None
            text = None if data is None else json.dumps(data)
            notes.append(Note(job, fence, event, self._ms(), progress, stage, text, artifact))
            for name in (event, stage):
                if name in _deaths:
                    _deaths.remove(name)
                    raise Killed(name)

        job = Job(claim.id, claim.task, claim.attempt, claim.crashes, claim.fence, say)
        job._holds = lambda key: self.store.jobs.hold(claim.id, claim.fence, key)  # noqa: SLF001
        end = self._end(claim, job, began)
        job._settle(success=isinstance(end, Finish) and end.status == "done")  # noqa: SLF001
        finishes, requeues = ([end], []) if isinstance(end, Finish) else ([], [end])
        self.store.turns.take(Turn(_NODE, self._ms(), notes, finishes, requeues))
        return not end.crash

    def _end(self, claim: Claim, job: Job, began: int) -> Finish | Requeue:
        """How a node would record the run."""
        try:
            outcome = execute.run(
                self.app.tasks.get(claim.task),
                job,
                claim.args,
                wait=_wait,
                max_result=self.app.producer.settings.max_payload,
                passing=(Killed, KeyboardInterrupt),
            )
        except Killed as death:
            return verdict.crashed(
                Ran(claim, began, self._ms()), "signal", f"killed by SIGKILL at {death}", self._policy
            )
        ran = Ran(claim, began, self._ms())
        match outcome:
            case ("done", _, _, result):
                return verdict.done(ran, result)
            case (_, _, _, kind, what, after):
                return verdict.failure(ran, kind, what, after, self._policy)
        raise AssertionError(outcome)
