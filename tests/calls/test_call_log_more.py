"""The call log of programs of others, and of calls that take turns on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

from tests.calls.test_call_log import cancel, logged, running
from tests.calls.test_calls import MODELS, Asking, ask
from tests.calls.test_servers import APP
from tests.harness import call, until


def test_calls_of_a_server_are_logged_and_its_own_paths_are_not_taken_for_ours(make_node, tmp_path: Path) -> None:
    node = make_node(app=APP, TURNS=str(tmp_path / "turns"))
    assert ask(node, "by_port", 1, model="org/two:b", headers={"x-request-id": "at-a-server"})[0] == 200
    row = logged(node, "at-a-server")
    assert (row["task"], row["model"], row["outcome"], row["worker"]) == (
        "by_port",
        "org/two:b",
        "done",
        "worker:by_port:0",
    )
    status, found = call(node.url, "GET", "/api/v1/calls/by_port/running?model=org/two:b")
    assert (status, found["path"]) == (200, "/running?model=org/two:b")


def test_a_call_that_waits_for_its_turn_is_listed_and_can_be_cancelled(make_node, tmp_path: Path) -> None:
    fake, used, go = tmp_path / "gpus.json", tmp_path / "used", tmp_path / "go"
    used.mkdir()
    fake.write_text(json.dumps({"gpus": [{"uuid": "GPU-0", "total_mb": 5000}], "folder": "used"}))
    node = make_node(
        app=MODELS,
        OSTLER_GPU_EXCLUSIVE="1",
        OSTLER_FAKE_GPUS=str(fake),
        TEST_GPU_USED=str(used),
        OSTLER_GPU_HEADROOM_MB="50",
    )
    payload = {"begun": str(tmp_path / "begun"), "go": str(go)}
    first = Asking(node, "large", payload, model="one", headers={"x-request-id": "first"})
    until((tmp_path / "begun").exists, "the first to begin")
    second = Asking(node, "large", 1, model="two", headers={"x-request-id": "second"})
    until(lambda: running(node).get("second", {}).get("state") == "waiting", "the second to wait for its turn")
    assert cancel(node, "second")[0] == 202
    assert second.result()[0] == 499
    go.touch()
    assert first.result()[0] == 200
    rows = [logged(node, name) for name in ("first", "second")]
    assert [(row["outcome"], row["code"]) for row in rows] == [("done", None), ("cancelled", "CANCELLED")]
    assert ask(node, "large", 1, model="two")[0] == 200, "nobody gave its turn back"
