"""Connections of a program that calls models: HTTP/1.1, kept open and used again. Standard library alone.

Both kinds have the same methods, all of them coroutines, so an exchange is written once (client.py). Those of a blocking link
never wait: they block, and `run` drives them without an event loop.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import asyncio
    import ssl

T = TypeVar("T")

LONGEST_LINE = 65_536  # of a head, or between chunks
_CONNECT = 10.0  # seconds until a node must have taken the connection
_KEPT = 30.0  # seconds for which an idle connection is used again; the node closes it after 75
_MOST_KEPT = 16  # idle connections of an event loop; a thread has one


class NotSent(OSError):
    """The connection was gone before a byte was sent: the call can be made on another one."""


class Where(NamedTuple):
    """Where a node is."""

    host: str
    port: int
    tls: bool

    @classmethod
    def of(cls, url: str) -> Where:
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        return cls(parts.hostname or "127.0.0.1", parts.port or (443 if tls else 80), tls)


class Link(Protocol):
    """One connection. Who fails on it closes it."""

    where: Where
    idle_since: float

    async def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send them all. Raises NotSent, or another OSError when some of it may have gone out."""
        ...

    async def line(self) -> bytes:
        """A line with its end; less at the end of input. Raises ValueError when it is too long."""
        ...

    async def some(self, size: int) -> bytes:
        """Up to so many bytes, b"" at the end of input."""
        ...

    def close(self) -> None: ...


class Links(Protocol):
    """Where links come from, and go to when their answer is whole."""

    async def take(self, where: Where, until: float | None) -> Link:
        """One that is open, or a new one. `until`: by the monotonic clock, when the call is over."""
        ...

    def give(self, link: Link) -> None: ...


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine on blocking links."""
    try:
        work.send(None)
    except StopIteration as done:
        found: T = done.value
        return found
    work.close()
    raise AssertionError("a coroutine on a blocking link has waited")


# ---- blocking


class BlockingLink:
    """A socket. Each operation ends with TimeoutError when the call's time is over."""

    def __init__(self, where: Where, until: float | None) -> None:
        self.where, self.until = where, until
        self.idle_since = 0.0
        left = _CONNECT if until is None else max(0.001, min(_CONNECT, until - time.monotonic()))
        self._socket = socket.create_connection((where.host, where.port), left)
        try:
            _prepare(self._socket)
            if where.tls:
                self._socket = _context().wrap_socket(self._socket, server_hostname=where.host)
        except BaseException:
            self._socket.close()
            raise
        self._file = self._socket.makefile("rb")
        self.close = weakref.finalize(self, _shut, self._file, self._socket)

    def _clock(self) -> None:
        if self.until is None:
            self._socket.settimeout(None)
            return
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    async def send(self, parts: Sequence[bytes | memoryview]) -> None:
        sent = False
        for part in parts:
            rest = memoryview(part)
            while rest:
                self._clock()
                try:
                    rest = rest[self._socket.send(rest) :]
                except TimeoutError:
                    raise
                except OSError as error:
                    raise error if sent else NotSent(str(error)) from error
                sent = True

    async def line(self) -> bytes:
        self._clock()
        found = self._file.readline(LONGEST_LINE + 1)
        if len(found) > LONGEST_LINE:
            raise ValueError("a line of the answer is too long")
        return found

    async def some(self, size: int) -> bytes:
        self._clock()
        return self._file.read1(size)

    def is_open(self) -> bool:
        """Whether the node has neither closed it nor said anything unasked."""
        self._socket.settimeout(0)
        try:
            self._socket.recv(1, 0 if self.where.tls else socket.MSG_PEEK)
        except (BlockingIOError, OSError) as error:
            return isinstance(error, BlockingIOError) or type(error).__name__ == "SSLWantReadError"
        return False


def _shut(*opened: Any) -> None:
    for one in opened:
        with contextlib.suppress(OSError):
            one.close()


class BlockingLinks(threading.local):
    """One link for each thread; after a fork, a new one."""

    _kept: BlockingLink | None = None
    _pid = 0

    async def take(self, where: Where, until: float | None) -> Link:
        link, self._kept = self._kept, None
        if link is not None:
            young = time.monotonic() - link.idle_since < _KEPT
            if self._pid == os.getpid() and link.where == where and young and link.is_open():
                link.until = until
                return link
            link.close()
        return BlockingLink(where, until)

    def give(self, link: Link) -> None:
        assert isinstance(link, BlockingLink)
        link.idle_since, self._pid = time.monotonic(), os.getpid()
        self._kept = link


# ---- on an event loop


class LoopLink:
    """A connection of an event loop. Who uses it limits the time."""

    def __init__(self, where: Where, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.where, self._reader, self._writer = where, reader, writer
        self.idle_since = 0.0

    async def send(self, parts: Sequence[bytes | memoryview]) -> None:
        if not self.is_open():
            raise NotSent("the connection was closed")
        self._writer.writelines(parts)
        await self._writer.drain()

    async def line(self) -> bytes:
        import asyncio  # noqa: PLC0415

        try:
            return await self._reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            return error.partial
        except asyncio.LimitOverrunError:
            raise ValueError("a line of the answer is too long") from None

    async def some(self, size: int) -> bytes:
        return await self._reader.read(size)

    def is_open(self) -> bool:
        return not (self._writer.is_closing() or self._reader.at_eof())

    def close(self) -> None:
        self._writer.transport.abort()


class _Idle:
    """The idle links of one event loop. They are closed with it: a loop that is shut down closes its async generators first."""

    def __init__(self) -> None:
        self.links: list[LoopLink] = []
        self._closing: AsyncIterator[None] | None = None

    async def open(self) -> None:
        if self._closing is None:
            self._closing = self._close_at_the_end()
            await anext(self._closing)

    async def _close_at_the_end(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            while self.links:
                self.links.pop().close()


class LoopLinks:
    """The links of all event loops of this process."""

    def __init__(self) -> None:
        self._idle: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Idle] = weakref.WeakKeyDictionary()

    async def take(self, where: Where, until: float | None) -> Link:
        import asyncio  # noqa: PLC0415  who never awaits does not load it

        idle = self._idle.setdefault(asyncio.get_running_loop(), _Idle())
        await idle.open()
        while idle.links:
            link = idle.links.pop()
            if link.where == where and link.is_open() and time.monotonic() - link.idle_since < _KEPT:
                return link
            link.close()
        context = _context() if where.tls else None
        async with asyncio.timeout(_CONNECT):
            reader, writer = await asyncio.open_connection(where.host, where.port, ssl=context, limit=LONGEST_LINE)
        _prepare(writer.get_extra_info("socket"))
        return LoopLink(where, reader, writer)

    def give(self, link: Link) -> None:
        import asyncio  # noqa: PLC0415

        assert isinstance(link, LoopLink)
        idle = self._idle.get(asyncio.get_running_loop())
        if idle is None or len(idle.links) >= _MOST_KEPT:
            link.close()
            return
        link.idle_since = time.monotonic()
        idle.links.append(link)


def _prepare(connected: socket.socket) -> None:
    """Small requests go out at once; a node whose machine has gone is noticed within two minutes."""
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    ):
        connected.setsockopt(level, option, value)


def _context() -> ssl.SSLContext:
    import ssl  # noqa: PLC0415  few calls need it

    return ssl.create_default_context()
