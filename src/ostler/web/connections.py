"""Connections of clients: what each may take of the node's files, memory and patience before anybody knows who it is."""

from __future__ import annotations

import asyncio
import json
import resource
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ostler.web.peers import Peers

PEER = "ostler.uid"  # the key of a request's scope with the user at the other end, or None

RESERVE = 64  # files, at the least, that are kept for the node itself; and a quarter of what it may have open
MAX_HEAD = 65_536  # bytes of a request's first line and headers
MAX_URL = 16_384
MAX_HEADERS = 200
MAX_UNFINISHED = 16_777_216  # bytes of heads that are still on their way, of all connections together
_PATIENCE = 30.0  # seconds until a client must have sent the head of a request
_HEAD_PIECE, _BODY_PIECE = 8192, 65_536  # what is parsed at once; the first is how exactly a head is measured
_PIPELINED = 64  # requests that may wait behind the one that is answered
_DRAIN_BYTES = (
    67_108_864  # what is still read and dropped of a refused body, so that its sender comes to see the answer
)
_DRAIN_SECONDS = 10.0
_BODY_SILENCE = 60.0  # seconds without a byte of a body that has begun


class _TooMuch(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Connection(HttpToolsProtocol):
    """Refused when only the reserve of files is left; closed when its client sends too much, or nothing."""

    head_patience = _PATIENCE
    body_patience = _BODY_SILENCE
    drain_patience = _DRAIN_SECONDS
    peers = Peers()
    unfinished = 0  # bytes of heads on their way, of all connections
    _peer: int | None = None
    _waiting: asyncio.TimerHandle | None = None
    _in_head = _in_body = False
    _counted = 0  # this connection's part of `unfinished`
    _excess: _TooMuch | None = None
    _dropped = 0
    _mute = 0  # bytes behind the head that were no body: chunk headers and trailers
    _body_clock: asyncio.TimerHandle | None = None
    _leaving: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if allowed != resource.RLIM_INFINITY and len(self.connections) > allowed - max(RESERVE, allowed // 4):
            transport.abort()
            return
        if self.client and self.server and self.server[1] is not None:
            self._peer = self.peers.uid(self.client, (self.server[0], self.server[1]))
        self._waiting = self.loop.call_later(self.head_patience, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
        self._time_body(None)
        self._count(0)
        self.pipeline.clear()  # nobody is there for the answers
        super().connection_lost(exc)

    # ---- the head of a request

    def data_received(self, data: bytes) -> None:
        """Parse in pieces, and look after each how much of a head has come without its end."""
        try:
            while data and self._leaving is None and not self.transport.is_closing():
                size = _BODY_PIECE if self._in_body else _HEAD_PIECE
                piece, data = data[:size], data[size:]
                began_here = not self._in_head
                if self._in_body:
                    self._mute += len(piece)  # taken back by `on_body`
                if not self._feed(piece):
                    return
                if self._in_body:
                    self._check_body()
                if self._in_head and not (began_here and size == _BODY_PIECE):
                    self._count(self._counted + len(piece))
                    self._check_head()
        except _TooMuch as error:
            self._refuse(error)
        if self._leaving is not None:
            self._drop(len(data))

    def _feed(self, data: bytes) -> bool:
        """Whether more can follow. As uvicorn's own, but for our limits."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            if self._excess is not None:
                raise self._excess from None
            self.send_400_response("Invalid HTTP request received.")
            return False
        except httptools.HttpParserUpgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            else:
                self._unsupported_upgrade_warning()
            return False
        return True

    def _count(self, size: int) -> None:
        """Note how much of an unfinished head is here; it must be whole in time."""
        if size and not self._counted and self._waiting is None:
            self._waiting = self.loop.call_later(self.head_patience, self.transport.abort)
        elif not size and self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        Connection.unfinished += size - self._counted
        self._counted = size

    def _check_head(self) -> None:
        if self._counted > MAX_HEAD:
            raise _TooMuch(431, "HEAD_TOO_LARGE", f"a request may have {MAX_HEAD} bytes of headers, found more")
        if Connection.unfinished > MAX_UNFINISHED:
            raise _TooMuch(503, "BUSY", "too many requests are unfinished at once; try again")

    def _check_body(self) -> None:
        """A body is on its way: it may not stop, and what is not data in it is as bounded as a head."""
        if self._mute > MAX_HEAD + _BODY_PIECE:
            raise _TooMuch(431, "HEAD_TOO_LARGE", f"a request may have {MAX_HEAD} bytes of trailers, found more")
        if self.cycle is None or not self.cycle.response_complete:
            self._time_body(self.body_patience)

    def _time_body(self, seconds: float | None) -> None:
        if self._body_clock is not None:
            self._body_clock.cancel()
        self._body_clock = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    def _stop(self, status: int, code: str, message: str) -> None:
        """End the parsing from inside one of its callbacks."""
        self._excess = _TooMuch(status, code, message)
        raise self._excess

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self.scope[PEER] = self._peer  # type: ignore[literal-required]

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL:
            self._stop(414, "URL_TOO_LONG", f"the URL of a request may have {MAX_URL} bytes, found more")

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._stop(431, "HEAD_TOO_LARGE", f"a request may have {MAX_HEADERS} headers, found more")

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= _PIPELINED:
            self._stop(429, "BUSY", f"at most {_PIPELINED} requests may wait on one connection")
        self._in_head, self._in_body, self._dropped, self._mute = False, True, 0, 0
        self._count(0)
        super().on_headers_complete()
        if self.cycle is not None:  # None where it becomes a WebSocket
            self.cycle.transport = _Exit(self)  # type: ignore[assignment]

    # ---- its body, also where nobody reads it

    def on_body(self, body: bytes) -> None:
        self._mute = 0
        super().on_body(body)
        if self.cycle is not None and self.cycle.response_complete:
            self._drop(len(body))

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_body = False
        self._time_body(None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._leaving is not None:
            self._unset_keepalive_if_required()
        elif self._in_body:  # answered, and the rest of its body is still to come
            self._time_body(self.drain_patience)

    def leave(self) -> None:
        """Close, but let a client that still sends its body see the answer first: a close at once would reset it."""
        if self._in_body and self._leaving is None and not self.transport.is_closing():
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        self._leaving = self.loop.call_later(self.drain_patience, self.transport.abort)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()

    def _drop(self, size: int) -> None:
        self._dropped += size
        if self._dropped > _DRAIN_BYTES:
            self.transport.close()

    def eof_received(self) -> None:
        if self._leaving is not None:
            self.transport.close()

    def _refuse(self, error: _TooMuch) -> None:
        """Answer and close; where an earlier request is still being answered, only close."""
        self._count(0)
        asked: Any = self.cycle
        if asked is not None and not asked.response_complete:
            self.transport.close()
            return
        body = json.dumps({"error": {"code": error.code, "message": str(error)}}).encode()
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self._linger()


class _Exit:
    """The transport as one answer uses it: its close is the connection's `leave`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        self._connection.leave()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection.transport, name)
