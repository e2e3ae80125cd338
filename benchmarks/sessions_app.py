"""What benchmarks/sessions.py has sessions with. The pools are in SESSIONS_BENCH_POOLS, as JSON: {name: {"kind": "echo", …options}}.

Each worker writes its own address into the node's directory, so that a client can also go to it without the node.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
from pathlib import Path

from ostler import Ostler

app = Ostler()
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
POOLS = json.loads(os.environ.get("SESSIONS_BENCH_POOLS", "{}"))


def note(worker, address: str) -> None:
    Path(os.environ["OSTLER_DATA"], f"address.{worker.name.replace(':', '.')}").write_text(address)


class Echo(asyncio.Protocol):
    """The least that a WebSocket server can do: it gives back each frame as it came."""

    def connection_made(self, transport) -> None:
        self._transport, self._data, self._talks = transport, b"", False

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._talks:
            head, end, self._data = self._data.partition(b"\r\n\r\n")
            if not end:
                self._data = head
                return
            key = next(part for part in head.split(b"\r\n") if part.lower().startswith(b"sec-websocket-key:"))
            accept = base64.b64encode(hashlib.sha1(key.partition(b":")[2].strip() + GUID).digest())
            self._transport.write(
                b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
                b"sec-websocket-accept: " + accept + b"\r\n\r\n"
            )
            self._talks = True
        while frame := self._frame():
            kind, payload = frame
            size = len(payload)
            short = bytes([kind, size]) if size < 126 else bytes([kind, 126]) + size.to_bytes(2, "big")
            self._transport.write(short + payload)
            if kind & 15 == 8:
                self._transport.close()

    def _frame(self) -> tuple[int, bytes] | None:
        data = self._data
        if len(data) < 6:
            return None
        size, start = data[1] & 127, 6
        if size == 126:
            size, start = int.from_bytes(data[2:4], "big"), 8
        if len(data) < start + size:
            return None
        mask, payload, self._data = data[start - 4 : start], data[start : start + size], data[start + size :]
        if any(mask):
            whole = (mask * (size // 4 + 1))[:size]
            payload = (int.from_bytes(payload, "big") ^ int.from_bytes(whole, "big")).to_bytes(size, "big")
        return (data[0] & 15 | 0x80 if data[0] & 15 != 9 else 0x8A), payload


async def echo(worker):
    server = await asyncio.get_running_loop().create_unix_server(Echo, worker.socket)
    note(worker, worker.socket)
    yield worker.socket
    server.close()


def noted(kind):
    class Noted(kind):
        async def start(self, worker):
            endpoint = await super().start(worker)
            note(worker, endpoint.address)
            return endpoint

    return Noted


for name, options in POOLS.items():
    match options.pop("kind"):
        case "echo":
            app.sessions(name, **options)(echo)
        case "chromium":
            import dataclasses

            from ostler.apps.browsers import driver
            from ostler.apps.browsers.pools import browsers

            driver._SCRIPT = Path(__file__).with_name("sessions_serve.js")

            browsers(app, name, **options)
            spec = app.session_pools[name]
            app.session_pools[name] = dataclasses.replace(spec, target=noted(spec.target))


@app.model("noop", idle=-1)
class Noop:
    def load(self, model_id): ...

    def infer(self, payload):
        return payload


@app.job(queue="bench")
def nothing(job): ...
