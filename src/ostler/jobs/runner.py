"""The job worker: what `python -m ostler.jobs.runner APP` does in a process of its own. Imports no web framework, no store.

The main thread runs jobs one after another; the channel's side thread takes what the node says. One frame per job goes
back, and the node takes it as the beginning of the next one too, so it always knows which job a dead worker was at.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from ostler.errors import BadArguments, ConfigError
from ostler.jobs import signature
from ostler.jobs.handle import Job
from ostler.jobs.outcome import Cancel, Cancelled, Fail, Retry, Snooze
from ostler.jobs.results import LostClaim
from ostler.lifecycle.child import APP_LOAD, Channel
from ostler.lifecycle.wire import Frame

if TYPE_CHECKING:
    from ostler.app import Ostler, Task

_TRACE = 8000


_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class Terminated(BaseException):
    """SIGTERM arrived: unwinds the running job, so that its `finally` blocks run."""


class Runner:
    """One worker's jobs: a short local line, one running."""

    def __init__(self, max_result: int) -> None:
        self._max_result = max_result
        self._line: deque[list[Any]] = deque()
        self._turn = threading.Condition()
        self._stopping = False
        self._leaving = False
        self._cancelled: set[int] = set()  # asked for before they began
        self.terminated = False
        self._current: Job | None = None
        self._interrupt: Callable[[], None] | None = None  # cancels the running coroutine
        self._loop: Any = None
        self._held: dict[tuple[int, int], bool] = {}
        self._pid = os.getpid()
        self._output = (os.dup(1), os.dup(2))
        self._token = b"\x1e" + os.environ.pop("OSTLER_LABEL", "").encode() + b" %d\n"
        self.channel = Channel(self._heard)

    # ---- the side thread

    def _heard(self, frame: Frame) -> None:
        match frame:
            case ["work", jobs]:
                # The end of a job is also the beginning of the next one in hand; the first of a hand-over has to be told,
                # because the node cannot know whether the worker lived to begin it.
                with self._turn:
                    self._line.extend([*job, number == 0] for number, job in enumerate(jobs))
                    self._turn.notify()
            case ["recall"]:
                with self._turn:
                    ids = [item[0] for item in self._line]
                    self._line.clear()
                self.channel.send("back", ids)
            case ["cancel", job]:
                with self._turn:
                    if self._current is None or self._current.id != job:
                        self._cancelled.add(job)
                        return
                    self._current.cancelled = True
                    if self._interrupt:
                        self._interrupt()
            case ["held", job, fence, answer]:
                with self._turn:
                    self._held[job, fence] = bool(answer)
                    self._turn.notify()
            case ["leaving"]:
                with self._turn:
                    self._leaving = True
                    if self._current is not None:
                        self._current.stopping = True
            case ["stop"]:
                with self._turn:
                    self._stopping = True
                    self._turn.notify()

    # ---- the main thread

    def serve(self, app: Ostler) -> None:
        """Run jobs until the node says stop."""
        tasks = app.tasks
        self.channel.send("ready", {"tasks": sorted(tasks)})
        while True:
            with self._turn:
                while not self._line and not self._stopping:
                    self._turn.wait()
                if not self._line:
                    return
                job, fence, task, args, attempt, crashes, first = self._line.popleft()
                self._current = handle = Job(job, task, attempt, crashes, fence, self.channel.send)
                handle._holds = partial(self._holds, job, fence)  # noqa: SLF001
                handle.stopping = self._leaving
                if self._cancelled:
                    handle.cancelled = job in self._cancelled
                    self._cancelled.clear()
            if first:
                self.channel.send("begin", job, fence)
            self._label(job)
            frame = self._run(tasks.get(task), handle, args)
            if os.getpid() != self._pid:
                os._exit(0)  # the job forked and the child came back too: the jobs in hand are not its own
            with self._turn:
                self._current = None
            handle._settle(success=frame[0] == "done")  # noqa: SLF001
            self.channel.send(*frame)
            if self.terminated:
                raise Terminated  # the job has swallowed it

    def _label(self, job: int) -> None:
        """What is printed from here on, also by programs that the job starts, is this job's."""
        with contextlib.suppress(OSError, ValueError):
            for own, standard in zip(self._output, (1, 2), strict=True):
                os.dup2(own, standard)  # a job may have put something else there
            os.write(self._output[0], self._token % job)

    def _holds(self, job: int, fence: int) -> bool:
        """Ask the node whether this claim is still the job's. No answer is no."""
        self.channel.send("holds", job, fence)
        with self._turn:
            self._turn.wait_for(lambda: (job, fence) in self._held, timeout=60)
            return self._held.pop((job, fence), False)

    def _terminate(self, _number: int, _frame: FrameType | None) -> None:
        self.terminated = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    def _run(self, task: Task[..., Any] | None, job: Job, args: str) -> tuple[Any, ...]:
        """The frame that tells how it went."""
        try:
            if task is None:
                raise Fail(
                    "UNKNOWN_TASK", f"this app declares no task {job.task!r}; declare it again, then retry the job"
                )
            values = json.loads(args)
            signature.check(job.task, task.parameters, values)
            result = self._call(task, job, values)
            return ("done", job.id, job.fence, self._encode(result))
        except Terminated:
            raise
        except BadArguments as error:
            return self._failed(job, "permanent", error.code, error)
        except Fail as error:
            return self._failed(job, "permanent", error.code, error)
        except Retry as error:
            return self._failed(job, "retry", "RETRY", error, error.after)
        except Snooze as error:
            return self._failed(job, "snooze", "SNOOZED", error, error.after)
        except Cancel as error:
            return self._failed(job, "cancelled", "CANCELLED", error)
        except LostClaim as error:
            return self._failed(job, "transient", error.code, error)
        except MemoryError as error:
            return self._failed(job, "transient", "OOM", error)
        except Cancelled as error:
            return self._failed(job, "cancelled" if job.cancelled else "transient", "CANCELLED", error)
        except BaseException as error:  # noqa: BLE001  sys.exit() in a job ends the job, not the worker
            if job.cancelled and type(error).__name__ == "CancelledError":
                return self._failed(job, "cancelled", "CANCELLED", error)
            return self._failed(job, "transient", "ERROR", error)

    def _call(self, task: Task[..., Any], job: Job, values: dict[str, Any]) -> Any:
        if not inspect.iscoroutinefunction(task.function):
            return task.function(job, **values)
        import asyncio  # noqa: PLC0415  only workers with async jobs pay for it

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        running = self._loop.create_task(task.function(job, **values))
        with self._turn:
            self._interrupt = lambda: self._loop.call_soon_threadsafe(running.cancel)
        try:
            return self._loop.run_until_complete(running)
        finally:
            with self._turn:
                self._interrupt = None

    def _encode(self, result: Any) -> str:
        try:
            text = "null" if result is None else _json(result)
            signature.check_depth(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise Fail(
                "BAD_RESULT", f"the result ({type(result).__name__}) cannot be written as JSON: {error}"
            ) from error
        if len(text) > self._max_result:
            raise Fail(
                "RESULT_TOO_LARGE",
                f"the result is {len(text)} bytes as JSON, more than max_payload ({self._max_result})",
            )
        return text

    def _failed(
        self, job: Job, kind: str, code: str, error: BaseException, after: float | None = None
    ) -> tuple[Any, ...]:
        expected = isinstance(error, Fail | Retry | Snooze | Cancel | Cancelled | LostClaim | BadArguments)
        message = _words(error) if expected else f"{type(error).__name__}: {_words(error)}"
        what = {"code": _plain(code)[:200], "message": _plain(message[:2000])}
        if not expected or (error.__cause__ is not None and kind == "permanent"):
            with contextlib.suppress(Exception):  # an exception may break while it is shown
                what["traceback"] = "".join(traceback.format_exception(type(error), error, _own(error.__traceback__)))[
                    -_TRACE:
                ]
        return ("fail", job.id, job.fence, kind, what, after)


def _own(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's first frame on."""
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename in (__file__, signature.__file__):
        first = first.tb_next
    return first or trace


def _plain(text: object) -> str:
    """Text that any reader can decode: messages with file names in them may hold bytes that are no characters."""
    return str(text).encode("utf-8", "replace").decode()


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001
        return f"(its message cannot be shown: {type(broken).__name__})"


def main(argv: list[str]) -> int:
    """Load the app, say ready, run jobs. The channel is open before the app loads, so a slow import still beats."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    runner = Runner(int(os.environ.get("OSTLER_MAX_PAYLOAD", "1048576")))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, runner._terminate)  # noqa: SLF001
    try:
        runner.channel.open()
        from ostler.app import load  # noqa: PLC0415

        try:
            app = load(argv[0])
        except ConfigError as error:
            print(error, file=sys.stderr)  # noqa: T201
            return APP_LOAD
        runner.serve(app)
    except Terminated:
        return 128 + signal.SIGTERM
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
