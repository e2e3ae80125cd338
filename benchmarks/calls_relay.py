"""The least that a process between a client and a worker can do in Python: it copies bytes on uvloop, and looks at none of them.

python benchmarks/calls_relay.py PATH PORT
"""

from __future__ import annotations

import asyncio
import sys

import uvloop


class Up(asyncio.Protocol):
    def __init__(self, client: Client) -> None:
        self._client = client

    def connection_made(self, transport) -> None:
        self.write = transport.write

    def data_received(self, data: bytes) -> None:
        self._client.transport.write(data)


class Client(asyncio.Protocol):
    up: Up | None = None

    def connection_made(self, transport) -> None:
        self.transport, self._early = transport, b""
        task = asyncio.get_running_loop().create_task(self._open())
        task.add_done_callback(lambda _: None)

    async def _open(self) -> None:
        _, self.up = await asyncio.get_running_loop().create_unix_connection(lambda: Up(self), sys.argv[1])
        if self._early:
            self.up.write(self._early)

    def data_received(self, data: bytes) -> None:
        if self.up is None:
            self._early += data
        else:
            self.up.write(data)


async def main() -> None:
    await asyncio.get_running_loop().create_server(Client, "127.0.0.1", int(sys.argv[2]))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main())
