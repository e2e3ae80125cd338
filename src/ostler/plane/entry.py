"""The limits of client connections: what each may take of files, memory and patience before anybody knows who it is.

Both HTTP servers use them: the data plane for its clients, and the node's own server (web/connections.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections.abc import Callable, Mapping
from http import HTTPStatus

RESERVE = 64  # files, at the least, that are kept for the process itself; and a quarter of what it may have open
MAX_HEAD = 65_536  # bytes of a request's first line and headers
MAX_URL = 16_384
MAX_HEADERS = 200
MAX_UNFINISHED = 16_777_216  # bytes of heads that are still on their way, of all connections together
PIPELINED = 64  # requests that may wait behind the one that is answered
_PATIENCE = 30.0  # seconds until a client must have sent the head of a request
_HEAD_PIECE, _BODY_PIECE = 8192, 65_536  # what is parsed at once; the first is how exactly a head is measured
_DRAIN_BYTES = 67_108_864  # read and dropped of a refused body, so that its sender comes to see the answer
_DRAIN_SECONDS = 10.0
_BODY_SILENCE = 60.0  # seconds without a byte of a body that has begun
_FILES = 65_536  # files that the process may have open, where it is allowed to

STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}
STATUS_LINES[499] = b"HTTP/1.1 499 Call Cancelled\r\n"  # of a call that an operator has cancelled


class TooMuch(Exception):
    """A client has sent more than it may; what it is answered."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def error_body(code: str, message: str) -> bytes:
    """An error as every route shapes it."""
    return json.dumps({"error": {"code": code, "message": message}}).encode()


def error_headers(status: int, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The headers that go with an error."""
    found = {"content-type": "application/json"}
    if status in (429, 503):
        found["retry-after"] = "1"
    if status == 401:
        found["www-authenticate"] = "Bearer"
    return {**found, **{name.lower(): value for name, value in (more or {}).items()}}


def allow_files() -> None:
    """Each client is an open file. The usual soft limit (1024) is for programs that use select(); the hard one is meant to be used."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # then as many as there are
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed."""
    try:
        import uvloop  # noqa: PLC0415
    except ImportError:
        return None
    return uvloop.new_event_loop


class Entry:
    """One client's connection: refused when only the reserve of files is left; closed when its client sends too much, or nothing.

    A server's protocol inherits from this, calls `enter` and `exit`, and tells of heads and bodies as its parser finds them.
    """

    head_patience = _PATIENCE
    body_patience = _BODY_SILENCE
    drain_patience = _DRAIN_SECONDS
    unfinished = 0  # bytes of heads on their way, of all connections
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    _waiting: asyncio.TimerHandle | None = None
    _in_head = _in_body = False
    _counted = 0  # this connection's part of `unfinished`
    _excess: TooMuch | None = None
    _dropped = 0
    _mute = 0  # bytes behind the head that were no body: chunk headers and trailers
    _body_clock: asyncio.TimerHandle | None = None
    _leaving: asyncio.TimerHandle | None = None

    # ---- what a server says of itself

    def parse(self, piece: bytes) -> bool:
        """Feed the parser; whether more can follow."""
        raise NotImplementedError

    def is_answering(self) -> bool:
        """Whether an earlier request is still being answered."""
        raise NotImplementedError

    def is_read(self) -> bool:
        """Whether somebody still waits for the body that is on its way."""
        raise NotImplementedError

    def read_on(self) -> None:
        """Read from the client, also where that was paused."""
        raise NotImplementedError

    # ---- the connection

    def enter(self, transport: asyncio.Transport, files: int) -> bool:
        """Begin; False (and the connection is gone) where `files` in use leave only the reserve."""
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if allowed != resource.RLIM_INFINITY and files > allowed - max(RESERVE, allowed // 4):
            transport.abort()
            return False
        self._waiting = self.loop.call_later(self.head_patience, transport.abort)
        return True

    def exit(self) -> None:
        """The connection is gone."""
        if self._leaving is not None:
            self._leaving.cancel()
        self._time_body(None)
        self._count(0)

    def data_received(self, data: bytes) -> None:
        self.take(data)

    def take(self, data: bytes) -> None:
        """Parse in pieces, and look after each how much of a head has come without its end."""
        at, end = 0, len(data)
        try:
            while at < end and self._leaving is None and not self.transport.is_closing() and not self.is_held():
                size = _BODY_PIECE if self._in_body else _HEAD_PIECE
                piece = data if not at and end <= size else data[at : at + size]
                at += len(piece)
                began_here = not self._in_head
                if self._in_body:
                    self._mute += len(piece)  # taken back by `body_came`
                if not self.parse(piece):
                    return
                if self._in_body:
                    self._check_body()
                if self._in_head and not (began_here and size == _BODY_PIECE):
                    self._count(self._counted + len(piece))
                    self._check_head()
        except TooMuch as error:
            self.refuse(error)
        if self._leaving is not None:
            self.drop(end - at)
        elif at < end:
            self.hold(data[at:])

    def is_held(self) -> bool:
        """Whether nothing more is parsed now."""
        return False

    def hold(self, data: bytes) -> None:
        """What has come and is not parsed now."""

    # ---- the head of a request

    def _count(self, size: int) -> None:
        """Note how much of an unfinished head is here; it must be whole in time."""
        if size and not self._counted and self._waiting is None:
            self._waiting = self.loop.call_later(self.head_patience, self.transport.abort)
        elif not size and self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        Entry.unfinished += size - self._counted
        self._counted = size

    def _check_head(self) -> None:
        if self._counted > MAX_HEAD:
            raise TooMuch(431, "HEAD_TOO_LARGE", f"a request may have {MAX_HEAD} bytes of headers, found more")
        if Entry.unfinished > MAX_UNFINISHED:
            raise TooMuch(503, "BUSY", "too many requests are unfinished at once; try again")

    def stop_parsing(self, status: int, code: str, message: str) -> None:
        """End the parsing from inside one of its callbacks."""
        self._excess = TooMuch(status, code, message)
        raise self._excess

    def head_begins(self) -> None:
        self._in_head = True

    def check_url(self, size: int) -> None:
        if size > MAX_URL:
            self.stop_parsing(414, "URL_TOO_LONG", f"the URL of a request may have {MAX_URL} bytes, found more")

    def check_headers(self, number: int) -> None:
        if number > MAX_HEADERS:
            self.stop_parsing(431, "HEAD_TOO_LARGE", f"a request may have {MAX_HEADERS} headers, found more")

    def head_ends(self, pipelined: int) -> None:
        if pipelined >= PIPELINED:
            self.stop_parsing(429, "BUSY", f"at most {PIPELINED} requests may wait on one connection")
        self._in_head, self._in_body, self._dropped, self._mute = False, True, 0, 0
        if self._counted or self._waiting is not None:
            self._count(0)

    # ---- its body, also where nobody reads it

    def _check_body(self) -> None:
        """A body is on its way: it may not stop, and what is not data in it is as bounded as a head."""
        if self._mute > MAX_HEAD + _BODY_PIECE:
            raise TooMuch(431, "HEAD_TOO_LARGE", f"a request may have {MAX_HEAD} bytes of trailers, found more")
        if self.is_read():
            self._time_body(self.body_patience)

    def _time_body(self, seconds: float | None) -> None:
        if self._body_clock is not None:
            self._body_clock.cancel()
        self._body_clock = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    def body_came(self) -> None:
        self._mute = 0

    def body_ends(self) -> None:
        self._in_body = False
        if self._body_clock is not None:
            self._time_body(None)

    def answered_early(self) -> None:
        """Answered, and the rest of its body is still to come."""
        self._time_body(self.drain_patience)

    def drop(self, size: int) -> None:
        """Count what is read for nobody."""
        self._dropped += size
        if self._dropped > _DRAIN_BYTES:
            self.transport.close()

    # ---- the end

    def leave(self) -> None:
        """Close, but let a client that still sends its body see the answer first: a close at once would reset it."""
        if self._in_body and self._leaving is None and not self.transport.is_closing():
            self.linger()
        else:
            self.transport.close()

    def linger(self) -> None:
        self._leaving = self.loop.call_later(self.drain_patience, self.transport.abort)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.read_on()

    def eof_received(self) -> None:
        if self._leaving is not None:
            self.transport.close()

    def refuse(self, error: TooMuch) -> None:
        """Answer and close; where an earlier request is still being answered, only close."""
        self._count(0)
        if self.is_answering():
            self.transport.close()
            return
        body = error_body(error.code, str(error))
        head = STATUS_LINES[error.status] + b"content-type: application/json\r\n"
        head += b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(head + body)
        self.linger()
