"""Connections to those who answer: HTTP/1.1 on a Unix socket or a port of this machine, kept open and used again, one exchange at a time on each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Callable
from typing import Protocol

import httptools

from ostler.plane.answer import Head, Headers

MAX_HEAD = 524_288  # bytes of a head or of trailers in an answer; more is no answer
_BACKLOG_PATIENCE = 5.0  # seconds for which a socket whose line is full is tried again
_RETRY = 0.005
TCP = "tcp:"

# A head as a model's worker writes it, and as a client may have it.
_PLAIN = re.compile(
    rb"HTTP/1\.1 200 OK\r\ncontent-type: [ -~]+\r\ncontent-length: (\d{1,12})\r\n(?:x-ostler-[a-z-]+: [ -~]*\r\n)*\r\n"
)


class Sink(Protocol):
    """Who gets the answer of one exchange: `answered`, `body` as often as it takes, `finished`; or `failed`, once, at any time.

    A sink that `passes` gets an answer that is whole in one read, with a plain head, as it is: `whole` takes the place of the three.
    `flush` follows what one read has brought. `full` and `drained` say whether the link takes more of the request's body.
    """

    bodiless: bool
    """The answer has no body, whatever its headers say (HEAD)."""
    is_sent: bool
    """All of the request has been handed to the link; one that is answered before is not used again."""
    passes: bool
    upgrades: bool
    """A tunnel is wanted: `101` gives one, and everything after it is `body`."""

    def informed(self, status: int) -> None: ...

    def whole(self, data: bytes, start: int) -> None: ...

    def answered(self, head: Head) -> None: ...

    def body(self, data: bytes) -> None: ...

    def flush(self) -> None: ...

    def finished(self, trailers: Headers) -> None: ...

    def failed(self, reason: str) -> None: ...

    def full(self) -> None: ...

    def drained(self) -> None: ...


def write_now(transport: asyncio.Transport, file: int, data: bytes) -> None:
    """Write to the transport's own file at once where nothing waits to be written: the loop would do it at the end of its turn, and the
    other side can begin now. What the file does not take is the transport's business, and so is every error.
    """
    sent = 0
    if not transport.is_closing() and not transport.get_write_buffer_size():
        with contextlib.suppress(OSError):
            sent = os.write(file, data)
    if sent < len(data):
        transport.write(data[sent:])


class _Garbage(Exception):
    pass


class Link(asyncio.Protocol):
    """One connection. It belongs to one exchange at a time, and to nobody while it is idle."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.used = False  # it has answered before
        self.begun = False  # a byte of the present answer has come
        self.idle_since = 0.0
        self._sink: Sink | None = None
        self._then: Callable[[], None] | None = None  # it was hung up
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self.is_closing: Callable[[], bool] = lambda: False
        self._file = -1
        self._parser = httptools.HttpResponseParser(self)
        self._head: Head | None = None
        self._in_body = self._done = self._stale = self._paused = self._tunnel = False
        self._mute = 0  # bytes without any of a body
        self._trailers: Headers = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self.is_closing = transport.is_closing
        self._file = transport.get_extra_info("socket").fileno()
        self.upstream.links.add(self)

    # ---- the request

    def begin(self, sink: Sink, data: bytes) -> None:
        """Send the head of a request, and whatever there is of its body."""
        self._sink = sink
        self.begun = self._in_body = self._done = self._stale = False
        self._head, self._mute = None, 0
        if self._trailers:
            self._trailers = []
        write_now(self._transport, self._file, data)

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def pause_writing(self) -> None:
        if self._sink is not None:
            self._sink.full()

    def resume_writing(self) -> None:
        if self._sink is not None:
            self._sink.drained()

    def pause(self) -> None:
        """Read nothing more for now: who gets it does not take it."""
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def abort(self) -> None:
        """Nobody wants the answer: the other side sees the connection closed at once."""
        self._sink = None
        self._transport.abort()

    def hang_up(self, then: Callable[[], None]) -> None:
        """Nobody wants the answer: the other side is told, and `then` is called when it has closed the connection as well."""
        self._sink, self._then = None, then
        if self._transport.is_closing():
            return
        self.resume()
        try:
            self._transport.write_eof()
        except (OSError, RuntimeError):
            self._transport.abort()

    def hand_over(self) -> asyncio.Transport:
        """The connection is somebody else's from now on."""
        self._sink = None
        self.upstream.lost(self)
        return self._transport

    def close(self) -> None:
        """As `abort`, but what was written still goes out."""
        self._sink = None
        self._transport.close()

    # ---- the answer

    def data_received(self, data: bytes) -> None:
        sink = self._sink
        if self._then is not None:
            return  # it was left
        if sink is None:  # it speaks without being asked
            self._transport.abort()
            return
        if not self.begun and sink.passes and not sink.bodiless:
            plain = _PLAIN.match(data)
            if plain is not None and plain.end() + int(plain[1]) == len(data):
                self._pass(sink, data, plain.end())
                return
        self.begun = True
        if self._tunnel:
            sink.body(data)
            sink.flush()
            return
        self._mute += len(data)
        try:
            self._parser.feed_data(data)
            if self._mute > MAX_HEAD:
                raise _Garbage(f"more than {MAX_HEAD} bytes of headers")
        except httptools.HttpParserUpgrade as at:
            self._upgrade(sink, data[at.args[0] :])
            return
        except (httptools.HttpParserError, _Garbage) as error:
            self._stale = True
            if not self._done:
                self._fail(f"it does not speak HTTP: {error.__context__ or error}")
                return
        if self._sink is not sink:
            return  # it was left in the middle of its answer
        if self._done:
            self._finish()
        else:
            sink.flush()

    def on_message_begin(self) -> None:
        if self._done:
            raise _Garbage("bytes behind the answer")
        self._head = Head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            self._trailers.append((name, value))
        elif self._head is not None:
            self._head.add(name, value)

    def on_headers_complete(self) -> None:
        head, sink = self._head, self._sink
        if head is None or sink is None:
            raise _Garbage("nobody asked")
        head.status = status = self._parser.get_status_code()
        if status < 200:
            if status == 101:
                if not (sink.upgrades and head.upgrade):
                    raise _Garbage("101 where no other protocol was asked for")
                sink.answered(head)
            else:
                sink.informed(status)
            return
        self._in_body = True
        if not head.close and self._parser.get_http_version() == "1.0":
            head.close = not self._parser.should_keep_alive()
        if sink.bodiless or status in (204, 304):
            self._done = True
            self._parser = httptools.HttpResponseParser(self)  # this one waits for a body
        sink.answered(head)

    def on_body(self, data: bytes) -> None:
        self._mute = 0
        if self._done:
            raise _Garbage("a body where there is none")
        if self._sink is not None:
            self._sink.body(data)

    def on_message_complete(self) -> None:
        if self._in_body:
            self._done = True

    def _upgrade(self, sink: Sink, rest: bytes) -> None:
        if self._head is None or self._head.status != 101:
            self._fail("it changes the protocol unasked")
            return
        self._tunnel = self._stale = True
        if rest:
            sink.body(rest)
        sink.flush()

    def _pass(self, sink: Sink, data: bytes, start: int) -> None:
        self._sink = None
        self._free(sink)
        sink.whole(data, start)

    def _finish(self) -> None:
        sink, self._sink = self._sink, None
        assert sink is not None
        assert self._head is not None
        self._stale = self._stale or self._head.close
        self._free(sink)
        sink.finished(self._trailers)

    def _free(self, sink: Sink) -> None:
        """The answer is whole: the link is free for the next one, before anybody learns of it."""
        self.resume()
        if self._stale or not sink.is_sent or self._transport.get_write_buffer_size():
            self._transport.abort()
        else:
            self.used = True
            self.upstream.give(self)

    def _fail(self, reason: str) -> None:
        sink, self._sink = self._sink, None
        self._transport.abort()
        if sink is not None:
            sink.failed(reason)

    def connection_lost(self, exc: Exception | None) -> None:
        self.upstream.lost(self)
        if self._then is not None:
            then, self._then = self._then, None
            then()
            return
        sink, head = self._sink, self._head
        if sink is None:
            return
        self._sink = None
        by_close = self._in_body and head is not None and head.length is None and not head.chunked
        if exc is None and (self._tunnel or by_close):
            sink.finished([])  # where its end is the end of the answer
        else:
            sink.failed(
                "it closed the connection in its answer" if self.begun else "it closed the connection without an answer"
            )


class Upstream:
    """One who answers, at the path of a Unix socket or at `tcp:[HOST:]PORT`. Links that are idle are kept, and the one that was used last comes first."""

    def __init__(self, path: str, *, keep: float = 60.0) -> None:
        self.path, self._keep = path, keep
        self.links: set[Link] = set()
        self._idle: list[Link] = []
        self._sweeping: asyncio.TimerHandle | None = None
        self._connecting: set[asyncio.Task[None]] = set()
        self.closed = False

    def take(self) -> Link | None:
        """A link that is open already."""
        while self._idle:
            link = self._idle.pop()
            if not link.is_closing():
                return link
        return None

    def give(self, link: Link) -> None:
        """The link is free."""
        if self.closed or link.is_closing():
            link.abort()
            return
        link.idle_since = time.monotonic()
        self._idle.append(link)
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(self._keep, self._sweep)

    def _sweep(self) -> None:
        """Close those that were not needed for long; the first are the oldest."""
        self._sweeping = None
        limit = time.monotonic() - self._keep
        while self._idle and self._idle[0].idle_since <= limit:
            self._idle.pop(0).abort()
        if self._idle:
            wait = self._idle[0].idle_since - limit
            self._sweeping = asyncio.get_running_loop().call_later(max(wait, 0.01), self._sweep)

    def connect(self, then: Callable[[Link | OSError], None]) -> None:
        """Open a link; `then` gets it, or why there is none."""
        task = asyncio.get_running_loop().create_task(self._connect(then))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, then: Callable[[Link | OSError], None]) -> None:
        then(await self.open())

    async def open(self) -> Link | OSError:
        """A new link, or why there is none. Where its line of waiting connections is full, it is tried again for a while."""
        loop, until = asyncio.get_running_loop(), time.monotonic() + _BACKLOG_PATIENCE
        while True:
            try:
                if self.path.startswith(TCP):
                    host, _, port = self.path[len(TCP) :].rpartition(":")
                    _, link = await loop.create_connection(lambda: Link(self), host or "127.0.0.1", int(port))
                else:
                    _, link = await loop.create_unix_connection(lambda: Link(self), self.path)
            except BlockingIOError as error:
                if time.monotonic() > until:
                    return error
                await asyncio.sleep(_RETRY)
            except OSError as error:
                return error
            else:
                return link

    def lost(self, link: Link) -> None:
        self.links.discard(link)
        with contextlib.suppress(ValueError):
            self._idle.remove(link)

    def close(self) -> None:
        """It is gone, or not wanted any more: idle links are closed, those in use when they are done."""
        self.closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        while self._idle:
            self._idle.pop().abort()
