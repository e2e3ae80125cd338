"""Calls on two nodes of one PostgreSQL: passed on to the node that has the model, or has room for it, and never lost with it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ostler.calls.placing import CROWDED, NEVER, NOW, There, Way, choose
from tests.calls.test_calls import Asking, ask
from tests.harness import Node, call, until
from tests.servers import Server, free_port

APP = Path(__file__).parent / "two_nodes_app.py"
JSON = {"content-type": "application/json"}


class Pair:
    """Node a has a GPU, node b a small one."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.store = server.url(server.create_database())
        self.folder = folder
        self.a, self.b = self.node("a", 1000), self.node("b", 100)

    def node(self, name: str, gpu_mb: int) -> Node:
        port, gpus = free_port(), self.folder / f"{name}.json"
        gpus.write_text(json.dumps({"gpus": [{"uuid": f"GPU-{name}", "total_mb": gpu_mb}]}))
        env = {"OSTLER_STORE": self.store, "OSTLER_FAKE_GPUS": str(gpus), "OSTLER_GPU_HEADROOM_MB": "0", "WHICH": name}
        env |= {
            "OSTLER_ADVERTISE": f"http://127.0.0.1:{port}",
            "OSTLER_NODE_LEASE": "3",
            "OSTLER_HEARTBEAT_INTERVAL": "0.3",
        }
        return Node(self.folder / name, APP, "--name", name, "--port", str(port), **env)

    def elsewhere(self, node: Node, name: str) -> dict[str, Any]:
        """What a node knows of a model on the other one."""
        found = node.get("/api/v1/models")[1]["elsewhere"]
        return next((row for row in found if f"{row['task']}:{row['model']}" == name), {})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, postgres: Server):
    found = Pair(tmp_path_factory.mktemp("two"), postgres)
    try:
        found.a.start(ready=False)
        found.b.start(ready=False)
        for node in (found.a, found.b):
            until(lambda node=node: len(node.get("/api/v1/nodes")[1]["nodes"]) == 2, "both nodes to be known")
            until(lambda node=node: found.elsewhere(node, "where:where"), "the other one's models to be known")
        yield found
    finally:
        for node in (found.a, found.b):
            if node.process is not None and node.process.poll() is None:
                node.kill()


def where(node: Node, task: str, payload: Any = None) -> str:
    status, body = ask(node, task, payload)
    assert status == 200, (body, node.log()[-2000:])
    return str(body["result"])


def test_a_warm_model_of_another_node_answers_and_is_seen_from_here(pair: Pair) -> None:
    assert where(pair.a, "where") == "a"
    until(lambda: pair.elsewhere(pair.b, "where:where").get("state") == "READY", "b to hear of it")
    assert where(pair.b, "where") == "a", "it is warm there"
    big = "x" * 3_000_000
    assert where(pair.b, "where", big) == "a"
    rows = [w["pool"] for w in pair.b.workers() if w["node"] == "b" and w["status"] == "healthy"]
    assert "where" not in rows


def test_an_error_of_the_model_there_is_the_callers_answer(pair: Pair) -> None:
    assert where(pair.a, "where") == "a"
    until(lambda: pair.elsewhere(pair.b, "where:where").get("state") == "READY", "b to hear of it")
    status, body = ask(pair.b, "where", {"fail": 1})
    assert (status, body["error"]["code"]) == (400, "BAD_PAYLOAD")


def test_a_model_for_which_there_is_no_room_here_is_placed_where_there_is(pair: Pair) -> None:
    assert where(pair.b, "large") == "a"


def test_what_was_passed_on_is_not_passed_on_again_and_only_nodes_may_ask_for_places(pair: Pair) -> None:
    assert where(pair.a, "where") == "a"
    until(lambda: pair.elsewhere(pair.b, "where:where").get("state") == "READY", "b to hear of it")
    found = call(pair.b.url, "POST", "/api/v1/calls/where", {"payload": None}, {**JSON, "ostler-forwarded-by": "x"})
    assert found[1]["result"] == "b"
    status, body = call(
        pair.b.url, "GET", "/api/v1/inner/places/where?model=where", None, {"x-forwarded-for": "1.2.3.4"}
    )
    assert status == 401, body


def test_a_node_that_dies_costs_a_typed_error_at_most_and_the_next_call_is_served(pair: Pair, tmp_path: Path) -> None:
    """Last: node a is gone after it."""
    assert where(pair.a, "pids") == "a"
    until(lambda: pair.elsewhere(pair.b, "pids:pids").get("state") == "READY", "b to hear of it")
    begun = tmp_path / "begun"
    asking = Asking(pair.b, "pids", {"begun": str(begun)})
    until(begun.exists, "the call to run on a")
    pair.a.kill()
    status, body = asking.result()
    # Its worker may die before its plane, which then still tells.
    assert status == 502 and body["error"]["code"] in ("NODE_LOST", "WORKER_DIED"), body
    assert where(pair.b, "pids") == "b"


# ---- the decision


@pytest.mark.parametrize(
    ("here", "elsewhere", "expected"),
    [
        (There("IDLE"), {"a": There("READY", free=1)}, [Way("a", False)]),
        (There("IDLE"), {"a": There("BUSY", free=0), "b": There("IDLE")}, []),
        (There("BUSY"), {"a": There("READY", free=2), "b": There("READY", free=5)}, [Way("b", False), Way("a", False)]),
        (There("STARTING"), {"a": There("STARTING")}, []),
        (There("IDLE", fits=NEVER), {"a": There("IDLE", fits=NOW), "b": There("IDLE", fits=NEVER)}, [Way("a", True)]),
        (
            There("UNAVAILABLE"),
            {"a": There("IDLE", fits=CROWDED), "b": There("STARTING")},
            [Way("b", True), Way("a", True)],
        ),
        (There("IDLE", fits=CROWDED), {"a": There("IDLE", fits=CROWDED)}, []),
        (There("IDLE", fits=CROWDED), {"a": There("IDLE", fits=NOW)}, [Way("a", True)]),
        (There("FAILED"), {"a": There("FAILED"), "b": There("UNAVAILABLE")}, []),
    ],
)
def test_where_a_call_goes(here: There, elsewhere: dict[str, There], expected: list[Way]) -> None:
    assert choose(here, elsewhere) == expected


def test_a_call_is_never_sent_where_the_model_can_never_be() -> None:
    chance, states = (
        random.Random(4),
        ["READY", "BUSY", "STARTING", "PARKED", "IDLE", "FAILED", "UNAVAILABLE", "TERMINATED"],
    )

    def some() -> There:
        return There(chance.choice(states), chance.randrange(3), chance.randrange(3), chance.randrange(3))

    for _ in range(5000):
        elsewhere = {name: some() for name in "abcd"[: chance.randrange(5)]}
        for way in choose(some(), elsewhere):
            there = elsewhere[way.node]
            assert there.state not in ("FAILED", "UNAVAILABLE", "TERMINATED")
            assert not (there.state == "IDLE" and there.fits == NEVER)
            assert way.starts or (there.free and there.state in ("READY", "BUSY"))
