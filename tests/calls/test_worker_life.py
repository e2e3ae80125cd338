"""From start to end: loading, failing to load, draining, leaving with the node, parking."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.calls.bench import until, worker


def test_progress_is_told_while_it_loads_and_health_says_that_it_is_not_ready(tmp_path: Path) -> None:
    with worker(tmp_path, "loads", "waits", ready=False) as bench:
        bench.noted("loading")
        assert bench.wait("loading") == ["loading", 0.25]
        health = bench.get("/healthz")
        assert (health.status, health.json) == (
            503,
            {"status": "loading", "model": "waits", "ready": False, "progress": 0.25},
        )
        refused = bench.call({"note": "x"})
        assert refused.error[:2] == (503, "NOT_READY")
        assert refused.headers["retry-after"] == "1"
        assert not bench.heard("ready")
        until(lambda: bench.heard("beat"), "a beat while it loads")
        bench.note("go on")
        assert bench.wait("ready")[1]["load_ms"] > 0
        assert bench.get("/healthz").status == 200
        assert bench.call({"note": "ran"}).result == "ok"


def test_a_generator_reports_each_step_and_a_function_calls_loading_progress(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with worker(tmp_path / "a", "loads", "steps") as bench:
        assert [frame[1] for frame in bench.heard("loading")] == [0.25, 0.5, 0.75, 1.0]
    (tmp_path / "b").mkdir()
    with worker(tmp_path / "b", "loads", "tells") as bench:
        assert bench.heard("loading") == [["loading", 0.5]]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("broken", "OSError: weights.bin is not there"),
        ("exits", "SystemExit: bye"),
        ("wrong", "TypeError: progress of load() must be a number from 0 to 1, found 'half'"),
        ("bad example", "RuntimeError: cannot infer"),
    ],
)
def test_a_model_that_cannot_be_loaded_exits_with_71_and_the_reason(tmp_path: Path, model: str, reason: str) -> None:
    with worker(tmp_path, "loads", model, ready=False) as bench:
        assert bench.ended() == 71
        assert bench.wait("failed") == ["failed", reason]
        assert not bench.heard("ready")
        assert f"model {model} of loads cannot be loaded:\nTraceback" in bench.printed()
        assert reason in bench.printed()
        assert not (tmp_path / "w.0.1.sock").exists()


def test_the_example_is_run_before_ready(tmp_path: Path) -> None:
    with worker(tmp_path, "loads", "example") as bench:
        assert (tmp_path / "example ran").exists()


def test_an_app_that_cannot_be_loaded_exits_with_70_and_the_reason(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_that_name\n")
    with worker(tmp_path, "echo", ready=False, target=str(broken)) as bench:
        assert bench.ended() == 70
        assert "'nothing_of_that_name'" in bench.wait("failed")[1]
    with worker(tmp_path, "unknown", ready=False) as bench:
        assert bench.ended() == 70
        assert "declares no model 'unknown'; known: abatch," in bench.wait("failed")[1]


@pytest.mark.parametrize(
    ("task", "options"), [("slow", {}), ("slow", {"concurrency": 2}), ("aslow", {"concurrency": 2})]
)
@pytest.mark.parametrize("how", ["frame", "route"])
def test_asked_to_stop_it_finishes_its_call_and_leaves(tmp_path: Path, task: str, options: dict, how: str) -> None:
    with worker(tmp_path, task, **options) as bench:
        busy, idle = bench.client(), bench.client()
        assert idle.call({"quick": True}).result == "quick"
        busy.start({"begun": "b", "seen": "s", "go": "go"})
        bench.noted("b")
        if how == "frame":
            bench.say("stop")
        else:
            assert bench.client().post("/shutdown").status == 202
        until(lambda: not _accepts(bench), "the listener to close")
        bench.note("go")
        answer = busy.answer()
        assert answer.result == "finished"
        assert bench.ended() == 0
        assert not (tmp_path / "s").exists()
        assert not (tmp_path / "w.0.1.sock").exists()


def _accepts(bench) -> bool:
    try:
        bench.client().close()
        return True
    except OSError:
        return False


@pytest.mark.parametrize(
    ("task", "options"), [("echo", {}), ("echo", {"concurrency": 2}), ("aslow", {}), ("batch", {"batch": 8})]
)
def test_an_idle_worker_leaves_at_once_when_it_is_asked(tmp_path: Path, task: str, options: dict) -> None:
    with worker(tmp_path, task, **options) as bench:
        client = bench.client()
        client.call({"quick": True})
        bench.say("stop")
        assert bench.ended() == 0
        assert client.ended()


def test_a_call_that_was_sent_before_the_stop_is_answered(tmp_path: Path) -> None:
    with worker(tmp_path, "slow") as bench:
        busy, behind = bench.client(), bench.client()
        assert behind.call({"quick": True}).result == "quick"
        busy.start({"begun": "b", "seen": "s", "go": "go"})
        bench.noted("b")
        behind.start({"quick": True})
        bench.say("stop")
        until(lambda: not _accepts(bench), "the listener to close")
        bench.note("go")
        assert busy.answer().result == "finished"
        assert behind.answer().result == "quick"
        assert bench.ended() == 0


def test_unload_runs_at_the_end(tmp_path: Path) -> None:
    with worker(tmp_path, "loads", "any") as bench:
        bench.say("stop")
        assert bench.ended() == 0
        assert (tmp_path / "unloaded").exists()


@pytest.mark.parametrize(
    ("task", "options"), [("slow", {}), ("slow", {"concurrency": 2}), ("aslow", {"concurrency": 2})]
)
def test_sigterm_cancels_what_runs_and_leaves(tmp_path: Path, task: str, options: dict) -> None:
    with worker(tmp_path, task, **options) as bench:
        client = bench.client()
        client.start({"begun": "b", "seen": "s"})
        bench.noted("b")
        os.kill(bench.process.pid, signal.SIGTERM)
        bench.noted("s")
        assert bench.ended() == 0


def test_a_stop_while_it_loads_ends_it(tmp_path: Path) -> None:
    with worker(tmp_path, "loads", "waits", ready=False) as bench:
        bench.noted("loading")
        bench.say("stop")
        assert bench.ended() == 0
    with worker(tmp_path, "loads", "waits", ready=False) as bench:
        bench.wait("loading")
        os.kill(bench.process.pid, signal.SIGTERM)
        assert bench.ended() == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("task", "options"), [("slow", {}), ("slow", {"concurrency": 2}), ("aslow", {"concurrency": 2})]
)
def test_it_leaves_at_once_when_the_node_is_gone(tmp_path: Path, task: str, options: dict) -> None:
    with worker(tmp_path, task, **options) as bench:
        client = bench.client()
        client.start({"begun": "b", "seen": "s"})
        bench.noted("b")
        bench.channel.shutdown(2)
        assert bench.ended() != 0
        assert client.ended()
        assert not (tmp_path / "s").exists()


def test_it_leaves_when_the_node_is_gone_while_it_loads(tmp_path: Path) -> None:
    with worker(tmp_path, "loads", "waits", ready=False) as bench:
        bench.noted("loading")
        bench.channel.shutdown(2)
        assert bench.ended() != 0


def test_a_model_parks_and_wakes_when_it_is_told(tmp_path: Path) -> None:
    with worker(tmp_path, "loads", "any") as bench:
        assert bench.wait("ready")[1]["parks"] is True
        client = bench.client()
        assert client.call({"note": "before"}).result == "ok"
        bench.say("park")
        assert bench.wait("parked")[1] >= 0
        assert bench.get("/healthz").json["status"] == "parked"
        assert bench.call({"note": "x"}).error[:2] == (503, "NOT_READY")
        bench.say("wake")
        bench.wait("woken")
        assert client.call({"note": "after"}).result == "ok"
        bench.say("wake")
        assert bench.wait("trouble") == ["trouble", "wake", "RuntimeError: will not wake twice"]


def test_a_long_run_directory_is_no_problem(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    with worker(folder, "echo") as bench:
        assert bench.call(1).result == 1


def test_what_a_model_prints_is_in_its_log_at_once(tmp_path: Path) -> None:
    with worker(tmp_path, "loads", "any") as bench:
        assert "loading any" in bench.printed()


def test_the_declared_options_reach_the_worker_and_no_variable_stays(tmp_path: Path) -> None:
    with worker(tmp_path, "odd") as bench:
        found = bench.call({"do": "modules"}).result
        assert "OSTLER_MODEL" not in found["env"]
        assert "OSTLER_CONTROL" not in found["env"]
        assert not any(part.endswith("ostler/calls") for part in found["path"])
        assert json.dumps(found)
