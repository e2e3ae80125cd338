"""Calls to models through a real node: the plane, the gateway and real workers, with real signals."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.harness import Node, family_of, gone, until

MODELS = Path(__file__).parent / "models.py"


@pytest.fixture
def models(make_node) -> Node:
    return make_node(app=MODELS)


def ask(node: Node, task: str, payload: Any = None, **more: Any) -> tuple[int, Any]:
    headers = more.pop("headers", {})
    return node.post(
        f"/api/v1/calls/{task}", {**more, "payload": payload}, **{"content-type": "application/json", **headers}
    )


def answer(node: Node, task: str, payload: Any = None, **more: Any) -> Any:
    status, body = ask(node, task, payload, **more)
    assert status == 200, (body, node.log()[-2000:])
    return body["result"]


def state(node: Node, name: str) -> dict[str, Any]:
    return dict(node.get("/api/v1/health")[1]["models"][name])


class Asking(threading.Thread):
    """A call in a thread of its own."""

    def __init__(self, node: Node, task: str, payload: Any = None, **more: Any) -> None:
        super().__init__(daemon=True)
        self._what = (node, task, payload, more)
        self.found: tuple[int, Any] = (0, None)
        self.start()

    def run(self) -> None:
        node, task, payload, more = self._what
        self.found = ask(node, task, payload, **more)

    def result(self) -> tuple[int, Any]:
        self.join(60)
        assert not self.is_alive()
        return self.found


def test_a_model_is_started_by_its_first_call_and_stays(models: Node) -> None:
    assert state(models, "echo:echo")["state"] == "IDLE"
    assert models.get("/readyz")[0] == 200
    status, body = ask(models, "echo", {"a": [1, None]}, model="echo")
    assert status == 200, body
    assert body["result"]["payload"] == {"a": [1, None]}
    assert (body["model"], set(body)) == ("echo", {"result", "request_id", "processing_time_ms", "model"})
    assert answer(models, "echo", 2, model="echo")["pid"] == body["result"]["pid"]
    assert state(models, "echo:echo")["state"] == "READY"


def test_an_operators_kill_of_a_model_counts_no_crash_and_the_next_call_starts_it(models: Node) -> None:
    pid = answer(models, "echo", 1, model="echo")["pid"]
    worker = next(w["component"] for w in models.workers() if w["pid"] == pid)
    assert models.post(f"/api/v1/workers/{worker}/kill")[0] == 200
    until(lambda: state(models, "echo:echo")["state"] == "IDLE", "it to be gone")
    assert answer(models, "echo", 2, model="echo")["pid"] != pid
    assert models.worker(worker)["restart_count"] == 0


def test_an_id_with_slashes_and_colons_is_a_model_like_any_other_and_names_no_file(models: Node) -> None:
    assert answer(models, "echo", 1, model="org/big:7b")["model"] == "org/big:7b"
    components = [w["component"] for w in models.workers() if w["pool"] == "echo"]
    assert components == ["worker:echo:0"]
    assert not [p for p in models.folder.rglob("*") if "big" in p.name]


def test_the_model_is_named_in_the_body_the_query_or_a_header(models: Node) -> None:
    url, pad, kind = "/api/v1/calls/echo", "x" * 2_000_000, {"content-type": "application/json"}
    found = [
        models.post(url, {"payload": 1, "model": "org/big:7b"}, **kind),
        models.post(f"{url}?model=org/big:7b", {"payload": pad}, **kind),
        models.post(url, {"payload": pad}, **kind, **{"x-ostler-model": "org/big:7b"}),
        models.post(url, {"model": "org/big:7b", "payload": pad}, **kind),
        models.post(
            url, {"payload": 1, "model": "org/big:7b"}, **{"content-type": "application/x-www-form-urlencoded"}
        ),
    ]
    assert [(status, body["model"]) for status, body in found] == [(200, "org/big:7b")] * 5
    assert found[-1][1]["result"]["payload"] == 1  # as from curl -d
    status, body = models.post(url, {"payload": pad, "model": "org/big:7b"}, **kind)
    assert (status, body["error"]["code"]) == (400, "NO_MODEL")  # so far back in so large a body it is not looked for


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/api/v1/calls/nothing", {"payload": 1}, 404, "UNKNOWN_TASK"),
        ("/api/v1/calls/echo", {"payload": 1}, 400, "NO_MODEL"),
        ("/api/v1/calls/echo", {"model": "other", "payload": 1}, 404, "UNKNOWN_MODEL"),
        ("/api/v1/calls/echo", {"model": 7, "payload": 1}, 400, "BAD_MODEL"),
        ("/api/v1/calls/zoo", {"model": "../../etc/passwd", "payload": 1}, 400, "BAD_MODEL"),
        ("/api/v1/calls/zoo", {"model": "/etc/passwd", "payload": 1}, 400, "BAD_MODEL"),
        ("/api/v1/calls/echo", b"{", 400, "BAD_JSON"),
    ],
)
def test_what_cannot_be_called_is_refused_and_says_why(
    models: Node, path: str, body: Any, status: int, code: str
) -> None:
    found, told = models.post(path, body, **{"content-type": "application/json"})
    assert (found, told["error"]["code"]) == (status, code)
    assert len(told["error"]["message"]) > 20


def test_bad_headers_are_refused(models: Node) -> None:
    for headers in ({"x-ostler-timeout": "soon"}, {"x-ostler-priority": "high"}, {"x-request-id": "a b"}):
        status, body = ask(models, "echo", 1, model="echo", headers=headers)
        assert status == 400, body
    assert ask(models, "echo", 1, model="echo", headers={"x-request-id": "mine-1"})[1]["request_id"] == "mine-1"


def test_a_call_needs_what_everything_else_needs(make_node) -> None:
    node = make_node(app=MODELS, OSTLER_TOKEN="a-secret-token-of-some-length", ready=False)
    assert ask(node, "echo", 1, model="echo")[0] == 401
    assert node.post("/api/v1/calls/echo?token=wrong", {"payload": 1})[0] == 401
    assert (
        ask(node, "echo", 1, model="echo", headers={"authorization": "Bearer a-secret-token-of-some-length"})[0] == 200
    )


def test_an_idle_model_leaves_and_the_next_call_has_it_back(models: Node, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    assert answer(models, "fleeting", {"marks": str(marks), "n": "1"}) == "1"
    until(lambda: state(models, "fleeting:fleeting")["state"] == "IDLE", "it to leave")
    assert models.worker("worker:fleeting:0")["restart_count"] == 0
    assert answer(models, "fleeting", {"marks": str(marks), "n": "2"}) == "2"
    assert marks.read_text() == "1\n2\n"


def test_a_call_says_how_long_its_model_stays(models: Node) -> None:
    answer(models, "echo", 1, model="echo", headers={"x-ostler-keep-alive": "0"})
    until(lambda: state(models, "echo:echo")["state"] == "IDLE", "it to leave at once")


def test_calls_fired_around_the_idle_deadline_are_each_run_once(models: Node, tmp_path: Path) -> None:
    """Hundreds of times a worker leaves while calls come for it: none is lost, and none is run twice."""
    marks, rounds, clients = tmp_path / "marks", 100, 100
    port = urlsplit(models.url).port
    rng = random.Random(1)
    wrong: list[Any] = []
    head = "POST /api/v1/calls/fleeting HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, n: int, late: float) -> None:
        await asyncio.sleep(late + rng.uniform(0, 0.005))
        body = json.dumps({"payload": {"marks": str(marks), "n": n}}).encode()
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        told = await reader.readuntil(b"\r\n\r\n")
        length = int(told.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        found = json.loads(await reader.readexactly(length))
        if not told.startswith(b"HTTP/1.1 200") or found["result"] != n:
            wrong.append((told, found))

    async def all_of_them() -> None:
        links = [await asyncio.open_connection("127.0.0.1", port) for _ in range(clients)]
        for turn in range(rounds):
            late = 0.02 + rng.uniform(-0.005, 0.005)  # after the last answer of all: about when the worker leaves
            await asyncio.gather(*(one(*link, turn * clients + n, late) for n, link in enumerate(links)))
        for _, writer in links:
            writer.close()

    asyncio.run(all_of_them())
    assert wrong == []
    ran = Counter(marks.read_text().split())
    assert len(ran) == rounds * clients and set(ran.values()) == {1}
    assert models.worker("worker:fleeting:0")["generation"] > 3, "it never left, so nothing was tried"


def test_a_worker_that_dies_in_a_call_is_told_to_its_caller_and_the_next_call_is_served(
    models: Node, tmp_path: Path
) -> None:
    first = {"begun": str(tmp_path / "begun"), "go": str(tmp_path / "go")}
    asking = Asking(models, "slow", first)
    until((tmp_path / "begun").exists, "the call to begin")
    waiting = Asking(models, "slow", {"go": str(tmp_path / "there")})
    until(lambda: state(models, "slow:slow")["waiting"] or waiting.found[0], "the second to wait")
    (tmp_path / "there").touch()
    pid = models.worker("worker:slow:0")["pid"]
    os.kill(pid, signal.SIGKILL)
    status, body = asking.result()
    assert (status, body["error"]["code"]) == (502, "WORKER_DIED")
    status, body = waiting.result()
    assert status == 200 and body["result"] != pid, "who waited was not served by another worker"


def test_more_than_may_wait_are_refused_at_once_with_a_time_to_come_back(models: Node, tmp_path: Path) -> None:
    payload = {"begun": str(tmp_path / "begun"), "go": str(tmp_path / "go")}
    running = Asking(models, "slow", payload)
    until((tmp_path / "begun").exists, "the call to begin")
    waiting = [Asking(models, "slow", payload) for _ in range(2)]
    until(lambda: state(models, "slow:slow")["waiting"] == 2, "two to wait")
    status, body = ask(models, "slow", payload)
    assert (status, body["error"]["code"]) == (429, "BUSY")
    (tmp_path / "go").touch()
    assert [a.result()[0] for a in (running, *waiting)] == [200, 200, 200]


def test_a_client_that_leaves_is_out_of_the_line_and_its_running_call_is_cancelled(
    models: Node, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    payload = {"begun": str(tmp_path / "begun"), "go": str(go)}
    running = leaving(models, "slow", payload)
    until((tmp_path / "begun").exists, "the call to begin")
    waiting = leaving(models, "slow", {"begun": str(tmp_path / "never"), "go": str(go)})
    until(lambda: state(models, "slow:slow")["waiting"] == 1, "the second to wait")
    waiting.close()
    until(lambda: state(models, "slow:slow")["waiting"] == 0, "the line to be empty")
    running.close()
    until(Path(f"{go}.cancelled").exists, "the model to see that it was cancelled")
    go.touch()
    assert ask(models, "slow", {"go": str(go)})[0] == 200
    assert not (tmp_path / "never").exists()
    assert models.worker("worker:slow:0")["generation"] == 1


def test_a_cancelled_call_does_not_touch_its_neighbour(models: Node, tmp_path: Path) -> None:
    go = tmp_path / "go"
    one = leaving(models, "wide", {"begun": str(tmp_path / "one"), "go": str(go)})
    two = Asking(models, "wide", {"begun": str(tmp_path / "two"), "go": str(go)})
    until(lambda: (tmp_path / "one").exists() and (tmp_path / "two").exists(), "both to run at once")
    one.close()
    go.touch()
    assert two.result()[0] == 200


def test_several_workers_of_one_model_serve_at_once(models: Node, tmp_path: Path) -> None:
    go = tmp_path / "go"
    asking = [Asking(models, "two", {"begun": str(tmp_path / f"b{n}"), "go": str(go)}) for n in range(2)]
    until(lambda: all((tmp_path / f"b{n}").exists() for n in range(2)), "both to run at once")
    go.touch()
    assert len({a.result()[1]["result"] for a in asking}) == 2


def test_a_warm_model_answers_while_another_one_loads(make_node, tmp_path: Path) -> None:
    go = tmp_path / "go"
    node = make_node(app=MODELS, HEAVY_GO=str(go))
    answer(node, "echo", 1, model="echo")
    loading = Asking(node, "heavy")
    until(lambda: state(node, "heavy:heavy")["state"] == "STARTING", "it to load")
    for n in range(50):
        assert answer(node, "echo", n, model="echo")["payload"] == n
    assert state(node, "heavy:heavy")["state"] == "STARTING"
    go.touch()
    assert loading.result()[0] == 200


def test_a_call_that_takes_too_long_ends_with_its_worker_and_the_next_one_is_served(models: Node) -> None:
    before = answer(models, "stuck", 0)
    status, body = ask(models, "stuck", 600)
    assert (status, body["error"]["code"]) == (504, "DEADLINE")
    until(lambda: gone(before), "the worker to be killed")
    assert answer(models, "stuck", 0) != before


def test_a_model_that_cannot_be_loaded_says_why_and_comes_back_when_it_is_mended(make_node, tmp_path: Path) -> None:
    mended = tmp_path / "mended"
    node = make_node(app=MODELS, MENDED=str(mended))
    status, body = ask(node, "broken", 1)
    assert (status, body["error"]["code"]) == (503, "MODEL_FAILED")
    assert "no such file: weights.bin" in body["error"]["message"]
    mended.touch()
    until(lambda: ask(node, "broken", 1)[0] == 200, "it to be served")


def test_a_model_that_fails_too_often_is_failed_until_it_is_reset(make_node, tmp_path: Path) -> None:
    mended = tmp_path / "mended"
    node = make_node(app=MODELS, MENDED=str(mended), OSTLER_RESTART_LIMIT="2")

    def failed() -> bool:
        status, body = ask(node, "broken", 1)
        return status == 503 and "ostler reset worker:broken:0" in body["error"]["message"]

    until(failed, "it to be failed")
    mended.touch()
    assert failed()
    assert node.post("/api/v1/workers/worker:broken:0/reset")[0] == 200
    until(lambda: ask(node, "broken", 1)[0] == 200, "it to be served")


def test_ids_that_are_not_listed_are_served_up_to_a_number_where_the_model_says_so(models: Node) -> None:
    assert [answer(models, "zoo", 1, model=m) for m in ("a", "b")] == ["a", "b"]
    status, body = ask(models, "zoo", 1, model="c")
    assert (status, body["error"]["code"]) == (503, "TOO_MANY_MODELS")


def test_words_are_streamed_as_they_come_and_an_error_in_the_middle_is_told(models: Node, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with leaving(models, "words", {"text": "a wait b", "go": str(go)}) as stream:
        told = received(stream, b'data: "a"')
        assert b"text/event-stream" in told
        go.touch()
        assert b"[DONE]" in received(stream, b"[DONE]")
    with leaving(models, "words", {"text": "a boom b"}) as stream:
        assert b"boom" in received(stream, b"event: error")
    assert models.worker("worker:words:0")["generation"] == 1


def test_bytes_go_through_untouched(models: Node) -> None:
    data = os.urandom(300_000)
    status, body = models.post("/api/v1/calls/echo?model=echo", data, **{"content-type": "application/octet-stream"})
    assert status in (200, 500), body  # bytes cannot be in its JSON answer; the worker has seen them
    assert "model" in json.dumps(body)


def test_a_plane_that_dies_is_replaced_and_models_stay_loaded(models: Node) -> None:
    before = answer(models, "echo", 1, model="echo")["pid"]
    os.kill(models.worker("worker:plane:0")["pid"], signal.SIGKILL)
    until(lambda: _tolerant(models, "echo", "echo") == before, "the same worker to answer through another plane")
    assert models.worker("worker:plane:0")["generation"] == 2


def _tolerant(node: Node, task: str, model: str) -> Any:
    try:
        status, body = ask(node, task, 1, model=model)
    except (OSError, ValueError):
        return None
    return body["result"]["pid"] if status == 200 else None


@pytest.mark.parametrize("when", ["starting", "ready", "busy", "streaming", "leaving"])
@pytest.mark.parametrize("turns", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_nothing_survives_a_sigkill_of_the_node(make_node, tmp_path: Path, when: str, turns: int) -> None:
    for turn in range(turns):
        go = tmp_path / f"go{turn}"
        node = make_node(app=MODELS, HEAVY_GO=str(go))
        threads: list[Any] = []
        if when == "starting":
            threads.append(leaving(node, "heavy", 1))
            until(lambda n=node: state(n, "heavy:heavy")["state"] == "STARTING", "it to load")
        elif when == "ready":
            answer(node, "echo", 1, model="echo")
        elif when == "busy":
            begun = tmp_path / f"begun{turn}"
            threads.append(leaving(node, "slow", {"begun": str(begun), "go": str(go)}))
            until(begun.exists, "the call to begin")
        elif when == "streaming":
            threads.append(stream := leaving(node, "words", {"text": "a wait b", "go": str(go)}))
            received(stream, b'data: "a"')
        else:
            answer(node, "echo", 1, model="echo", headers={"x-ostler-keep-alive": "0"})
        workers = family_of(node.folder)
        assert workers
        node.kill()
        until(lambda f=node.folder: not family_of(f), "all workers to be gone")
        for one in threads:
            one.close()


@pytest.fixture
def small_gpu(make_node, tmp_path: Path) -> Node:
    fake = tmp_path / "gpus.json"
    used = tmp_path / "used"
    used.mkdir()
    fake.write_text(json.dumps({"gpus": [{"uuid": "GPU-0", "total_mb": 1000}], "folder": "used"}))
    return make_node(app=MODELS, OSTLER_FAKE_GPUS=str(fake), TEST_GPU_USED=str(used), OSTLER_GPU_HEADROOM_MB="50")


def test_two_models_under_a_budget_that_holds_one_take_turns(small_gpu: Node) -> None:
    assert [answer(small_gpu, "large", 1, model=m) for m in ("one", "two", "one", "two")] == [
        "one",
        "two",
        "one",
        "two",
    ]
    workers = [w for w in small_gpu.workers() if w["pool"] == "large"]
    assert [w["status"] for w in workers].count("healthy") == 1
    assert all(w["restart_count"] == 0 for w in workers)


def test_a_busy_model_is_not_evicted_and_who_needs_its_memory_waits(small_gpu: Node, tmp_path: Path) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    busy = Asking(small_gpu, "large", {"begun": str(begun), "go": str(go)}, model="one")
    until(begun.exists, "the first to be busy")
    other = Asking(small_gpu, "large", 1, model="two")
    until(lambda: state(small_gpu, "large:two")["waiting"], "the other to wait")
    assert state(small_gpu, "large:one")["state"] == "BUSY"
    assert answer(small_gpu, "echo", 1, model="echo")["payload"] == 1, "a model without a GPU waited for it"
    go.touch()
    assert (busy.result()[0], other.result()[0]) == (200, 200)


def leaving(node: Node, task: str, payload: Any, **headers: str) -> socket.socket:
    """A call whose client can go away, or read piece by piece."""
    found = socket.create_connection(("127.0.0.1", urlsplit(node.url).port or 0), 60)
    body = json.dumps({"payload": payload}).encode()
    head = f"POST /api/v1/calls/{task} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    found.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return found


def received(stream: socket.socket, mark: bytes) -> bytes:
    """What comes, up to and with this."""
    told = b""
    while mark not in told:
        piece = stream.recv(65_536)
        assert piece, told
        told += piece
    return told
