"""A relay of WebSocket sessions as the library `websockets` makes it easy: one message after another, both ways.

python benchmarks/sessions_relay.py PATH PORT [uvloop]
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

from websockets.asyncio.client import unix_connect
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed


async def pump(source, sink) -> None:
    with contextlib.suppress(ConnectionClosed):
        async for message in source:
            await sink.send(message)
    await sink.close()


async def relay(client) -> None:
    keep = ("user-agent", "x-playwright-browser", "x-playwright-proxy", "x-playwright-launch-options")
    headers = [(name, value) for name, value in client.request.headers.raw_items() if name.lower() in keep]
    agent = next((value for name, value in headers if name.lower() == "user-agent"), None)
    headers = [(name, value) for name, value in headers if name.lower() != "user-agent"]
    how = {"compression": None, "max_size": None, "ping_interval": None}
    async with unix_connect(
        sys.argv[1], "ws://localhost/", additional_headers=headers, user_agent_header=agent, **how
    ) as worker:
        await asyncio.gather(pump(client, worker), pump(worker, client))


async def main() -> None:
    async with serve(relay, "127.0.0.1", int(sys.argv[2]), compression=None, max_size=None, ping_interval=None):
        await asyncio.Event().wait()


if __name__ == "__main__":
    if sys.argv[3:] == ["uvloop"]:
        import uvloop

        asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main())
    else:
        asyncio.run(main())
