"""Heads that were seen before: whoever is recognized by them is served as if he had been parsed."""

from __future__ import annotations

import asyncio
import random
import socket
from typing import Any

from ostler.plane.heads import Heads
from ostler.plane.plan import Peek, Plan, Reply
from ostler.plane.client import Client
from ostler.plane.front import Front
from ostler.plane.request import Request
from ostler.plane.timers import Timers


class Unseen(Heads):
    """Knows nobody."""

    def find(self, data: bytes) -> None:  # type: ignore[override]
        return None


class Wire:
    """A transport of which nothing leaves."""

    def __init__(self) -> None:
        self.out, self.closed = b"", False
        self.sock = socket.socket(socket.AF_UNIX)

    def write(self, data: bytes) -> None:
        self.out += data

    def get_extra_info(self, name: str) -> Any:
        return {"socket": self.sock}.get(name)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def get_write_buffer_size(self) -> int:
        return 1  # so nothing is written past it

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None: ...

    resume_reading = pause_reading


class Side:
    """One connection, and what its route was asked."""

    def __init__(self, heads: Heads) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.known = 0
        self.sock = socket.socket()
        front = Front(self.sock, self.route)
        front.heads = heads
        self.client, self.wire = Client(front), Wire()
        self.client.connection_made(self.wire)  # type: ignore[arg-type]

    def route(self, request: Request) -> Plan:
        self.known += request.seen is not None
        return Peek(self.peeked, 100_000)

    def peeked(self, request: Request) -> Plan:
        known = (request.method, request.target, request.path, request.query, request.headers, request.length)
        self.asked.append((*known, request.begun(), request.get(b"host"), request.version))
        return Reply(200, {"x-number": str(len(self.asked))}, request.begun())

    def close(self) -> None:
        self.client.connection_lost(None)
        self.wire.sock.close()
        self.sock.close()


HEADS = [
    "POST /a?x=1 HTTP/1.1\r\nhost: a\r\ncontent-length: {n}\r\n",
    "POST /a?x=1 HTTP/1.1\r\nHost: a\r\nContent-Length: {n}\r\naccept: */*\r\n",
    "POST /b%20c HTTP/1.1\r\ncontent-length: {n}\r\nhost: a\r\nhost: b\r\n",
    "POST /a HTTP/1.1\r\nhost: a\r\ncontent-length: {n}\r\ncontent-length: {n}\r\n",
    "POST /a HTTP/1.1\r\nhost: a\r\nx: y\r\n content-length: {n}\r\n",
    "POST /a HTTP/1.1\r\nhost: a\r\nx-content-length: 5\r\ncontent-length: {n}\r\n",
    "POST /a HTTP/1.1\r\nhost: a\r\ncontent-length: {n}\r\ntransfer-encoding: chunked\r\n",
    "POST /a HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: {n}\r\n",
    "POST /a HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {n}\r\n",
    "POST /a HTTP/1.0\r\nhost: a\r\ncontent-length: {n}\r\n",
    "HEAD /a HTTP/1.1\r\nhost: a\r\ncontent-length: {n}\r\n",
    "GET /a HTTP/1.1\r\nhost: a\r\n",
    "GET /a HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\ncontent-length: {n}\r\n",
    "\r\nPOST /a HTTP/1.1\r\nhost: a\r\ncontent-length: {n}\r\n",
    "POST /a HTTP/1.1\nhost: a\ncontent-length: {n}\n",
]


def pieces(rng: random.Random) -> list[bytes]:
    """What comes on one connection, as it is read: mostly whole requests, some split, some together, some wrong."""
    found = []
    for _ in range(rng.randint(2, 12)):
        head = rng.choice(HEADS[:3] * 8 + HEADS)
        body = rng.choice([b"", b"x", b"\r\n\r\n", b"POST /z HTTP/1.1\r\n\r\n", b"content-length: 3\r\n", b"y" * 300])
        size = rng.choice([len(body)] * 12 + [len(body) + 1, 0])
        data = head.format(n=rng.choice([size] * 12 + [f"0{size}", f"+{size}", "x"])).encode() + b"\r\n" + body
        at = rng.randint(1, len(data) - 1)
        found += rng.choice([[data]] * 6 + [[data[:at], data[at:]], [data + data]])
    return found


def test_a_head_that_is_recognized_is_served_as_one_that_is_parsed() -> None:
    async def compare() -> int:
        known, heads = 0, Heads()
        for seed in range(1500):
            sides = Side(heads), Side(Unseen())
            for piece in pieces(random.Random(seed)):
                for side in sides:
                    if not side.wire.closed:
                        side.client.data_received(piece)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert sides[0].asked == sides[1].asked, (seed, piece)
                assert sides[0].wire.out == sides[1].wire.out, (seed, piece)
                assert sides[0].wire.closed == sides[1].wire.closed, (seed, piece)
            known += sides[0].known
            for side in sides:
                side.close()
        return known

    assert asyncio.run(compare()) > 500


def test_so_many_heads_are_remembered_and_no_more() -> None:
    heads = Heads()
    for number in range(1000):
        data = b"POST /%d HTTP/1.1\r\ncontent-length: 1\r\n\r\nx" % number
        heads.remember(data, 1, {})
        assert heads.find(data) is not None
        assert len(heads._seen) <= 256
    assert heads.find(b"POST /999 HTTP/1.1\r\ncontent-length: 1\r\n\r\nxy") is None  # not one request alone


def test_deadlines_come_in_time_and_not_when_they_were_cancelled() -> None:
    async def wait() -> list[int]:
        loop, found, timers = asyncio.get_running_loop(), [], Timers()
        now = loop.time()
        set_at = [timers.at(now + 0.01 * n, found.append, n) for n in (3, 1, 2, 1)]
        set_at[2].cancel()
        set_at[2].cancel()
        ended = loop.create_future()
        timers.at(now + 0.05, ended.set_result, None)
        await ended
        assert loop.time() >= now + 0.05
        assert not timers._slots
        return found

    assert asyncio.run(wait()) == [1, 1, 3]


def test_a_deadline_may_cancel_another_of_the_same_moment_and_one_that_fails_harms_nobody() -> None:
    async def wait() -> list[str]:
        loop, found, timers = asyncio.get_running_loop(), [], Timers()
        when = loop.time() + 0.01
        timers.at(when, lambda _: later.cancel(), None)
        timers.at(when, lambda _: 1 / 0, None)
        later = timers.at(when, found.append, "cancelled")
        ended = loop.create_future()
        timers.at(when, ended.set_result, None)
        await ended
        return found

    assert asyncio.run(wait()) == []
