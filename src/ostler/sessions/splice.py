"""Two connections as one: bytes go through as they come, until one of them ends or a limit is reached. Standard library alone.

Each side is read only as fast as the other takes it, and the end of one direction is passed on. For WebSocket the headers of the
frames are followed, so that a ping or a close frame can be put between two frames: the client always learns why a session ended,
unless the end comes in the middle of a frame. Callbacks alone: no task, and no copy of what goes through.

A client that talks much is lent to a worker that takes connections (lending.py). The data plane and a worker's own door both use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ostler import tcp
from ostler.sessions import frames

if TYPE_CHECKING:
    from ostler.sessions.lending import Loan

LINGER = 5.0  # seconds that a side gets to take what was written last and to close
_HALF = 30.0  # seconds that a TCP client gets to end its own direction after the worker has
_NEWS = 0.6  # seconds in which somebody may say why a worker broke off its connection
_LOOK_AGAIN = 1.0
_PING = 8  # bytes in our pings
_PONG = 6 + _PING  # a client's answer is masked
_BUSY = 0.05  # seconds between two pieces of one side, at most, while it is busy
_MUCH = 50  # pieces in a row: worth lending


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a session may last, in seconds; 0: no limit."""

    idle: float = 0.0  # without a byte but for pings
    longest: float = 0.0  # in all
    ping: float = 0.0  # a client that sent nothing for so long is asked; after two without an answer it is gone
    slow: float = 60.0  # a client that takes nothing of what waits for it


class End(NamedTuple):
    """Why it ended. `code` is what the client was told, or said."""

    reason: str
    text: str
    code: int


class Side(asyncio.Protocol):
    """One of the two connections."""

    other: Side

    def __init__(self, splice: Splice, transport: asyncio.Transport) -> None:
        self.splice, self.transport = splice, transport
        self.track = frames.Track(lambda: splice.said_close(self)) if splice.is_websocket else None
        self.file: int = transport.get_extra_info("socket").fileno()
        self.count = 0  # bytes that came from it
        self.row = 0  # pieces that came one right after another
        self.heard = self.active = splice.time()  # when anything came, and more than pings
        self.is_full = self.is_paused = self.has_ended = self.is_lost = False

    def data_received(self, data: bytes) -> None:
        """Passed on before it is looked at: the other side can begin meanwhile."""
        splice = self.splice
        if len(data) != _PONG or not splice.is_our_pong(self, data):
            self.other.write(data)
        else:
            splice.kept += _PONG
        self.count += len(data)
        now = splice.time()
        self.row = self.row + 1 if now - self.heard < _BUSY else 0
        self.heard = now
        if self.track is None or self.track.feed(data):
            self.active = now
        if splice.loan is not None:
            splice.loan.passed()
        elif self.row >= _MUCH and splice.lend is not None:
            splice.offer(splice.lend)

    def write(self, data: bytes) -> None:
        """At once where nothing waits to be written: the loop would do it at the end of its turn, and the other side can begin now."""
        transport, sent = self.transport, 0
        if not transport.get_write_buffer_size() and not transport.is_closing():
            try:
                sent = os.write(self.file, data)
            except OSError:
                sent = 0  # the transport meets it, too
            if sent == len(data):
                return
        if not transport.is_closing():
            transport.write(data[sent:])

    def pause_writing(self) -> None:
        self.is_full = True
        self.other.pause()
        self.splice.is_slow(self)

    def resume_writing(self) -> None:
        self.is_full = False
        self.other.resume()

    def pause(self) -> None:
        if not self.is_paused and not self.has_ended and not self.transport.is_closing():
            self.is_paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self.is_paused:
            self.is_paused = False
            if not self.has_ended and not self.transport.is_closing():
                self.transport.resume_reading()

    def eof_received(self) -> bool:
        self.has_ended = True
        return self.splice.ended(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.has_ended = self.is_lost = True
        self.splice.lost(self)

    def send_eof(self) -> None:
        if not self.transport.is_closing():
            with contextlib.suppress(OSError, RuntimeError):
                self.transport.write_eof()


class Splice:
    """One session's bytes. `over` is called once, when it has ended; `gone` when both connections are closed, too."""

    def __init__(
        self,
        client: asyncio.Transport,
        worker: asyncio.Transport,
        limits: Limits,
        over: Callable[[Splice], None],
        gone: Callable[[], None] = lambda: None,
        *,
        websocket: bool = True,
        far: str = "the worker",
        lend: Callable[[Splice], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.time = self._loop.time
        self.limits, self.is_websocket = limits, websocket
        self._far = far  # what the other end is called when it breaks off
        self._over, self._gone = over, gone
        self.lend = lend
        self.loan: Loan | None = None
        self.lent_in = self.lent_out = 0  # bytes of the client's while it was lent
        self.kept = 0  # bytes of the client's that did not go to the worker
        self.began = self.time()
        self.end: End | None = None
        self.client, self.worker = self.sides(client, worker)
        self.client.other, self.worker.other = self.worker, self.client
        self._first: Side | None = None  # whose direction ended first
        self.closer: Side | None = None  # whose close frame was the first
        self._closing = 0.0  # when that was
        self._pinged, self._pings = 0.0, 0
        self._payload = secrets.token_bytes(_PING)
        self._full_since = 0.0
        self._clock: asyncio.TimerHandle | None = None
        self._leaving: asyncio.TimerHandle | None = None

    def sides(self, client: asyncio.Transport, worker: asyncio.Transport) -> tuple[Side, Side]:
        return Side(self, client), Side(self, worker)

    def start(self, to_client: bytes = b"", to_worker: bytes = b"") -> None:
        """Both connections are the splice's from now on. What came from either side before goes first."""
        if not self.is_websocket and self.limits.ping:
            tcp.keep_alive(self.client.transport, self.limits.ping, self.limits.ping, 2)
        for side, early in ((self.worker, to_client), (self.client, to_worker)):
            side.transport.set_protocol(side)
            if early:
                side.data_received(early)
        self._look()

    # ---- what is known of it

    @property
    def bytes_in(self) -> int:
        """From the client."""
        return self.client.count + self.lent_in

    @property
    def bytes_out(self) -> int:
        return self.worker.count + self.lent_out

    @property
    def idle(self) -> float:
        """Seconds without anything but pings."""
        return self.time() - max(self.client.active, self.worker.active)

    def is_our_pong(self, side: Side, data: bytes) -> bool:
        """Whether that, as long as such an answer, is the client's to a ping of ours, and nothing else: the worker did not ask for it."""
        return (
            self._pinged > 0
            and side is self.client
            and side.track is not None
            and side.track.between
            and data[0] == 0x80 | frames.PONG
            and frames.masked(data[6:], data[2:6]) == self._payload
        )

    def offer(self, lend: Callable[[Splice], None]) -> None:
        """Lend the client, if it can be: between two of its frames, while neither side waits for the other."""
        client, worker = self.client, self.worker
        client.row = worker.row = 0
        if self.end is not None or self.closer is not None or client.track is None or not client.track.between:
            return
        if not (client.is_full or client.is_paused or client.has_ended or worker.is_full or worker.has_ended):
            lend(self)

    # ---- the clock

    def later(self, seconds: float, then: Callable[[], None]) -> None:
        """Unless it is over by then."""
        self._loop.call_later(seconds, lambda: then() if self.end is None else None)

    def is_slow(self, side: Side) -> None:
        if side is self.client:
            self._full_since = self.time()
            self.look_by(self._full_since + self.limits.slow)

    def look_by(self, when: float) -> None:
        when = max(when, self.time() + 0.01)
        if self.end is None and (self._clock is None or when < self._clock.when()):
            if self._clock is not None:
                self._clock.cancel()
            self._clock = self._loop.call_at(when, self._look)

    def _look(self) -> None:
        """Is a limit reached? When the next may be."""
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
        if self.end is not None:
            return
        now, limits = self.time(), self.limits
        due = [self._look_at_client(now)]
        if self.closer is not None:
            due.append(self._closing + LINGER)
            if now >= due[-1]:
                self._finish_by(self.closer)
        if limits.longest:
            due.append(self.began + limits.longest)
            if now >= due[-1]:
                self.finish("longest", f"ostler: the session reached its limit of {limits.longest:g} s", 1008)
        if limits.idle:
            due.append(max(self.client.active, self.worker.active) + limits.idle)
            if now >= due[-1]:
                self.finish("idle", f"ostler: the session was idle for {limits.idle:g} s", 1008)
        if self.end is None:
            self.look_by(min(due))

    def _look_at_client(self, now: float) -> float:
        client, limits = self.client, self.limits
        if self.loan is not None:
            return self.loan.look(now)
        if client.is_full:
            due = self._full_since + limits.slow
            if now >= due:
                self.finish("slow", f"ostler: the client took nothing for {limits.slow:g} s", 1008)
            return due
        if client.is_paused:  # the worker takes nothing: the client is not read, and is not seen to leave
            if tcp.has_left(client.file):
                self.ended(client)
            return now + _LOOK_AGAIN
        if not limits.ping or not self.is_websocket:
            return now + 3600.0
        if client.heard >= self._pinged:
            self._pings = 0
        due = max(client.heard, self._pinged) + limits.ping
        if now < due:
            return due
        if self._pings >= 2:
            self.finish("silent", f"ostler: the client did not answer pings for {2 * limits.ping:g} s", 1008)
            return due
        return self._ping(now)

    def _ping(self, now: float) -> float:
        if not self.may_write():
            return now + min(_LOOK_AGAIN, self.limits.ping)
        self._pinged, self._pings = now, self._pings + 1
        self.client.write(frames.ping(self._payload))
        return now + self.limits.ping

    # ---- the end

    def may_write(self) -> bool:
        """Whether a frame of our own can be written to the client: between two of the worker's, and before a close."""
        track, loan = self.worker.track, self.loan
        if (
            track is None
            or not track.between
            or track.closed is not None
            or (loan is not None and not loan.may_write())
        ):
            return False
        return not self.client.transport.is_closing()

    def said_close(self, side: Side) -> None:
        """Its close frame went by: the rest is up to the two of them, for a while."""
        if self.closer is None and not (side is self.worker and self.loan is not None and self.loan.tells_more):
            self.closer, self._closing = side, self.time()
            self.look_by(self._closing + LINGER)

    def ended(self, side: Side) -> bool:
        """Nothing more comes from that side; whether its connection stays open for what goes there."""
        if self.end is not None:
            side.transport.close()
            return False
        first = self._first = self._first or side
        if not self.is_websocket:
            side.other.send_eof()
            if side.other.has_ended:
                self._finish_by(first)
            elif side is self.worker:
                self._loop.call_later(_HALF, self._finish_by, side)
        elif self.closer is not None:
            self._finish_by(self.closer)
        elif side is self.client:
            self._finish_by(side) if first is side else self.break_off()
        else:  # it broke off: whoever watches the process may know why in a moment
            self.later(_NEWS, self.break_off)
        return True

    def lost(self, side: Side) -> None:
        if self.end is None:
            self.ended(side)
            if self.end is None and not self.is_websocket:
                self._finish_by(self._first or side)
        if self.client.is_lost and self.worker.is_lost and self.end is not None:
            self._release()

    def _release(self) -> None:
        """Both connections are closed. What leads back here is let go: what is over is freed at once."""
        for clock in (self._clock, self._leaving):
            if clock is not None:
                clock.cancel()
        gone, self._gone = self._gone, lambda: None
        for side in (self.client, self.worker):
            side.track = None
            side.splice = side.other = None  # type: ignore[assignment]
        gone()

    def _finish_by(self, side: Side) -> None:
        closed = side.track.closed if side.track is not None else None
        who = "client" if side is self.client else "worker"
        code, text = closed or (frames.ABNORMAL if self.is_websocket else 1000, "")
        self.finish(who, text, code, tell=False)

    def break_off(self) -> None:
        """The worker has, and nobody knows why."""
        if self.closer is not None or ((track := self.worker.track) and track.closed):
            self._finish_by(self.closer or self.worker)
        else:
            self.finish("worker", f"ostler: {self._far} closed the connection without a close frame", 1011)

    def finish(self, reason: str, text: str, code: int, *, tell: bool = True) -> None:
        """End it now. `tell`: with a close frame for the client, where one can be written."""
        if self.end is not None:
            return
        self.end = End(reason, text, code)
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
        if tell and self.may_write():
            self.client.write(frames.close(code, text))
        if self.loan is not None:
            self.loan.end()
        self.worker.transport.close()
        self._let_go(self.client)
        over, self._over = self._over, lambda _: None
        over(self)
        if self.client.is_lost and self.worker.is_lost:
            self._release()

    def _let_go(self, side: Side) -> None:
        """Let it take what was written, and close. A close at once would reset a connection on which something still comes."""
        if side.has_ended:
            side.transport.close()
        else:
            side.send_eof()
            side.resume()
        self._leaving = self._loop.call_later(LINGER, self._abort)

    def _abort(self) -> None:
        for side in (self.client, self.worker):
            side.transport.abort()
