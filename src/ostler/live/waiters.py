"""Requests that wait for a job to end. The bus wakes them; none of them polls.

What this node writes is named on the bus with each turn. What others write (another process, another node) is found when somebody
rings, or by one look each `poll_interval` for all jobs together. Nobody waits: nothing is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

from ostler.errors import OstlerError, StoreBusy
from ostler.events import Bus, JobsTouched
from ostler.parts import Tasks
from ostler.store.lanes import Lane

log = logging.getLogger("ostler.live")

LONGEST = 60.0  # seconds that a request may wait
MOST = 1000  # requests that wait at once
_PATIENCE = 1.0  # seconds that a look waits for the store
_QUICKEST, _SLOWEST = 0.005, 1.0  # seconds between two looks
_SHARE = 5  # a look that cost x is followed by a rest of so many x


class TooManyWait(OstlerError):
    """So many requests wait for jobs that no more are taken."""

    code = "TOO_MANY_WAIT"
    status = 503


class Waiters:
    """Those who wait for the end of a job. One task for all of them; all on the node's loop."""

    def __init__(self, bus: Bus, reader: Lane, poll_interval: float, most: int = MOST) -> None:
        self._reader, self._poll_interval, self._most = reader, poll_interval, most
        self._waiting: dict[int, set[asyncio.Future[None]]] = {}
        self._count = 0
        self._touched: set[int] = set()  # jobs that somebody waits for, and that may have ended
        self._dirty = asyncio.Event()
        self._closed = False
        self._tasks = Tasks()
        bus.listen(self._heard)

    async def start(self) -> None:
        self._tasks.begin(self._run(), "waiters")
        self._tasks.begin(self._poll(), "waiters poll")

    async def stop(self) -> None:
        """Everybody is answered now, and nobody waits any more."""
        self._closed = True
        self._wake(set(self._waiting))
        await self._tasks.stop()

    @contextlib.contextmanager
    def waiting(self, job: int) -> Iterator[asyncio.Future[None]]:
        """A future that is done when the job may have ended. Begin this, then look at the job, then await it. Raises TooManyWait."""
        if self._count >= self._most:
            raise TooManyWait(f"{self._most} requests already wait for jobs; ask without `wait`, and again in a second")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._closed:
            future.set_result(None)
        self._waiting.setdefault(job, set()).add(future)
        self._count += 1
        try:
            yield future
        finally:
            self._count -= 1
            others = self._waiting[job]
            others.discard(future)
            if not others:
                del self._waiting[job]
                self._touched.discard(job)

    def _heard(self, event: Any) -> None:
        if self._waiting and isinstance(event, JobsTouched):
            self._touched.update(self._waiting if event.others else self._waiting.keys() & event.jobs)
            if self._touched:
                self._dirty.set()

    async def _run(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            began = time.perf_counter()
            try:
                await self._look()
            except StoreBusy as error:  # that is told elsewhere; the poll looks again
                log.debug("whether jobs have ended is looked at later: %s", error)
            except Exception:  # the loop must survive one bad look
                log.exception("whether jobs have ended could not be read once; it goes on")
            await asyncio.sleep(min(max(_SHARE * (time.perf_counter() - began), _QUICKEST), _SLOWEST))

    async def _look(self) -> None:
        touched, self._touched = [*self._touched], set()
        if touched:
            self._wake(await self._reader.call(lambda store: store.jobs.ended(touched), patience=_PATIENCE))

    async def _poll(self) -> None:
        """For what others wrote without ringing."""
        while True:
            await asyncio.sleep(self._poll_interval)
            if self._waiting:
                self._touched.update(self._waiting)
                self._dirty.set()

    def _wake(self, ended: set[int]) -> None:
        for job in ended:
            for future in self._waiting.get(job, ()):
                if not future.done():
                    future.set_result(None)
