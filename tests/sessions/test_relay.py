"""Sessions through the plane: connect, bytes both ways, and one reason for each end."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.server import ServerConnection, unix_serve
from websockets.exceptions import ConnectionClosed, InvalidStatus

from ostler.plane import handshake as handshakes
from ostler.sessions import frames
from tests.plane.serving import run
from tests.sessions.planes import FakeNode, echo, handshake, session_of, until


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    return FakeNode(tmp_path)


async def closed(client: ClientConnection) -> tuple[int, str]:
    """What the client was told at the end."""
    with pytest.raises(ConnectionClosed) as found:
        while True:
            await client.recv()
    assert found.value.rcvd is not None
    return found.value.rcvd.code, found.value.rcvd.reason


async def refused(node: FakeNode, target: str = "echo", **more: Any) -> tuple[int, dict[str, str], str]:
    with pytest.raises(InvalidStatus) as found:
        async with node.connect(target, **more):
            pass
    response = found.value.response
    return response.status_code, dict(response.headers), (response.body or b"").decode()


def test_a_client_is_relayed_to_a_worker_and_its_end_is_told(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool()
            await node.worker()
            async with node.connect(compression=None) as client:
                for message in ("hello", "", b"\x00\x01", "x" * 70_000, b"y" * 1_000_000):
                    await client.send(message)
                    assert await client.recv() == message
                assert [admitted[0] for admitted in node.of("admit")] == [session_of(client)]
                assert node.in_use() == 1
            ((reason, sums),) = await node.ends(1)
            assert (reason, sums["code"]) == ("client", 1000)
            assert sums["bytes_in"] > 1_070_000
            assert sums["bytes_out"] > 1_070_000
            assert node.in_use() == 0
            about = node.of("admit")[0][3]
            assert about["pool"] == "echo"
            assert about["owner"].startswith("user:")
            async with node.connect() as client:  # with compression, as the two agree on it
                await client.send("x" * 1000)
                assert await client.recv() == "x" * 1000

    run(main())


def test_codes_and_reasons_of_a_close_go_through_unchanged(node: FakeNode) -> None:
    heard: list[tuple[int, str]] = []

    async def worker(connection: ServerConnection) -> None:
        if await connection.recv() == "you":
            await connection.close(4001, "the worker's own words")
        else:
            with pytest.raises(ConnectionClosed) as found:
                await connection.recv()
            assert found.value.rcvd is not None
            heard.append((found.value.rcvd.code, found.value.rcvd.reason))

    async def main() -> None:
        async with node.running():
            node.pool()
            await node.worker(handler=worker)
            async with node.connect() as client:
                await client.send("you")
                assert await closed(client) == (4001, "the worker's own words")
            async with node.connect() as client:
                await client.send("me")
                await client.close(4002, "the client's own words")
            found = [(reason, sums["code"], sums["text"]) for reason, sums in await node.ends(2)]
            assert found == [("worker", 4001, "the worker's own words"), ("client", 4002, "the client's own words")]
            await until(lambda: heard == [(4002, "the client's own words")], "the worker to hear it")

    run(main())


def test_the_freed_slot_goes_to_the_head_of_the_line_and_never_to_one_that_left(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool()
            await node.worker(slots=1)
            first = await node.connect()
            left = await node.raw(handshake())
            await until(lambda: node.of("want") == [["echo", 1]], "the first in line")
            waiting = asyncio.ensure_future(node.connect().__aenter__())
            await until(lambda: node.of("want")[-1] == ["echo", 2], "the second in line")
            left[1].close()
            await until(lambda: node.of("want")[-1] == ["echo", 1], "it to leave")
            node.sessions.report()
            facts = node.of("facts")[-1][0]
            assert facts["lines_total"] == {"echo": 1}
            assert facts["counts"]["echo"]["left"] == 1
            await first.close()
            second = await waiting
            await second.send("mine")
            assert await second.recv() == "mine"
            assert len(node.of("admit")) == 2
            assert node.of("admit")[1][3]["waited_ms"] > 0
            order = [frame[0] for frame in node.said if frame[0] in ("admit", "ended")]
            assert order == ["admit", "ended", "admit"], "the slot was free before it was given"
            await second.close()

    run(main())


def test_whoever_ends_it_the_client_is_told_why(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool()
            await node.worker(0)
            await node.worker(1)
            clients = [await node.connect() for _ in range(4)]
            by_worker: dict[str, list[ClientConnection]] = {}
            where = {admit[0]: admit[1] for admit in node.of("admit")}
            for client in clients:
                by_worker.setdefault(where[session_of(client)], []).append(client)
            (zero, one), (two, three) = by_worker["worker:echo:0"], by_worker["worker:echo:1"]
            node.tell("kill", session_of(zero), "killed", "ostler: the session was ended by ann")
            assert await closed(zero) == (1008, "ostler: the session was ended by ann")
            node.tell("cut", "worker:echo:0", 1, "drained", "the drain limit of 30 s is over")
            assert await closed(one) == (1001, "ostler: the drain limit of 30 s is over")
            node.tell("down", "worker:echo:1", 1, "worker-lost", "the worker died (SIGKILL)")
            assert await closed(two) == (1011, "ostler: the worker died (SIGKILL)")
            assert await closed(three) == (1011, "ostler: the worker died (SIGKILL)")
            found = sorted(reason for reason, _ in await node.ends(4))
            assert found == ["drained", "killed", "worker-lost", "worker-lost"]
            assert not node.sessions.live

    run(main())


def test_a_worker_that_breaks_off_is_explained_by_what_the_node_says_a_moment_later(node: FakeNode) -> None:
    async def worker(connection: ServerConnection) -> None:
        await connection.recv()
        assert connection.request is not None
        id_ = connection.request.headers["x-ostler-session"]
        splice = node.sessions.live[id_].splice
        connection.transport.abort()
        if "explained" in connection.request.path:
            await until(lambda: splice._first is not None, "the plane to see the end")
            node.tell("kill", id_, "worker-lost", "the browser died")

    async def main() -> None:
        async with node.running():
            node.pool()
            await node.worker(handler=worker)
            async with node.connect("echo/explained") as client:
                await client.send("now")
                assert await closed(client) == (1011, "ostler: the browser died")
            async with node.connect() as client:
                await client.send("now")
                assert await closed(client) == (1011, "ostler: the worker closed the connection without a close frame")
            assert [reason for reason, _ in await node.ends(2)] == ["worker-lost", "worker"]

    run(main())


def test_limits_of_idle_and_of_all_time(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool("idle", idle=0.5, ping=0.1)
            node.pool("long", longest=0.3)
            await node.worker(pool="idle")
            await node.worker(pool="long")
            async with node.connect("idle") as client:
                (one,) = node.sessions.live.values()
                assert one.splice is not None
                seen, before = one.splice.client, one.splice.client.active
                await until(lambda: seen.heard > before, "an answer to a ping")
                assert seen.active == before, "pings and their answers are no activity"
                assert await closed(client) == (1008, "ostler: the session was idle for 0.5 s")
            async with node.connect("long") as client:
                assert await closed(client) == (1008, "ostler: the session reached its limit of 0.3 s")
            assert [reason for reason, _ in await node.ends(2)] == ["idle", "longest"]

    run(main())


def test_a_client_that_does_not_answer_pings_is_gone_and_one_that_does_is_not_told_to_the_worker(
    node: FakeNode,
) -> None:
    seen: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        while data := await reader.read(1000):
            seen.append(data)

    async def main() -> None:
        async with node.running():
            node.pool(ping=0.1)
            await node.rough_worker(talk)
            reader, writer = await node.raw(handshake())
            await reader.readuntil(b"\r\n\r\n")
            for number in range(6):  # more than two: each answer counts
                head = await reader.readexactly(10)
                assert head[:2] == b"\x89\x08", "a ping of eight bytes"
                mask = struct.pack("!I", number + 1)
                writer.write(b"\x8a\x88" + mask + frames.masked(head[2:], mask))
            await reader.readexactly(20)  # two without an answer
            rest = await reader.read()
            assert rest == frames.close(1008, "ostler: the client did not answer pings for 0.2 s")
            ((reason, sums),) = await node.ends(1)
            assert (reason, sums["bytes_in"], seen) == ("silent", 6 * 14, [])
            writer.close()

    run(main())


def test_an_end_in_the_middle_of_a_frame_closes_without_one(node: FakeNode) -> None:
    """And a ping waits until the frame is whole."""
    go_on = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        writer.write(b"\x81\x0ahalf ")
        await go_on.wait()
        writer.write(b"whole\x81\x0aha")
        await reader.read()

    async def main() -> None:
        async with node.running():
            node.pool(ping=0.05)
            await node.rough_worker(talk)
            reader, writer = await node.raw(handshake())
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(7) == b"\x81\x0ahalf "
            (live,) = node.sessions.live.values()
            real, may = live.splice.may_write, []
            live.splice.may_write = lambda: may.append(real()) or may[-1]
            await until(lambda: len(may) > 1, "pings to be due")
            assert not any(may)
            go_on.set()
            assert await reader.readexactly(5) == b"whole"
            assert await reader.readexactly(4) == b"\x81\x0aha"
            (id_,) = node.sessions.live
            node.tell("kill", id_, "killed", "enough")
            assert await reader.read() == b"", "nothing could be put into the frame"
            assert [reason for reason, _ in await node.ends(1)] == ["killed"]
            writer.close()

    run(main())


def test_one_dead_worker_of_four_fails_no_connect(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool()
            node.up("worker:echo:0", str(node.folder / "nobody.sock"))
            for number in (1, 2, 3):
                await node.worker(number)
            clients = await asyncio.gather(*(node.connect().__aenter__() for _ in range(15)))
            for client in clients:
                await client.send("x")
                assert await client.recv() == "x"
            strikes = node.of("strike")
            assert {(component, generation) for component, generation, _ in strikes} == {("worker:echo:0", 1)}
            assert {reason for reason, _ in await node.ends(len(strikes))} == {"refused"}
            assert node.in_use() == 15
            for client in clients:
                await client.close()
            await node.ends(15 + len(strikes))
            assert node.in_use() == 0

    run(main())


def test_a_client_whose_only_worker_is_dead_gets_the_next_one(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool()
            node.up("worker:echo:0", str(node.folder / "nobody.sock"))
            waiting = asyncio.ensure_future(node.connect().__aenter__())
            await until(lambda: node.of("strike"), "a strike")
            node.tell("down", "worker:echo:0", 1, "worker-lost", "it died")
            await node.worker(0, generation=2)
            client = await waiting
            await client.send("x")
            assert await client.recv() == "x"
            await client.close()

    run(main())


def test_a_client_whose_only_worker_failed_it_once_gets_a_session_of_it_a_moment_later(node: FakeNode) -> None:
    """What failed may be one session's endpoint, such as a browser that died in reserve: the worker serves others."""
    address = str(node.folder / "late.sock")

    async def main() -> None:
        async with node.running():
            node.pool()
            node.up("worker:echo:0", address)
            waiting = asyncio.ensure_future(node.connect().__aenter__())
            await until(lambda: node.of("strike"), "a strike")
            node.servers.append(await unix_serve(echo, address))
            client = await waiting
            await client.send("x")
            assert await client.recv() == "x"
            await client.close()
            assert len(node.of("strike")) <= 2
            await until(lambda: node.in_use() == 0, "the slot")

    run(main())


def test_a_worker_that_fails_again_and_again_is_tried_less_and_less(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool()
            node.up("worker:echo:0", str(node.folder / "nobody.sock"))
            status, _, body = await refused(node, "echo?wait=3")
            assert status == 503
            assert "NO_WORKER" in body
            assert len(node.of("strike")) in (2, 3, 4), "at once, after 0.5, 1 and 2 s"
            await until(lambda: node.in_use() == 0, "the slot")

    run(main())


def test_workers_that_accept_and_say_nothing_or_garbage_or_no_are_not_the_end(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "HEAD", 0.2)

    async def mute(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\x00\x01\x02 not HTTP at all" * 1000)

    async def unwell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy")
        await reader.read()

    async def shut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)

    async def main() -> None:
        async with node.running():
            node.pool()
            for number, talk in enumerate((mute, garbage, unwell, shut)):
                await node.rough_worker(talk, number)
            await node.worker(8)
            async with node.connect() as client:
                await client.send("x")
                assert await client.recv() == "x"
            texts = sorted(text.split(":")[0] for _, _, text in node.of("strike"))
            assert texts == [
                "it answered the handshake with 503",
                "it closed the connection without an answer",
                "it did not answer the handshake within 0.2 s",
                "it does not speak HTTP",
            ]

    run(main())


def test_what_a_worker_refuses_is_the_clients_answer(node: FakeNode) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 428 Precondition Required\r\ncontent-length: 13\r\n\r\nwrong version")

    async def main() -> None:
        async with node.running():
            node.pool()
            await node.rough_worker(talk)
            status, _, body = await refused(node)
            assert (status, body) == (428, "wrong version")
            ((reason, sums),) = await node.ends(1)
            assert (reason, sums["text"]) == ("refused", "the worker answered 428 to the handshake")
            assert node.in_use() == 0

    run(main())


def test_the_worker_sees_the_clients_handshake_without_what_is_ours(node: FakeNode) -> None:
    heads: list[Any] = []

    async def worker(connection: ServerConnection) -> None:
        heads.append(connection.request)
        await echo(connection)

    async def main() -> None:
        async with node.running():
            node.pool()
            await node.worker(handler=worker, path="/inner")
            more = {
                "Authorization": "Bearer the-token-of-the-node", "Cookie": "ostler_token=secret; theme=dark",
                "x-playwright-browser": "chromium", "x-ostler-session": "a lie", "X-Ostler-Owner": "a lie",
            }  # fmt: skip
            target = "echo/deep%20er?token=the-token-of-the-node&a=1&priority=3&wait=5&session=k&a=2&b=%26"
            agent = "Playwright/1.65.0 (x64; debian 12) python/3.11"
            async with node.connect(target, additional_headers=more, user_agent_header=agent) as client:
                head = heads[0]
                assert head.path == "/inner/deep%20er?a=1&a=2&b=%26"
                assert head.headers["host"] == "localhost"
                assert head.headers["user-agent"] == agent
                assert head.headers["x-playwright-browser"] == "chromium"
                assert head.headers["x-ostler-session"] == session_of(client)
                assert head.headers["cookie"] == "theme=dark"
                assert "permessage-deflate" in head.headers["sec-websocket-extensions"]
                assert {"authorization", "origin", "x-ostler-owner"} & {name.lower() for name in head.headers} == set()
                about = node.of("admit")[0][3]
                assert (about["owner"], about["priority"], about["key"], about["agent"]) == ("token", 3, "k", agent)
                assert (about["path"], about["via"]) == ("/deep%20er", None)

    run(main())


def test_the_workers_handshake_is_begun_while_the_node_is_asked_and_answered_with_its_consent(node: FakeNode) -> None:
    met: list[str] = []
    left: list[str] = []

    async def handler(connection: ServerConnection) -> None:
        assert connection.request is not None
        name = connection.request.headers["x-ostler-session"]
        met.append(name)
        try:
            await echo(connection)
        finally:
            left.append(name)

    async def main() -> None:
        async with node.running():
            node.pool()
            await node.worker(handler=handler)
            node.admit = lambda *_: None
            connecting = asyncio.create_task(node.connect().__aenter__())
            await until(lambda: met, "the worker to be asked")
            id_ = node.of("admit")[0][0]
            assert met == [id_]
            assert not connecting.done(), "no client is connected without the node's consent"
            node.tell("admitted", id_, {})
            client = await connecting
            await client.send("x")
            assert await client.recv() == "x"
            assert met == [id_], "there was one handshake"
            await client.close()
            # The node says no: the worker's connection is closed, and nobody was served.
            connecting = asyncio.create_task(node.connect().__aenter__())
            await until(lambda: len(met) == 2, "the worker to be asked")
            node.tell("refused", met[1], "registry", "the store is away", 1.0)
            with pytest.raises(InvalidStatus):
                await connecting
            await until(lambda: met[1] in left, "its connection to be closed")
            # The client leaves: so does the handshake.
            connecting = asyncio.create_task(node.connect().__aenter__())
            await until(lambda: len(met) == 3, "the worker to be asked")
            connecting.cancel()
            await until(lambda: met[2] in left, "its connection to be closed")
            node.tell("admitted", met[2], {})
            await until(lambda: node.in_use() == 0, "the slots")

    run(main())


def test_the_node_may_say_no(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool()
            await node.worker(0)
            await node.worker(1)
            node.admit = lambda id_, component, *_: (
                ["refused", id_, "worker", "it did not open", None]
                if component == "worker:echo:0"
                else ["admitted", id_, {"address": str(node.folder / "echo1-1.sock"), "path": "/own"}]
            )
            async with node.connect() as client:
                await client.send("x")
                assert await client.recv() == "x"
            assert [admit[1] for admit in node.of("admit")] == ["worker:echo:0", "worker:echo:1"]
            node.admit = lambda id_, *_: ["refused", id_, "registry", "the store is away", 7.0]
            status, headers, body = await refused(node)
            assert (status, headers["retry-after"]) == (503, "7")
            assert '"REGISTRY"' in body
            assert "the store is away" in body
            await until(lambda: node.in_use() == 0, "the slots")

    run(main())


def test_a_client_that_leaves_while_the_node_is_asked_costs_its_slot_until_the_answer(node: FakeNode) -> None:
    """So that the row of a session that never began is ended after it was written, never before."""

    async def main() -> None:
        async with node.running():
            node.pool()
            await node.worker(slots=1)
            node.admit = lambda *_: None
            _, writer = await node.raw(handshake())
            await until(lambda: node.of("admit"), "the question")
            writer.close()
            await until(lambda: not node.front.clients, "the client to be gone")
            assert (node.of("ended"), node.in_use()) == ([], 1)
            node.tell("admitted", node.of("admit")[0][0], {})
            assert [reason for reason, _ in await node.ends(1)] == ["client"]
            assert node.in_use() == 0

    run(main())


def test_a_worker_that_is_told_twice_has_its_slots_once(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool()
            await node.worker(slots=1)
            async with node.connect() as client:
                (worker,) = node.sessions.slots.workers.values()
                node.up(worker.component, worker.endpoint["address"], slots=1)
                assert node.in_use() == 1
                node.tell("down", worker.component, worker.generation, "worker-lost", "ostler: it died")
                await client.wait_closed()
            assert len(node.sessions.slots.groups["echo"].ready) == 0, "nobody is sent to a worker that is gone"

    run(main())


def test_a_worker_that_closes_says_empty_when_the_last_session_is_over(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool()
            await node.worker(0)
            client = await node.connect()
            node.tell("close", "worker:echo:0", 1)
            waiting = asyncio.ensure_future(node.connect().__aenter__())
            await until(lambda: node.of("want"), "one in line: no new sessions")
            await client.send("x")
            assert await client.recv() == "x", "the one that is there goes on"
            assert node.of("empty") == []
            await node.worker(0, generation=2)
            second = await waiting
            await client.close()
            await until(lambda: node.of("empty") == [["worker:echo:0", 1]], "empty")
            await second.close()
            node.tell("close", "worker:echo:0", 2)
            await until(lambda: node.of("empty")[1:] == [["worker:echo:0", 2]], "empty")

    run(main())


def test_a_plane_that_stops_waits_for_its_sessions_and_sends_those_in_line_away(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool()
            await node.worker(slots=1)
            client = await node.connect()
            waiting = asyncio.ensure_future(refused(node))
            await until(lambda: node.of("want"), "one in line")
            node.sessions.stop()
            stopping = asyncio.ensure_future(node.front.stop())
            status, headers, _ = await waiting
            assert (status, headers["retry-after"]) == (503, "1")
            await client.send("still here")
            assert await client.recv() == "still here"
            assert not stopping.done()
            node.sessions.end_all()
            node.front.abort()
            assert await closed(client) == (1001, "ostler: the node is shutting down")
            await stopping
            assert [reason for reason, _ in await node.ends(1)] == ["shutdown"]

    run(main())


def test_facts_tell_bytes_and_the_line(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool()
            await node.worker(slots=1)
            async with node.connect(compression=None) as client:
                await client.send("x" * 100)
                await client.recv()
                waiting = asyncio.ensure_future(node.connect("echo?priority=-5").__aenter__())
                await until(lambda: node.of("want"), "one in line")
                node.sessions.report()
                facts = node.of("facts")[-1][0]
                ((id_, (bytes_in, bytes_out, idle, state)),) = facts["live"].items()
                assert (id_, bytes_in, bytes_out, state) == (session_of(client), 106, 102, "live")
                assert idle < 30
                ((owner, priority, waited),) = facts["lines"]["echo"]
                assert owner.startswith("user:")
                assert (priority, waited < 30) == (-5, True)
                counts = facts["counts"]["echo"]
                assert (counts["admitted"], counts["bytes_in"], counts["bytes_out"]) == (1, 106, 102)
            await (await waiting).close()
            await node.ends(2)
            await until(lambda: node.of("facts")[-1][0]["live"] == {}, "a last report")

    run(main())
