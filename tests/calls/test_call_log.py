"""The call log, the calls under way, and cancelling one: through a real node with real workers, on both databases."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.calls.test_calls import MODELS, Asking, ask, leaving, received, state
from tests.harness import Node, call, until
from tests.sse import Stream
from tests.stores import store_of

_names = (f"call-{n}" for n in itertools.count())


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    with store_of(request) as url:
        node = Node(tmp_path_factory.mktemp("models"), MODELS, OSTLER_STORE=url).start()
        yield node
        node.kill()


def named(**headers: str) -> tuple[str, dict[str, str]]:
    name = next(_names)
    return name, {**headers, "x-request-id": name}


def logged(node: Node, name: str) -> dict[str, Any]:
    """The row of a call, once it is written."""
    (row,) = until(lambda: node.get(f"/api/v1/calls?request={name}")[1]["calls"], f"{name} to be in the log")
    return dict(row)


def running(node: Node) -> dict[str, dict[str, Any]]:
    status, found = node.get("/api/v1/calls/running")
    assert status == 200 and found["total"] == len(found["calls"])
    return {one["request"]: one for one in found["calls"]}


def cancel(node: Node, name: str) -> tuple[int, Any]:
    return call(node.url, "DELETE", f"/api/v1/calls/{name}")


def to_the_end(stream: socket.socket) -> None:
    """Read until the other side has closed it."""
    while stream.recv(65_536):
        pass


def test_an_answered_call_is_logged_with_its_worker_times_bytes_and_memory(models: Node) -> None:
    name, headers = named()
    body = ask(models, "echo", "x" * 1000, model="org/big:7b", headers=headers)[1]
    row = logged(models, name)
    assert (row["task"], row["model"], row["outcome"], row["status"]) == ("echo", "org/big:7b", "done", 200)
    worker = state(models, "echo:org/big:7b")["worker"]
    assert row["worker"] == worker and row["node"] and row["code"] is None and row["streamed"] is False
    assert row["bytes_in"] > 1000 and row["bytes_out"] > 1000
    assert row["took_ms"] >= body["processing_time_ms"] * 0.5 and row["waited_ms"] >= 0
    until(lambda: models.worker(worker)["rss_mb"], "its first heartbeat")
    name, headers = named()
    ask(models, "echo", 1, model="org/big:7b", headers=headers)
    assert logged(models, name)["host_mb"] > 5


def test_what_a_model_refuses_is_an_error_and_a_stream_is_marked_as_one(models: Node) -> None:
    name, headers = named(**{"content-type": "application/octet-stream"})
    models.post("/api/v1/calls/echo?model=echo", b"bytes cannot be in its answer", **headers)
    assert [logged(models, name)[k] for k in ("outcome", "status")] == ["error", 500]
    name, headers = named()
    with leaving(models, "words", {"text": "a b"}, **headers) as stream:
        received(stream, b"[DONE]")
    row = logged(models, name)
    assert (row["outcome"], row["streamed"]) == ("done", True)


def test_an_answer_that_breaks_off_is_the_models_error_or_the_workers_death(models: Node, tmp_path: Path) -> None:
    name, headers = named()
    with leaving(models, "words", {"text": "a boom"}, **headers) as stream:
        to_the_end(stream)  # who leaves before it has cancelled the call
    assert [logged(models, name)[k] for k in ("outcome", "status")] == ["error", 200]
    name, headers = named()
    with leaving(models, "words", {"text": "a wait", "go": str(tmp_path / "never")}, **headers) as stream:
        received(stream, b'data: "a"')
        assert running(models)[name]["state"] == "streaming"
        os.kill(models.worker("worker:words:0")["pid"], signal.SIGKILL)
        to_the_end(stream)
    row = logged(models, name)
    assert (row["outcome"], row["worker"]) == ("died", "worker:words:0")
    assert row["host_mb"] is None or row["host_mb"] > 5


def test_calls_in_line_and_in_a_worker_are_listed_and_can_be_cancelled_one_by_one(models: Node, tmp_path: Path) -> None:
    go = str(tmp_path / "go")
    (first, one), (second, two), (third, three), (fourth, four) = named(), named(), named(), named()
    held = Asking(models, "slow", {"begun": str(tmp_path / "begun"), "go": go}, headers=one)
    until((tmp_path / "begun").exists, "the call to begin")
    in_line = Asking(models, "slow", {"go": go}, headers=two)
    until(lambda: second in running(models), "the second to wait")
    patient = Asking(models, "slow", {"go": go}, headers=three)
    until(lambda: third in running(models), "the third to wait")
    assert ask(models, "slow", {"go": go}, headers=four)[0] == 429
    found = running(models)
    assert [found[n]["state"] for n in (first, second, third)] == ["running", "waiting", "waiting"]
    assert found[first]["running_ms"] > 0 and found[second]["running_ms"] is None
    assert (found[first]["task"], found[first]["model"], found[first]["replica"]) == ("slow", "slow", 0)

    assert cancel(models, second) == (202, {"ok": True, "action": "cancel", "calls": 1})
    assert [in_line.result()[0], in_line.result()[1]["error"]["code"]] == [499, "CANCELLED"]
    assert cancel(models, first)[0] == 202
    assert [held.result()[0], held.result()[1]["error"]["code"]] == [499, "CANCELLED"]
    until(Path(f"{go}.cancelled").exists, "the model to see that it was cancelled")
    Path(go).touch()
    assert patient.result()[0] == 200, "its neighbour was touched"
    assert [cancel(models, name)[0] for name in (first, "nobody", "a%2Fb")] == [404, 404, 404]
    rows = [logged(models, n) for n in (first, second, third, fourth)]
    assert [(r["outcome"], r["code"], r["status"]) for r in rows] == [
        ("cancelled", "CANCELLED", 499),
        ("cancelled", "CANCELLED", 499),
        ("done", None, 200),
        ("refused", "BUSY", 429),
    ]
    assert [r["took_ms"] is None for r in rows] == [False, True, False, True]
    assert rows[0]["worker"] == "worker:slow:0" and rows[1]["worker"] is None


def test_clients_that_leave_are_logged_as_cancelled_and_a_missed_deadline_as_that(models: Node, tmp_path: Path) -> None:
    go = str(tmp_path / "go")
    (first, one), (second, two) = named(), named()
    held = leaving(models, "slow", {"begun": str(tmp_path / "begun"), "go": go}, **one)
    until((tmp_path / "begun").exists, "the call to begin")
    in_line = leaving(models, "slow", {"go": go}, **two)
    until(lambda: second in running(models), "the second to wait")
    in_line.close()
    held.close()
    (late, three), (stuck, four) = named(**{"x-ostler-timeout": "0.2"}), named()
    for name in (first, second):
        row = logged(models, name)
        assert (row["outcome"], row["code"], row["status"]) == ("cancelled", "LEFT", 499)
    assert ask(models, "slow", {"go": go}, headers=three)[0] == 504
    assert ask(models, "stuck", 600, headers=four)[0] == 504
    assert [logged(models, name)["outcome"] for name in (late, stuck)] == ["deadline", "deadline"]


def test_calls_are_shown_and_cancelled_from_the_terminal(models: Node, tmp_path: Path) -> None:
    def ostler(*args: str, status: int = 0) -> str:
        where = ["--data", str(models.folder), "--store", models.env["OSTLER_STORE"]]
        command = [sys.executable, "-m", "ostler", "calls", *args, *where]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    name, headers = named()
    asking = Asking(models, "slow", {"begun": str(tmp_path / "begun"), "go": str(tmp_path / "go")}, headers=headers)
    until((tmp_path / "begun").exists, "the call to begin")
    assert name in ostler("--running") and name not in ostler("--running", "--task", "echo")
    assert ostler("cancel", name) == f"call {name} is cancelled\n"
    assert asking.result()[0] == 499
    assert "was never here" in ostler("cancel", "nobody", status=2)
    logged(models, name)
    (row,) = json.loads(ostler("--outcome", "cancelled", "--request", name, "--json"))["calls"]
    assert (row["task"], row["code"]) == ("slow", "CANCELLED")
    table = ostler("--task", "slow", "--limit", "1")
    assert "cancelled" in table


def test_a_worker_that_dies_takes_its_call_into_the_log(models: Node, tmp_path: Path) -> None:
    name, headers = named()
    asking = Asking(models, "slow", {"begun": str(tmp_path / "begun"), "go": str(tmp_path / "never")}, headers=headers)
    until((tmp_path / "begun").exists, "the call to begin")
    os.kill(models.worker("worker:slow:0")["pid"], signal.SIGKILL)
    assert asking.result()[0] == 502
    row = logged(models, name)
    assert (row["outcome"], row["code"], row["worker"]) == ("died", "WORKER_DIED", "worker:slow:0")


def test_the_log_is_read_in_pages_and_by_filter_and_bad_filters_are_refused(models: Node) -> None:
    names = []
    for _ in range(5):
        name, headers = named()
        assert ask(models, "zoo", 1, model="<b>odd</b>", headers=headers)[0] == 200
        names.append(name)
    logged(models, names[-1])
    query, seen = "/api/v1/calls?task=zoo&model=%3Cb%3Eodd%3C/b%3E&outcome=done&limit=2", []
    page = models.get(query)[1]
    while True:
        seen += [row["request"] for row in page["calls"]]
        if page["next"] is None:
            break
        page = models.get(f"{query}&before={page['next']}")[1]
    assert seen == names[::-1]
    for wrong in ("outcome=well", "before=yesterday", "limit=0", "limit=5000"):
        status, told = models.get(f"/api/v1/calls?{wrong}")
        assert status in (400, 422) and told["error"]["message"], wrong


def test_every_call_of_a_flood_is_in_the_log_or_counted_as_left_out(models: Node) -> None:
    def answered() -> int:
        return sum(m["calls"].get("done", 0) for m in models.get("/api/v1/models/stats")[1]["models"])

    def accounted() -> int:
        with models.open_store(read_only=True) as store:
            rows = len(store.calls.list(outcome="done", limit=100_000)[0])
        return rows + int(models.get("/api/v1/calls")[1]["left_out"].get("done", 0))

    before, many = answered(), 1000
    one = b"POST /api/v1/calls/echo?model=echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n\r\n1"
    with leaving(models, "echo", 1, **{"x-ostler-model": "echo"}) as stream:
        received(stream, b"processing_time_ms")
        for _ in range(many // 50):
            stream.sendall(one * 50)
            told = b""
            while told.count(b"processing_time_ms") < 50:
                told += stream.recv(65536)
    until(lambda: answered() >= before + many + 1, "all to be counted")
    until(lambda: accounted() == answered(), "each to be in the log or left out")


def samples(node: Node) -> dict[str, float]:
    """The metrics by name and labels, as they are written."""
    with urllib.request.urlopen(f"{node.url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_metrics_tell_of_each_model_and_do_not_go_back_when_the_plane_is_replaced(models: Node, tmp_path: Path) -> None:
    echo = '{model="org/big:7b",task="echo"}'
    name, headers = named()
    assert ask(models, "echo", 1, model="org/big:7b", headers=headers)[0] == 200
    logged(models, name)
    found = samples(models)
    done = found['ostler_calls_total{model="org/big:7b",outcome="done",task="echo"}']
    assert (
        done >= 1
        and found[f"ostler_call_seconds_count{echo}"] == found[f"ostler_call_wait_seconds_count{echo}"] == done
    )
    assert found['ostler_call_seconds_bucket{le="+Inf",model="org/big:7b",task="echo"}'] == done
    assert found[f"ostler_call_seconds_sum{echo}"] > 0
    assert found[f"ostler_model_loads_total{echo}"] >= 1 and found[f"ostler_model_workers{echo}"] == 1
    assert found[f"ostler_call_received_bytes_total{echo}"] > 0
    assert found['ostler_models{state="ready",task="echo"}'] >= 1
    until(lambda: 'ostler_memory_bytes{device="host",kind="room",name="host"}' in samples(models), "the host's memory")
    asking = [Asking(models, "slow", {"begun": str(tmp_path / "b"), "go": str(tmp_path / "go")}) for _ in range(2)]
    slow = '{model="slow",task="slow"}'
    until(lambda: [samples(models)[f"ostler_calls_{k}{slow}"] for k in ("in_flight", "waiting")] == [1, 1], "both")
    (tmp_path / "go").touch()
    assert [a.result()[0] for a in asking] == [200, 200]
    until(lambda: samples(models)[f"ostler_calls_in_flight{slow}"] == 0, "both to be over")
    plane = models.worker("worker:plane:0")
    os.kill(plane["pid"], signal.SIGKILL)
    models.wait_worker(
        "worker:plane:0", "another plane", lambda w: w["generation"] > plane["generation"] and w["status"] == "healthy"
    )
    name, headers = named()
    assert ask(models, "echo", 1, model="org/big:7b", headers=headers)[0] == 200
    logged(models, name)
    assert samples(models)['ostler_calls_total{model="org/big:7b",outcome="done",task="echo"}'] == done + 1


def test_the_state_of_models_is_live_and_their_ids_are_in_no_topic(models: Node, tmp_path: Path) -> None:
    odd = "<script>a:b/c</script>"
    assert ask(models, "zoo", 1, model=odd)[0] == 200
    with Stream(models.url, "call:*:status") as stream:
        found: dict[tuple[str, str], dict[str, Any]] = {}
        topics: set[str] = set()

        def seen(task: str, model: str) -> dict[str, Any]:
            for event in stream.events:
                if "call" in event:
                    found[event["call"]["task"], event["call"]["model"]] = event["call"]
                    topics.add(event["topic"])
            return found.get((task, model), {})

        stream.wait(lambda: seen("zoo", odd).get("state") == "READY", "the model to be told as ready")
        asking = Asking(models, "slow", {"begun": str(tmp_path / "begun"), "go": str(tmp_path / "go")})
        stream.wait(lambda: seen("slow", "slow").get("in_flight") == 1, "the call to be told")
        assert found["slow", "slow"]["state"] == "BUSY" and found["slow", "slow"]["worker"] == "worker:slow:0"
        (tmp_path / "go").touch()
        assert asking.result()[0] == 200
        stream.wait(lambda: seen("slow", "slow").get("in_flight") == 0, "its end to be told")
        assert {"call:zoo:status", "call:slow:status"} <= topics
        assert all(re.fullmatch(r"call:[a-z]+:status", topic) for topic in topics)


def test_a_model_that_cannot_be_had_says_why_where_it_is_shown(models: Node) -> None:
    assert ask(models, "broken", 1)[0] == 503
    shown = state(models, "broken:broken")
    assert "no such file: weights.bin" in shown["reason"]
    (one,) = [m for m in models.get("/api/v1/models/stats")[1]["models"] if m["task"] == "broken"]
    assert one["reason"] == shown["reason"]


def test_the_idle_time_of_a_model_goes_on_while_nothing_happens(models: Node) -> None:
    assert ask(models, "echo", 1, model="echo")[0] == 200
    first = until(lambda: state(models, "echo:echo")["idle_seconds"], "it to be idle")
    until(lambda: state(models, "echo:echo")["idle_seconds"] > first + 0.5, "its idle time to grow")


def test_an_idle_node_lists_nothing_and_a_plane_that_dies_takes_nothing_back(models: Node) -> None:
    name, headers = named()
    ask(models, "echo", 1, model="echo", headers=headers)
    logged(models, name)
    until(lambda: running(models) == {}, "nothing to be under way")
    before = models.get("/api/v1/models/stats")[1]["models"]
    plane = models.worker("worker:plane:0")
    os.kill(plane["pid"], signal.SIGKILL)
    models.wait_worker(
        "worker:plane:0", "another plane", lambda w: w["generation"] > plane["generation"] and w["status"] == "healthy"
    )
    after = models.get("/api/v1/models/stats")[1]["models"]
    assert [m["calls"] for m in after] == [m["calls"] for m in before]
    assert state(models, "echo:echo")["reason"] is None
