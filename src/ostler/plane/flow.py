"""When a client's connection is read and written: whoever takes what it sends may be slow, and so may the client. And who reads it."""

from __future__ import annotations

import asyncio
import select
from abc import abstractmethod
from typing import TYPE_CHECKING

from ostler.plane.entry import Entry
from ostler.plane.request import HELD, Request
from ostler.plane.upstream import write_now

if TYPE_CHECKING:
    from ostler.plane.front import Front
    from ostler.plane.heads import Seen
    from ostler.plane.leases import Key
    from ostler.plane.loans import Loan

_GLANCE = 1.0  # how often a client that is not read is looked at: it may have gone


class Flow(Entry):
    """The part of a `Client` that pauses, resumes and lends it."""

    loop: asyncio.AbstractEventLoop
    file = -1
    is_full = False  # it does not take what is written
    lately: tuple[Seen | None, Key, float] | None = None  # its last call: head, model, and when it ended
    is_lendable = True
    _front: Front
    _now: Request | None = None  # which is being answered
    _held = b""  # not parsed yet
    _loan: Loan | None = None  # a worker reads it meanwhile
    _paused = False  # nothing is read from it
    _is_choked = False  # … because of whoever takes the body
    _stall_clock: asyncio.TimerHandle | None = None
    _glancing: asyncio.TimerHandle | None = None

    @abstractmethod
    def data_received(self, data: bytes) -> None: ...

    @abstractmethod
    def _rests(self) -> bool: ...

    @abstractmethod
    def _next(self) -> None: ...

    @abstractmethod
    def _wait_idle(self) -> None: ...

    def write(self, data: bytes) -> None:
        write_now(self.transport, self.file, data)

    def pause_writing(self) -> None:
        self.is_full = True
        now = self._now
        if now is not None:
            now.client_full()
            if now.stall is not None and self._stall_clock is None:
                self._stall_clock = self.loop.call_later(now.stall, self.transport.abort)

    def resume_writing(self) -> None:
        self.is_full = False
        if self._stall_clock is not None:
            self._stall_clock.cancel()
            self._stall_clock = None
        if self._now is not None:
            self._now.client_drained()
        elif not self._in_head and not self._in_body:
            self._next()

    def pause(self) -> None:
        """Whoever takes the body is not ready for more."""
        self._is_choked = True
        self._stop_reading()

    def _stop_reading(self) -> None:
        if self._paused or self.transport.is_closing():
            return
        self._paused = True
        self.transport.pause_reading()
        self._time_body(None)
        self._glancing = self.loop.call_later(_GLANCE, self._glance)

    def _glance(self) -> None:
        """A client that is not read is not seen to leave."""
        self._glancing = None
        if not self._paused or self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        if poll.poll(0):
            self.transport.abort()
        else:
            self._glancing = self.loop.call_later(_GLANCE, self._glance)

    def resume(self) -> None:
        """Whoever takes the body is ready for more."""
        self._is_choked = False
        self._maybe_read()

    def _maybe_read(self) -> None:
        if self._paused and not self._is_choked and len(self._held) <= HELD:
            self.read_on()
            if self._in_body and self.is_read():
                self._time_body(self.body_patience)

    def read_on(self) -> None:
        self._is_choked = False
        if self._paused:
            self._paused = False
            if self._glancing is not None:
                self._glancing.cancel()
                self._glancing = None
            if not self.transport.is_closing():
                self.transport.resume_reading()

    # ---- lent to a worker (see lending.py)

    def rests(self) -> bool:
        """Whether it is answered, takes what it is sent, and has asked nothing else so far."""
        return self._rests() and not self.transport.is_closing() and not self.transport.get_write_buffer_size()

    def lend(self, loan: Loan) -> None:
        """Somebody else reads and answers it until `take_back` or `end_loan`."""
        self._loan = loan
        self._stop_reading()

    def take_back(self, data: bytes) -> None:
        """Go on reading; this was read already."""
        self._loan = None
        if self.transport.is_closing():
            return
        if self._front.is_closing and not data:
            self.transport.close()
            return
        self._wait_idle()
        self.read_on()
        if data:
            self.data_received(data)
