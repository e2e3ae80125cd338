"""An app on two nodes: its workers say where they are."""

from __future__ import annotations

import os
from typing import Any

from websockets.asyncio.server import ServerConnection, unix_serve

from ostler import Ostler

app = Ostler()


async def talk(connection: ServerConnection) -> None:
    async for message in connection:
        await connection.send(os.environ["WHICH"] if message == "where" else message)


@app.sessions("where", workers=1, slots=2, lifetime=0)
async def where(worker: Any) -> Any:
    async with unix_serve(talk, worker.socket):
        yield worker.socket
