"""The job worker: what `python -m ostler.jobs.runner APP` does in a process of its own. Imports no web framework, no store.

The main thread runs jobs one after another; meanwhile the channel's side thread takes what the node says. One frame per job goes
back, and the node takes it as the beginning of the next one too, so it always knows which job a dead worker was at.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from ostler.errors import ConfigError
from ostler.jobs import execute
from ostler.jobs.handle import Job
from ostler.jobs.restore import Baseline, show_faults
from ostler.lifecycle.child import APP_LOAD, Channel
from ostler.lifecycle.wire import Frame

if TYPE_CHECKING:
    from ostler.app import Ostler

log = logging.getLogger("ostler.jobs")


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
        self._tired = False  # spoilt by a job: it takes nothing more
        self._cancelled: set[int] = set()  # asked for before they began
        self.terminated = False
        self._current: Job | None = None
        self._interrupt: Callable[[], None] | None = None  # cancels the running coroutine
        self._baseline: Baseline  # taken once the app is loaded
        self._queue = ""
        self._held: dict[tuple[int, int], bool] = {}
        self._asking = threading.Lock()
        self._pid = os.getpid()
        self._marker = b""  # the line that says whose output follows
        self.channel = Channel(self._heard)

    # ---- what the node says: on the side thread, or on the main thread while it has nothing to do

    def _heard(self, frame: Frame) -> None:
        match frame:
            case ["label", token]:
                self._marker = b"\x1e" + token.encode() + b" %d\n"
            case ["work", jobs]:
                # The end of a job is also the beginning of the next one in hand; the first of a hand-over has to be told,
                # because the node cannot know whether the worker lived to begin it.
                with self._turn:
                    tired = self._tired
                    if not tired:
                        self._line.extend([*job, number == 0] for number, job in enumerate(jobs))
                        self._turn.notify()
                if tired:
                    self.channel.send("back", [job[0] for job in jobs])
            case ["recall"]:
                self._give_back()
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
                    if self._held.get((job, fence)) is not False:
                        self._held[job, fence] = bool(answer)
                    self._turn.notify_all()
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
        self._baseline = Baseline()
        self._queue = os.environ.get("OSTLER_COMPONENT", "::").split(":")[1]
        if app.hooks.starting:
            app.hooks.start(self._queue, self._wait)
            self._baseline = Baseline(self._baseline)  # what they changed is how jobs find it
        self.channel.send("ready", {"tasks": sorted(tasks)})
        try:
            self._work(tasks)
        finally:
            if not self.terminated:
                app.hooks.stop(self._queue, self._wait)

    def _work(self, tasks: Mapping[str, Any]) -> None:
        while True:
            if not self._line:
                self.channel.listen(lambda: self._line or self._stopping)
            with self._turn:
                if not self._line:
                    if self._stopping:
                        return
                    continue  # it was given back meanwhile
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
            frame = execute.run(
                tasks.get(task), handle, args, wait=self._wait, max_result=self._max_result, passing=(Terminated,)
            )
            if os.getpid() != self._pid:
                _leave_child(frame)
            with self._turn:
                self._current = None
            tired = None if self.terminated else self._baseline.restore()
            handle._settle(success=frame[0] == "done")  # noqa: SLF001
            if tired:
                self._tired = True
                self._give_back()
            self.channel.send(*frame)
            if self.terminated:
                raise Terminated  # the job has swallowed it
            if tired:
                log.warning("job %d changed its worker permanently (%s); it is replaced", job, tired)
                self.channel.send("tired", tired)  # the node recycles this worker: it runs nothing more

    def _label(self, job: int) -> None:
        """What is printed from here on, also by programs that the job starts, is this job's."""
        try:  # noqa: SIM105  once for each job: `suppress` would be an object each time
            self._baseline.write(self._marker % job)
        except OSError:
            pass

    def _give_back(self) -> None:
        """Return what waits here, before the end of the running job: the node takes that for the beginning of the next one."""
        with self._turn:
            ids = [item[0] for item in self._line]
            self._line.clear()
        self.channel.send("back", ids)

    def _holds(self, job: int, fence: int, key: str | None) -> bool:
        """Ask the node whether this claim is still the job's, and may publish under the key. No answer is no, and stays no: an answer that comes too late must
        not be taken for that of a later question. Threads of the job ask one after another.
        """
        with self._asking:
            if self._held.get((job, fence)) is False:
                return False
            self._held.clear()
            self.channel.send("holds", job, fence, key)
            with self._turn:
                self._turn.wait_for(lambda: (job, fence) in self._held, timeout=60)
                return self._held.setdefault((job, fence), False)

    def _terminate(self, _number: int, _frame: FrameType | None) -> None:
        self.terminated = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run an async job; a cancel reaches it as `asyncio.CancelledError`."""
        loop = self._baseline.loop()
        running = loop.create_task(coroutine)
        with self._turn:
            self._interrupt = lambda: loop.call_soon_threadsafe(running.cancel)
        try:
            return loop.run_until_complete(running)
        finally:
            with self._turn:
                self._interrupt = None


def _leave_child(frame: execute.Outcome) -> NoReturn:
    """The job forked and the child came back too: the jobs in hand are not its own."""
    if frame[0] == "fail":
        what = frame[4]
        print(what.get("traceback") or what["message"], file=sys.stderr)  # noqa: T201
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(0 if frame[0] == "done" else 1)


def _in_env(env: str, target: str) -> str:
    return (
        f"this worker runs in environment {env!r} ({sys.executable}): what {target} imports at its top must be installed there and "
        "in the node's own environment; what only one of them has is imported inside the job"
    )


def main(argv: list[str]) -> int:
    """Load the app, say ready, run jobs. The channel is open before the app loads, so a slow import still beats."""
    show_faults(os.dup(2))  # a job may put something else there
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
            if env := os.environ.get("OSTLER_ENV"):
                print(_in_env(env, argv[0]), file=sys.stderr)  # noqa: T201
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
