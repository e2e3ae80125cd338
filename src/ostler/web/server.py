"""The HTTP server on the node's own loop and socket."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from ostler.config import Settings, is_loopback
from ostler.errors import ConfigError
from ostler.web.connections import Connection

_ADVERTISED = re.compile(r"https?://[^/\s@?#]+(/[^\s?#]*)?")
_UNSENT = 131_072  # bytes that the kernel holds of what a client has not taken


class Server(uvicorn.Server):
    """uvicorn as a part of the node; signals are the node's business."""

    def __init__(self, app: Any, sock: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=3,
                server_header=False,
            )
        )
        self._sock = sock
        self._serving: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def start(self) -> None:
        """Return when it answers; raises ConfigError when it cannot."""
        self._serving = asyncio.get_running_loop().create_task(self.serve(sockets=[self._sock]), name="web")
        while not self.started:
            if self._serving.done():
                await self._serving
                raise ConfigError("the HTTP server ended at its start")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        self.should_exit = True
        serving, self._serving = self._serving, None
        if serving:
            await serving


@contextlib.contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """The bound socket; taken before anything starts, so that a taken port leaves nothing running."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(kind, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # What a client has not taken stays with us, where it can be replaced by newer, not as megabytes in the kernel.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
        try:
            sock.bind((host.strip("[]"), port))
            sock.listen(1024)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with --port (0 takes any free one)"
            ) from error
        yield sock


def advertised(settings: Settings, url: str) -> str | None:
    """Where other nodes reach this one; None when it only listens on loopback. Raises ConfigError."""
    if settings.advertise and not _ADVERTISED.fullmatch(settings.advertise):
        raise ConfigError(f"advertise must be a URL such as http://10.0.0.7:8356, found {settings.advertise!r}")
    if settings.advertise or is_loopback(settings.host):
        return settings.advertise.rstrip("/") or None
    port = url.rpartition(":")[2]
    host = socket.gethostname() if settings.host in ("0.0.0.0", "::") else settings.host  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def url_of(host: str, sock: socket.socket) -> str:
    """The address that a client on this machine uses."""
    port = sock.getsockname()[1]
    shown = host if is_loopback(host) else ("127.0.0.1" if host in ("0.0.0.0", "::") else host)  # noqa: S104
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
