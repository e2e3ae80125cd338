"""What a client is answered: status codes with what to do, tokens, sticky keys, redirects, TCP and the addresses for Playwright and DevTools."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Request, Response

from ostler.plane import handshake as handshakes
from ostler.plane import relay
from ostler.plane.access import Token
from ostler.plane.request import HELD
from tests.plane.serving import answer, run
from tests.sessions.planes import TOKEN, FakeNode, handshake, session_of, until

CI = Token("ci", "the-secret-of-the-tests", ["echo"], 2, 5)


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    return FakeNode(tmp_path)


async def asked(node: FakeNode, target: str, head: str = "", method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """A request by hand, and its whole answer."""
    reader, writer = await node.raw(f"{method} /sessions/{target} HTTP/1.1\r\nHost: 127.0.0.1:1\r\n{head}\r\n".encode())
    try:
        return await answer(reader)
    finally:
        writer.close()


async def refusal(node: FakeNode, target: str = "echo", **more: object) -> tuple[int, dict, dict[str, str]]:  # type: ignore[type-arg]
    """Status, error and headers."""
    with pytest.raises(InvalidStatus) as found:
        async with node.connect(target, **more):
            pass
    response = found.value.response
    return response.status_code, json.loads(response.body or b"{}")["error"], dict(response.headers)


def bearer(token: str) -> dict[str, dict[str, str]]:
    return {"additional_headers": {"Authorization": f"Bearer {token}"}}


async def closed(client: ClientConnection) -> int:
    with pytest.raises(ConnectionClosed) as found:
        await client.recv()
    return found.value.rcvd.code if found.value.rcvd else 1006


def test_every_refusal_says_what_and_what_to_do(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool("echo", line=1, line_wait=20.0, versions=["1.63", "1.65"], product="Playwright")
            await node.worker(slots=1, versions=["1.65"])

            status, error, _ = await refusal(node, "strange")
            assert (status, error["code"]) == (400, "UNKNOWN_POOL")
            assert "echo" in error["message"]

            status, headers, body = await asked(node, "echo")
            assert (status, headers["upgrade"], json.loads(body)["error"]["code"]) == (
                426,
                "websocket",
                "UPGRADE_REQUIRED",
            )
            status, _, _ = await asked(node, "echo", "Content-Length: 0\r\n", "POST")
            assert status == 426

            status, error, _ = await refusal(node, user_agent_header="Playwright/1.50.1 (x64) node/20")
            assert (status, error["code"], error["served"], error["found"]) == (
                409,
                "VERSION",
                ["1.63", "1.65"],
                "1.50.1",
            )

            for wrong in ("priority=high", "priority=101", "wait=-1", "wait=soon", "session=" + "k" * 101):
                status, error, _ = await refusal(node, f"echo?{wrong}")
                assert (status, error["code"]) == (400, "BAD_PARAMETER"), wrong

            client = await node.connect(user_agent_header="Playwright/1.65.0 (x64) node/20")
            began = asyncio.get_running_loop().time()
            status, error, headers = await refusal(node, "echo?wait=0.2")
            assert (status, error["code"], error["position"], headers["retry-after"]) == (503, "LINE_TIMEOUT", 1, "5")
            assert asyncio.get_running_loop().time() - began >= 0.19
            status, error, _ = await refusal(node, "echo?wait=0.1", user_agent_header="Playwright/1.63.0")
            assert (status, error["code"]) == (503, "NO_WORKER")

            _, waiting = await node.raw(handshake())
            await until(lambda: node.of("want")[-1][1] == 1, "one in line")
            status, error, headers = await refusal(node)
            assert (status, error["code"]) == (429, "LINE_FULL")
            assert int(headers["retry-after"]) >= 1
            waiting.close()
            await until(lambda: node.of("want")[-1][1] == 0, "it to leave")
            status, error, _ = await refusal(node, "echo?wait=0")
            assert (status, error["code"]) == (503, "LINE_TIMEOUT")
            node.sessions.report()
            counts = node.of("facts")[-1][0]["counts"]["echo"]
            assert (counts["admitted"], counts["refused"], counts["expired"], counts["left"]) == (1, 1, 3, 1)
            await client.close()

    run(main())


def test_tokens_open_sessions_of_their_pools_and_no_more_than_they_may(node: FakeNode) -> None:
    node.friends, node.tokens = frozenset(), (CI,)

    async def main() -> None:
        async with node.running():
            node.pool("echo")
            node.pool("other")
            await node.worker()
            await node.worker(pool="other")
            assert (await refusal(node))[:1] == (401,)
            assert (await refusal(node, **bearer("wrong")))[:1] == (401,)
            status, error, _ = await refusal(node, "other", **bearer(CI.secret))
            assert (status, error["code"]) == (403, "FORBIDDEN_POOL")
            first = await node.connect(f"echo?token={CI.secret}&priority=50")
            second = await node.connect(**bearer(CI.secret))
            status, error, _ = await refusal(node, **bearer(CI.secret))
            assert (status, error["code"]) == (429, "TOO_MANY_SESSIONS")
            node.sessions.report()
            admits = node.of("admit")
            assert [(about["owner"], about["priority"]) for *_, about in admits] == [("token:ci", 5), ("token:ci", 0)]
            async with node.connect("other", **bearer(TOKEN)) as third:
                assert node.of("admit")[-1][0] == session_of(third)
            await first.close()
            await node.ends(2)
            async with node.connect(**bearer(CI.secret)):
                pass
            await second.close()

    run(main())


def test_pages_of_other_sites_open_no_sessions(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool()
            await node.worker()
            for origin in ("https://evil.example", "null"):
                status, error, _ = await refusal(node, origin=origin)
                assert (status, error["code"]) == (403, "FORBIDDEN_ORIGIN")

    run(main())


def test_a_sticky_session_waits_for_its_client(node: FakeNode) -> None:
    async def main() -> None:
        node.tokens = (CI,)
        async with node.running():
            node.pool(sticky=30.0)
            await node.worker()
            first = await node.connect("echo?session=mine")
            status, error, _ = await refusal(node, "echo?session=mine")
            assert (status, error["code"]) == (409, "SESSION_IN_USE")
            other = await node.connect("echo?session=mine", **bearer(CI.secret))
            assert session_of(other) != session_of(first), "another owner's key is another key"
            await first.close()
            await until(lambda: "detached" in {s.facts()[3] for s in node.sessions.live.values()}, "it to be detached")
            assert node.of("ended") == []
            assert node.in_use() == 2
            again = await node.connect("echo?session=mine")
            assert session_of(again) == session_of(first)
            await again.send("x")
            assert await again.recv() == "x"
            await again.close()
            await other.close()
            await until(lambda: all(s.state == "detached" for s in node.sessions.live.values()), "both to be detached")
            node.tell("kill", session_of(other), "killed", "enough")
            node.pool(sticky=0.05)
            third = await node.connect("echo?session=mine")
            assert session_of(third) == session_of(first)
            await third.close()
            found = dict(await node.ends(1))
            assert "killed" in found
            assert len(node.of("admit")) == 2
            await until(lambda: node.in_use() == 0, "the slots")

    run(main())


def test_a_client_may_be_back_before_its_last_connection_has_ended(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool(sticky=30.0)
            await node.worker()
            first = await node.connect("echo?session=mine")
            again = asyncio.create_task(node.connect("echo?session=mine").__aenter__())
            await asyncio.sleep(0)  # it asks while the other one is still there
            await first.close()
            back = await again
            assert session_of(back) == session_of(first)
            await back.close()

    run(main())


def test_a_client_that_the_worker_refuses_does_not_end_the_session_that_it_wanted_back(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool(sticky=30.0)
            await node.worker(serve={"origins": None, "process_request": _not_with_a_cookie})
            first = await node.connect("echo?session=mine")
            await first.close()
            await until(lambda: {s.state for s in node.sessions.live.values()} == {"detached"}, "it to be detached")
            with pytest.raises(InvalidStatus) as found:
                await node.connect("echo?session=mine", additional_headers={"Cookie": "version=1.50"})
            assert found.value.response.status_code == 428
            await until(lambda: {s.state for s in node.sessions.live.values()} == {"detached"}, "it to be detached")
            assert node.of("ended") == []
            async with node.connect("echo?session=mine") as again:
                assert session_of(again) == session_of(first)

    run(main())


def _not_with_a_cookie(connection: ServerConnection, request: Request) -> Response | None:
    return connection.respond(428, "another version") if "Cookie" in request.headers else None


def test_nobody_comes_back_to_a_session_of_a_node_that_stops(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool(sticky=30.0)
            await node.worker()
            first = await node.connect("echo?session=mine")
            await first.close()
            await until(lambda: {s.state for s in node.sessions.live.values()} == {"detached"}, "it to be detached")
            node.tell("close", "worker:echo:0", 1)
            assert {s.state for s in node.sessions.live.values()} == {"detached"}, "a worker that is replaced keeps it"
            node.tell("close", "worker:echo:0", 1, True)
            assert "shutdown" in dict(await node.ends(1))

    run(main())


def test_a_client_whose_network_was_lost_comes_back_to_its_session(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool(sticky=30.0, ping=0.05)
            await node.worker()
            _, writer = await node.raw(handshake("echo?session=mine"))  # it answers no pings
            await until(lambda: {s.state for s in node.sessions.live.values()} == {"detached"}, "it to be detached")
            async with node.connect("echo?session=mine") as again:
                assert session_of(again) == node.of("admit")[0][0]
            writer.close()
            assert len(node.of("admit")) == 1

    run(main())


def test_the_key_of_a_client_that_still_waits_in_line_is_taken(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostler.plane.sessions._COMES_BACK", 0.2)

    async def main() -> None:
        async with node.running():
            node.pool(sticky=30.0)
            waiting = asyncio.create_task(node.connect("echo?session=mine").__aenter__())
            await until(lambda: node.sessions.slots.groups["echo"].line, "it to wait")
            status, error, _ = await refusal(node, "echo?session=mine")
            assert (status, error["code"]) == (409, "SESSION_IN_USE")
            await node.worker()
            await (await waiting).close()

    run(main())


def test_who_comes_back_to_its_session_needs_no_other(node: FakeNode) -> None:
    one = Token("one", "the-secret-of-one", [], 1, 0)
    node.friends, node.tokens = frozenset(), (one,)

    async def main() -> None:
        async with node.running():
            node.pool(sticky=30.0)
            await node.worker()
            first = await node.connect("echo?session=mine", **bearer(one.secret))
            await first.close()
            await until(lambda: {s.state for s in node.sessions.live.values()} == {"detached"}, "it to be detached")
            status, error, _ = await refusal(node, "echo?session=other", **bearer(one.secret))
            assert (status, error["code"]) == (429, "TOO_MANY_SESSIONS")
            async with node.connect("echo?session=mine", **bearer(one.secret)) as again:
                assert session_of(again) == session_of(first)

    run(main())


def test_a_sticky_session_nobody_comes_back_to_ends_and_one_whose_worker_is_gone_is_lost(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool(sticky=0.1)
            server = await node.worker()
            await (await node.connect("echo?session=a")).close()
            assert [reason for reason, _ in await node.ends(1)] == ["detached"]
            node.pool(sticky=30.0)
            client = await node.connect("echo?session=b")
            await client.close()
            await until(lambda: {s.state for s in node.sessions.live.values()} == {"detached"}, "it to be detached")
            server.close()
            await server.wait_closed()
            status, error, _ = await refusal(node, "echo?session=b")
            assert (status, error["code"]) == (410, "SESSION_LOST")
            assert [reason for reason, _ in await node.ends(2)] == ["detached", "worker"]
            assert node.in_use() == 0

    run(main())


def test_a_redirect_leads_to_the_workers_door_with_a_ticket(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with node.running():
            node.pool(redirect=True)
            await node.worker(door=4321, path="/inner")
            node.admit = lambda id_, *_: ["admitted", id_, {"ticket": "t/1"}]
            upgrade = (
                "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n"
            )
            status, headers, _ = await asked(node, "echo/rest?a=1&priority=2", upgrade)
            assert status == 307
            assert headers["location"] == "ws://127.0.0.1:4321/rest?a=1&ticket=t%2F1"
            id_ = headers["x-ostler-session"]
            assert node.of("admit")[0][3]["redirect"] is True
            node.tell("began", id_)
            assert node.in_use() == 1
            node.tell("over", id_, "client", {"bytes_in": 5, "bytes_out": 7, "text": "", "code": 1000})
            (ended,) = node.of("ended")
            assert ended == [id_, "client", {"bytes_in": 5, "bytes_out": 7, "text": "", "code": 1000}]
            assert node.in_use() == 0
            monkeypatch.setattr("ostler.plane.session._UNUSED", 0.05)
            await asked(node, "echo", upgrade)
            assert [reason for reason, _ in await node.ends(2)] == ["client", "unused"]

    run(main())


def test_a_strange_host_costs_a_redirected_client_nothing(node: FakeNode) -> None:
    node.loopback = False

    async def main() -> None:
        async with node.running():
            node.pool(redirect=True)
            await node.worker(door=4321)
            node.admit = lambda id_, *_: ["admitted", id_, {"ticket": "t"}]
            reader, writer = await node.raw(handshake().replace(b"127.0.0.1", b"[not-an-address"))
            status, headers, _ = await answer(reader)
            writer.close()
            assert (status, headers["location"]) == (307, "ws://localhost:4321/?ticket=t")

    run(main())


def test_the_addresses_that_playwright_and_devtools_clients_ask_for(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool("echo")
            node.pool("cdp")
            await node.worker()
            await node.worker(pool="cdp", cdp={"Browser": "Chrome/156", "webSocketDebuggerUrl": "ws://inside/x"})
            status, _, body = await asked(node, "cdp/json/version/?token=abc")
            assert status == 200
            assert json.loads(body) == {
                "Browser": "Chrome/156", "webSocketDebuggerUrl": "ws://127.0.0.1:1/sessions/cdp?token=abc"
            }  # fmt: skip
            assert json.loads((await asked(node, "echo/json"))[2]) == {"wsEndpointPath": ""}
            assert json.loads((await asked(node, "cdp/json/list"))[2]) == []
            assert (await asked(node, "echo/json/version"))[0] == 426
            async with node.connect("echo/") as client:  # where Playwright goes with the empty path
                await client.send("x")
                assert await client.recv() == "x"

    run(main())


def test_a_cdp_client_that_asks_while_no_worker_is_there_waits_in_line_like_others(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool("cdp")
            node.pool("playwright", product="Playwright", versions=["1.65"])
            url = {"webSocketDebuggerUrl": "ws://127.0.0.1:1/sessions/cdp"}
            status, _, body = await asked(node, "cdp/json/version")
            assert (status, json.loads(body)) == (200, url), "its first worker is still on its way"
            waiting = asyncio.create_task(node.connect("cdp").__aenter__())
            await until(lambda: node.of("want") == [["cdp", 1]], "it to wait")
            await node.worker(pool="cdp", cdp={"Browser": "Chrome/156"})
            await (await waiting).close()
            node.tell("down", "worker:cdp:0", 1, "worker-lost", "it died")
            assert json.loads((await asked(node, "cdp/json/version"))[2]) == {"Browser": "Chrome/156", **url}
            assert json.loads((await asked(node, "cdp/json/list"))[2]) == []
            assert (await asked(node, "playwright/json/version"))[0] == 426

    run(main())


async def shouting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A TCP worker that speaks first, and goes on after the client's end."""
    writer.write(b"READY\n")
    while data := await reader.read(65_536):
        writer.write(data.upper())
    writer.write(b"BYE\n")


def test_tcp_goes_through_as_it_is_and_each_direction_ends_by_itself(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool(protocol="tcp", ping=20.0)
            await node.rough_worker(shouting)
            head = b"GET /sessions/echo HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
            reader, writer = await node.raw(head + b"early\n")
            status, headers, _ = await answer(reader)
            assert (status, headers["upgrade"]) == (101, "tcp")
            assert [await reader.readline(), await reader.readline()] == [b"READY\n", b"EARLY\n"]
            writer.write(b"x" * 200_000 + b"\n")
            assert await reader.readexactly(200_001) == b"X" * 200_000 + b"\n"
            writer.write_eof()
            assert await reader.read() == b"BYE\n", "what came after the client's end"
            ((reason, sums),) = await node.ends(1)
            assert (reason, sums["bytes_in"], sums["bytes_out"]) == ("client", 200_007, 200_017)
            writer.close()
            status, headers, _ = await asked(node, "echo", "Connection: Upgrade\r\nUpgrade: smtp\r\n")
            assert status == 426

    run(main())


def test_a_worker_that_has_much_to_say_before_its_client_is_there_can_say_it_all(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 1_000_000

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x" * size)
        await reader.read()

    async def late(*given: Any) -> Any:
        transport, early = await relay.dial(*given)
        await until(lambda: len(early.data) > HELD, "more than is held")
        return transport, early

    async def main() -> None:
        monkeypatch.setattr(handshakes, "dial", late)
        async with node.running():
            node.pool(protocol="tcp")
            await node.rough_worker(talk)
            head = b"GET /sessions/echo HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
            reader, writer = await node.raw(head)
            assert (await answer(reader))[0] == 101
            assert await reader.readexactly(size) == b"x" * size
            writer.close()
            await node.ends(1)

    run(main())


def test_a_websocket_client_of_a_tcp_pool_is_bridged(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool(protocol="tcp", ping=0.05)
            await node.rough_worker(shouting)
            async with node.connect() as client:
                assert await client.recv() == b"READY\n"
                await client.send("hello\n")
                assert await client.recv() == b"HELLO\n"
                await (await client.ping())
                (live,), pings = node.sessions.live.values(), {0.0}
                await until(lambda: pings.add(live.splice._pinged) or len(pings) > 4, "answers to our pings, too")
                body = b"y" * 300_000 + b"\n"
                await client.send([body[:1000], body[1000:]])
                got = b""
                while len(got) < len(body):
                    piece = await client.recv()
                    assert isinstance(piece, bytes)
                    assert len(piece) <= 65_536
                    got += piece
                assert got == body.upper()
            assert [reason for reason, _ in await node.ends(1)] == ["client"]

    run(main())


def test_the_end_of_a_tcp_worker_is_a_close_frame_for_a_bridged_client(node: FakeNode) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"all I have")

    async def main() -> None:
        failed: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
        async with node.running():
            node.pool(protocol="tcp")
            await node.rough_worker(talk)
            async with node.connect(subprotocols=["binary"]) as client:
                assert client.subprotocol == "binary"
                assert await client.recv() == b"all I have"
                assert await closed(client) == 1000
            assert [reason for reason, _ in await node.ends(1)] == ["worker"]
            await until(lambda: not node.front.clients, "the client to be gone")
            assert not failed, "its own close frame needs no answer"
            reader, writer = await node.raw(handshake() + b"\x82\x03not masked")
            assert (await answer(reader))[0] == 101
            assert b"\x03\xea" in await reader.read(), "1002: a protocol error"
            writer.close()

    run(main())


def test_a_client_of_a_tcp_pool_that_leaves_at_the_moment_of_its_admission_costs_no_slot(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool(protocol="tcp")
            await node.worker()
            node.admit = lambda *_: None
            _, writer = await node.raw(handshake())
            await until(lambda: node.of("admit"), "its admission to be asked for")
            (session,) = node.sessions.live.values()
            assert session.request is not None
            node.tell("admitted", session.id, {})
            session.request.client_left()
            writer.close()
            assert [reason for reason, _ in await node.ends(1)] == ["client"]
            assert node.in_use() == 0

    run(main())
