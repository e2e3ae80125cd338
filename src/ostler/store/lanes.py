"""Lanes: how the one event loop uses blocking stores. A lane is a thread with a connection of its own.

The loop never waits for a disk: it awaits a lane. What is put on a lane runs in order. There is one lane for each purpose, so
that slow work never stands in front of quick work:

    turns     the dispatcher's transactions: results out, claims in. Tries for ever; not synced
    records   health rows, exits, heartbeats, incidents. Tries for ever; not synced
    intake    what is acknowledged: enqueue, cancel, retry, hold, pause flags, schedules. Bounded patience; synced (FULL)
    glance    quick reads: polls, the live state, one job. Bounded patience
    reader    slow reads: searches, listings, metrics. Bounded patience
    upkeep    recovery and deleting, in short steps. Bounded patience; not synced
    sessions  the registry's turns, where the app has sessions. Bounded patience; what a crash forgets is told again

Patience counts from the call: time spent in the lane's queue is part of it. Work that has not begun when its patience ends is
refused and never runs; work that has begun is waited for, because it may have been stored, but no longer than for `_ANSWER` more:
then it is in doubt. Lanes that only read (`reads`) wait for nothing after that. A lane that tries for ever finds the
store locked, full or away, or its rights or tables taken from it (ConfigError), and delays: it loses nothing.

A commit whose answer was lost (StoreDoubt) may have been stored. Work with patience is not tried again then, or a job could be
stored twice: its caller gets the error. Work that the store recognises when it comes a second time (a numbered turn, a record
of a generation) is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ostler.config import Settings
from ostler.errors import ConfigError, OstlerError, StoreBusy, StoreDoubt, StoreGone
from ostler.store import database
from ostler.store.store import Store

log = logging.getLogger("ostler.store")

_ANSWER = 20.0  # seconds after which a server that took the work and says nothing is given up; TCP gives up at 15
_SILENT = 10.0  # seconds after which a server that says nothing to a lane that tries for ever is in trouble
T = TypeVar("T")


class _Item:
    """A piece of work. Whoever takes it first decides: the lane runs it, or the clock refuses it."""

    def __init__(
        self, work: Callable[[Store], Any], future: asyncio.Future[Any] | None, until: float | None, *, known: bool
    ) -> None:
        self.work, self.future, self.until, self.known = work, future, until, known
        self._taken = threading.Lock()

    def take(self) -> bool:
        return self._taken.acquire(blocking=False)


class Lane:
    """A thread, a store, a queue of work. `patience` is how long a `call` may take; None is for ever."""

    def __init__(
        self,
        name: str,
        store: Callable[[], Store],
        loop: asyncio.AbstractEventLoop,
        answers: Callable[[str, bool], None] | None = None,
        patience: float | None = None,
        *,
        reads: bool = False,
    ) -> None:
        self.name, self.patience, self._reads = name, patience, reads
        self.trouble: str | None = None  # what is wrong with the store, while it does not answer
        self._answers = answers  # told, on the loop, when the store is lost and when it is back
        self._trouble_since: float | None = None
        self._began: float | None = None  # when the work under way was given to the store
        self._open = store
        self._loop = loop
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._giving_up = threading.Event()
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """Begin to work. What was put on the lane before waits for this."""
        self._thread = threading.Thread(target=self._work, name=f"ostler-{self.name}", daemon=True)
        self._thread.start()

    async def call(self, work: Callable[[Store], T], *, patience: float | None = None, known: bool = False) -> T:
        """Run the work on the lane and return its value. Raises StoreBusy when that takes longer than `patience` (by default the
        lane's): then nothing was stored; or StoreDoubt, when it may have been. `known`: the store knows the work when it comes
        twice, so a doubt is resolved by trying again.
        """
        patience = self.patience if patience is None else patience
        future: asyncio.Future[T] = self._loop.create_future()
        if patience is None:
            self._items.put(_Item(work, future, None, known=True))
            return await future
        item = _Item(work, future, time.monotonic() + patience, known=known)
        clocks = [self._loop.call_later(patience, self._refuse, item, patience)]
        if not self._reads:
            clocks.append(self._loop.call_later(patience + _ANSWER, self._doubt, item, patience + _ANSWER))
        self._items.put(item)
        try:
            return await future
        finally:
            for clock in clocks:
                clock.cancel()

    def _refuse(self, item: _Item, patience: float) -> None:
        """Its patience has ended before it began, or nothing can have been stored."""
        if item.future is not None and not item.future.done() and (item.take() or self._reads):
            why = self.trouble or "other work was before it"
            item.future.set_exception(
                StoreBusy(f"the store has not answered within {patience:g} s ({why}); nothing was stored, try again")
            )

    def _doubt(self, item: _Item, waited: float) -> None:
        """It has begun, and the store says nothing."""
        if item.future is not None and not item.future.done():
            item.future.set_exception(
                StoreDoubt(
                    f"the store has not answered within {waited:g} s: what it got may be stored or not. Look first"
                )
            )

    def post(self, work: Callable[[Store], Any]) -> None:
        """Run the work on the lane, in order, whenever it goes through; it must be harmless when done twice. Errors are logged."""
        self._items.put(_Item(work, None, None, known=True))

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
        began = self._began
        if self._trouble_since is None and self.patience is None and began is not None:
            return began if time.monotonic() - began > _SILENT else None
        return self._trouble_since

    def _in_trouble(self, error: OstlerError) -> None:
        if self._trouble_since is None:
            log.warning("%s; lane %s keeps trying", error, self.name)
            self._trouble_since = time.monotonic()
            self._tell(well=False)
        self.trouble = str(error)

    def _well(self) -> None:
        if self._trouble_since is not None:
            log.info("lane %s writes again after %.1f s", self.name, time.monotonic() - self._trouble_since)
            self._forget_trouble()

    def _forget_trouble(self) -> None:
        self._trouble_since = self.trouble = None
        self._tell(well=True)

    def _tell(self, *, well: bool) -> None:
        if self._answers is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._answers, self.name, well)

    # ---- in the lane's thread

    def _work(self) -> None:
        store: Store | None = None
        while (item := self._items.get()) is not None:
            if item.take():
                store = self._one(store, item)
                self._began = None
        if store:
            store.close()

    def _one(self, store: Store | None, item: _Item) -> Store | None:
        """Do one piece of work, opening the store first where that has not worked yet. Returns the open store."""
        delay = 0.05
        while True:
            try:
                self._began = time.monotonic()
                store = store or self._open()
                store.db.check()
                value = item.work(store)
                if item.until is not None:
                    store.db.check()  # what is acknowledged is in the file that is there
            except (StoreBusy, ConfigError) as error:
                if isinstance(error, ConfigError) and item.until is not None:
                    self._settle(item.future, None, error)
                    return store
                self._in_trouble(error)
                if self._hopeless(item, error):
                    self._settle(item.future, None, error)
                    return store
                self._giving_up.wait(
                    delay if item.until is None else min(delay, max(0.0, item.until - time.monotonic()))
                )
                delay = min(delay * 2, 1.0)
            except Exception as error:  # noqa: BLE001  the lane must survive one bad piece of work; its caller gets the error
                self._settle(item.future, None, error)
                return store
            else:
                self._well()
                self._settle(item.future, value, None)
                return store

    def _hopeless(self, item: _Item, error: OstlerError) -> bool:
        """Whether to give up on the work. A file that is gone does not come back by waiting: whoever waits is told at once."""
        if self._giving_up.is_set():
            return True
        if item.until is None:
            return False
        if isinstance(error, StoreGone):
            return True
        if isinstance(error, StoreDoubt) and not item.known:
            self._forget_trouble()  # the next work finds out how the store is
            return True
        if time.monotonic() >= item.until:
            self._forget_trouble()  # nothing waits any more
            return True
        return False

    def _settle(self, future: asyncio.Future[Any] | None, value: Any, error: Exception | None) -> None:
        if future is None:
            if error is not None:
                log.error("lane %s: a write failed", self.name, exc_info=error)
            return
        try:
            self._loop.call_soon_threadsafe(_resolve, future, value, error)
        except RuntimeError:  # the loop has ended: nobody waits any more
            log.debug("lane %s: the loop has ended before an answer", self.name)


@dataclass(frozen=True, slots=True)
class Lanes:
    """A node's lanes, one for each purpose. Started and stopped together."""

    turns: Lane
    records: Lane
    intake: Lane
    glance: Lane
    reader: Lane
    upkeep: Lane
    sessions: Lane | None  # where the app has any

    @classmethod
    def of(cls, settings: Settings, answers: Callable[[str, bool], None], *, sessions: bool) -> Lanes:
        """Lanes to the node's store, for the running loop. Nothing is opened before the start."""
        loop, patience = asyncio.get_running_loop(), settings.store_patience

        def lane(name: str, patience: float | None = patience, **how: Any) -> Lane:
            # It waits for a lock for a second at most: then the lane looks whether it may go on trying.
            opened = partial(_opened, settings, busy_timeout=1.0, **how)
            return Lane(name, opened, loop, answers, patience, reads=how.get("read_only", False))

        return cls(
            turns=lane("turns", None, durable=False, cache_mb=16, steady=True),
            records=lane("records", None, durable=False),
            intake=lane("intake", durable=True),
            glance=lane("glance", read_only=True),
            reader=lane("reader", read_only=True),
            upkeep=lane("upkeep", durable=False),
            sessions=lane("sessions", told_again=True) if sessions else None,
        )

    def all(self) -> list[Lane]:
        lanes = [self.turns, self.records, self.intake, self.glance, self.reader, self.upkeep]
        return lanes if self.sessions is None else [*lanes, self.sessions]

    async def start(self) -> None:
        for lane in self.all():
            await lane.start()

    async def stop(self) -> None:
        await asyncio.gather(*(lane.stop() for lane in self.all()))


def _opened(settings: Settings, **how: Any) -> Store:
    """The node's store, which was there when the node started: a file that is missing now was deleted, and no other is made for it."""
    if not database.exists(settings.store, settings.data_dir):
        path = database.sqlite_path(settings.store, settings.data_dir)
        raise StoreGone(
            f"the database {path} was deleted while it was in use; nothing was stored. Stop the node, put the file back, start it again"
        )
    return Store.open(settings.store, settings.data_dir, **how)


def _resolve(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
