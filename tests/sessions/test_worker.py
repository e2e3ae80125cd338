"""The program of a session worker, from the inside: what is called around each session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ostler.sessions import frames
from ostler.sessions.door import Door
from ostler.sessions.spec import Endpoint
from ostler.sessions.splice import Limits
from ostler.sessions.worker import Child
from tests.sessions.planes import until

OPTIONS = {"generation": 1, "slots": 2, "probe": 0}


class Slow:
    """Opens a session when it is allowed to; `calls` is what was called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.go, self.is_deaf = asyncio.Event(), False

    async def start(self, _: object) -> str:
        return "tcp:127.0.0.1:1"

    async def open(self, _: object) -> None:
        self.calls.append("open")
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            self.calls.append("open ends")
            if not self.is_deaf:
                raise

    async def close(self, _: object) -> None:
        self.calls.append("close")


def child(test: Callable[[Child, Slow, list[tuple[Any, ...]]], Awaitable[None]], folder: Path) -> None:
    async def main() -> None:
        said: list[tuple[Any, ...]] = []
        spec: Any = SimpleNamespace(name="slow", target=Slow)
        channel: Any = SimpleNamespace(send=lambda *frame: said.append(frame))
        made = Child(spec, folder, OPTIONS, channel)
        await test(made, made._code, said)  # noqa: SLF001

    asyncio.run(main())


@pytest.mark.parametrize("deaf", [False, True])
def test_a_session_that_ends_while_it_is_opened_is_closed_once_and_after_that(tmp_path: Path, deaf: bool) -> None:
    async def test(made: Child, code: Slow, said: list[tuple[Any, ...]]) -> None:
        code.is_deaf = deaf
        made.heard(["open", "s1", {}])
        await until(lambda: code.calls, "open to be called")
        made.heard(["close", "s1", "client", ""])
        await until(lambda: "close" in code.calls, "close to be called")
        await asyncio.sleep(0)
        assert code.calls == ["open", "open ends", "close"]
        assert made.sessions == {}
        assert said == []

    child(test, tmp_path)


def test_a_worker_that_stops_while_it_opens_a_session_closes_it_once(tmp_path: Path) -> None:
    async def test(made: Child, code: Slow, said: list[tuple[Any, ...]]) -> None:
        made.heard(["open", "s1", {}])
        await until(lambda: code.calls, "open to be called")
        await made._end()  # noqa: SLF001
        assert code.calls == ["open", "open ends", "close"]

    child(test, tmp_path)


class Served(Slow):
    """Says where it is served, or that each session has its own place."""

    address = "tcp:127.0.0.1:1"

    async def start(self, _: object) -> Endpoint:
        return Endpoint(self.address)


@pytest.mark.parametrize(("options", "address"), [({"probe": 0}, "tcp:127.0.0.1:1"), ({"probe": 1}, "")])
def test_a_worker_that_is_not_probed_is_never_said_to_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], address: str
) -> None:
    monkeypatch.setattr(Served, "address", address)

    async def reachable(_: object) -> None: ...

    async def main() -> None:
        said: list[tuple[Any, ...]] = []
        monkeypatch.setattr("ostler.sessions.worker._reachable", reachable)
        spec: Any = SimpleNamespace(name="served", target=Served)
        channel: Any = SimpleNamespace(send=lambda *frame: said.append(frame))
        made = Child(spec, tmp_path, {**OPTIONS, **options}, channel)
        running = asyncio.create_task(made.run())
        await until(lambda: said, "it to be ready")
        await until(lambda: "probe" not in {task.get_name() for task in asyncio.all_tasks()}, "no probe to run")
        made._probed -= 3600  # noqa: SLF001
        made.facts()
        made.stop()
        await running
        assert [frame[0] for frame in said] == ["ready"]

    asyncio.run(main())


def test_facts_of_the_door_may_be_asked_while_sessions_come_and_go() -> None:
    door = Door("127.0.0.1", Limits(), lambda *_: None)

    class Coming:
        bytes_in = bytes_out = 1

        @property
        def idle(self) -> float:
            door._live[f"s{len(door._live)}"] = self  # type: ignore[assignment]  # noqa: SLF001
            return 0.0

    door._live["s0"] = Coming()  # type: ignore[assignment]  # noqa: SLF001
    assert door.facts() == {"s0": [1, 1, 0.0]}


@pytest.mark.parametrize(
    "spoofed", ["X-Ostler-Session : other", "X-Mine: 1\r\n x-ostler-session: other", "Cookie : secret"]
)
def test_a_client_cannot_tell_the_worker_whose_session_it_has(tmp_path: Path, spoofed: str) -> None:
    async def main() -> None:
        heads: list[bytes] = []

        async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_unix_server(met, tmp_path / "s")
        door = Door("127.0.0.1", Limits(), lambda *_: None)
        port = await door.start()
        door.expect("t1", "mine", Endpoint(str(tmp_path / "s")))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /?ticket=t1 HTTP/1.1\r\nHost: x\r\n{spoofed}\r\n\r\n".encode())
        await reader.read()
        writer.close()
        assert all(b"mine" in head and b"other" not in head and b"secret" not in head for head in heads)
        door.stop()
        server.close()

    asyncio.run(main())


def test_a_door_whose_worker_cannot_be_reached_says_so_to_its_client_and_to_the_node(tmp_path: Path) -> None:
    async def main() -> None:
        said: list[tuple[Any, ...]] = []
        door = Door("127.0.0.1", Limits(), lambda *frame: said.append(frame))
        port = await door.start()
        door.expect("t", "s1", Endpoint(str(tmp_path / "nobody")))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /?ticket=t HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = await reader.read()
        writer.close()
        door.stop()
        assert answer.startswith(b"HTTP/1.1 502") and b"NO_WORKER" in answer
        assert [(frame[0], frame[1], frame[2]) for frame in said] == [("over", "s1", "worker-lost")]

    asyncio.run(main())


class Entrance:
    """A door with one ticket, and a worker behind it that answers the handshake when it may."""

    def __init__(self, folder: Path) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.door = Door("127.0.0.1", Limits(), lambda *frame: self.said.append(frame))
        self.go, self.asked, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._path = str(folder / "s")

    async def __aenter__(self) -> Entrance:
        self._server = await asyncio.start_unix_server(self._met, self._path)
        self._port = await self.door.start()
        self.door.expect("t", "s1", Endpoint(self._path))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.go.set()
        self.door.stop()
        self._server.close()

    async def _met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.asked.set()
        await self.go.wait()
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        self.left.set()
        writer.close()

    async def client(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """One that came with the ticket, and waits for the worker's answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(b"GET /?ticket=t HTTP/1.1\r\nhost: x\r\n\r\n")
        await self.asked.wait()
        return reader, writer

    def ends(self) -> list[tuple[Any, ...]]:
        return [frame[:3] for frame in self.said if frame[0] == "over"]


@pytest.mark.parametrize("abort", [False, True])
def test_a_client_that_leaves_while_the_door_connects_it_costs_no_slot(tmp_path: Path, abort: bool) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), Entrance(tmp_path) as made:
            _, writer = await made.client()
            writer.transport.abort() if abort else writer.close()
            await asyncio.sleep(0.1)
            made.go.set()
            await until(lambda: made.ends() == [("over", "s1", "client")], "the node to be told")
            await made.left.wait()
            assert not made.door.facts()

    asyncio.run(main())


def test_a_session_that_is_ended_while_the_door_connects_its_client_does_not_begin(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), Entrance(tmp_path) as made:
            reader, writer = await made.client()
            made.door.end("s1", "killed", "ostler: the session was ended by ann")
            made.go.set()
            assert (await reader.read()).endswith(frames.close(1008, "ostler: the session was ended by ann"))
            writer.close()
            await made.left.wait()
            assert not made.door.facts()

    asyncio.run(main())


def test_a_worker_that_does_not_answer_the_handshake_at_its_door_is_said_to_the_client_and_to_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostler.sessions.door._PATIENCE", 0.3)

    async def main() -> None:
        async with asyncio.timeout(30), Entrance(tmp_path) as made:
            reader, writer = await made.client()
            answer = await reader.read()
            writer.close()
            assert answer.startswith(b"HTTP/1.1 502") and b"NO_WORKER" in answer
            assert made.ends() == [("over", "s1", "worker-lost")]

    asyncio.run(main())
