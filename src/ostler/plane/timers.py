"""Deadlines by the thousand, nearly all of which are cancelled: kept in slots of time, with one timer of the loop for all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger("ostler.plane")

_SLOT = 0.02  # seconds: a deadline comes late by up to this, and never early


class Timer:
    """One deadline."""

    __slots__ = ("_number", "_slots", "callback", "what")

    def __init__(
        self, slots: dict[int, dict[Timer, None]], number: int, callback: Callable[[Any], None], what: Any
    ) -> None:
        self._slots, self._number, self.callback, self.what = slots, number, callback, what

    def cancel(self) -> None:
        slot = self._slots.get(self._number)
        if slot is not None:
            slot.pop(self, None)
            if not slot:
                del self._slots[self._number]


class Timers:
    """The deadlines of one loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._slots: dict[int, dict[Timer, None]] = {}
        self._next: asyncio.TimerHandle | None = None
        self._due = 0  # the slot for which `_next` is set

    def at(self, when: float, callback: Callable[[Any], None], what: Any) -> Timer:
        """Have `callback(what)` called at that time of the loop."""
        number = int(when / _SLOT) + 1
        timer = Timer(self._slots, number, callback, what)
        slot = self._slots.get(number)
        if slot is not None:
            slot[timer] = None
            return timer
        self._slots[number] = {timer: None}
        if self._next is None or number < self._due:
            self._set(number)
        return timer

    def _set(self, number: int) -> None:
        if self._next is not None:
            self._next.cancel()
        self._due, self._next = number, self._loop.call_at(number * _SLOT, self._ring)

    def _ring(self) -> None:
        """Slots whose deadlines were all cancelled are gone, so this comes seldom."""
        self._next = None
        now = self._loop.time()
        for number in sorted(n for n in self._slots if n * _SLOT <= now):
            while slot := self._slots.get(number):
                timer = next(iter(slot))
                timer.cancel()
                try:
                    timer.callback(timer.what)
                except Exception:
                    log.exception("a deadline failed")
        if self._slots:
            self._set(min(self._slots))
