"""Clients' connections, lent to a worker while they are busy: nothing is lost or moved, and every end is told as if they were not."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from ostler import tcp
from ostler.apps.browsers import installed
from ostler.apps.browsers.channel import Channel
from ostler.sessions import lending, splice
from ostler.sessions.lending import LENT, RECALLED, Loan
from ostler.sessions.passage import Passage
from ostler.sessions.splice import Limits, Splice
from tests.plane.serving import run
from tests.sessions.planes import FakeNode, handshake, session_of, until

LINE = Path(installed.__file__).with_name("line.js")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    monkeypatch.setattr(splice, "_MUCH", 3)
    monkeypatch.setattr(splice, "_BUSY", 30.0)
    return FakeNode(tmp_path)


@contextlib.asynccontextmanager
async def lent_worker(node: FakeNode, **terms: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker with the driver's own line.js, up and known to the plane."""
    node.pool(**terms)
    channel, address = Channel(node.folder / "l"), str(node.folder / "w")
    process = await asyncio.create_subprocess_exec(
        installed.driver().node,
        Path(__file__).with_name("lent_worker.js"),
        LINE,
        address,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **channel.variables},
        pass_fds=(channel.theirs.fileno(),),
    )
    channel.inherited()
    assert process.stdout is not None
    assert await process.stdout.readline() == b"up\n"
    node.up("worker:echo:0", address, lends=channel.path)
    process.channel = channel  # type: ignore[attr-defined]
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        channel.close()


def spliced(node: FakeNode, client: ClientConnection) -> Splice:
    found = node.sessions.live[session_of(client)].splice
    assert found is not None
    return found


async def lend(node: FakeNode, client: ClientConnection) -> Loan:
    """Talk until it is lent."""

    def is_lent() -> bool:
        loan = spliced(node, client).loan
        return loan is not None and loan.state == LENT

    while not is_lent():
        await client.send("much")
        assert await client.recv() == "much"
    loan = spliced(node, client).loan
    assert loan is not None
    return loan


async def closed(client: ClientConnection) -> tuple[int, str] | None:
    """What the client was told at the end; None: nothing."""
    with pytest.raises(ConnectionClosed) as found:
        while True:
            await client.recv()
    rcvd = found.value.rcvd
    return None if rcvd is None else (rcvd.code, rcvd.reason)


def size(payload: int, *, masked: bool) -> int:
    return payload + (2 if payload < 126 else 4 if payload < 65_536 else 10) + (4 if masked else 0)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_not_a_byte_is_lost_or_moved_while_connections_are_lent_and_had_back_all_the_time(
    node: FakeNode, seed: int
) -> None:
    chance = random.Random(seed)
    counts = {"lent": 0, "back": 0}

    async def talk(client: ClientConnection) -> int:
        """Sizes of what was sent: several messages on their way at once, small and large."""
        total = 0
        for number in range(120):
            sent = [
                bytes([number]) * chance.choice([0, 1, 125, 126, 1000, 65_535, 65_536, 300_000])
                for _ in range(chance.choice([1, 1, 1, 4]))
            ]
            for message in sent:
                await client.send(message)
                total += size(len(message), masked=True)
            if (loan := spliced(node, client).loan) is not None and loan.state == LENT:
                counts["lent"] += 1
                if chance.random() < 0.4:
                    loan.recall()
                    counts["back"] += 1
            for message in sent:
                assert await client.recv() == message
        return total

    async def main() -> None:
        async with node.running(), lent_worker(node, slots=5):
            async with contextlib.AsyncExitStack() as stack:
                clients = [
                    await stack.enter_async_context(node.connect(compression=None, max_size=None)) for _ in range(4)
                ]
                sums = await asyncio.gather(*(talk(client) for client in clients))
                ids = [session_of(client) for client in clients]
            await node.ends(4)
            told = {id_: (reason, about) for id_, reason, about in node.of("ended")}
            for id_, total in zip(ids, sums, strict=True):
                reason, about = told[id_]
                assert (reason, about["code"]) == ("client", 1000)
                assert about["bytes_in"] == total + size(2, masked=True)
            assert min(counts.values()) > 20, counts

    run(main())


def test_a_worker_reads_and_writes_a_busy_clients_own_connection_until_it_rests(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "_WATCH", 0.02)
    monkeypatch.setattr(lending, "_RESTS", 0.1)

    async def main() -> None:
        async with node.running(), lent_worker(node, ping=0.2) as process, node.connect(compression=None) as client:
            assert not files(process.pid, client)
            await lend(node, client)
            assert files(process.pid, client)
            way = spliced(node, client).worker.count
            for _ in range(20):
                await client.send("x" * 100)
                assert await client.recv() == "x" * 100
            live = spliced(node, client)
            assert live.worker.count == way  # nothing came the other way …
            await until(lambda: live.loan is None, "the connection to come back")
            assert not files(process.pid, client)
            assert live.lent_in >= 20 * size(100, masked=True)  # … and it was counted all the same
            assert live.lent_out >= 20 * size(100, masked=False)
            heard = live.client.heard
            await until(lambda: live.client.heard > heard, "the client to answer a ping of the relay's")
            await client.send("again")
            assert await client.recv() == "again"
            await lend(node, client)

    run(main())


def files(pid: int, client: ClientConnection) -> bool:
    """Whether that process has the plane's end of the client's connection open."""
    own = f"{client.local_address[1]:04X}"
    inodes = {
        row.split()[9]
        for row in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if row.split()[2].endswith(f":{own}")
    }
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(os.readlink(entry))
    return any(f"socket:[{inode}]" in found for inode in inodes)


@pytest.mark.parametrize(
    ("way", "told", "reason"),
    [
        ("kill", (1008, "ostler: enough"), "killed"),
        ("cut", (1001, "ostler: it drains"), "drained"),
        ("down", (1011, "ostler: it died of something"), "worker-lost"),
        ("sigkill", (1011, "ostler: the worker closed the connection without a close frame"), "worker"),
        ("plane leaves", (1001, "ostler: the node is shutting down"), "shutdown"),
        ("worker closes", (4001, "its own words"), "worker"),
        ("client closes", None, "client"),
        ("client vanishes", None, "client"),
    ],
)
def test_every_end_of_a_lent_connection_is_told_and_its_slot_is_free(
    node: FakeNode, way: str, told: tuple[int, str] | None, reason: str
) -> None:
    async def main() -> None:
        async with node.running(), lent_worker(node) as process:
            client = await node.connect(compression=None)
            await lend(node, client)
            lent = spliced(node, client)
            match way:
                case "kill":
                    node.tell("kill", session_of(client), "killed", "enough")
                case "cut":
                    node.tell("cut", "worker:echo:0", 1, "drained", "it drains")
                case "down":
                    process.kill()
                    node.tell("down", "worker:echo:0", 1, "worker-lost", "it died of something")
                case "sigkill":
                    process.kill()
                case "plane leaves":
                    node.sessions.end_all()
                case "worker closes":
                    await client.send("close 4001 its own words")
                case "client closes":
                    await client.close(4002, "mine")
                case "client vanishes":
                    client.transport.abort()
            if told is not None:
                assert await closed(client) == told
            ((found, sums),) = await node.ends(1)
            assert found == reason
            if way == "client closes":
                assert (sums["code"], sums["text"]) == (4002, "mine")
                assert client.close_code == 4002
            if way == "worker closes":
                assert (sums["code"], sums["text"]) == told
            assert sums["bytes_in"] >= 3 * size(4, masked=True)
            assert node.in_use() == 0
            assert lent.loan is None
            await client.close()

    run(main())


def test_a_lent_client_has_its_limits(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "_WATCH", 0.02)
    monkeypatch.setattr(lending, "_RESTS", 3600.0)

    async def main() -> None:
        async with node.running(), lent_worker(node, longest=0.5):
            async with node.connect(compression=None) as client:
                await lend(node, client)
                assert await closed(client) == (1008, "ostler: the session reached its limit of 0.5 s")
            node.pool(idle=0.5)
            async with node.connect(compression=None) as client:
                await lend(node, client)

                async def pings() -> None:  # which are no use
                    with contextlib.suppress(ConnectionClosed):
                        while True:
                            await (await client.ping())
                            await asyncio.sleep(0.02)

                pinging = asyncio.create_task(pings())
                assert await closed(client) == (1008, "ostler: the session was idle for 0.5 s")
                await pinging
            assert [reason for reason, _ in await node.ends(2)] == ["longest", "idle"]

    run(main())


def test_a_lent_client_that_takes_nothing_is_ended_and_nobody_else_notices(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "_WATCH", 0.02)

    async def main() -> None:
        async with node.running(), lent_worker(node):
            other = await node.connect(compression=None)
            await lend(node, other)
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.setblocking(False)
                await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", node.port))
                client = await node.connect(compression=None, sock=sock, max_size=None)
                await lend(node, client)
                live = spliced(node, client)
                live.limits = Limits(slow=0.5)
                client.transport.pause_reading()
                await client.send("send 200 200000")
                loan = live.loan
                assert loan is not None
                await until(lambda: not loan.may_write(), "the worker to say that a frame is half written")
                loan.recall()  # which cannot be: the frame is never whole
                await other.send("still")
                assert await other.recv() == "still"
                assert [reason for reason, _ in await node.ends(1)] == ["slow"]
                client.transport.abort()
            await other.send("still")
            assert await other.recv() == "still"
            await other.close()

    run(main())


def test_a_session_whose_worker_takes_no_connection_goes_on_without_and_is_not_asked_again(node: FakeNode) -> None:
    asked: list[Any] = []

    async def main() -> None:
        async with node.running(), taker(node, lambda message: [["no", *message[1:3]]], asked):
            async with node.connect(compression=None) as client:
                for number in range(30):
                    await client.send(str(number))
                    assert await client.recv() == str(number)
                assert [message[0] for message in asked] == ["take"]
            assert [reason for reason, _ in await node.ends(1)] == ["client"]

    run(main())


@contextlib.asynccontextmanager
async def taker(
    node: FakeNode, answer: Callable[[list[Any]], list[Any] | None], asked: list[Any]
) -> AsyncIterator[None]:
    """An echo worker whose socket for connections says what a test likes; None: it breaks off."""

    writers = []

    async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        async for line in reader:
            asked.append(json.loads(line))
            answers = answer(asked[-1])
            if answers is None:
                break
            for one in answers:
                writer.write(json.dumps(one).encode() + b"\n")
        writer.close()

    server = await asyncio.start_unix_server(met, node.folder / "l")
    node.pool()
    await node.worker(lends=str(node.folder / "l"))
    try:
        yield
    finally:
        server.close()
        for writer in writers:
            writer.close()


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([], "ostler: the worker does not give the connection back"),
        ([["took", 10**9]], "ostler: the worker does not give the connection back"),
        (None, "ostler: the worker closed the connection without a close frame"),
    ],
    ids=["says nothing", "tells lies", "breaks off"],
)
def test_a_worker_that_keeps_a_connection_and_says_nothing_of_it_loses_that_session_alone(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, answers: list[Any] | None, text: str
) -> None:
    monkeypatch.setattr(lending, "_WATCH", 0.02)
    monkeypatch.setattr(lending, "_PATIENCE", 0.3)
    monkeypatch.setattr(lending, "_LOST", 0.1)

    def answer(message: list[Any]) -> list[Any] | None:
        return None if answers is None else [[verb, *message[1:3], *more] for verb, *more in answers]

    async def main() -> None:
        async with node.running(), taker(node, answer, asked := []):
            async with node.connect(compression=None) as client, node.connect(compression=None) as other:
                while not asked:
                    await client.send("x")
                    assert await client.recv() == "x"
                await client.send("y")
                assert await closed(client) == (1011, text)
                await other.send("still")
                assert await other.recv() == "still"

    run(main())


def test_nonsense_about_a_connection_that_comes_back_is_no_more_than_that(node: FakeNode) -> None:
    nonsense = [
        {},
        {"left": -5, "head": "xyz", "rest": "soon", "closed": 7},
        {"left": 0, "head": "", "rest": 10**400, "closed": [10**30, "x"]},
        {"left": 0, "head": "", "rest": -(10**400), "closed": ["x", 1]},
        {"left": float("inf"), "head": "", "rest": 1},
    ]
    given = itertools.cycle(nonsense)

    def answer(message: list[Any]) -> list[Any]:
        named = message[1:3]
        if message[0] != "take":
            return [["gave", *named, next(given)]] if message[0] == "go" else []
        return [["stray"], 5, ["gave", "nobody", 1, {}], ["gave", *named, {}], ["took", *named, 0]]

    async def main() -> None:
        async with node.running(), taker(node, answer, asked := []):
            async with node.connect(compression=None) as client:
                while sum(message[0] == "go" for message in asked) <= len(nonsense):
                    await client.send("x")
                    assert await client.recv() == "x"
            assert [reason for reason, _ in await node.ends(1)] == ["client"]

    run(main())


def test_what_a_worker_says_of_a_close_is_a_text_that_every_store_takes(node: FakeNode) -> None:
    how = {"left": 0, "head": "", "rest": 1, "closed": [1000, "half a character \ud800"]}

    def answer(message: list[Any]) -> list[Any]:
        named = message[1:3]
        return [["took", *named, 0]] if message[0] == "take" else [["gave", *named, how]] if message[0] == "go" else []

    async def main() -> None:
        async with node.running(), taker(node, answer, asked := []):
            async with node.connect(compression=None) as client:
                while not any(message[0] == "go" for message in asked):
                    await client.send("x")
                    assert await client.recv() == "x"
                await until(lambda: spliced(node, client).closer is not None, "the close to be believed")
            ((_, sums),) = await node.ends(1)
            assert sums["text"] == "half a character ?"

    run(main())


def test_files_and_nonsense_that_a_worker_sends_are_not_kept() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        heard: list[Any] = []
        passage = Passage(ours, heard.append, lambda: None, takes_files=False)
        before = len(os.listdir("/proc/self/fd"))
        for number in range(40):
            socket.send_fds(theirs, [b"%d\n" % number], [theirs.fileno()] * 16)
        theirs.send(b"[" * 50_000 + b'\n"last"\n')
        await until(lambda: "last" in heard, "all messages")
        assert heard == [*range(40), "last"]
        assert len(os.listdir("/proc/self/fd")) == before
        passage.close()
        theirs.close()

    run(main())


def test_a_client_on_its_way_to_the_worker_is_told_when_the_relay_dies(node: FakeNode) -> None:
    """The worker has its socket, and waits for what the relay has still to pass on."""

    async def main() -> None:
        async with node.running(), lent_worker(node):
            way_in, way = await asyncio.open_unix_connection(node.folder / "w")
            way.write(handshake(more="X-Ostler-Session: one\r\n"))
            await way_in.readuntil(b"\r\n\r\n")
            with socket.create_server(("127.0.0.1", 0)) as server:
                reader, writer = await asyncio.open_connection(*server.getsockname())
                accepted, _ = server.accept()
            with socket.socket(socket.AF_UNIX) as lender, accepted:
                lender.connect(str(node.folder / "l"))
                take = json.dumps(["take", "one", 1, 10**6]).encode() + b"\n"
                socket.send_fds(lender, [take], [accepted.fileno()])
                way.write(b"\x89\x80\0\0\0\0")  # a ping, whose answer shows that it goes on
                assert await way_in.readexactly(2) == b"\x8a\0"
                await asyncio.sleep(0.1)
            way.close()
            frame = await reader.readexactly(2)
            assert frame[0] == 0x88
            assert await reader.readexactly(frame[1]) == b"\x03\xf3ostler: the relay died"
            writer.close()

    run(main())


def test_a_channel_forgets_sessions_that_ended_while_they_were_lent(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running(), lent_worker(node) as process:
            channel = process.channel  # type: ignore[attr-defined]
            async with node.connect(compression=None) as client:
                await lend(node, client)
                assert [*channel._by_session] == [session_of(client)]
                node.tell("kill", session_of(client), "killed", "enough")
                await closed(client)
            await until(lambda: not channel._by_session, "the session to be forgotten")

    run(main())


def test_a_client_that_sends_a_frame_in_pieces_is_had_back_in_the_middle_of_it(node: FakeNode) -> None:
    """The rest of the frame is followed by the relay, which then finds the client's close."""

    async def main() -> None:
        async with node.running(), lent_worker(node):
            reader, writer = await node.raw(handshake())
            await reader.readuntil(b"\r\n\r\n")
            message = b"\x81\x85\0\0\0\0hello"

            async def exchange() -> None:
                writer.write(message)
                assert await reader.readexactly(7) == b"\x81\x05hello"

            (session,) = node.sessions.live.values()
            while (loan := session.splice and session.splice.loan) is None or loan.state != LENT:
                await exchange()
            writer.write(message[:8])
            live = session.splice
            assert live is not None
            await until(lambda: tcp.look(live.client.file).heard < 0.05, "the piece to be there")
            await asyncio.sleep(0.05)
            loan.recall()
            assert loan.state == RECALLED
            await until(lambda: live.loan is None, "the connection to come back")
            assert live.client.track is not None
            assert not live.client.track.between
            writer.write(message[8:])
            assert await reader.readexactly(7) == b"\x81\x05hello"
            writer.write(b"\x88\x82\0\0\0\0\x03\xe9")
            assert await reader.readexactly(4) == b"\x88\x02\x03\xe9"
            ((reason, sums),) = await node.ends(1)
            assert (reason, sums["code"]) == ("client", 1001)
            writer.close()

    run(main())


def test_a_worker_that_hangs_with_a_lent_client_does_not_keep_its_end_from_it(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running(), lent_worker(node) as process:
            client = await node.connect(compression=None)
            await lend(node, client)
            process.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            node.tell("cut", "worker:echo:0", 1, "hung", "the worker hangs")
            assert await closed(client) == (1011, "ostler: the worker hangs")
            assert time.monotonic() - began < 5
            await client.close()

    run(main())
