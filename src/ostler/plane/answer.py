"""An answer: its head, as an upstream sends it, and how its client gets it, with a body of which the client can tell the end, and trailers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ostler.plane.entry import STATUS_LINES

if TYPE_CHECKING:
    from ostler.plane.client import Client
    from ostler.plane.request import Request


HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)

Headers = list[tuple[bytes, bytes]]


class Head:
    """The beginning of an answer. `headers` have names in lower case, and only those that are for the client."""

    status = 0
    upgrade = b""
    length: int | None = None
    chunked = False
    close = False  # the other side closes after this answer

    def __init__(self) -> None:
        self.headers: Headers = []

    def get(self, name: bytes) -> bytes | None:
        return next((value for found, value in self.headers if found == name), None)

    def add(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name not in HOP:
            if name == b"content-length" and value.isdigit():
                self.length = int(value)
            self.headers.append((name, value))
        elif name == b"transfer-encoding":
            self.chunked = value.lower().endswith(b"chunked")
        elif name == b"upgrade":
            self.upgrade = value
        elif name == b"connection":
            self.close = self.close or b"close" in value.lower()


class Answer:
    """The bytes of one answer; `flush` writes those that were added. It does not know its request, so both are free when they are over."""

    is_chunked = False  # nobody knows its length: each piece says its own
    is_events = False  # an event stream

    def __init__(self, client: Client, head: bytes = b"") -> None:
        self._client = client
        self._out = [head] if head else []

    def begin(self, request: Request, status: int, headers: Iterable[tuple[bytes, bytes]], *, measured: bool) -> None:
        """The head. Without a length, a client of HTTP/1.0 learns from the closed connection where the body ends."""
        out = self._out
        out.append(STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status)
        for name, value in headers:
            out += (name, b": ", value, b"\r\n")
            if name == b"content-type":
                self.is_events = value.startswith(b"text/event-stream")
        if not measured and not request.bodiless and status not in (204, 304):
            if request.version == "1.1":
                self.is_chunked = True
                out.append(b"transfer-encoding: chunked\r\n")
            else:
                request.keep = False
        out.append(b"\r\n" if request.keep else b"connection: close\r\n\r\n")

    def body(self, data: bytes) -> None:
        if self.is_chunked:
            self._out += (b"%x\r\n" % len(data), data, b"\r\n")
        else:
            self._out.append(data)

    def end(self, trailers: Headers) -> None:
        """The body is whole."""
        if self.is_chunked:
            self._out.append(b"0\r\n")
            self._out += [part for name, value in trailers for part in (name, b": ", value, b"\r\n")]
            self._out.append(b"\r\n")
        self.flush()

    def flush(self) -> None:
        if self._out:
            data = b"".join(self._out)
            self._out.clear()
            self._client.write(data)


def switching(head: Head, more: Sequence[tuple[bytes, bytes]] = ()) -> bytes:
    """An upstream's 101, for the client; `more` are further headers."""
    lines = [b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: ", head.upgrade, b"\r\n"]
    lines += [part for name, value in (*head.headers, *more) for part in (name, b": ", value, b"\r\n")]
    return b"".join([*lines, b"\r\n"])
