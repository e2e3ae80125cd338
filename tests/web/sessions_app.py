"""Sessions for the tests of their routes, page and commands: what clients say is echoed, and each session can be watched."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from websockets.asyncio.server import ServerConnection, unix_serve

from ostler import Ostler

app = Ostler()
FRAMES = [b"\xff\xd8 frame %d \xff\xd9" % n for n in range(3)]


async def talk(connection: ServerConnection) -> None:
    async for message in connection:
        await connection.send(message)


@app.sessions("seen", workers=1, slots=2, lifetime=0, line=3)
class Seen:
    async def start(self, worker: Any) -> str:
        self.server = await unix_serve(talk, worker.socket)
        return str(worker.socket)

    async def open(self, session: Any) -> None:
        """So that the worker knows its sessions."""

    async def view(self, session: Any) -> AsyncIterator[bytes]:
        for frame in itertools.cycle(FRAMES):
            yield frame
            await asyncio.sleep(0.02)


@app.sessions("blind", workers=1, slots=1, lifetime=0)
async def blind(worker: Any) -> Any:
    async with unix_serve(talk, worker.socket):
        yield worker.socket
