"""What goes wrong on either side: the other side is told, nobody waits, and memory stays bounded."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ostler.plane.entry import allow_files
from ostler.plane.plan import Forward, Peek, Refuse, Serve
from ostler.plane.request import Request
from tests.plane.serving import Stage, Upside, answer, run, until
from tests.plane.test_proxy import echo

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def stage(tmp_path) -> Stage:
    stage = Stage(tmp_path)
    stage.route = lambda request: stage.told()
    return stage


def rss_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def test_where_nobody_listens_nothing_was_sent(stage: Stage) -> None:
    async def main() -> None:
        async with stage.front():
            status, _, body = await stage.ask(GET)
            assert (status, json.loads(body)["error"]["code"]) == (502, "BAD_UPSTREAM")
            assert [sent for _, sent in stage.failures] == [False]
            assert stage.ends == []

    run(main())


def test_an_upstream_that_dies_without_an_answer_is_told_and_another_may_be_tried(stage: Stage) -> None:
    async def dies(up: Upside) -> None:
        await up.request()

    async def main() -> None:
        other = Stage(Path(stage.path).parent / "other")
        Path(other.path).parent.mkdir()

        def failed(request: Request, reason: str, sent: bool):
            stage.failures.append((reason, sent))
            return Forward(other.upstream)

        async with stage.upside(dies), other.upside(echo), stage.front():
            post = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
            assert (await stage.ask(post))[0] == 502
            assert [sent for _, sent in stage.failures] == [True]
            stage.route = lambda request: Forward(stage.upstream, failed=failed)
            assert json.loads((await stage.ask(post))[2])["body"] == "abc"
            reader, writer = await stage.connect(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\nabc")
            await until(lambda: stage.connections == 3, "the first half to be sent")
            writer.write(b"def")
            assert (await answer(reader))[0] == 502, "a body that was handed over in pieces is not here any more"
            writer.close()
            other.upstream.close()

    run(main())


def test_a_kept_connection_that_was_closed_meanwhile_costs_a_get_nothing(stage: Stage) -> None:
    async def once(up: Upside) -> None:
        await up.request()
        await up.answer(b"1")
        if stage.connections == 1:
            await up.head()  # the second request is read, and the connection closed
            return
        await up.closed()

    async def main() -> None:
        async with stage.upside(once), stage.front():
            assert [(await stage.ask(GET))[0] for _ in range(2)] == [200, 200]
            assert (stage.connections, stage.failures, stage.ends) == (2, [], ["done", "done"])

    run(main())


SPEAKER = """
import os, socket, sys
with socket.socket(socket.AF_UNIX) as listening:
    listening.bind(sys.argv[1] + ".new")
    listening.listen()
    os.rename(sys.argv[1] + ".new", sys.argv[1])  # whoever sees the name can connect
    connection = listening.accept()[0]
    connection.recv(65536)
    kind = sys.argv[2].encode()
    framing = b"content-length: 1000" if kind == b"text/plain" else b"transfer-encoding: chunked"
    connection.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-type: " + kind + b"\\r\\n" + framing + b"\\r\\n\\r\\n")
    connection.sendall(b"9\\r\\ndata: 1\\n\\n\\r\\n" if kind != b"text/plain" else b"begun")
    connection.recv(1)
"""


@pytest.mark.parametrize("kind", ["text/plain", "text/event-stream", "application/octet-stream"])
def test_sigkill_in_the_middle_of_an_answer_cuts_it_and_a_stream_is_told_why(stage: Stage, kind: str) -> None:
    async def main() -> None:
        worker = subprocess.Popen([sys.executable, "-c", SPEAKER, stage.path, kind])
        try:
            await until(lambda: os.path.exists(stage.path), "the upstream")
            async with stage.front():
                reader, writer = await stage.connect(GET)
                got = await reader.readuntil(b"begun" if kind == "text/plain" else b"data: 1\n\n\r\n")
                worker.kill()
                got += await reader.read()
                assert (b"event: error" in got) == (kind == "text/event-stream")
                assert not got.endswith(b"0\r\n\r\n")
                assert stage.ends == ["cut"]
                writer.close()
        finally:
            worker.kill()
            worker.wait()

    run(main())


def test_a_client_that_knows_an_end_by_the_close_alone_sees_a_reset(stage: Stage) -> None:
    async def say(up: Upside) -> None:
        await up.request()
        await up.say(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nbegun\r\n")
        await go.wait()

    go = asyncio.Event()

    async def main() -> None:
        async with stage.upside(say), stage.front():
            reader, writer = await stage.connect(b"GET / HTTP/1.0\r\n\r\n")
            await reader.readuntil(b"begun")
            go.set()
            with pytest.raises(ConnectionResetError):
                await reader.read()
            writer.close()

    run(main())


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00hello",
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200_000,
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 2_000_000,
    ],
    ids=["tls", "ssh", "two lengths", "negative", "unasked upgrade", "headers", "header"],
)
def test_garbage_is_a_502_and_the_next_request_is_served(stage: Stage, garbage: bytes) -> None:
    async def say(up: Upside) -> None:
        while True:
            first, _, _ = await up.request()
            if "/bad" in first:
                await up.say(garbage)
                await up.closed()
                return
            await up.answer(b"well")

    async def main() -> None:
        async with stage.upside(say), stage.front():
            for _ in range(3):
                status, _, body = await stage.ask(b"GET /bad HTTP/1.1\r\nHost: x\r\n\r\n")
                assert (status, json.loads(body)["error"]["code"]) == (502, "BAD_UPSTREAM")
                assert (await stage.ask(GET))[::2] == (200, b"well")

    run(main())


def test_garbage_after_the_head_cuts_the_answer_and_bytes_behind_one_are_nobodys_answer(stage: Stage) -> None:
    async def say(up: Upside) -> None:
        first, _, _ = await up.request()
        if "/chunk" in first:
            await up.say(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n")
        else:
            await up.say(
                b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
            )
        await up.closed()

    async def main() -> None:
        async with stage.upside(say), stage.front():
            reader, writer = await stage.connect(b"GET /chunk HTTP/1.1\r\nHost: x\r\n\r\n")
            assert not (await reader.read()).endswith(b"0\r\n\r\n")
            writer.close()
            for _ in range(3):
                assert (await stage.ask(GET))[::2] == (200, b"ok")
            assert stage.ends == ["cut", "done", "done", "done"]

    run(main())


def test_a_client_that_goes_away_ends_its_own_call_alone(stage: Stage) -> None:
    ended: list[str] = []

    async def say(up: Upside) -> None:
        first, _ = await up.head()
        if "/stays" in first:
            await up.say(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            await until(lambda: len(ended) == 3, "the others to be cancelled")
            await up.say(b"2\r\nok\r\n0\r\n\r\n")
            return
        if "/begun" in first:
            await up.say(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nbegun")
        await up.closed()
        ended.append(first)

    async def main() -> None:
        async with stage.upside(say), stage.front():
            stays, stays_too = await stage.connect(b"GET /stays HTTP/1.1\r\nHost: x\r\n\r\n")
            await stays.readuntil(b"\r\n\r\n")
            others = [
                await stage.connect(b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % path) for path in (b"silent", b"begun")
            ]
            others.append(
                await stage.connect(
                    b"POST /silent HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n" + b"x" * 300_000
                )
            )
            await until(lambda: stage.connections == 4, "all to be forwarded")
            for _, writer in others:
                writer.transport.abort()
            await until(lambda: stage.ends[:3] == ["left"] * 3, "all to be cancelled")
            assert (await stays.readuntil(b"0\r\n\r\n")).startswith(b"2\r\nok")
            stays_too.close()

    run(main())


def test_a_client_that_is_not_read_is_seen_to_leave(stage: Stage) -> None:
    async def main() -> None:
        left: list[Request] = []

        def route(request: Request):
            request.gone = left.append
            return None

        stage.route = route
        async with stage.front() as front:
            sock = socket.create_connection(("127.0.0.1", stage.port))
            sock.setblocking(False)
            sock.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 90000000\r\n\r\n")
            loop = asyncio.get_running_loop()
            sending = loop.create_task(loop.sock_sendall(sock, b"x" * 90_000_000))
            await until(lambda: any(c._paused for c in front.clients), "the body to be held")
            client = next(iter(front.clients))
            assert client._now is not None
            assert client._now._held_size < 1_000_000
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            sock.close()
            await until(lambda: left, "the client to be missed")

    run(main())


def test_an_answer_without_end_waits_for_a_client_that_does_not_read(stage: Stage) -> None:
    sent = 0

    async def say(up: Upside) -> None:
        nonlocal sent
        await up.request()
        await up.say(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            await up.say(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            sent += 65536

    async def main() -> None:
        async with stage.upside(say), stage.front():
            before = rss_mb()
            writers = [await stage.connect(GET) for _ in range(10)]
            for reader, _ in writers:
                reader._transport.pause_reading()  # type: ignore[attr-defined]
            seen = -1

            async def still() -> bool:
                nonlocal seen
                before, seen = seen, sent
                await asyncio.sleep(0.2)
                return before == sent

            while not await still():
                pass
            assert sent / 10 < 16_000_000, "what the kernel holds, and a bounded rest"
            assert rss_mb() - before < 100
            for _, writer in writers:
                writer.transport.abort()
            await until(lambda: len(stage.ends) == 10, "the calls to be cancelled")
            stage.route = lambda request: stage.told(stall=0.2)
            reader, writer = await stage.connect(GET)
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            await until(lambda: len(stage.ends) == 11, "the client that takes nothing to be given up")
            writer.close()

    run(main())


def test_a_body_waits_for_an_upstream_that_does_not_read(stage: Stage) -> None:
    go = asyncio.Event()
    total = 40_000_000

    async def say(up: Upside) -> None:
        await up.head()
        up.writer.transport.pause_reading()
        await go.wait()
        up.writer.transport.resume_reading()
        await up.reader.readexactly(total)
        await up.answer(b"all")

    async def main() -> None:
        async with stage.upside(say), stage.front() as front:
            before = rss_mb()
            reader, writer = await stage.connect(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % total)
            data, at = b"x" * 65536, 0
            while not any(c._paused for c in front.clients):
                piece = data[: total - at]
                writer.write(piece)
                at += len(piece)
                await asyncio.sleep(0)
                assert at < total, "the plane took all of it"
            assert rss_mb() - before < 60
            go.set()
            for _ in range(0, total - at, 65536):
                writer.write(data[: total - at])
                at += min(65536, total - at)
                await writer.drain()
            assert (await answer(reader))[2] == b"all"
            writer.close()

    run(main())


def test_a_thousand_idle_connections_cost_little_and_others_are_served(stage: Stage) -> None:
    async def main() -> None:
        async with stage.upside(echo), stage.front() as front:
            before = rss_mb()
            idle = [await stage.connect() for _ in range(1000)]
            for reader, writer in idle[:500]:
                writer.write(GET)
                await answer(reader)
            await until(lambda: len(front.clients) == 1000, "all of them")
            assert (await stage.ask(GET))[0] == 200
            assert rss_mb() - before < 60, "both ends are in this process"
            assert stage.connections == 1
            for _, writer in idle:
                writer.close()
            await until(lambda: not front.clients, "all to be gone")

    allow_files()
    run(main())


def test_a_stop_answers_what_was_asked_and_closes_the_rest(stage: Stage) -> None:
    go = asyncio.Event()

    async def say(up: Upside) -> None:
        first, _, _ = await up.request()
        kind = "text/event-stream" if "/events" in first else "text/plain"
        await up.say(f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        await go.wait()
        await up.say(b"2\r\nok\r\n0\r\n\r\n")

    async def main() -> None:
        async with stage.upside(say), stage.front() as front:
            stage.route = lambda request: stage.told(finishes=False)
            idle, idle_writer = await stage.connect(GET[:10])
            other, other_writer = await stage.connect()
            asks, asks_writer = await stage.connect(GET)
            follows, follows_writer = await stage.connect(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
            for reader in (asks, follows):
                await reader.readuntil(b"\r\n\r\n")
            new, new_writer = await stage.connect()
            await until(lambda: len(front.clients) == 5, "all to be taken")
            stopping = asyncio.get_running_loop().create_task(front.stop())
            await until(lambda: front.is_closing, "the stop")
            new_writer.write(GET)  # it was on its way
            assert await other.read() == b""
            assert await follows.read() == b"", "a stream without end is followed elsewhere"
            assert not stopping.done()
            go.set()
            assert (await asks.read()).endswith(b"ok\r\n0\r\n\r\n")
            idle_writer.write(GET[10:])
            assert (await answer(idle))[1]["connection"] == "close"
            assert (await answer(new))[1]["connection"] == "close"
            await stopping
            for writer in (new_writer, idle_writer, other_writer, asks_writer, follows_writer):
                writer.close()

    run(main())


def test_what_a_route_or_a_handler_raises_is_a_500_and_no_more(stage: Stage) -> None:
    async def fails(request: Request) -> None:
        raise RuntimeError("as planned")

    async def main() -> None:
        async with stage.upside(echo), stage.front():
            stage.route = lambda request: 1 / 0  # type: ignore[assignment, return-value]
            assert (await stage.ask(GET))[0] == 500
            stage.route = lambda request: Peek(lambda request: 1 / 0)  # type: ignore[arg-type, return-value]
            assert (await stage.ask(GET))[0] == 500
            stage.route = lambda request: Forward(stage.upstream, ended=lambda request, how: 1 / 0)  # type: ignore[arg-type, return-value]
            assert [(await stage.ask(GET))[0] for _ in range(2)] == [200, 200]
            stage.route = lambda request: Serve(fails)
            assert (await stage.ask(GET))[0] == 500
            stage.route = lambda request: Refuse(503, "UNAVAILABLE", "not now")
            status, headers, _ = await stage.ask(GET)
            assert (status, headers["retry-after"]) == (503, "1")

    run(main())
