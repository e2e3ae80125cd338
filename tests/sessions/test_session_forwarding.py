"""Clients of a node without a free slot, and a node that has one: two planes in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus

from ostler.plane.access import Token
from ostler.plane.plan import Plan
from ostler.plane.request import Request
from tests.plane.serving import answer, run
from tests.sessions.planes import SECRET, FakeNode, handshake, session_of, until

CI = Token("ci", "the-secret-of-the-tests", [], 1, 7)


class Pair:
    """Node `here`, to which clients come, and node `there`."""

    def __init__(self, folder: Path) -> None:
        for name in ("h", "t"):
            (folder / name).mkdir()
        self.here, self.there = FakeNode(folder / "h"), FakeNode(folder / "t")
        self.here.tokens = (CI,)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.there.running(), self.here.running():
            for node in (self.here, self.there):
                node.pool(sticky=30.0)
            yield

    def tell(self, free: int, *, port: int | None = None, versions: tuple[str, ...] = ()) -> None:
        """What the node has read of the other."""
        for node, name, other in ((self.here, "there", self.there), (self.there, "here", self.here)):
            pools = {"echo": {"free": free if node is self.here else 5, "versions": [*versions]}}
            url = f"http://127.0.0.1:{port or other.port}"
            told = {"own": "here" if name == "there" else "there", "secret": SECRET}
            node.tell("peers", {**told, "peers": {name: {"url": url, "pools": pools}}})


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


async def says(client: ClientConnection, word: str = "x") -> None:
    await client.send(word)
    assert await client.recv() == word


def bearer(token: str) -> dict[str, dict[str, str]]:
    return {"additional_headers": {"Authorization": f"Bearer {token}"}}


def test_a_client_of_a_node_without_a_free_slot_is_relayed_to_the_node_that_has_one(pair: Pair) -> None:
    async def main() -> None:
        async with pair.running():
            await pair.here.worker(slots=1)
            await pair.there.worker(slots=2)
            pair.tell(2)
            own = await pair.here.connect()
            assert pair.there.of("admit") == [], "a slot of its own comes first"
            away = await pair.here.connect("echo/deep?token=the-token-of-the-node&a=1&priority=9", compression=None)
            await says(away)
            ((id_, component, _, about),) = pair.there.of("admit")
            assert id_ == session_of(away)
            assert (component, about["owner"], about["via"]) == ("worker:echo:0", "token", "here")
            assert (about["priority"], about["path"], about["redirect"]) == (9, "/deep", False)
            assert about["client"].startswith("127.0.0.1:")
            assert len(pair.here.of("admit")) == 1
            await away.close(4005, "done")
            ((reason, sums),) = await pair.there.ends(1)
            assert (reason, sums["code"], sums["text"]) == ("client", 4005, "done")
            await until(lambda: not pair.here.sessions.slots.live["token"], "its count")
            again = await pair.here.connect()
            pair.there.tell("kill", session_of(again), "killed", "enough")
            with pytest.raises(ConnectionClosed) as found:
                await again.recv()
            assert found.value.rcvd is not None
            assert (found.value.rcvd.code, found.value.rcvd.reason) == (1008, "ostler: enough")
            await own.close()

    run(main())


def test_one_that_waits_is_tried_where_a_slot_becomes_free(pair: Pair) -> None:
    async def main() -> None:
        async with pair.running():
            await pair.here.worker(slots=1)
            await pair.there.worker(slots=1)
            pair.tell(0)
            own = await pair.here.connect()
            first = asyncio.ensure_future(pair.here.connect().__aenter__())
            await until(lambda: pair.here.of("want")[-1:] == [["echo", 1]], "one in line")
            second = asyncio.ensure_future(pair.here.connect().__aenter__())
            await until(lambda: pair.here.of("want")[-1:] == [["echo", 2]], "two in line")
            pair.tell(1)
            client = await first
            await says(client)
            assert len(pair.there.of("admit")) == 1
            assert not second.done()
            await own.close()
            await says(await second)
            assert len(pair.here.of("admit")) == 2
            await client.close()
            await (await second).close()
            await until(lambda: pair.here.in_use() + pair.there.in_use() == 0, "the slots")

    run(main())


def test_a_node_that_has_no_slot_after_all_or_is_gone_costs_a_moment_and_no_client(pair: Pair) -> None:
    async def main() -> None:
        async with pair.running():
            await pair.here.worker(slots=1)
            pair.tell(3)  # it has none
            own = await pair.here.connect()
            waiting = asyncio.ensure_future(pair.here.connect().__aenter__())
            await until(lambda: pair.here.of("want")[-1:] == [["echo", 1]], "one in line")
            await own.close()
            client = await waiting
            await says(client)
            pair.tell(3, port=1)  # nobody listens there
            waiting = asyncio.ensure_future(pair.here.connect().__aenter__())
            await until(lambda: pair.here.of("want")[-1:] == [["echo", 1]], "one in line")
            await client.close()
            await says(await waiting)
            await (await waiting).close()
            assert pair.there.of("admit") == []

    run(main())


def test_nothing_is_passed_on_twice_and_only_nodes_may_ask(pair: Pair) -> None:
    async def main() -> None:
        async with pair.running():
            await pair.here.worker(slots=1)
            pair.tell(3)
            own = await pair.here.connect()
            more = f"Authorization: Bearer {SECRET}\r\nostler-forwarded-by: there\r\nx-ostler-lease: old\r\n"
            reader, writer = await pair.here.raw(handshake("echo?wait=0", more=more))
            status, _, body = await answer(reader)
            assert (status, json.loads(body)["error"]["code"]) == (503, "LINE_TIMEOUT")
            writer.close()
            for secret, expected in ((SECRET, 409), ("wrong", 401)):
                head = "GET /api/v1/inner/sessions/echo?owner=x HTTP/1.1\r\nHost: localhost\r\n"
                head += (
                    f"Authorization: Bearer {secret}\r\nx-forwarded-for: 1.2.3.4\r\n\r\n"  # so that users do not count
                )
                reader, writer = await pair.here.raw(head.encode())
                assert (await answer(reader))[0] == expected
                writer.close()
            await own.close()

    run(main())


def test_a_slot_that_is_kept_for_nobody_is_free_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostler.plane.session_forwarding._KEPT", 0.5)

    async def main() -> None:
        async with pair.running():
            await pair.there.worker(slots=1, lifetime=3)
            pair.tell(1)
            head = (
                f"GET /api/v1/inner/sessions/echo?owner=x HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRET}\r\n\r\n"
            )
            reader, writer = await pair.there.raw(head.encode())
            status, _, body = await answer(reader)
            assert (status, pair.there.in_use()) == (200, 1)
            waiting = asyncio.ensure_future(pair.there.connect().__aenter__())
            client = await waiting
            await says(client)
            (one,) = pair.there.sessions.slots.workers.values()
            assert one.served == 1, "nobody used the other one"
            lease = json.loads(body)["lease"]
            more = f"Authorization: Bearer {SECRET}\r\nostler-forwarded-by: here\r\nx-ostler-lease: {lease}\r\n"
            late, other = await pair.there.raw(handshake("echo?wait=0", more=more))
            assert (await answer(late))[0] == 503
            other.close()
            writer.close()
            await client.close()

    run(main())


def test_limits_of_a_token_and_keys_of_sticky_sessions_hold_across_nodes(pair: Pair) -> None:
    async def main() -> None:
        async with pair.running():
            await pair.there.worker(slots=2)
            pair.tell(2)
            client = await pair.here.connect("echo?session=mine&priority=50", **bearer(CI.secret))
            assert pair.there.of("admit")[0][3]["priority"] == 7
            assert pair.there.of("admit")[0][3]["owner"] == "token:ci"
            with pytest.raises(InvalidStatus) as found:
                await pair.here.connect(**bearer(CI.secret))
            assert found.value.response.status_code == 429, "it has one, elsewhere"
            await client.close()
            await until(lambda: {s.state for s in pair.there.sessions.live.values()} == {"detached"}, "it to detach")
            await until(lambda: not pair.here.sessions.slots.live["token:ci"], "its count")
            await pair.here.worker(slots=1)
            again = await pair.here.connect("echo?session=mine", **bearer(CI.secret))
            assert session_of(again) == session_of(client), "back to the node that has kept it"
            assert pair.here.of("admit") == []
            await again.close()

    run(main())


def test_a_node_that_dies_is_told_to_the_client(pair: Pair) -> None:
    async def main() -> None:
        async with pair.running():
            await pair.there.worker(slots=1)
            pair.tell(1)
            client = await pair.here.connect()
            await says(client)
            for one in [*pair.there.sessions.live.values()]:
                assert one.splice is not None
                one.splice.client.transport.abort()
            with pytest.raises(ConnectionClosed) as found:
                await client.recv()
            assert found.value.rcvd is not None
            assert found.value.rcvd.reason == "ostler: node there closed the connection without a close frame"
            assert not pair.here.sessions.slots.live

    run(main())


def test_a_node_that_vanishes_without_a_word_is_asked_for_by_the_system(pair: Pair) -> None:
    async def main() -> None:
        async with pair.running():
            await pair.there.worker(slots=1)
            pair.tell(1)
            client = await pair.here.connect()
            (splice,) = pair.here.sessions.forwarding._away  # noqa: SLF001
            sock = splice.worker.transport.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle, every, times = (
                sock.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert idle + every * times <= 30, "seconds until the client is told"
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000, "also while it sends"
            await client.close()

    run(main())


def test_a_tokens_limit_counts_those_whose_session_is_looked_for_elsewhere(pair: Pair) -> None:
    async def main() -> None:
        async with pair.running():
            await pair.here.worker(slots=5)
            await pair.there.worker(slots=5)
            pair.tell(5)
            tries = (pair.here.connect(f"echo?session=k{n}", **bearer(CI.secret)) for n in range(5))
            found = await asyncio.gather(*tries, return_exceptions=True)
            clients = [one for one in found if isinstance(one, ClientConnection)]
            assert len(clients) == 1
            await clients[0].close()

    run(main())


def test_a_client_that_is_back_in_line_after_its_time_is_told_so(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostler.plane.session_forwarding._HANDSHAKE", 0.5)

    async def main() -> None:
        async with pair.running():
            await pair.there.worker(slots=1)
            pair.there.admit = lambda *_: None  # it has a slot, and then never answers
            pair.tell(1)
            with pytest.raises(InvalidStatus) as found:
                await pair.here.connect("echo?wait=0.1")
            assert found.value.response.status_code == 503

    run(main())


def test_a_client_that_leaves_while_its_session_is_looked_for_leaves_no_key_behind(pair: Pair) -> None:
    async def main() -> None:
        async with pair.running():
            await pair.here.worker(slots=5)
            pair.tell(0)
            route, seen = pair.here.front.route, []

            def leaves(request: Request) -> Plan:
                seen.append(request)
                asyncio.get_running_loop().call_soon(request.client_left)
                return route(request)

            pair.here.front.route = leaves
            _, writer = await pair.here.raw(handshake("echo?session=mine"))
            await until(lambda: seen and not pair.here.sessions._keys, "the key to be forgotten")  # noqa: SLF001
            writer.close()
            assert not pair.here.sessions.slots.live
            assert pair.here.in_use() == 0

    run(main())
