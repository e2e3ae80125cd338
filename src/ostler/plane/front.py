"""The clients' side of the data plane: a listening socket, and the connections that were taken from it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from ostler.plane.client import Client
from ostler.plane.heads import Heads
from ostler.plane.plan import Plan
from ostler.plane.request import Request

Route = Callable[[Request], Plan]


class Front:
    """Takes connections from a listening socket and asks `route` what is to be done with each request."""

    def __init__(self, sock: socket.socket, route: Route, *, files: Callable[[], int] = lambda: 0) -> None:
        self.route = route
        self.clients: set[Client] = set()
        self.heads = Heads()
        self.is_closing = False
        self._sock, self._more_files = sock, files
        self._server: asyncio.Server | None = None
        self._empty: asyncio.Event | None = None

    def files(self) -> int:
        """Open files: clients, and what is open on their behalf."""
        return len(self.clients) + self._more_files()

    async def start(self) -> None:
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Client(self), sock=self._sock, backlog=1024
        )

    async def stop(self) -> None:
        """Take nothing new, answer what was asked, and return when the last client is gone. The socket stays open for others."""
        self.is_closing = True
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for client in [*self.clients]:
            client.close_if_idle()
        self._empty = asyncio.Event()
        if self.clients:
            await self._empty.wait()

    def abort(self, *, sessions: bool = False) -> None:
        """End all that is left; `sessions`: those, too."""
        for client in [*self.clients]:
            if sessions or not client.is_relayed:
                client.transport.abort()

    def left(self) -> None:
        if self._empty is not None and not self.clients:
            self._empty.set()
