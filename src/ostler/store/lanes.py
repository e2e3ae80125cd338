"""Lanes: how the one event loop uses blocking stores. A lane is a thread with a connection of its own.

The loop never waits for a disk: it awaits a lane. What is put on a lane runs in order. A lane that finds the store
locked or full tries again until it goes through, so a busy disk delays and loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ostler.errors import StoreBusy
from ostler.store.store import Store

log = logging.getLogger("ostler.store")
T = TypeVar("T")

_Item = tuple[Callable[[Store], Any], "asyncio.Future[Any] | None", float | None]


class Lane:
    """A thread, a store, a queue of work. `patience` is how long `call` tries; None is for ever."""

    def __init__(
        self,
        name: str,
        store: Callable[[], Store],
        loop: asyncio.AbstractEventLoop,
        answers: Callable[[str, bool], None] | None = None,
    ) -> None:
        self.name = name
        self._answers = answers  # told, on the loop, when the store is lost and when it is back
        self._trouble_since: float | None = None
        self._open = store
        self._loop = loop
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._giving_up = threading.Event()
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """Begin to work. What was put on the lane before waits for this."""
        self._thread = threading.Thread(target=self._work, name=f"ostler-{self.name}", daemon=True)
        self._thread.start()

    async def call(self, work: Callable[[Store], T], *, patience: float | None = None) -> T:
        """Run the work on the lane and return its value. Raises StoreBusy when the store stays busy longer than `patience`."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._items.put((work, future, None if patience is None else time.monotonic() + patience))
        return await future

    def post(self, work: Callable[[Store], Any]) -> None:
        """Run the work on the lane, in order, whenever it goes through. Errors are logged."""
        self._items.put((work, None, None))

    async def stop(self, deadline: float = 5.0) -> None:
        """Finish what was put on the lane, for at most `deadline` seconds, and end the thread."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._items.put(None)
        for _ in range(int(deadline * 100)):
            if not thread.is_alive():
                return
            await asyncio.sleep(0.01)
        self._giving_up.set()
        log.warning("lane %s could not write everything before the end; the next start recovers it", self.name)
        await asyncio.to_thread(thread.join, 6.0)

    @property
    def trouble_since(self) -> float | None:
        """Since when (monotonic) the store has not answered; None when it does."""
        return self._trouble_since

    @trouble_since.setter
    def trouble_since(self, value: float | None) -> None:
        changed = (value is None) != (self._trouble_since is None)
        self._trouble_since = value
        if changed and self._answers is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._answers, self.name, value is None)

    def _work(self) -> None:
        store: Store | None = None
        while (item := self._items.get()) is not None:
            store = self._one(store, item)
        if store:
            store.close()

    def _one(self, store: Store | None, item: _Item) -> Store | None:
        """Do one piece of work, opening the store first where that has not worked yet. Returns the open store."""
        work, future, until = item
        delay = 0.05
        while True:
            try:
                store = store or self._open()
                value = work(store)
            except StoreBusy as error:
                if self._giving_up.is_set() or (until is not None and time.monotonic() >= until):
                    self.trouble_since = None  # nothing waits any more
                    self._settle(future, None, error)
                    return store
                if self.trouble_since is None:
                    self.trouble_since = time.monotonic()
                    log.warning("%s; lane %s keeps trying", error, self.name)
                self._giving_up.wait(delay)
                delay = min(delay * 2, 1.0)
            except Exception as error:  # noqa: BLE001  the lane must survive one bad piece of work; its caller gets the error
                self._settle(future, None, error)
                return store
            else:
                if self.trouble_since is not None:
                    log.info("lane %s writes again after %.1f s", self.name, time.monotonic() - self.trouble_since)
                    self.trouble_since = None
                self._settle(future, value, None)
                return store

    def _settle(self, future: asyncio.Future[Any] | None, value: Any, error: Exception | None) -> None:
        if future is None:
            if error is not None:
                log.error("lane %s: a write failed", self.name, exc_info=error)
            return
        try:
            self._loop.call_soon_threadsafe(_resolve, future, value, error)
        except RuntimeError:  # the loop has ended: nobody waits any more
            log.debug("lane %s: the loop has ended before an answer", self.name)


def _resolve(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
