"""A minimal client for benchmarks/calls.py: raw sockets, kept open. The same code asks every side."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable

Connect = Callable[[], socket.socket]


def unix(path: str) -> Connect:
    def connect() -> socket.socket:
        found = socket.socket(socket.AF_UNIX)
        found.connect(path)
        return found

    return connect


def tcp(port: int) -> Connect:
    def connect() -> socket.socket:
        found = socket.create_connection(("127.0.0.1", port), timeout=60)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found.settimeout(None)
        return found

    return connect


def request(path: str, body: bytes | object, kind: str = "application/json", **headers: str) -> bytes:
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-type: {kind}", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def receive(connection: socket.socket) -> int:
    """Read one answer with a known length; its status."""
    got = connection.recv(65536)
    while (end := got.find(b"\r\n\r\n")) < 0:
        more = connection.recv(65536)
        if not more:
            raise EOFError(got)
        got += more
    length = int(got[:end].lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(got) < end + 4 + length:
        got += connection.recv(65536)
    return int(got[9:12])


def ask(connection: socket.socket, data: bytes) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    connection.sendall(data)
    status = receive(connection)
    if status != 200:
        raise SystemExit(f"a call was answered with {status}")
    return time.perf_counter() - start


def first_item(connection: socket.socket, data: bytes) -> float:
    """Seconds until the first item of a stream is here; the rest is read afterwards."""
    start = time.perf_counter()
    connection.sendall(data)
    got = b""
    while b"data: " not in got:
        got += connection.recv(65536)
    took = time.perf_counter() - start
    while not got.endswith(b"0\r\n\r\n"):
        got += connection.recv(65536)
    return took


def rate(connect: Connect, clients: int, data: bytes, seconds: float) -> float:
    """Calls a second, one on each connection at a time, from one thread. The connections are opened before."""
    connections = [connect() for _ in range(clients)]
    poll, by_number = select.epoll(), {c.fileno(): c for c in connections}
    for c in connections:
        poll.register(c, select.EPOLLIN)
        c.sendall(data)
    count, start = 0, time.perf_counter()
    while (now := time.perf_counter()) < start + seconds:
        for number, _ in poll.poll(1):
            if receive(by_number[number]) != 200:
                raise SystemExit("a call was refused")
            by_number[number].sendall(data)
            count += 1
    for c in connections:
        receive(c)
        c.close()
    poll.close()
    return count / (now - start)


class Flood:
    """Calls at a fixed rate, whatever becomes of them: each on a connection that is free."""

    def __init__(self, connect: Connect, data: bytes, per_second: float, connections: int) -> None:
        self._connect, self._data, self._gap = connect, data, 1 / per_second
        self._free = [connect() for _ in range(connections)]
        self.accepted: list[float] = []
        self.refused: list[float] = []
        self.strange = self.late = 0

    def run(self, seconds: float, each: Callable[[], None] = lambda: None) -> None:
        """`each` is called about once a second."""
        poll, busy = select.epoll(), {}
        for c in self._free:
            poll.register(c, select.EPOLLIN)
        start = following = told = time.perf_counter()
        while (now := time.perf_counter()) < start + seconds or busy:
            while following <= now < start + seconds:
                following += self._gap
                if not self._free:
                    self.late += 1
                    continue
                c = self._free.pop()
                busy[c.fileno()] = (c, time.perf_counter())
                c.sendall(self._data)
            if now - told > 1:
                told = now
                each()
            for number, _ in poll.poll(max(0.0, min(following - time.perf_counter(), 0.05))):
                c, sent = busy.pop(number)
                status = receive(c)
                took = time.perf_counter() - sent
                if status == 200:
                    self.accepted.append(took)
                elif status == 429:
                    self.refused.append(took)
                else:
                    self.strange += 1
                self._free.append(c)
        poll.close()
