"""Sessions on two nodes, of one PostgreSQL or of one Valkey: a client gets a slot wherever there is one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.sync.client import ClientConnection

from ostler.sessions.registry import WorkerKey
from tests.harness import Node, call, until
from tests.servers import Server, free_port
from tests.sessions import valkey
from tests.sessions.test_sessions import closed, id_of, refusal, row, say, session

APP = Path(__file__).parent / "two_nodes_app.py"


class Pair:
    """Two nodes. On Valkey each has a store of its own."""

    def __init__(self, folder: Path, common: dict[str, str], server: Server | valkey.Server) -> None:
        self.folder, self._common, self.server = folder, common, server
        self.a, self.b = self.node("a"), self.node("b")

    def node(self, name: str) -> Node:
        port = free_port()
        env = {"OSTLER_ADVERTISE": f"http://127.0.0.1:{port}", "WHICH": name, "OSTLER_NODE_LEASE": "3"}
        env |= {"OSTLER_HEARTBEAT_INTERVAL": "0.3", "OSTLER_REGISTRY_KEY_TTL": "2", "OSTLER_REGISTRY_COMMAND_TTL": "3"}
        env |= {"OSTLER_REGISTRY_SWEEP": "3", **self._common}
        return Node(self.folder / name, APP, "--name", name, "--port", str(port), **env)

    def start(self) -> None:
        for node in (self.a, self.b):
            node.start(ready=False)
        for node, name in ((self.a, "a"), (self.b, "b")):
            until(lambda node=node, name=name: at(node) == name, f"{name} to serve")
        for node in (self.a, self.b):
            until(lambda node=node: self.reaches_both(node), "each to know of the other")

    def reaches_both(self, node: Node) -> bool:
        """Whether three clients of one node find slots: it has two."""
        with contextlib.ExitStack() as stack:
            try:
                clients = [stack.enter_context(session(node, "where", "?wait=2")) for _ in range(3)]
            except Exception:  # noqa: BLE001
                return False
            return {say(client, "where") for client in clients} == {"a", "b"}


def at(node: Node) -> str | None:
    try:
        with session(node, "where", "?wait=0.1") as client:
            return say(client, "where")
    except Exception:  # noqa: BLE001
        return None


def generation(node: Node, name: str) -> int:
    """Of the worker that serves on the node of that name."""
    found = [w for w in node.workers() if w["node"] == name and w["component"] == "worker:where:0"]
    return max((int(w["generation"]) for w in found if w["status"] == "healthy"), default=0)


@pytest.fixture(scope="module", params=["postgres", "valkey"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        if request.param == "postgres":
            server: Server = request.getfixturevalue("postgres")
            found = Pair(tmp_path_factory.mktemp("two"), {"OSTLER_STORE": server.url(server.create_database())}, server)
        else:
            kv = valkey.Server()
            stack.callback(kv.close)
            kv.start()
            found = Pair(tmp_path_factory.mktemp("two"), {"OSTLER_REGISTRY": kv.url}, kv)
        try:
            found.start()
            yield found
        finally:
            for node in (found.a, found.b):
                if node.process is not None and node.process.poll() is None:
                    node.kill()


def test_a_client_gets_a_slot_of_the_other_node_when_its_own_has_none(pair: Pair) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(session(pair.a, "where")) for _ in range(4)]
        assert sorted(say(client, "where") for client in clients) == ["a", "a", "b", "b"]
        assert say(clients[-1], "x" * 200_000) == "x" * 200_000
        status, body = refusal(pair.a, "where", "?wait=0.3")
        assert status == 503 and "LINE_TIMEOUT" in body
    until(lambda: at(pair.b) == "b", "the slots to be free")


def test_a_client_that_waits_gets_the_slot_that_is_freed_on_the_other_node(pair: Pair) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(session(pair.a, "where")) for _ in range(4)]
        there = next(client for client in clients if say(client, "where") == "b")
        got: list[str] = []

        def wait() -> None:
            with session(pair.a, "where") as client:
                got.append(say(client, "where"))

        waiting = threading.Thread(target=wait)
        waiting.start()
        there.close()
        waiting.join(60)
        assert got == ["b"]


def test_a_session_of_another_node_is_seen_and_ended_from_here(pair: Pair) -> None:
    with session(pair.b, "where") as client:
        assert say(client, "where") == "b"
        one = id_of(client)
        listed = until(
            lambda: [s for s in pair.a.get("/api/v1/sessions?state=live")[1]["sessions"] if s["id"] == one],
            "a to list it",
        )
        assert listed[0]["node"].startswith("b@") and listed[0]["worker"] == "worker:where:0"
        assert pair.a.get(f"/api/v1/sessions/{one}")[1]["state"] == "live"
        assert "watch it there" in pair.a.get(f"/api/v1/sessions/{one}/view")[1]["error"]["message"]
        until(
            lambda: [w["in_use"] for w in pair.a.get("/api/v1/capacity")[1]["elsewhere"] if w["name"] == "b"] == [1],
            "a to know what b has",
        )
        until(lambda: call(pair.a.url, "DELETE", f"/api/v1/sessions/{one}")[0] == 202, "a to know of it")
        code, text = closed(client)
        assert code == 1008 and "ended by" in text


def test_a_drain_that_the_registry_asks_for_replaces_the_worker_and_cuts_no_session(pair: Pair) -> None:
    with session(pair.b, "where") as client:
        assert say(client, "where") == "b"
        before = generation(pair.b, "b")
        if isinstance(pair.server, valkey.Server):  # by hand, as with redis-cli
            (key,) = pair.server.client.keys(f"worker:where:b-*-{before}")
            pair.server.client.set(f"worker:cmd:{key.split(':', 2)[2]}", "shutdown", ex=60)
        else:
            with pair.a.open_store() as store:
                (node,) = {one["node"] for one in store.sessions.workers() if one["name"] == "b"}
                assert store.sessions.want(node, WorkerKey("worker:where:0", before), "drain")
        until(lambda: generation(pair.b, "b") > before, "the next worker to serve")
        assert say(client, "hello") == "hello"
    assert row(pair.b, id_of(client))["reason"] == "client"
    for node in (pair.a, pair.b):
        until(lambda node=node: pair.reaches_both(node), "each to know of the other")


def test_the_server_may_forget_or_go_away_and_no_session_ends(pair: Pair) -> None:
    with session(pair.a, "where") as client:
        if isinstance(pair.server, valkey.Server):
            active = pair.server.client
            active.flushall()
            assert say(client, "hello") == "hello"
            until(
                lambda: sorted(active.hgetall("cluster:active_connections").values()) == ["0", "1"],
                "both workers and the session to be registered again",
            )
        pair.server.kill()
        assert say(client, "still here") == "still here"
        status, body = refusal(pair.a, "where", "?wait=1")
        assert status == 503 and "REGISTRY" in body
        pair.server.start()
        until(lambda: at(pair.a), "new sessions")
        assert say(client, "all the time") == "all the time"
    assert row(pair.a, id_of(client))["reason"] == "client"


def test_the_death_of_a_node_ends_its_sessions_alone_and_the_other_serves_on(pair: Pair) -> None:
    """Last: node a is gone after it."""
    with contextlib.ExitStack() as stack:
        clients: list[ClientConnection] = [stack.enter_context(session(pair.b, "where")) for _ in range(3)]
        by_node = {client: say(client, "where") for client in clients}
        assert sorted(by_node.values()) == ["a", "b", "b"]
        lost = next(client for client, where in by_node.items() if where == "a")
        one = id_of(lost)
        pair.a.kill()
        code, text = closed(lost)
        assert code == 1011 and text.startswith("ostler: ") and "node" in text
        for client, where in by_node.items():
            if where == "b":
                assert say(client, "hello") == "hello"
    until(lambda: at(pair.b) == "b", "b to serve")
    if "OSTLER_STORE" in pair.b.env:
        assert row(pair.b, one)["reason"] == "node-lost"
