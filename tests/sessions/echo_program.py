"""A program that knows nothing of Ostler and echoes over WebSocket on the socket that it is given."""

from __future__ import annotations

import asyncio
import sys

from websockets.asyncio.server import ServerConnection, unix_serve


async def talk(connection: ServerConnection) -> None:
    async for message in connection:
        await connection.send(message)


async def main() -> None:
    async with unix_serve(talk, sys.argv[1]) as server:
        await server.serve_forever()


asyncio.run(main())
