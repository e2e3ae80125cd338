"""The HTTP server on the node's own loop and socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from ostler.config import Settings, is_loopback
from ostler.errors import ConfigError
from ostler.web import errors
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
                log_config=None,  # its lines are the node's, with a time
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=3,
                timeout_keep_alive=5
                if sock.family != socket.AF_UNIX
                else 120,  # the data plane closes what it does not need
                server_header=False,
            )
        )
        logging.getLogger("uvicorn.error").addFilter(errors.is_news)
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


@contextlib.contextmanager
def listen_unix(data: Path) -> Iterator[socket.socket]:
    """The node's own socket, for a node whose clients are taken by the data plane: `node.sock` in `run`, for its user alone."""
    folder = run_folder(data)
    path = folder / "node.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, _directory(folder) as number:
        path.unlink(missing_ok=True)
        try:
            # The path of a socket may have 107 bytes, a data directory's more.
            sock.bind(f"/proc/self/fd/{number}/{path.name}")
            path.chmod(0o600)
            sock.listen(1024)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {path}: {error.strerror or error}; name another with --data"
            ) from error
        try:
            yield sock
        finally:
            path.unlink(missing_ok=True)


def run_folder(data: Path) -> Path:
    """Where sockets are, for the node's user alone, whoever may read the data directory."""
    folder = data / "run"
    folder.mkdir(0o700, exist_ok=True)
    folder.chmod(0o700)
    return folder


@contextlib.contextmanager
def _directory(folder: Path) -> Iterator[int]:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield number
    finally:
        os.close(number)


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
