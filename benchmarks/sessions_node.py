"""For benchmarks/sessions.py: a node with session pools, a WebSocket client on a raw socket, and what processes cost."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from calls import wait
from calls_client import Connect, tcp, unix

HERE = Path(__file__).resolve().parent
SIZE = 300  # bytes of a message
PATIENCE = 120.0


class Node:
    """`ostler up` with these pools. `with` it: it is stopped in the end."""

    def __init__(self, pools: dict[str, dict], **env: str) -> None:
        self.pools = pools
        self.data = Path(tempfile.mkdtemp(prefix="ostler-bench-"))
        self.env = {
            **os.environ,
            "OSTLER_DATA": str(self.data),
            "OSTLER_LOG_LEVEL": "error",
            "OSTLER_LOAD_THRESHOLD": "1000",  # what else runs on the machine must not pause the claiming
            "OSTLER_MEMORY_HEADROOM_MB": "0",
            "OSTLER_RESTART_LIMIT": "1000",
            "OSTLER_RESTART_LIFETIME": "1000",
            "OSTLER_BACKOFF_MAX": "0.1",
            "SESSIONS_BENCH_POOLS": json.dumps(pools),
            **env,
        }
        argv = [sys.executable, "-m", "ostler", "up", str(HERE / "sessions_app.py"), "--port", "0", "--pool", "bench=2"]
        with (self.data / "node.log").open("wb") as log:
            self.process = subprocess.Popen(argv, env=self.env, cwd=self.data, stdout=log, stderr=log)
        self.url = wait(lambda: json.loads((self.data / "node.json").read_text())["url"])
        self.port = int(self.url.rpartition(":")[2].strip("/"))
        for name in pools:
            self.wait_for(name)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE)
        shutil.rmtree(self.data, ignore_errors=True)

    def ask(self, path: str, method: str = "GET") -> dict:
        request = urllib.request.Request(self.url + path, method=method)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.load(answer)

    def capacity(self, name: str) -> dict:
        return {pool["name"]: pool for pool in self.ask("/api/v1/capacity")["pools"]}[name]

    def wait_for(self, name: str) -> None:
        """All its workers serve."""
        options = self.pools[name]
        slots = options.get("workers", 1) * options.get("slots", 5)
        wait(lambda: self.capacity(name)["slots"] >= slots, PATIENCE)

    def pid(self, component: str) -> int:
        return next(w["pid"] for w in self.ask("/api/v1/workers")["workers"] if w["component"] == component)

    @property
    def plane(self) -> int:
        return self.pid("worker:plane:0")

    def path(self, pool: str, number: int = 0) -> str:
        """The worker's own socket."""
        return (self.data / f"address.worker.{pool}.{number}").read_text()

    def own(self, pool: str) -> Connect:
        return unix(self.path(pool))

    @property
    def connect(self) -> Connect:
        return tcp(self.port)

    def ws(self, pool: str) -> str:
        return f"{self.url.replace('http', 'ws').rstrip('/')}/sessions/{pool}"


def masked(kind: int, payload: bytes) -> bytes:
    """A client's frame; the mask is zero."""
    size = len(payload)
    head = bytes([0x80 | kind, 0x80 | size]) if size < 126 else bytes([0x80 | kind, 0xFE]) + size.to_bytes(2, "big")
    return head + b"\0\0\0\0" + payload


MESSAGE = masked(2, os.urandom(SIZE))


class Refused(Exception):
    """An answer that is no 101."""


class Client:
    """A WebSocket client. Its messages have one size, and it answers pings."""

    def __init__(self, connect: Connect, path: str = "/") -> None:
        self.socket = connect()
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [f"GET {path} HTTP/1.1", "Host: localhost", "Connection: Upgrade", "Upgrade: websocket"]
        lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", ""]
        self.socket.sendall("\r\n".join(lines).encode())
        self._got = b""
        self.is_open = False

    def opened(self) -> Client:
        """The session has begun."""
        while b"\r\n\r\n" not in self._got:
            self._more()
        head, _, self._got = self._got.partition(b"\r\n\r\n")
        if b" 101 " not in head[:15]:
            self.socket.close()
            raise Refused(head.decode("latin-1"))
        self.is_open = True
        self.id = next((part[18:] for part in head.decode().split("\r\n") if part.startswith("x-ostler-session: ")), "")
        return self

    def _more(self) -> None:
        data = self.socket.recv(65536)
        if not data:
            raise EOFError
        self._got += data

    def frame(self) -> tuple[int, bytes]:
        """The next one that is no ping."""
        while True:
            while len(self._got) < 2 or len(self._got) < (end := self._end()):
                self._more()
            kind, size = self._got[0] & 15, self._got[1] & 127
            payload = self._got[4 if size == 126 else 2 : end]
            self._got = self._got[end:]
            if kind != 9:
                return kind, payload
            self.socket.sendall(masked(10, payload))

    def _end(self) -> int:
        size = self._got[1] & 127
        if size < 126:
            return 2 + size
        return 4 + int.from_bytes(self._got[2:4], "big") if len(self._got) >= 4 else 1 << 30

    def echo(self) -> float:
        """Seconds for one message there and back."""
        start = time.perf_counter()
        self.socket.sendall(MESSAGE)
        kind, payload = self.frame()
        took = time.perf_counter() - start
        if kind != 2 or len(payload) != SIZE:
            raise SystemExit(f"not an echo: {kind} {payload[:100]!r}")
        return took

    def closed(self) -> str:
        """What the other side says when it ends the session."""
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                kind, payload = self.frame()
                if kind == 8:
                    return payload[2:].decode()
        return ""

    def leave(self) -> None:
        """Close as a client does, and wait for the answer."""
        self.socket.sendall(masked(8, b"\x03\xe8"))
        self.closed()
        self.socket.close()


def opened(connect: Connect, path: str = "/") -> float:
    """Seconds until a session has begun; it is ended afterwards."""
    start = time.perf_counter()
    client = Client(connect, path).opened()
    took = time.perf_counter() - start
    client.leave()
    return took


def cpu(pid: int) -> float:
    """Seconds of CPU of all threads of a process."""
    found = 0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            found += int(file.read_text().split()[0])
    return found / 1e9


def family_cpu(*roots: int) -> float:
    """Seconds of CPU of these processes, of all below them, and of those that have ended below them."""
    found, stats = 0, {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            stats[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()
    for pid, fields in stats.items():
        up = pid
        while up in stats and up not in roots:
            up = int(stats[up][1])
        if up in roots:
            found += sum(int(value) for value in fields[11:15])
    return found / os.sysconf("SC_CLK_TCK")


def tenth(raw: dict[str, list[float]], one: str, other: str) -> str:
    """The ratio of what a tenth of all single times are below: those in which nobody else had the core."""
    low = {side: sorted(raw[side])[len(raw[side]) // 10] for side in (one, other)}
    return f"p10 {low[one] / low[other]:.2f} ({low[one] * 1000:.3g} over {low[other] * 1000:.3g} ms)"


def rss_mb(pid: int) -> float:
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024
