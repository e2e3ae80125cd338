"""The wake-up, which is part of the store: who stores a job rings (`Database.ring`), the node listens here.

On SQLite it is a Unix datagram socket in the folder of the file (doorbell.py), on PostgreSQL LISTEN on a connection of its own.
A ring that is lost costs one fallback poll, never a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ostler.parts import Part
from ostler.store.database import is_postgres
from ostler.store.doorbell import Doorbell

log = logging.getLogger("ostler.store")

_IDLE = 30.0  # seconds that a connection is kept for the next one who waits


def listener(url: str, folder: Path, wake: Callable[[], None]) -> Part:
    """The node's side of the wake-up of its store, as a part of the node: a ring calls `wake` on the loop."""
    return Listening(url, wake) if is_postgres(url) else Hearing(folder, wake)


class Hearing:
    """The doorbell of a data directory."""

    def __init__(self, folder: Path, wake: Callable[[], None]) -> None:
        self._folder, self._wake = folder, wake
        self._bell: Doorbell | None = None

    async def start(self) -> None:
        self._bell = Doorbell(self._folder)
        asyncio.get_running_loop().add_reader(self._bell.fileno(), self._bell.answer, self._wake)

    async def stop(self) -> None:
        bell, self._bell = self._bell, None
        if bell:
            asyncio.get_running_loop().remove_reader(bell.fileno())
            bell.close()


class Listening:
    """A thread with a connection that does nothing but LISTEN. It is made anew when it is lost; until then there is the poll."""

    def __init__(self, url: str, wake: Callable[[], None]) -> None:
        from ostler.store.postgres_place import Place  # noqa: PLC0415  its driver is an extra

        self._place, self._wake = Place(url), wake
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.hears = False
        """Whether rings arrive now."""

    async def start(self) -> None:
        if self._place.pooler:
            log.info("the store is behind a pooler, where LISTEN does not work: new jobs are found by the poll")
            return
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="ostler-bell", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread:
            self._stopping.set()
            await asyncio.to_thread(thread.join, 7.0)

    # ---- in the thread

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        delay = 0.1
        while not self._stopping.is_set():
            try:
                self._listen(loop)
                delay = 0.1
            except Exception as error:  # noqa: BLE001  whatever it is, the poll goes on and the next try may work
                if self.hears:
                    log.warning("the connection that listens was lost (%s); making another", str(error).strip())
                    delay = 0.1
                self.hears = False
                self._stopping.wait(delay)
                delay = min(delay * 2, 5.0)

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._place.connect(application_name="ostler listens") as connection:
            connection.execute(f"LISTEN {self._place.channel}")
            self.hears = True
            self._ring(loop)  # what was stored before is found by looking
            while not self._stopping.is_set():
                if any(True for _ in connection.notifies(timeout=0.5, stop_after=1)):
                    self._ring(loop)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._wake)


class Ends:
    """Hears which jobs have ended, on PostgreSQL, for a process without a node: one thread with one connection that does nothing but
    LISTEN, while anybody waits. Threads and event loops share it.

    Somebody who waits also looks by himself now and then: a connection that is lost is made anew, and what was told meanwhile is lost.
    """

    def __init__(self, url: str) -> None:
        from ostler.store.postgres_place import Place  # noqa: PLC0415  its driver is an extra

        self._place = Place(url)
        self._lock = threading.Lock()
        self._waiting: dict[int, set[Callable[[], None]]] = {}
        self._thread: threading.Thread | None = None
        self.hears = threading.Event()
        """Whether it hears now."""

    @contextlib.contextmanager
    def waiting(self, job: int, wake: Callable[[], None]) -> Iterator[None]:
        """`wake` is called, on a thread of its own, when the job has ended."""
        with self._lock:
            self._waiting.setdefault(job, set()).add(wake)
            if self._thread is None and not self._place.pooler:  # LISTEN does not work there
                self._thread = threading.Thread(target=self._run, name="ostler-ends", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                others = self._waiting[job]
                others.discard(wake)
                if not others:
                    del self._waiting[job]

    # ---- in the thread

    def _run(self) -> None:
        delay = 0.1
        while True:
            try:
                self._listen()
            except Exception as error:  # noqa: BLE001  whoever waits looks by himself; the next try may work
                log.debug("ends of jobs cannot be heard: %s", str(error).strip())
            heard, delay = self.hears.is_set(), min(2 * delay, 5.0)
            self.hears.clear()
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
            time.sleep(0.1 if heard else delay)

    def _listen(self) -> None:
        """Until nobody has waited for a while. Raises what the driver raises."""
        with self._place.connect(application_name="ostler waits") as connection:
            connection.execute(f"LISTEN {self._place.ended_channel}")
            self.hears.set()
            idle_since = time.monotonic()
            while time.monotonic() - idle_since < _IDLE:
                for told in connection.notifies(timeout=1.0, stop_after=1):
                    self._wake(told.payload)
                if self._waiting:
                    idle_since = time.monotonic()

    def _wake(self, payload: str) -> None:
        with self._lock:
            woken = [*self._waiting.get(int(payload), ())] if payload.isdigit() else []
        for wake in woken:
            wake()
