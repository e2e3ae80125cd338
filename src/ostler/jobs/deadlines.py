"""Deadlines of running jobs: timeouts, cancels, and recalling what waits behind a long one. One timer for all workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from ostler.config import Settings
from ostler.jobs.seat import Seat
from ostler.lifecycle.supervisor import Supervisor
from ostler.lifecycle.worker import Worker

log = logging.getLogger("ostler.jobs")

# The last line of a worker's stack that is of interest, or of one that is too deep.
_OUTERMOST, _CUT = b" in _work", b"  ..."
_STACK = 1.0  # seconds that a worker gets to print its stack, before it is killed
RECALL_AFTER = 0.050  # seconds; a running job that lasts longer gives back what waits behind it


class Deadlines:
    """Looks at the dispatcher's seats in time, and has their workers signalled."""

    def __init__(self, settings: Settings, seats: Mapping[Worker, Seat]) -> None:
        self._settings, self._seats = settings, seats
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self.supervisor: Supervisor  # set by the dispatcher

    def stop(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def cancel(self, job: int, fence: int | None = None) -> None:
        """Somebody wants this running job cancelled: ask it, then signals. Harmless when asked twice."""
        for seat in self._seats.values():
            held = next((c for c in seat.jobs if c.id == job and fence in (None, c.fence)), None)
            if held is None:
                continue
            if held is not seat.jobs[0]:
                self.recall(seat)  # not begun: it comes back, and the store ends it there
            elif seat.cancel_by is None:
                seat.worker.send("cancel", job)
                seat.cancel_by = time.monotonic() + self._settings.cancel_grace
                self.arm(seat)

    def recall(self, seat: Seat) -> None:
        """Take back what the worker has not begun."""
        if len(seat.jobs) > 1:
            seat.recalled = True
            seat.worker.send("recall")

    def arm(self, seat: Seat) -> None:
        """See to it that the clock looks at the seat in time. The loop's clock is the monotonic one."""
        moment = min(self._moments(seat), default=None)
        if moment is None or (self._timer is not None and self._timer_at <= moment):
            return
        self.stop()
        self._timer, self._timer_at = self._loop.call_at(moment, self.tick), moment

    def _moments(self, seat: Seat) -> list[float]:
        """When the seat must be looked at again."""
        if not seat.jobs or seat.worker.killing:
            return []
        moments = [m for m in (seat.kill_by or seat.cancel_by,) if m is not None]
        if seat.jobs[0].timeout is not None and not seat.timed_out:
            moments.append(seat.began + seat.jobs[0].timeout)
        if len(seat.jobs) > 1 and not seat.recalled:
            moments.append(seat.began + RECALL_AFTER)
        return moments

    def tick(self) -> None:
        """Look at every seat, and do what is due."""
        self._timer = None
        now = time.monotonic()
        for seat in list(self._seats.values()):
            if not seat.jobs or seat.worker.killing:
                continue
            self._due(seat, now)
            if len(seat.jobs) > 1 and not seat.recalled and now >= seat.began + RECALL_AFTER:
                self.recall(seat)
            self.arm(seat)

    def printed(self, seat: Seat, lines: list[bytes]) -> None:
        """What the job of the seat printed. Once the stack of one that overran is complete, its worker is killed."""
        if seat.timed_out and any(line.endswith(_OUTERMOST) or line == _CUT for line in lines):
            seat.kill_by = time.monotonic()
            self.tick()

    def _due(self, seat: Seat, now: float) -> None:
        timeout = seat.jobs[0].timeout
        overran = timeout is not None and now >= seat.began + timeout
        if seat.timed_out:
            if seat.kill_by is None or now >= seat.kill_by:
                self.supervisor.kill(seat.worker, "job-timeout", on_purpose=True)
            return
        if overran and seat.cancel_by is None:
            log.warning(
                "job %d ran longer than its timeout of %g s: killing %s",
                seat.jobs[0].id,
                timeout,
                seat.worker.component,
            )
            shows = seat.worker.process is not None and seat.worker.process.show_stack()
            seat.timed_out, seat.kill_by = True, now + _STACK if shows else None
            self._due(seat, now)
        elif overran or (seat.kill_by is not None and now >= seat.kill_by):
            self.supervisor.kill(seat.worker, "cancelled", on_purpose=True)
        elif seat.kill_by is None and seat.cancel_by is not None and now >= seat.cancel_by:
            self.recall(seat)
            self.supervisor.terminate(seat.worker, "cancelled")
            seat.kill_by = now + self._settings.term_grace
