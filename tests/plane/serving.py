"""A plane in this process, and upstreams that say exactly what a test tells them to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from ostler.plane.entry import loop_factory
from ostler.plane.plan import Forward, Plan
from ostler.plane.front import Front
from ostler.plane.request import Request
from ostler.plane.upstream import Upstream

PATIENCE = 30.0
Say = Callable[["Upside"], Awaitable[None]]


class Upside:
    """The upstream's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def head(self) -> tuple[str, dict[str, str]]:
        """The request line and headers of the next request; what it may not have twice, it has not."""
        text = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = text.strip().split("\r\n")
        return first, {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}

    async def request(self) -> tuple[str, dict[str, str], bytes]:
        first, headers = await self.head()
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(await self.reader.readline(), 16):
                body += await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            await self.reader.readline()
            return first, headers, body
        return first, headers, await self.reader.readexactly(int(headers.get("content-length", 0)))

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, body: bytes = b"", status: str = "200 OK", headers: str = "") -> None:
        await self.say(f"HTTP/1.1 {status}\r\n{headers}content-length: {len(body)}\r\n\r\n".encode() + body)

    async def closed(self) -> None:
        """Returns when the plane has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass


class Stage:
    """A front, and one upstream behind it."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "u.sock")
        self.upstream = Upstream(self.path)
        self.forward = Forward(self.upstream)
        self.route: Callable[[Request], Plan] = lambda request: self.forward
        self.connections = 0
        self.ends: list[str] = []
        self.failures: list[tuple[str, bool]] = []

    def told(self, **more: object) -> Forward:
        """A plan whose callbacks are noted."""
        return Forward(
            self.upstream,
            failed=lambda request, reason, sent: self.failures.append((reason, sent)),
            ended=lambda request, how: self.ends.append(how),
            **more,  # type: ignore[arg-type]
        )

    @contextlib.asynccontextmanager
    async def upside(self, say: Say) -> AsyncIterator[None]:
        """Answer as `say` does, on each connection."""

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await say(Upside(reader, writer))
            writer.close()

        server = await asyncio.start_unix_server(connected, self.path)
        try:
            yield
        finally:
            server.close()

    @contextlib.asynccontextmanager
    async def front(self) -> AsyncIterator[Front]:
        sock = socket.create_server(("127.0.0.1", 0))
        front = Front(sock, lambda request: self.route(request), files=lambda: len(self.upstream.links))
        self.port = sock.getsockname()[1]
        await front.start()
        try:
            yield front
        finally:
            front.abort()
            await asyncio.wait_for(front.stop(), PATIENCE)
            self.upstream.close()

    async def connect(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        return reader, writer

    async def ask(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        """One request on a connection of its own, and the whole answer."""
        reader, writer = await self.connect(data)
        try:
            return await answer(reader)
        finally:
            writer.close()


async def answer(reader: asyncio.StreamReader, *, bodiless: bool = False) -> tuple[int, dict[str, str], bytes]:
    """The next answer on a connection."""
    text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = text.strip().split("\r\n")
    headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
    body = b""
    if bodiless or int(first.split()[1]) in (100, 101, 204, 304):
        pass
    elif headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        while (line := await reader.readline()).strip():
            headers["trailer " + line.decode().partition(":")[0].lower()] = line.decode().partition(":")[2].strip()
    elif "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        body = await reader.read()
    return int(first.split()[1]), headers, body


async def until(found: Callable[[], object], what: str) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while not found():
        assert asyncio.get_running_loop().time() < deadline, f"waited in vain for {what}"
        await asyncio.sleep(0.005)


def run(work: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work, 60)
        ended = asyncio.get_running_loop().time() + PATIENCE
        while len(asyncio.all_tasks()) > 1 and asyncio.get_running_loop().time() < ended:
            await asyncio.sleep(0.01)  # upstreams see that they are not needed any more
        for _ in range(5):
            await asyncio.sleep(0.01)  # and transports are closed

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(bounded())
