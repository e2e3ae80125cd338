"""Clients and workers that misbehave: bounded memory, a clear answer, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from pathlib import Path

import pytest
from websockets.asyncio.server import ServerConnection

from ostler.plane.entry import Entry
from ostler.sessions import splice
from tests.plane.serving import answer, run
from tests.sessions.planes import FakeNode, echo, handshake, session_of, until

MB = 1 << 20


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    return FakeNode(tmp_path)


def used() -> float:
    """MB of memory in use now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / MB


async def works(node: FakeNode, pool: str = "echo") -> None:
    """Somebody else is served as always."""
    async with node.connect(pool) as client:
        await client.send("fine")
        assert await client.recv() == "fine"


async def pour(writer: asyncio.StreamWriter, piece: bytes, size: int) -> int:
    """Send so much, or as much as is taken within a moment; how much that was."""
    sent = 0
    with contextlib.suppress(ConnectionError, TimeoutError):
        while sent < size:
            writer.write(piece)
            sent += len(piece)
            async with asyncio.timeout(0.5):
                await writer.drain()
    return sent


def test_a_handshake_that_is_never_finished_costs_a_connection_and_then_nothing(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Entry, "head_patience", 1.0)

    async def main() -> None:
        async with node.running():
            node.pool()
            await node.worker()
            half = [await node.raw(handshake()[:-2]) for _ in range(50)]
            await works(node)
            for reader, writer in half:
                assert await reader.read() == b"", "closed, for it took too long"
                writer.close()
            await until(lambda: not node.front.clients, "all of them to be gone")
            assert len(node.of("admit")) == 1

    run(main())


def test_a_million_headers_are_refused_with_bounded_memory(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool()
            await node.worker()
            reader, writer = await node.raw(handshake()[:-2] + b"".join(b"x-h%d: y\r\n" % n for n in range(201)))
            status, _, body = await answer(reader)
            writer.close()
            assert status == 431
            assert b"HEAD_TOO_LARGE" in body
            before = used()
            reader, writer = await node.raw(handshake()[:-2])
            await pour(writer, b"".join(b"x-h%d: y\r\n" % n for n in range(1000)), 1000 * 12_000)
            assert used() - before < 30
            await works(node)
            with contextlib.suppress(ConnectionError):  # it may see the end of the connection before the answer
                assert (await answer(reader))[0] == 431
            writer.close()
            assert len(node.of("admit")) == 1

    run(main())


def test_a_frame_without_end_is_read_only_as_fast_as_the_worker_takes_it(node: FakeNode) -> None:
    """The worker does not read: the client is held, and both ends stay in bounds."""
    go_on = asyncio.Event()
    total = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal total
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await go_on.wait()
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        while data := await reader.read(MB):
            total += len(data)

    async def main() -> None:
        async with node.running():
            node.pool()
            await node.worker()
            await works(node)
            await node.rough_worker(talk)
            node.tell("close", "worker:echo:0", 1)
            reader, writer = await node.raw(handshake())
            assert (await answer(reader))[0] == 101
            before = used()
            head = b"\x82\xff" + (1 << 40).to_bytes(8, "big") + b"mask"
            sent = len(head) + await pour(writer, head + bytes(MB), 200 * MB)
            assert sent < 60 * MB, "nobody takes it, and yet it was taken"
            assert used() - before < 60
            (one,) = node.sessions.live.values()
            assert one.splice is not None
            assert one.splice.client.is_paused
            go_on.set()
            await until(lambda: total > 0 and one.splice and not one.splice.client.is_paused, "it to go on")
            writer.close()
            assert [reason for reason, _ in await node.ends(2)] == ["client", "client"]
            node.tell("close", "worker:echo:9", 1)
            await node.worker(1)
            await works(node)

    run(main())


def test_a_client_that_does_not_read_is_ended_with_bounded_memory(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splice.Limits, "__init__", _with_slow(0.4))
    sent = 0

    async def flood(connection: ServerConnection) -> None:
        nonlocal sent
        with contextlib.suppress(Exception):
            while True:
                await connection.send(os.urandom(MB))
                sent += 1

    async def main() -> None:
        async with node.running():
            node.pool()
            node.pool("calm")
            await node.worker(handler=flood, serve={"compression": None})
            await node.worker(pool="calm")
            before = used()
            reader, writer = await node.raw(handshake())
            assert (await answer(reader))[0] == 101
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await until(lambda: any(s.splice and s.splice.client.is_full for s in node.sessions.live.values()), "it")
            await works(node, "calm")
            found = [(reason, sums["code"]) for reason, sums in await node.ends(2)]
            assert found == [("client", 1000), ("slow", 1008)]
            assert sent < 40
            assert used() - before < 60
            assert node.in_use() == 0
            writer.close()

    run(main())


def _with_slow(seconds: float):  # type: ignore[no-untyped-def]
    def init(self: splice.Limits, idle: float = 0.0, longest: float = 0.0, ping: float = 0.0) -> None:
        for name, value in (("idle", idle), ("longest", longest), ("ping", ping), ("slow", seconds)):
            object.__setattr__(self, name, value)

    return init


def test_a_flood_of_pings_is_held_by_back_pressure(node: FakeNode) -> None:
    """Its sender reads no answer: what waits for it is bounded, in a WebSocket pool and behind a bridge."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def main() -> None:
        async with node.running():
            node.pool("echo")
            await node.worker(handler=echo, serve={"compression": None})
            node.pool("raw", protocol="tcp")
            address = str(node.folder / "raw.sock")
            node.servers.append(await asyncio.start_unix_server(talk, address))  # type: ignore[arg-type]
            node.up("worker:raw:0", address, pool="raw")
            ping = b"\x89\xfd" + b"mask" + bytes(125)
            for target in ("echo", "raw"):
                before = used()
                reader, writer = await node.raw(handshake(target))
                assert (await answer(reader))[0] == 101
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                await pour(writer, ping * 1000, 30 * MB)
                assert used() - before < 80, target
                if target == "echo":
                    await works(node)
                writer.transport.abort()  # type: ignore[attr-defined]
            found = [reason for reason, _ in await node.ends(3)]
            assert found == ["client"] * 3
            assert node.in_use() == 0

    run(main())


def test_an_answer_without_end_from_a_worker_is_cut(node: FakeNode) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\n")
        while True:
            writer.write(b"x-more: " + b"y" * 10_000 + b"\r\n")
            await writer.drain()

    async def main() -> None:
        async with node.running():
            node.pool()
            await node.rough_worker(talk, 1)
            await node.worker(2)
            before = used()
            await works(node)
            ((_, _, text),) = node.of("strike")
            assert "headers" in text
            assert used() - before < 30

    run(main())


def test_what_is_over_leaves_nothing_behind(node: FakeNode) -> None:
    """Two hundred sessions that end in all ways: no slot, no file, no session, no client is left."""

    async def moody(connection: ServerConnection) -> None:
        async for message in connection:
            if message == "abort":
                connection.transport.abort()
                return

    async def one(number: int) -> None:
        client = await node.connect()
        match number % 5:
            case 0:
                await client.close()
            case 1:
                client.transport.abort()
            case 2:
                await client.send("abort")
            case 3:
                client.transport.write(b"\x88\x80mask")  # a close frame, and gone
                client.transport.close()
            case 4:
                node.tell("kill", session_of(client), "killed", "enough")
        await client.wait_closed()

    async def main() -> None:
        async with node.running():
            node.pool(line=200)
            for number in range(4):
                await node.worker(number, handler=moody, lifetime=0)
            files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
            for first in range(0, 200, 40):
                await asyncio.gather(*(one(first + n) for n in range(40)))
            await node.ends(200)
            assert (node.in_use(), len(node.sessions.live), dict(node.sessions.slots.live)) == (0, 0, {})
            await until(lambda: not node.front.clients, "the clients to be gone")
            await until(lambda: len(os.listdir("/proc/self/fd")) <= files, "the files to be closed")  # noqa: PTH208
            assert len(node.of("ended")) == 200

    run(main())
