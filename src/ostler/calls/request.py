"""HTTP/1.1 requests as they come in: bytes in, requests out, every length bounded. No I/O. Standard library, Python 3.9."""

from __future__ import annotations

import re

LONGEST_HEAD = 16_384
_LONGEST_LINE = 256  # of a chunk's size
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_HEX = re.compile(rb"[0-9A-Fa-f]{1,12}")


class BadRequest(Exception):
    """What came is not a request that can be taken. The connection cannot be used any further."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Request:
    """One request. `old`: HTTP/1.0; `keep`: the connection may stay open; `expects`: it waits for `100 Continue`."""

    __slots__ = ("body", "chunked", "expects", "headers", "keep", "length", "method", "old", "path")

    def __init__(self, method: str, path: str, old: bool, headers: dict[str, str]) -> None:
        self.method, self.path, self.old, self.headers = method, path, old, headers
        self.keep = not old and headers.get("connection", "").lower() != "close"
        self.body: bytes | bytearray = b""
        self.chunked = False
        self.length = 0
        self.expects = False


def parse_head(data: bytes, max_body: int) -> Request:
    """A head without its empty line; raises BadRequest."""
    text = data.decode("latin-1")
    first, *lines = text.split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or parts[2] not in ("HTTP/1.1", "HTTP/1.0") or not _TOKEN.fullmatch(parts[0]):
        raise BadRequest(400, "BAD_REQUEST", f"not an HTTP/1.1 request: {first[:80]!r}")
    if text.count("\n") != len(lines) or text.count("\r") != len(lines) or "\0" in text:
        raise BadRequest(400, "BAD_REQUEST", "a header has a line break or a NUL in it")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _TOKEN.fullmatch(name):
            raise BadRequest(400, "BAD_REQUEST", f"not a header: {line[:80]!r}")
        name = name.lower()
        if name in headers:
            if name in ("content-length", "transfer-encoding", "content-type"):
                raise BadRequest(400, "BAD_REQUEST", f"the header {name} is given twice")
            value = f"{headers[name]}, {value.strip()}"
        headers[name] = value.strip()
    request = Request(parts[0], parts[1].partition("?")[0], parts[2] == "HTTP/1.0", headers)
    _measure(request, max_body)
    return request


def _measure(request: Request, max_body: int) -> None:
    """How its body comes, and whether it may be that long."""
    headers = request.headers
    length, coding = headers.get("content-length"), headers.get("transfer-encoding")
    if coding is not None:
        if length is not None or request.old:
            raise BadRequest(400, "BAD_REQUEST", "transfer-encoding cannot stand beside content-length or in HTTP/1.0")
        if coding.lower() != "chunked":
            raise BadRequest(501, "NOT_IMPLEMENTED", f"transfer-encoding {coding[:40]!r} is unknown; send chunked")
        request.chunked = True
    elif length is not None:
        if not (length.isascii() and length.isdigit()):
            raise BadRequest(400, "BAD_REQUEST", f"content-length is not a number: {length[:40]!r}")
        request.length = int(length) if len(length) < 16 else 10**15
        if request.length > max_body:
            raise _too_large(max_body)
    request.expects = headers.get("expect", "").lower() == "100-continue" and (request.chunked or request.length > 0)


def _too_large(limit: int) -> BadRequest:
    return BadRequest(413, "PAYLOAD_TOO_LARGE", f"the body is larger than {limit} bytes")


class Reader:
    """The requests of one connection, one after another. `head`: that of a request whose body has not come in full."""

    __slots__ = ("_chunked", "_have", "_max", "_pending", "_view", "head")

    def __init__(self, max_body: int) -> None:
        self._max = max_body
        self._pending = b""  # part of a head, or what came after a request
        self._view: memoryview | None = None  # a body of known length, and how much of it is there
        self._have = 0
        self._chunked: _Chunked | None = None
        self.head: Request | None = None

    @property
    def begun(self) -> bool:
        """Whether part of a request has come."""
        return self.head is not None or bool(self._pending)

    @property
    def room(self) -> memoryview | None:
        """Where the next bytes of a body may be put; tell `filled` then. None: give them to `feed`."""
        return None if self._view is None else self._view[self._have :]

    def keep(self, data: bytes) -> None:
        """Bytes that came too early, for later: `feed(b"")`."""
        self._pending += data

    def feed(self, data: bytes) -> Request | None:
        """Take what came; a request once it is whole. Raises BadRequest."""
        if self.head is None:
            if self._pending:
                data = self._pending + data
                self._pending = b""
            if not data:
                return None
            end = data.find(b"\r\n\r\n")
            if end < 0 or end > LONGEST_HEAD:
                if not 65 <= data[0] <= 90:
                    raise BadRequest(400, "BAD_REQUEST", f"not an HTTP/1.1 request: {data[:40]!r}")
                if len(data) > LONGEST_HEAD:
                    raise BadRequest(431, "HEAD_TOO_LARGE", f"the head is larger than {LONGEST_HEAD} bytes")
                self._pending = data
                return None
            head = parse_head(data[:end], self._max)
            data = data[end + 4 :]
            if not head.chunked and len(data) >= head.length:
                self._pending = data[head.length :]
                head.body = data[: head.length]
                return head
            self.head = head
            if head.chunked:
                self._chunked = _Chunked(self._max)
            else:
                self._view, self._have = memoryview(bytearray(head.length)), 0
        if self._chunked is not None:
            rest = self._chunked.feed(data)
            return None if rest is None else self._whole(self._chunked.body, rest)
        assert self._view is not None
        count = min(len(data), len(self._view) - self._have)
        self._view[self._have : self._have + count] = data[:count]
        return self.filled(count, data[count:])

    def filled(self, count: int, rest: bytes = b"") -> Request | None:
        """So many bytes were put into `room`; the request once it is whole."""
        assert self._view is not None
        self._have += count
        if self._have < len(self._view):
            return None
        body = self._view.obj
        assert isinstance(body, bytearray)
        return self._whole(body, rest)

    def _whole(self, body: bytearray, rest: bytes) -> Request:
        assert self.head is not None
        request, self.head, self._view, self._chunked = self.head, None, None, None
        request.body, self._pending = body, rest
        return request


class _Chunked:
    """A body in chunks."""

    def __init__(self, limit: int) -> None:
        self.body = bytearray()
        self._limit = limit
        self._line = b""
        self._left = 0  # of the chunk
        self._state = "size"
        self._trailers = 0

    def feed(self, data: bytes) -> bytes | None:
        """Take what came; what follows the body once it is whole. Raises BadRequest."""
        at = 0
        while at < len(data):
            if self._state == "data":
                part = data[at : at + self._left]
                self.body += part
                at += len(part)
                self._left -= len(part)
                if not self._left:
                    self._state = "end"
                continue
            newline = data.find(b"\n", at)
            self._line += data[at : newline + 1] if newline >= 0 else data[at:]
            if len(self._line) > _LONGEST_LINE:
                raise BadRequest(400, "BAD_REQUEST", "a line between the chunks is too long")
            if newline < 0:
                return None
            at = newline + 1
            line, self._line = self._line.rstrip(b"\r\n"), b""
            if self._ended(line):
                return data[at:]
        return None

    def _ended(self, line: bytes) -> bool:
        if self._state == "end":
            if line:
                raise BadRequest(400, "BAD_REQUEST", "a chunk is longer than its size")
            self._state = "size"
        elif self._state == "size":
            size = line.partition(b";")[0].strip()
            if not _HEX.fullmatch(size):
                raise BadRequest(400, "BAD_REQUEST", f"not the size of a chunk: {line[:40]!r}")
            self._left = int(size, 16)
            if len(self.body) + self._left > self._limit:
                raise _too_large(self._limit)
            self._state = "data" if self._left else "trailer"
        else:
            self._trailers += 1
            if self._trailers > 100:
                raise BadRequest(400, "BAD_REQUEST", "too many trailers")
            return not line
        return False
