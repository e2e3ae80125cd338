"""A client's connection to the data plane: its requests are parsed and answered one after another, in callbacks alone."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING

import httptools

from ostler.plane.access import tell
from ostler.plane.entry import MAX_HEADERS, MAX_URL
from ostler.plane.flow import Flow
from ostler.plane.peers import Peers
from ostler.plane.request import HELD, Request
from ostler.plane.upstream import Link

if TYPE_CHECKING:
    from ostler.plane.front import Front
    from ostler.plane.plan import Refuse

KEEP_ALIVE = 75.0  # seconds for which a connection without a request stays open
_FRAMING = frozenset({b"transfer-encoding", b"expect"})
_FIRST = 1.0  # seconds that a connection gets for its first request when the plane is about to leave
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


class Client(Flow, asyncio.Protocol):
    """One client's connection."""

    peers = Peers()

    def __init__(self, front: Front) -> None:
        self.loop = asyncio.get_running_loop()
        self.peer: int | None = None
        self.address: tuple[str, int] | None = None
        self.introduction = b""  # how it is told to the node: lines of a head
        self.is_reading = False  # inside data_received
        self.is_tunnel = False
        self.is_relayed = False  # it is a session's
        self._front = front
        self._parser = httptools.HttpRequestParser(self)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._coming: Request | None = None  # whose head or body is being parsed
        self._line: deque[Request] = deque()
        self._is_upgrading = False
        self._after = b""  # came behind the request for another protocol
        self._link: Link | None = None  # of the tunnel
        self._is_new = True  # it has asked nothing yet
        self._idle_since = 0.0
        self._idle_clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._front.clients.add(self)
        if not self.enter(transport, self._front.files()):
            return
        sock = transport.get_extra_info("socket")
        self.file = sock.fileno()
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            there, here = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
            if there and here:
                self.address = (str(there[0]), int(there[1]))
                self.peer = self.peers.uid(self.address, (str(here[0]), int(here[1])))
        self.introduction = tell(self.peer, self.address)

    def connection_lost(self, exc: Exception | None) -> None:
        self._front.clients.discard(self)
        self.exit()
        self._stop_clocks()
        self._line.clear()
        if self._loan is not None:
            self._loan.recall()
        now, self._now = self._now, None
        if now is not None:
            now.client_left()
        elif self._coming is not None:
            self._coming.client_left()
        self._front.left()

    # ---- what comes

    def data_received(self, data: bytes) -> None:
        if self._link is not None:
            self._link.write(data)
            return
        if self._is_upgrading:
            self._keep_for_later(data)
            return
        rests = self._rests()
        if rests and (found := self._front.heads.find(data)):
            self._coming = request = Request(self)
            request.repeat(*found)
            self._begin(request)
            return
        self.is_reading = True
        self.take(data)
        self.is_reading = False
        if rests and self._coming is not None and self._coming.is_plain and not self._held:
            self._front.heads.remember(data, self._coming.length or 0, self._coming.head_fields())
        if self._now is not None and not self.transport.is_closing():
            self._now.push()

    def _rests(self) -> bool:
        """Whether the next byte is the first of a request, and that request is answered at once."""
        return not (
            self._now
            or self._in_head
            or self._in_body
            or self._waiting
            or self._held
            or self._line
            or self._paused
            or self.is_full
            or self._leaving
        )

    def parse(self, piece: bytes) -> bool:
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade as at:
            self._is_upgrading = True
            self._keep_for_later(piece[at.args[0] :])
            return False
        except httptools.HttpParserError:
            if self._excess is not None:
                raise self._excess from None
            self._not_http()
            return False
        return True

    def _keep_for_later(self, data: bytes) -> None:
        """Another protocol was asked for: what follows waits until it is agreed to."""
        self._after += data
        if len(self._after) > HELD:
            self.pause()

    def _not_http(self) -> None:
        if self.is_answering():
            self.transport.close()
            return
        message = b"Invalid HTTP request received."
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(message) + message)
        self.transport.close()

    def is_held(self) -> bool:
        return bool(self._line)

    def hold(self, data: bytes) -> None:
        """Requests wait in the line already: what follows them is parsed when it is its turn."""
        self._held += data
        if len(self._held) > HELD:
            self._stop_reading()

    def is_answering(self) -> bool:
        return self._now is not None

    def is_read(self) -> bool:
        return not self._paused and self._coming is not None and not self._coming.is_over

    # ---- what the parser finds

    def on_message_begin(self) -> None:
        self._in_head = True
        self._coming = Request(self)

    def on_url(self, url: bytes) -> None:
        assert self._coming is not None
        self._coming.target += url
        if len(self._coming.target) > MAX_URL:
            self.check_url(len(self._coming.target))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # trailers are not passed on
        assert self._coming is not None
        headers = self._coming.headers
        name = name.lower()
        if name == b"content-length":
            self._coming.length = int(value)
            return
        headers.append((name, value))
        if name in _FRAMING:
            self._coming.frame(name, value)
        elif len(headers) > MAX_HEADERS:
            self.check_headers(len(headers))

    def on_headers_complete(self) -> None:
        self.head_ends(len(self._line))
        request = self._coming
        assert request is not None
        request.read_head(self._parser)
        if not request.chunked and not request.length:
            request.length, request.is_whole = 0, True
            self.body_ends()
        request.expects = request.expects and request.version == "1.1"
        if self._now is None:
            self._begin(request)
        else:
            self._line.append(request)

    def on_body(self, data: bytes) -> None:
        self.body_came()
        assert self._coming is not None
        self._coming.take(data)

    def on_message_complete(self) -> None:
        self.body_ends()
        if self._coming is not None:
            self._coming.is_whole = True
            if self._coming.is_over and self._now is None:
                self._next()

    # ---- one after another

    def _begin(self, request: Request) -> None:
        self._now, self._is_new = request, False
        request.begin(self._front.route)

    def done(self, request: Request) -> None:
        """The request is answered. What follows on this connection, or its end."""
        self._now = None
        if not request.keep or self._front.is_closing:
            self.leave()
        elif not request.is_whole:
            self.answered_early()  # its body is read and dropped
            self.read_on()
        else:
            self._next()

    def _next(self) -> None:
        if self.is_full:  # it has to take what is there first
            self._wait_idle()
        elif self._line:
            request = self._line.popleft()
            self._begin(request)
            if self._now is request and not self.is_reading:
                request.push()
            if self._held and not self._line:
                self.loop.call_soon(self._parse_held)
        elif self._held:
            self.loop.call_soon(self._parse_held)
        else:
            if self._paused:
                self.read_on()
            self._wait_idle()

    def _wait_idle(self) -> None:
        self._idle_since = self.loop.time()
        if self._idle_clock is None:
            self._idle_clock = self.loop.call_later(KEEP_ALIVE, self._look_idle)

    def _parse_held(self) -> None:
        data, self._held = self._held, b""
        if data and not self.transport.is_closing():
            self.data_received(data)
        self._maybe_read()

    def _look_idle(self) -> None:
        """One clock per connection, not one per request."""
        self._idle_clock = None
        if self._now is not None or self._in_head or self._in_body or self.transport.is_closing() or self._loan:
            return
        left = self._idle_since + KEEP_ALIVE - self.loop.time()
        if left <= 0:
            (self.transport.abort if self.is_full else self.transport.close)()
        else:
            self._idle_clock = self.loop.call_later(left, self._look_idle)

    @property
    def is_closing(self) -> bool:
        return self._front.is_closing

    def close_if_idle(self) -> None:
        """The plane stops: whoever is being answered is answered to the end, except on streams without one."""
        if self.is_relayed:
            return  # it ends with its session
        if self._loan is not None:
            self._loan.recall()
        elif self._now is not None:
            if not self._now.finishes:
                self.cut()
        elif not self._in_head and not self._in_body:
            if self._is_new:  # it was taken a moment ago, so its request is on the way
                self._is_new = False
                self.loop.call_later(_FIRST, self.close_if_idle)
            else:
                self.transport.close()

    def streams(self, request: Request) -> None:
        if self._front.is_closing and not request.finishes:
            self.loop.call_soon(self.cut)

    # ---- its end, or another protocol

    def end_loan(self, last: Refuse | None) -> None:
        """Its call has ended without an answer: this is the answer, and the connection ends with it. None: it just ends."""
        self._loan = None
        if last is None or self.transport.is_closing():
            self.transport.abort()
            return
        self._now = request = Request(self)
        request.version, request.is_whole, request.keep = "1.1", True, False
        self._in_body = True  # more of what it asked may come, and is dropped
        request.go(last)

    def cut(self) -> None:
        """End the connection in the middle of an answer, so that its client sees that it is not whole."""
        if self._now is not None and self._now.version != "1.1":
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()
        else:
            self.transport.close()
            if self._leaving is None:  # where it does not even take what is left
                self._leaving = self.loop.call_later(self.drain_patience, self.transport.abort)
        now, self._now = self._now, None
        if now is not None:
            now.client_left()

    def tunnel(self, link: Link | None) -> None:
        """Both sides have agreed to another protocol: bytes go through as they are."""
        self.is_tunnel, self._link = True, link
        self._in_body = False
        self._time_body(None)
        if self._after and link is not None:
            link.write(self._after)
            self._after = b""

    def hand_over(self) -> bytes:
        """The connection is a session's from now on, which gives it another protocol; `gone` says that it is closed. What came behind
        the request is returned.
        """
        self.is_relayed, self._in_body, self._now, self._coming = True, False, None, None
        self.exit()
        self._stop_clocks()
        self.read_on()
        after, self._after = self._after, b""
        return after

    def gone(self) -> None:
        self._front.clients.discard(self)
        self._front.left()

    def _stop_clocks(self) -> None:
        for clock in (self._idle_clock, self._stall_clock, self._glancing):
            if clock is not None:
                clock.cancel()
