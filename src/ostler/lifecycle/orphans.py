"""What workers leave behind: their families are ended, and orphans that come to the node are reaped.

The node adopts orphans of its descendants (PR_SET_CHILD_SUBREAPER). An orphan that has exited is reaped at once, whoever it
came from. One that lives belongs to the worker that its mark names, and is ended with that worker alone. An orphan that
cleared its environment and started a session names nobody: it is ended when the last worker that it may have come from
is gone. Children that the node's own code started (routes of an app) carry the node's mark and are left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ostler.lifecycle import family
from ostler.lifecycle.worker import Worker

log = logging.getLogger("ostler.lifecycle")

_SOON = 0.05  # seconds from a SIGCHLD to the look that it causes: many exits are one look
_DOUBT = 1.0  # … that an exited process of unknown origin is left to whoever may wait for it


class Orphans:
    """The guard, the sweep behind each worker, and the reaping. `workers` are those that live now."""

    def __init__(self, token: str, workers: Callable[[], list[Worker]], folders: Sequence[str] = ()) -> None:
        self._token, self._workers, self._folders = token, workers, folders
        self._guard: subprocess.Popen[bytes] | None = None
        self._own: set[int] = set()  # children that the node's own code started
        self._strangers: dict[
            int, set[Worker]
        ] = {}  # an orphan without a mark -> the workers that it may have come from
        self._doubtful: dict[int, float] = {}  # exited, of unknown origin -> since
        self._look: asyncio.TimerHandle | None = None
        self._before: Any = None  # who handled SIGCHLD before us
        self._started = False

    # ---- start and stop

    async def start(self) -> None:
        """Adopt orphans, start the guard, and listen for exits."""
        self._started = True
        os.environ[family.NODE] = self._token
        self._own = {child.pid for child in family.children()}  # older than every worker, so none of them left it
        if not family.adopt_orphans():
            log.info("orphans cannot be adopted on this system; families are found by their mark alone")
        self.keep_guard()
        self._listen(asyncio.get_running_loop())

    async def stop(self) -> None:
        """End the guard. Call when all workers are gone."""
        if self._started:
            self._started = False
            if self._before is not None:
                signal.signal(signal.SIGCHLD, self._before)
                self._before = None
        if self._look:
            self._look.cancel()
            self._look = None
        guard, self._guard = self._guard, None
        if guard and guard.stdin:
            guard.stdin.close()
            await asyncio.to_thread(guard.wait)

    def keep_guard(self) -> None:
        """Start the guard, or another one when it has ended."""
        if not self._started or (self._guard and self._guard.poll() is None):
            return
        if self._guard:
            log.warning("the guard process has ended; starting another")
        argv = [sys.executable, "-I", "-S", family.__file__, f"{self._token}/", *self._folders]
        self._guard = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)

    # ---- behind one worker

    async def sweep(self, worker: Worker) -> None:
        """End all that came out of the worker. When this returns, nothing of it runs any more."""
        assert worker.process is not None
        left = await asyncio.to_thread(family.kill, worker.process.mark, [worker.process.pid])
        self.look()
        nobodys = []
        for pid, suspects in self._strangers.items():
            suspects.discard(worker)
            if not suspects:
                nobodys.append(pid)
        if nobodys:
            left += await asyncio.to_thread(family.kill, "\0", nobodys)
            self.look()
        if left:
            log.info("%s left %d processes behind; they were killed", worker.component, left)

    # ---- reaping

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hear of exits at once. Where that cannot be had, heartbeats look.

        Not by the loop: uvloop refuses SIGCHLD. It takes the signal over when a route starts a program by asyncio, and
        from then on heartbeats look, too.
        """
        with contextlib.suppress(ValueError):  # not the main thread
            self._before = (
                signal.signal(signal.SIGCHLD, lambda *_: loop.call_soon_threadsafe(self._rang)) or signal.SIG_DFL
            )
            signal.siginterrupt(signal.SIGCHLD, False)  # other threads must not find their reads and writes interrupted

    def _rang(self) -> None:
        if self._started and self._look is None:
            self._look = asyncio.get_running_loop().call_later(_SOON, self.look)

    def look(self) -> None:
        """Reap what has exited, and note where new orphans may have come from."""
        if not self._started:
            return
        if self._look:
            self._look.cancel()
            self._look = None
        now = time.monotonic()
        workers = self._workers()
        known = {w.process.pid for w in workers if w.process} | ({self._guard.pid} if self._guard else set())
        children = {c.pid: c for c in family.children()}
        own_session = os.getsid(0)
        for gone in [pid for pid in (*self._strangers, *self._own, *self._doubtful) if pid not in children]:
            self._strangers.pop(gone, None)
            self._own.discard(gone)
            self._doubtful.pop(gone, None)
        for pid, child in children.items():
            if pid in known or pid in self._own or child.session == own_session:
                continue
            if child.zombie:
                self._exited(child, known, now)
            elif pid not in self._strangers:
                self._meet(child, workers)
        if self._doubtful:
            self._look = asyncio.get_running_loop().call_later(_DOUBT, self.look)

    def _exited(self, child: family.Seen, known: set[int], now: float) -> None:
        # A session that is not its own is a worker's: nobody here waits for it. Else it may be a child of a route that
        # was never seen alive; that one gets time to be waited for.
        if (
            child.pid in self._strangers
            or child.session != child.pid
            or child.session in known
            or now - self._doubtful.setdefault(child.pid, now) >= _DOUBT
        ):
            self._reap(child.pid)

    def _reap(self, pid: int) -> None:
        self._strangers.pop(pid, None)
        self._doubtful.pop(pid, None)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)

    def _meet(self, child: family.Seen, workers: list[Worker]) -> None:
        marks = family.marks_of(child.pid)
        mark = marks.get(family.VARIABLE, "")
        if mark.startswith(f"{self._token}/"):
            self._strangers[child.pid] = {w for w in workers if w.process and mark.startswith(w.process.mark)}
        elif marks.get(family.NODE) == self._token:
            self._own.add(child.pid)
        else:
            born = family.start_time(child.pid) or 0
            self._strangers[child.pid] = {w for w in workers if w.process and (w.process.started or 0) <= born}
