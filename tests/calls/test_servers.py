"""Programs of others as models; models that take turns, that are not there, that do not heed a cancel, that are there early."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.calls.test_calls import Asking, answer, ask, state
from tests.harness import Node, call, gone, until

HERE = Path(__file__).parent
APP = HERE / "servers_app.py"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """One node for all that leave it as it was."""
    folder = tmp_path_factory.mktemp("servers")
    node = Node(folder / "data", APP, TURNS=str(folder / "turns")).start()
    yield node
    node.stop()


def by_hand(node: Node, path: str, body: Any = None, method: str = "POST", **headers: str) -> Any:
    status, found = call(node.url, method, path, body, {**JSON, **headers})
    assert status == 200, (found, node.log()[-1500:])
    return found


def test_a_server_gets_requests_as_they_came_and_not_the_nodes_secrets(node: Node) -> None:
    found = by_hand(
        node, "/api/v1/calls/by_port?model=one&x=%2F", b'{"a": 1}', authorization="Bearer node", cookie="a=b"
    )
    assert (found["method"], found["path"], found["body"], found["model"]) == (
        "POST",
        "/?model=one&x=%2F",
        '{"a": 1}',
        "one",
    )
    assert not {"authorization", "cookie", "x-ostler-model"} & set(found["headers"])
    assert found["headers"]["x-request-id"]
    other = by_hand(node, "/api/v1/calls/by_port", {"model": "org/two:b", "payload": 1})
    assert other["model"] == "org/two:b" and other["pid"] != found["pid"]
    assert state(node, "by_port:one")["port"] > 0


def test_a_server_on_a_socket_has_its_own_path_and_any_other(node: Node) -> None:
    found = by_hand(node, "/api/v1/calls/by_socket", b"[1]")
    assert found["path"] == "/v1/things"
    there = by_hand(node, "/api/v1/calls/by_socket/a/b%20c?d=e", method="GET")
    assert (there["path"], there["method"]) == ("/a/b%20c?d=e", "GET")
    assert node.get("/api/v1/calls/echo/a/b")[0] == 404
    sockets = [p.name for p in (node.folder / "run").glob("by_socket*")]
    assert len(sockets) == 1
    until(lambda: state(node, "by_socket:by_socket")["state"] == "IDLE", "it to leave")
    assert not [*(node.folder / "run").glob("by_socket*")]


def test_a_server_that_answers_garbage_is_a_502_and_no_more(node: Node) -> None:
    for _ in range(2):
        status, found = node.post("/api/v1/calls/garbage", {"payload": 1}, **JSON)
        assert (status, found["error"]["code"]) == (502, "WORKER_DIED"), found
    assert by_hand(node, "/api/v1/calls/by_port?model=one", b"{}")["model"] == "one"


@pytest.mark.parametrize(
    ("task", "why"),
    [("nowhere", "no program 'no-such-program-anywhere'"), ("filed", "there-is-no-filed.bin does not exist")],
)
def test_what_is_not_there_is_unavailable_and_says_why(node: Node, task: str, why: str) -> None:
    shown = state(node, f"{task}:{task}")
    assert shown["state"] == "UNAVAILABLE" and why in shown["reason"]
    status, found = ask(node, task, 1)
    assert status == 503 and why in found["error"]["message"]
    assert node.get("/readyz")[0] == 200


def test_a_server_that_cannot_start_says_what_it_printed(node: Node) -> None:
    status, found = ask(node, "dies", 1)
    assert (status, found["error"]["code"]) == (503, "MODEL_FAILED"), found


def test_models_that_are_pinned_or_preloaded_are_there_before_anybody_calls(node: Node) -> None:
    until(lambda: state(node, "kept:kept")["state"] == "READY", "the pinned one")
    until(lambda: state(node, "early:early")["workers"] == 2, "both workers of the preloaded one")
    pid = answer(node, "kept")
    os.kill(pid, 9)
    node.wait_worker(
        "worker:kept:0", "to come back by itself", lambda w: w["generation"] == 2 and w["status"] == "healthy"
    )
    assert answer(node, "kept") != pid


def test_a_model_can_be_loaded_unloaded_and_changed_while_the_node_runs(node: Node) -> None:
    url = "/api/v1/models"
    assert node.post(f"{url}/load", {"task": "first"}, **JSON)[0] == 200
    until(lambda: state(node, "first:first")["state"] == "READY", "it to be loaded")
    assert node.post(f"{url}/unload", {"task": "first"}, **JSON)[0] == 200
    until(lambda: state(node, "first:first")["state"] == "IDLE", "it to leave")
    assert call(node.url, "PATCH", url, {"task": "first", "idle": "50ms"}, JSON)[0] == 200
    answer(node, "first", {})
    until(lambda: state(node, "first:first")["state"] == "IDLE", "it to leave early")
    for body, status in (
        ({"task": "first", "idle": "soon"}, 422),
        ({"task": "none", "idle": 1}, 404),
        ({"task": "first", "env": "x"}, 422),
        ({"task": "by_port", "model": "three", "idle": 1}, 404),
    ):
        assert call(node.url, "PATCH", url, body, JSON)[0] == status, body
    assert node.post(f"{url}/load", {"task": "nowhere"}, **JSON)[0] == 409
    assert node.post(f"{url}/load", {"task": "by_port"}, **JSON)[0] == 422


def test_a_cancelled_call_that_does_not_end_takes_its_worker_along_where_that_is_allowed(
    node: Node, tmp_path: Path
) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    assert node.post("/api/v1/models/load", {"task": "deaf"}, **JSON)[0] == 200
    until(lambda: state(node, "deaf:deaf")["state"] == "READY", "it to be loaded")
    status, found = ask(node, "deaf", {"begun": str(begun), "go": str(go)}, headers={"x-ostler-timeout": "0.3"})
    assert (status, found["error"]["code"]) == (504, "DEADLINE")
    second = Asking(node, "deaf", {"begun": str(tmp_path / "again"), "go": str(tmp_path / "now")})
    until(lambda: (tmp_path / "again").exists(), "the next call to run in a new process")
    (tmp_path / "now").touch()
    assert second.result()[0] == 200
    shown = node.worker("worker:deaf:0")
    assert (shown["generation"], shown["restart_count"]) == (2, 0), (
        "what a caller cancels says nothing against the model"
    )
    assert "a cancelled call did not end" in node.log() or "kill_on_cancel" in node.log()


def test_in_exclusive_mode_loads_and_calls_take_turns(make_node, tmp_path: Path) -> None:
    """Seed 003's load test: concurrent requests to two models, and never two operations at once."""
    turns, gpus = tmp_path / "turns", tmp_path / "gpus.json"
    gpus.write_text(json.dumps({"gpus": [{"uuid": "GPU-0", "total_mb": 1000}], "folder": "used"}))
    node = make_node(
        app=APP, TURNS=str(turns), OSTLER_GPU_EXCLUSIVE="true", OSTLER_FAKE_GPUS=str(gpus), OSTLER_GPU_HEADROOM_MB="0"
    )
    asking = [Asking(node, task, {}) for _ in range(12) for task in ("first", "second")]
    until(lambda: node.get("/api/v1/health")[1]["gpu_lock_held"], "a turn to be taken")
    assert [a.result()[0] for a in asking] == [200] * 24
    lines = turns.read_text().splitlines()
    assert len(lines) == 2 * (24 + 2)
    assert all(one[0] == "+" and two == "-" + one[1:] for one, two in zip(lines[::2], lines[1::2])), lines
    until(lambda: node.get("/api/v1/health")[1]["gpu_lock_held"] is False, "the last turn to be over")
