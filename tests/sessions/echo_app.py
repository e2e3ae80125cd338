"""An app whose workers echo what clients say, over WebSocket; and some that misbehave."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from websockets.asyncio.server import ServerConnection, unix_serve

from ostler import Endpoint, Ostler

app = Ostler()


async def talk(connection: ServerConnection) -> None:
    """Echo; a few words mean something."""
    async for message in connection:
        if message == "pid":
            await connection.send(str(os.getpid()))
        elif message == "path":
            assert connection.request is not None
            await connection.send(connection.request.path)
        elif message == "bye":
            await connection.close(4001, "as you wish")
        else:
            await connection.send(message)


@app.sessions("echo", workers=2, slots=3, lifetime=0)
async def echo(worker: Any) -> Any:
    async with unix_serve(talk, worker.socket):
        yield worker.socket


@app.sessions("short", workers=2, slots=2, lifetime=6, margin=2, drain=0.5)
async def short(worker: Any) -> Any:
    async with unix_serve(talk, worker.socket):
        yield worker.socket


@app.sessions("door", workers=1, slots=2, lifetime=0, redirect=True, memory_mb=20)
async def door(worker: Any) -> Any:
    async with unix_serve(talk, worker.socket):
        yield worker.socket


@app.sessions("each", workers=1, slots=2, lifetime=0)
class Each:
    """A socket for each session; a file called `hang` in the scratch directory's parent makes its probe hang."""

    async def start(self, worker: Any) -> None:
        self.worker, self.servers = worker, {}

    async def open(self, session: Any) -> Endpoint:
        if session.path == "/bad":
            raise ValueError("not this one")
        path = str(self.worker.scratch / "private" / session.id)
        self.servers[session.id] = await unix_serve(talk, path)
        return Endpoint(path, path="/mine")

    async def close(self, session: Any) -> None:
        if (server := self.servers.pop(session.id, None)) is not None:
            server.close()

    async def probe(self) -> None:
        if (self.worker.scratch / "hang").exists():
            await asyncio.sleep(60)


app.endpoint(
    "program",
    [sys.executable, str(Path(__file__).with_name("echo_program.py")), "{socket}"],
    workers=1,
    slots=2,
    lifetime=0,
)


@app.job()
def kill(job: Any, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
