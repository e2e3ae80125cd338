"""A plane in this process, workers that speak WebSocket or TCP on Unix sockets, and a node that a test plays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import Server, ServerConnection, unix_serve

from ostler.plane.access import Access, Token
from ostler.plane.plan import Plan, Refuse
from ostler.plane.front import Front
from ostler.plane.request import Request
from ostler.plane.session_forwarding import INNER
from ostler.plane.sessions import PATH, Sessions

TOKEN, SECRET = "the-token-of-the-node", "the-secret-of-all-nodes"
PATIENCE = 30.0
TERMS: dict[str, Any] = {
    "slots": 5, "lifetime": 50, "margin": 5, "line": 100, "line_wait": 30.0, "idle": 0.0, "longest": 0.0, "ping": 0.0,
    "redirect": False, "protocol": "websocket", "sticky": 0.0, "serves": None, "versions": [], "product": None, "paused": False,
}  # fmt: skip


async def echo(connection: ServerConnection) -> None:
    async for message in connection:
        await connection.send(message)


class FakeNode:
    """The node's end of the control channel: `tell` says something to the plane, `said` is what the plane has said.

    It admits every session at once; `admit` (id, component, generation, about) answers otherwise, with a frame or None for nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[list[Any]] = []
        self.pools: dict[str, dict[str, Any]] = {}
        self.admit: Callable[..., list[Any] | None] = lambda id_, *_: ["admitted", id_, {}]
        self.tokens: tuple[Token, ...] = ()
        self.friends = frozenset({os.geteuid()})
        self.loopback = True
        self.servers: list[Server] = []
        self.port = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FakeNode]:
        """The plane serves."""
        access = Access(
            TOKEN, SECRET, loopback=self.loopback, public=frozenset(), friends=self.friends, tokens=self.tokens
        )
        self.sessions = Sessions(self._hear, lambda: access)
        sock = socket.create_server(("127.0.0.1", 0))
        self.port = sock.getsockname()[1]
        self.front = Front(sock, self._route)
        await self.front.start()
        try:
            yield self
        finally:
            self.sessions.stop()
            self.sessions.end_all()
            self.front.abort()
            for server in self.servers:
                server.close()
            async with asyncio.timeout(PATIENCE):
                await self.front.stop()
                for server in self.servers:
                    await server.wait_closed()

    def _route(self, request: Request) -> Plan:
        if request.path.startswith(PATH):
            return self.sessions.route(request)
        if request.path.startswith(INNER):
            return self.sessions.asked_by_node(request)
        return Refuse(404, "NOT_FOUND", "sessions alone are served here")

    def _hear(self, *frame: Any) -> None:
        assert frame[0] == "sessions"
        self.said.append([*frame[1:]])
        if frame[1] == "admit" and (answer := self.admit(*frame[2:])):
            asyncio.get_running_loop().call_soon(self.tell, *answer)

    # ---- what the node says

    def tell(self, *frame: Any) -> None:
        self.sessions.heard(["sessions", *frame])

    def pool(self, name: str = "echo", **terms: Any) -> None:
        self.pools[name] = {**TERMS, "serves": name, **terms}
        self.tell("pools", self.pools)

    def up(self, component: str, address: str, *, pool: str = "echo", generation: int = 1, **more: Any) -> None:
        """A worker that listens there is up."""
        told = {"address": address, "path": "/", "slots": 5, "lifetime": 50, "served": 0, "opens": False}
        self.tell("up", pool, component, generation, {**told, "versions": [], "door": None, "cdp": None, **more})

    async def worker(
        self,
        number: int = 0,
        *,
        handler: Callable[[ServerConnection], Awaitable[None]] = echo,
        pool: str = "echo",
        generation: int = 1,
        serve: dict[str, Any] | None = None,
        **more: Any,
    ) -> Server:
        """A WebSocket worker, up and known to the plane."""
        address = str(self.folder / f"{pool}{number}-{generation}.sock")
        server = await unix_serve(handler, address, **(serve or {}))
        self.servers.append(server)
        self.up(f"worker:{pool}:{number}", address, pool=pool, generation=generation, **more)
        return server

    async def rough_worker(self, talk: Callable[..., Awaitable[None]], number: int = 9, **more: Any) -> None:
        """A worker that does what a test likes with each connection (reader, writer)."""
        address = str(self.folder / f"rough{number}.sock")

        async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await talk(reader, writer)
            writer.close()

        server = await asyncio.start_unix_server(met, address)
        self.servers.append(server)  # type: ignore[arg-type]
        self.up(f"worker:echo:{number}", address, **more)

    # ---- clients

    def url(self, target: str = "echo") -> str:
        return f"ws://127.0.0.1:{self.port}{PATH}{target}"

    def connect(self, target: str = "echo", **more: Any) -> connect:
        """A client of the websockets library; it neither pings nor goes through a proxy."""
        return connect(self.url(target), **{"ping_interval": None, "proxy": None, "open_timeout": PATIENCE, **more})

    async def raw(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        return reader, writer

    # ---- what became of it

    def of(self, verb: str) -> list[list[Any]]:
        """What the plane has said with that verb."""
        return [frame[1:] for frame in self.said if frame[0] == verb]

    async def ends(self, number: int) -> list[tuple[str, dict[str, Any]]]:
        """Wait for so many ends: reasons and sums."""
        await until(lambda: len(self.of("ended")) >= number, f"{number} ends of sessions")
        return [(reason, sums) for _, reason, sums in self.of("ended")]

    def in_use(self) -> int:
        return sum(worker.in_use for worker in self.sessions.slots.workers.values())


def handshake(target: str = "echo", *, more: str = "") -> bytes:
    """A WebSocket handshake by hand."""
    return (
        f"GET {PATH}{target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{more}\r\n"
    ).encode()


async def until(found: Callable[[], object], what: str) -> None:
    """Wait for a condition."""
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while not found():
        assert asyncio.get_running_loop().time() < deadline, f"waited in vain for {what}"
        await asyncio.sleep(0.005)


def session_of(client: ClientConnection) -> str:
    """The id in the answer to the handshake."""
    assert client.response is not None
    return client.response.headers["x-ostler-session"]
