"""What a message costs on its way through the plane: a raw 300-byte WebSocket echo, directly, through the plane, through a bare splice, and
through a relay written with the `websockets` library (on uvloop, and on asyncio's own loop). All in one run, in turns.

python benchmarks/relay.py [--rounds 3000] [--turns 6]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import hashlib
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from ostler.plane.access import Access
from ostler.plane.front import Front
from ostler.plane.sessions import Sessions

SIZE = 300
ASKED = b"\x82\xfe" + SIZE.to_bytes(2, "big") + bytes(4) + bytes(SIZE)  # masked with zeros
ANSWER = b"\x82\x7e" + SIZE.to_bytes(2, "big") + bytes(SIZE)
HANDSHAKE = (
    b"GET /sessions/echo HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
WAYS = ("direct", "plane", "splice", "websockets-uvloop", "websockets")


class Echo(asyncio.Protocol):
    """Answers each message with one of the same size, and does nothing else."""

    def connection_made(self, transport) -> None:
        self._transport, self._held, self._is_up = transport, b"", False

    def data_received(self, data: bytes) -> None:
        self._held += data
        if not self._is_up:
            head, end, rest = self._held.partition(b"\r\n\r\n")
            if not end:
                return
            key = re.search(rb"(?i)sec-websocket-key: (\S+)", head)[1]
            accept = base64.b64encode(hashlib.sha1(key + GUID).digest())
            self._is_up, self._held = True, rest
            self._transport.write(
                b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
                b"sec-websocket-accept: " + accept + b"\r\n\r\n"
            )
        number = len(self._held) // len(ASKED)
        if number:
            self._held = self._held[number * len(ASKED) :]
            self._transport.write(ANSWER * number)


async def direct(path: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    await loop.create_unix_server(Echo, path)
    await loop.create_server(Echo, "127.0.0.1", port)
    await asyncio.Event().wait()


async def plane(path: str, port: int) -> None:
    """The plane's sessions, with a node that admits everybody at once."""
    loop = asyncio.get_running_loop()

    def say(*frame) -> None:
        if frame[1] == "admit":
            loop.call_soon(sessions.heard, ["sessions", "admitted", frame[2], {}])

    access = Access("token", "", loopback=True, public=frozenset(), friends=frozenset({os.geteuid()}))
    sessions = Sessions(say, lambda: access)
    terms = {
        "line": 100,
        "line_wait": 30.0,
        "margin": 5,
        "paused": False,
        "idle": 600.0,
        "longest": 21_600.0,
        "ping": 20.0,
    }
    sessions.heard(["sessions", "pools", {"echo": {**terms, "serves": "echo"}}])
    endpoint = {"address": path, "path": "/", "slots": 1000, "lifetime": 0}
    sessions.heard(["sessions", "up", "echo", "worker:echo:0", 1, endpoint])
    await Front(socket.create_server(("127.0.0.1", port)), sessions.route).start()
    await asyncio.Event().wait()


async def splice(path: str, port: int) -> None:
    """The least that is possible: benchmarks/calls_relay.py."""
    os.execv(sys.executable, [sys.executable, str(Path(__file__).with_name("calls_relay.py")), path, str(port)])


async def websockets(path: str, port: int) -> None:
    from websockets.asyncio.client import unix_connect
    from websockets.asyncio.server import serve

    async def pump(source, target) -> None:
        with contextlib.suppress(Exception):
            async for message in source:
                await target.send(message)
        await target.close()

    plain = {"compression": None, "ping_interval": None, "max_size": None}

    async def relay(client) -> None:
        async with unix_connect(path, "ws://localhost/", **plain) as worker:
            await asyncio.gather(pump(client, worker), pump(worker, client))

    async with serve(relay, "127.0.0.1", port, **plain):
        await asyncio.Event().wait()


def opened(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(HANDSHAKE)
    got = b""
    while b"\r\n\r\n" not in got:
        piece = sock.recv(4096)
        assert piece, got
        got += piece
    assert b" 101 " in got, got
    return sock


def rounds(sock: socket.socket, number: int) -> list[float]:
    found = []
    for _ in range(number):
        began, got = time.perf_counter(), 0
        sock.sendall(ASKED)
        while got < len(ANSWER):
            got += len(sock.recv(65_536))
        found.append(time.perf_counter() - began)
    return found


def cpu(process: subprocess.Popen[bytes]) -> float:
    """Seconds of CPU that it has used."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def started(way: str, path: str) -> tuple[subprocess.Popen[bytes], int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, __file__, way, path, str(port)])
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return process, port
        assert process.poll() is None, f"{way} has ended"
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--turns", type=int, default=6)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/echo.sock"
        running = {}
        try:
            for way in WAYS:
                running[way] = started(way, path)
            socks = {way: opened(port) for way, (_, port) in running.items()}
            times = {way: [] for way in WAYS}
            connects = {way: [] for way in WAYS}
            used = dict.fromkeys(WAYS, 0.0)
            for way in WAYS:
                rounds(socks[way], 300)
            for _ in range(asked.turns):
                for way, (process, port) in running.items():
                    before = cpu(process)
                    times[way] += rounds(socks[way], asked.rounds)
                    used[way] += cpu(process) - before
                    for _ in range(20):
                        began = time.perf_counter()
                        sock = opened(port)
                        connects[way].append(time.perf_counter() - began)
                        sock.close()
        finally:
            for process, _ in running.values():
                process.kill()
    print(f"{'':18s} {'round trip p50':>15s} {'CPU each':>10s} {'connect p50':>12s} {'CPU / websockets':>17s}")
    each = {way: used[way] / len(times[way]) * 1e6 for way in WAYS}
    for way in WAYS:
        middle, connect = statistics.median(times[way]) * 1e6, statistics.median(connects[way]) * 1e3
        ratio = each[way] / each["websockets"]
        print(f"{way:18s} {middle:12.1f} us {each[way]:7.1f} us {connect:9.2f} ms {ratio:17.2f}")


if __name__ == "__main__":
    if len(sys.argv) > 3 and sys.argv[1] in WAYS:
        name, where, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
        factory = None if name == "websockets" else uvloop.new_event_loop
        work = {"direct": direct, "plane": plane, "splice": splice}.get(name, websockets)
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(work(where, port))
    else:
        main()
