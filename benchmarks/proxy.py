"""What the data plane adds to one hop: the same requests to an upstream's own Unix socket, and through the plane, in one run.

    python benchmarks/proxy.py [--seconds 4] [--only fast|blocking]

Two upstreams answer 1 KB without any work: a bare one on uvloop, and one with a blocking thread per connection (as a model's
worker has it). Sides take turns in short rounds, so that a slow moment of the machine hits both.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

BODY = b"x" * 1024
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: 1024\r\n\r\n" + BODY


def request(path: str = "/infer") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/octet-stream\r\ncontent-length: 1024\r\n\r\n"
    return head.encode() + BODY


# ---- upstreams, each in a process of its own


def fast(path: str) -> None:
    import asyncio

    import httptools
    import uvloop

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport) -> None:
            self.transport, self.parser = transport, httptools.HttpRequestParser(self)

        def data_received(self, data: bytes) -> None:
            self.parser.feed_data(data)

        def on_message_complete(self) -> None:
            self.transport.write(ANSWER)

    async def main() -> None:
        await asyncio.get_running_loop().create_unix_server(Protocol, path, backlog=1024)
        await asyncio.Event().wait()

    asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main())


def blocking(path: str) -> None:
    def serve(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file:
            while line := file.readline():
                length = 0
                while (line := file.readline()) not in (b"\r\n", b""):
                    name, _, value = line.partition(b":")
                    if name.lower() == b"content-length":
                        length = int(value)
                file.read(length)
                connection.sendall(ANSWER)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(1024)
        while True:
            threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()


def plane(path: str, descriptor: str) -> None:
    import asyncio
    import gc

    import uvloop

    from ostler.plane.front import Front
    from ostler.plane.plan import Forward
    from ostler.plane.upstream import Upstream

    async def main() -> None:
        upstream = Upstream(path)
        same, given = Forward(upstream), Forward(upstream, head=b"POST /infer HTTP/1.1\r\nhost: localhost\r\n")
        front = Front(
            socket.socket(fileno=int(descriptor)), lambda request: given if request.path == "/infer" else same
        )
        await front.start()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        await asyncio.Event().wait()

    asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main())


# ---- clients: blocking sockets, so that the client costs both sides the same


def unix(path: str) -> Callable[[], socket.socket]:
    def connect() -> socket.socket:
        found = socket.socket(socket.AF_UNIX)
        found.connect(path)
        return found

    return connect


def tcp(port: int) -> Callable[[], socket.socket]:
    def connect() -> socket.socket:
        found = socket.create_connection(("127.0.0.1", port))
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return found

    return connect


def receive(connection: socket.socket) -> None:
    got = connection.recv(65536)
    end = got.index(b"\r\n\r\n") + 4
    while len(got) < end + 1024:
        got += connection.recv(65536)


def latencies(connection: socket.socket, data: bytes, seconds: float) -> list[float]:
    found, until = [], time.perf_counter() + seconds
    while (start := time.perf_counter()) < until:
        connection.sendall(data)
        receive(connection)
        found.append(time.perf_counter() - start)
    return found


def throughput(connections: list[socket.socket], data: bytes, seconds: float) -> float:
    """Requests a second, one on each connection at a time, from one thread."""
    poll, by_number = select.epoll(), {c.fileno(): c for c in connections}
    for c in connections:
        poll.register(c, select.EPOLLIN)
        c.sendall(data)
    count, start = 0, time.perf_counter()
    while time.perf_counter() < start + seconds:
        for number, _ in poll.poll():
            receive(by_number[number])
            by_number[number].sendall(data)
            count += 1
    took = time.perf_counter() - start
    for c in connections:
        receive(c)
    poll.close()
    return count / took


def large(kind: str, direct: Callable[[], socket.socket], through: Callable[[], socket.socket]) -> None:
    """25 MB of body."""
    size = 25_000_000
    data = f"POST /infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: {size}\r\n\r\n".encode() + b"x" * size
    found: dict[str, list[float]] = {"direct": [], "plane": []}
    for _ in range(5):
        for name, connect in (("direct", direct), ("plane", through)):
            with connect() as connection:
                start = time.perf_counter()
                connection.sendall(data)
                receive(connection)
                found[name].append((time.perf_counter() - start) * 1000)
    a, b = min(found["direct"]), min(found["plane"])
    print(f"{kind:9} 25 MB {a:6.1f} ms direct, {b:6.1f} ms plane, ratio {b / a:.2f}", flush=True)


def measure(kind: str, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listening:
        path = str(Path(folder) / "u.sock")
        argv = [sys.executable, __file__, "--role"]
        started = [
            subprocess.Popen([*argv, kind, path]),
            subprocess.Popen([*argv, "plane", path, str(listening.fileno())], pass_fds=[listening.fileno()]),
        ]
        try:
            while not os.path.exists(path):
                time.sleep(0.01)
            time.sleep(0.5)
            compare(kind, unix(path), tcp(listening.getsockname()[1]), seconds)
        finally:
            for process in started:
                process.send_signal(signal.SIGKILL)
                process.wait()


def compare(
    kind: str, direct: Callable[[], socket.socket], through: Callable[[], socket.socket], seconds: float
) -> None:
    data = request()
    sides = {"direct": direct(), "plane": through()}
    for connection in sides.values():
        latencies(connection, data, 0.3)
    found: dict[str, list[float]] = {"direct": [], "plane": []}
    for turn in range(int(seconds * 5)):
        for name in sorted(sides, reverse=bool(turn % 2)):
            found[name] += latencies(sides[name], data, 0.1)
    us = {
        name: [round(q * 1e6, 1) for q in (statistics.median(v), sorted(v)[int(len(v) * 0.99)])]
        for name, v in found.items()
    }
    ratio = us["plane"][0] / us["direct"][0]
    print(
        f"{kind:9} c=1   p50 {us['direct'][0]:6.1f} us direct, {us['plane'][0]:6.1f} us plane, ratio {ratio:.2f}   p99 {us['direct'][1]:.0f}, {us['plane'][1]:.0f} us",
        flush=True,
    )
    large(kind, direct, through)
    many = {"direct": [direct() for _ in range(64)], "plane": [through() for _ in range(64)]}
    rates: dict[str, list[float]] = {"direct": [], "plane": []}
    for turn in range(max(2, int(seconds))):
        for name in sorted(many, reverse=bool(turn % 2)):
            rates[name].append(throughput(many[name], data, 0.5))
    a, b = statistics.median(rates["direct"]), statistics.median(rates["plane"])
    print(f"{kind:9} c=64  {a:6.0f}/s direct, {b:6.0f}/s plane, ratio {b / a:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--only", choices=["fast", "blocking"])
    parser.add_argument("--role", nargs="+")
    args = parser.parse_args()
    if args.role:
        {"fast": fast, "blocking": blocking, "plane": plane}[args.role[0]](*args.role[1:])
        return
    for kind in ("fast", "blocking"):
        if args.only in (None, kind):
            measure(kind, args.seconds)


if __name__ == "__main__":
    main()
