"""Requests through the plane: what arrives, what comes back, and what does not pass."""

from __future__ import annotations

import asyncio
import json

import pytest

from ostler.plane.plan import Forward, Peek, Refuse, Reply, Serve
from ostler.plane.request import Request
from tests.plane.serving import Stage, Upside, answer, run, until


@pytest.fixture
def stage(tmp_path) -> Stage:
    return Stage(tmp_path)


async def echo(up: Upside) -> None:
    """Answers with what it got, as JSON."""
    while True:
        first, headers, body = await up.request()
        said = json.dumps({"first": first, "headers": headers, "body": body.decode("latin-1")}).encode()
        await up.answer(said, headers="content-type: application/json\r\n")


def test_a_request_arrives_as_it_was_sent_and_many_use_one_connection(stage: Stage) -> None:
    async def main() -> None:
        async with stage.upside(echo), stage.front():
            reader, writer = await stage.connect()
            for size in (0, 1, 1000, 300_000):
                body = bytes(range(256)) * (size // 256 + 1)
                writer.write(
                    b"POST /a%%20b/c?d=%%2F HTTP/1.1\r\nHost: x\r\nX-A: 1\r\nContent-Length: %d\r\n\r\n" % len(body)
                )
                writer.write(body)
                status, headers, got = await answer(reader)
                said = json.loads(got)
                assert (status, headers["content-type"]) == (200, "application/json")
                assert said["first"] == "POST /a%20b/c?d=%2F HTTP/1.1"
                assert said["body"].encode("latin-1") == body
                assert (said["headers"]["host"], said["headers"]["x-a"]) == ("x", "1")
            writer.close()
            assert stage.connections == 1

    run(main())


def test_a_chunked_body_and_a_chunked_answer_with_trailers_go_through(stage: Stage) -> None:
    async def say(up: Upside) -> None:
        _, headers, body = await up.request()
        assert (body, headers.get("x-late")) == (b"abcdef", None), "a client's trailers are not passed on"
        await up.say(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await up.say(b"4;x=y\r\ndefg\r\n0\r\nx-sum: 7\r\n\r\n")

    async def main() -> None:
        async with stage.upside(say), stage.front():
            head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            status, headers, body = await stage.ask(head + b"3\r\nabc\r\n3\r\ndef\r\n0\r\nX-Late: 1\r\n\r\n")
            assert (status, body, headers["trailer x-sum"]) == (200, b"abcdefg", "7")

    run(main())


def test_answers_without_a_body_leave_the_connection_usable(stage: Stage) -> None:
    async def say(up: Upside) -> None:
        while True:
            first, _, _ = await up.request()
            status = {"/204": "204 No Content", "/304": "304 Not Modified"}.get(first.split()[1], "200 OK")
            length = b"content-length: 5\r\n" if status != "204 No Content" else b""
            body = b"hello" if first.startswith("GET /200") else b""
            await up.say(f"HTTP/1.1 {status}\r\n".encode() + length + b"\r\n" + body)

    async def main() -> None:
        async with stage.upside(say), stage.front():
            reader, writer = await stage.connect()
            for method, path in (("HEAD", "/200"), ("GET", "/204"), ("GET", "/304"), ("GET", "/200"), ("HEAD", "/304")):
                writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                status, headers, body = await answer(reader, bodiless=method == "HEAD")
                assert (str(status), body) == (path[1:], b"hello" if (method, path) == ("GET", "/200") else b"")
                assert path == "/204" or headers["content-length"] == "5"
            writer.close()
            assert stage.connections == 1

    run(main())


def test_expect_100_continue_is_the_upstreams_to_answer_and_other_informations_are_dropped(stage: Stage) -> None:
    async def say(up: Upside) -> None:
        while True:
            _, headers = await up.head()
            assert headers["expect"] == "100-continue"
            await up.say(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
            await up.answer(await up.reader.readexactly(int(headers["content-length"])))

    async def refuses(up: Upside) -> None:
        await up.head()
        await up.answer(b"no", "401 Unauthorized")
        await up.closed()

    async def main() -> None:
        head = b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
        async with stage.upside(say), stage.front():
            reader, writer = await stage.connect(head)
            assert (await answer(reader))[0] == 100
            writer.write(b"hello")
            assert (await answer(reader))[::2] == (200, b"hello")
            writer.close()
        stage.upstream = type(stage.upstream)(stage.path)
        stage.forward = Forward(stage.upstream)
        async with stage.upside(refuses), stage.front():
            reader, writer = await stage.connect(head)
            status, headers, _ = await answer(reader)
            assert (status, headers["connection"]) == (401, "close"), "nobody knows whether the body follows"
            assert await reader.read() == b""
            writer.close()

    run(main())


def test_an_answer_that_ends_with_the_connection_is_chunked_or_closed_as_the_client_understands(stage: Stage) -> None:
    async def say(up: Upside) -> None:
        await up.request()
        await up.say(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhello ")
        await up.say(b"world")

    async def main() -> None:
        async with stage.upside(say), stage.front():
            status, headers, body = await stage.ask(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (status, headers["transfer-encoding"], body) == (200, "chunked", b"hello world")
            status, headers, body = await stage.ask(b"GET / HTTP/1.0\r\n\r\n")
            assert (status, headers["connection"], body) == (200, "close", b"hello world")

    run(main())


def test_each_event_of_a_stream_arrives_before_the_next_is_sent(stage: Stage) -> None:
    seen = asyncio.Event()

    async def say(up: Upside) -> None:
        await up.request()
        await up.say(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for n in range(20):
            data = b"data: %d\n\n" % n
            await up.say(b"%x\r\n%b\r\n" % (len(data), data))
            await seen.wait()
            seen.clear()
        await up.say(b"0\r\n\r\n")

    async def main() -> None:
        async with stage.upside(say), stage.front():
            reader, writer = await stage.connect(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            for n in range(20):
                await reader.readuntil(b"data: %d\n\n" % n)
                seen.set()
            await reader.readuntil(b"0\r\n\r\n")
            writer.close()

    run(main())


def test_only_the_plane_says_for_whom_it_asks_and_what_is_about_one_connection_stays_there(stage: Stage) -> None:
    async def main() -> None:
        async with stage.upside(echo), stage.front():
            forged = b"X-Ostler-Peer: 0\r\nx-ostler-CLIENT: 10.0.0.1:1\r\nX-OSTLER-PEER: 0\r\n"
            own = (
                b"Connection: x-forwarded-for, close\r\nKeep-Alive: 5\r\nTE: trailers\r\nX-Forwarded-For: 10.1.1.1\r\n"
            )
            _, headers, body = await stage.ask(b"GET / HTTP/1.1\r\nHost: x\r\n" + forged + own + b"\r\n")
            got = json.loads(body)["headers"]
            import os

            assert got["x-ostler-peer"] == str(os.geteuid())
            assert got["x-ostler-client"].startswith("127.0.0.1:")
            assert not got["x-ostler-client"].endswith(":1")
            assert got.keys().isdisjoint({"connection", "keep-alive", "te"})
            assert got["x-forwarded-for"] == "10.1.1.1", "a client cannot have the proxy's word taken away"
            assert headers["connection"] == "close"

    run(main())


def test_a_websocket_is_a_tunnel_and_one_that_is_refused_is_an_answer(stage: Stage) -> None:
    async def say(up: Upside) -> None:
        _, headers = await up.head()
        assert (headers["upgrade"], headers["connection"].lower()) == ("websocket", "upgrade")
        if headers.get("x-no"):
            await up.answer(b"no", "403 Forbidden")
            await up.closed()
            return
        await up.say(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nX-K: 1\r\n\r\nfirst"
        )
        while data := await up.reader.read(65536):
            await up.say(data.swapcase())

    async def main() -> None:
        ask = b"GET /s HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"
        async with stage.upside(say), stage.front():
            stage.route = lambda request: stage.told()
            reader, writer = await stage.connect(ask + b"\r\n\x00early")
            status, headers, _ = await answer(reader)
            assert (status, headers["upgrade"], headers["x-k"]) == (101, "websocket", "1")
            assert await reader.readexactly(11) == b"first\x00EARLY"
            writer.write(b"\xffa" * 100_000 + b"\n\n")
            assert await reader.readexactly(200_002) == b"\xffA" * 100_000 + b"\n\n"
            writer.close()
            await until(lambda: stage.ends == ["left"], "the tunnel's end")
            assert (await stage.ask(ask + b"X-No: 1\r\n\r\n"))[::2] == (403, b"no")

    run(main())


def test_pipelined_requests_are_answered_in_order(stage: Stage) -> None:
    async def main() -> None:
        async with stage.upside(echo), stage.front():

            def route(request: Request):
                return Reply(200, {}, request.path.encode()) if int(request.path[1:]) % 3 == 0 else stage.forward

            stage.route = route
            head = b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: 3000\r\n\r\n"
            reader, writer = await stage.connect(b"".join(head % n + b"%d" % (n % 10) * 3000 for n in range(200)))
            for n in range(200):
                status, _, body = await answer(reader)
                assert status == 200
                if n % 3 == 0:
                    assert body == b"/%d" % n
                else:
                    said = json.loads(body)
                    assert (said["first"].split()[1], said["body"]) == (f"/{n}", str(n % 10) * 3000)
            writer.close()

    run(main())


def test_a_route_may_look_at_the_body_first_wait_and_then_decide(stage: Stage) -> None:
    waiting: list[Request] = []

    def decide(request: Request):
        if request.begun().startswith(b"no"):
            return Refuse(429, "QUEUE_FULL", "wait", {"Retry-After": "7"})
        waiting.append(request)
        return None

    async def main() -> None:
        async with stage.upside(echo), stage.front():
            stage.route = lambda request: Peek(decide, 2)
            head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
            status, headers, body = await stage.ask(head % 4 + b"nope")
            assert (status, headers["retry-after"], json.loads(body)["error"]["code"]) == (429, "7", "QUEUE_FULL")
            reader, writer = await stage.connect(head % 600_000 + b"a" * 300_000)
            await until(lambda: waiting, "the decision")
            assert not waiting[0].is_whole
            writer.write(b"b" * 300_000)
            waiting[0].go(Forward(stage.upstream, head=b"POST /infer HTTP/1.1\r\nhost: w\r\nx-id: 7\r\n"))
            said = json.loads((await answer(reader))[2])
            assert said["first"] == "POST /infer HTTP/1.1"
            assert said["headers"] == {"host": "w", "x-id": "7", "content-length": "600000"}
            assert said["body"] == "a" * 300_000 + "b" * 300_000
            writer.write(head % 3 + b"abc")
            await until(lambda: len(waiting) == 2, "the second")
            gone: list[Request] = []
            waiting[1].gone = gone.append
            writer.close()
            await until(lambda: gone, "the client to be missed")
            waiting[1].go(stage.forward)  # too late: nothing happens
            assert stage.connections == 1

    run(main())


def test_a_coroutine_answers_or_hands_on(stage: Stage) -> None:
    async def handler(request: Request):
        if request.path == "/fails":
            raise ValueError("as planned")
        body = await request.read(1000)
        if request.path == "/hand-on":
            return stage.forward
        request.reply(201, {"x-a": "b"}, body[::-1])
        return None

    async def main() -> None:
        async with stage.upside(echo), stage.front():
            stage.route = lambda request: Serve(handler)
            post = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
            assert (await stage.ask(b"GET /fails HTTP/1.1\r\nHost: x\r\n\r\n"))[0] == 500
            status, headers, body = await stage.ask(post % (b"/", 3) + b"abc")
            assert (status, headers["x-a"], body) == (201, "b", b"cba")
            status, _, body = await stage.ask(post % (b"/", 3000) + b"a" * 3000)
            assert (status, json.loads(body)["error"]["code"]) == (413, "PAYLOAD_TOO_LARGE")
            assert json.loads((await stage.ask(post % (b"/hand-on", 3) + b"abc"))[2])["body"] == "abc"

    run(main())


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 3\r\nContent-Length: 4\r\n",
        b"Content-Length: 3, 3\r\n",
        b"Content-Length: +3\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"X: a\r\n b: c\r\n",
        b"X: a\rY: b\r\n",
        b"X: a\0b\r\n",
        b"X Y: a\r\n",
    ],
)
def test_a_head_that_could_be_read_in_two_ways_is_passed_to_nobody(stage: Stage, headers: bytes) -> None:
    async def main() -> None:
        async with stage.upside(echo), stage.front():
            reader, writer = await stage.connect(
                b"POST / HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\nabcGET /evil HTTP/1.1\r\n\r\n"
            )
            assert (await answer(reader))[0] == 400
            assert await reader.read() == b""
            writer.close()
            assert stage.connections == 0

    run(main())


def test_a_large_body_that_waited_goes_to_a_connection_that_is_open_already(stage: Stage) -> None:
    async def main() -> None:
        waiting: list[Request] = []
        async with stage.upside(echo), stage.front():
            assert (await stage.ask(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"))[0] == 200
            stage.route = lambda request: waiting.append(request)
            reader, writer = await stage.connect(
                b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5000000\r\n\r\n" + b"x" * 5_000_000
            )
            await until(lambda: waiting and waiting[0]._client._paused, "the body to be held")
            waiting[0].go(stage.forward)
            assert len(json.loads((await answer(reader))[2])["body"]) == 5_000_000
            writer.close()
            assert stage.connections == 1

    run(main())


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit_is_refused_while_it_is_sent_and_its_sender_sees_why(
    stage: Stage, chunked: bool
) -> None:
    async def main() -> None:
        async with stage.upside(echo), stage.front():
            stage.route = lambda request: stage.told(max_body=1_000_000)
            reader, writer = await stage.connect(b"POST / HTTP/1.1\r\nHost: x\r\n")
            size, piece = 20_000_000, b"x" * 100_000
            if chunked:
                writer.write(
                    b"Transfer-Encoding: chunked\r\n\r\n"
                    + (b"%x\r\n" % len(piece) + piece + b"\r\n") * 200
                    + b"0\r\n\r\n"
                )
            else:
                writer.write(b"Content-Length: %d\r\n\r\n" % size + piece * 200)
            status, _, body = await answer(reader)
            assert (status, json.loads(body)["error"]["code"]) == (413, "PAYLOAD_TOO_LARGE")
            assert stage.ends == ["refused"]
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nok")
            assert (await answer(reader))[0] == 200, "and the connection is still good"
            writer.close()

    run(main())
