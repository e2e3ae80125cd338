"""Calls from Python: `app.call` and its kin, beside a real node and in its jobs."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from ostler import (
    BadArguments,
    Body,
    CallBusy,
    CallError,
    CallRefused,
    CallTimeout,
    ConfigError,
    ModelFailed,
    Ostler,
)
from tests.harness import Node, until

MODELS = Path(__file__).parent / "models.py"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory):
    found = Node(tmp_path_factory.mktemp("calls") / "node", MODELS).start()
    yield found
    found.kill()


@pytest.fixture
def app(node: Node) -> Ostler:
    return Ostler(data=str(node.folder))


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest, app: Ostler) -> Callable[..., Any]:
    """`app.call`, and the same on a blocking socket."""
    if request.param == "sync":
        return app.call_sync
    return lambda *what, **wishes: asyncio.run(app.call(*what, **wishes))


def stream(app: Ostler, form: str, *what: Any) -> list[Any]:
    async def collect(items: AsyncIterator[Any]) -> list[Any]:
        return [item async for item in items]

    if form == "sync":
        return list(app.stream_sync(*what))
    return asyncio.run(collect(app.stream(*what)))


def test_a_call_returns_the_result(call: Callable[..., Any]) -> None:
    found = call("echo", "org/big:7b", {"a": [1, None, "ä\n"]})
    assert (found["payload"], found["model"]) == ({"a": [1, None, "ä\n"]}, "org/big:7b")
    assert call("echo", "echo", None)["payload"] is None


def test_the_answer_has_the_request_id_and_the_time(app: Ostler) -> None:
    for found in (app.answer_sync("echo", "echo", 1), asyncio.run(app.answer("echo", "echo", 1))):
        assert found.result["payload"] == 1
        assert (found.model, bool(found.request_id)) == ("echo", True)
        assert found.processing_time_ms is not None and found.processing_time_ms >= 0


def test_bytes_go_and_come_back_as_they_are(call: Callable[..., Any]) -> None:
    found = call("negative", None, Body(b"\x00\xff\r\n", "image/x-raw"))
    assert (found.data, found.content_type) == (b"\xff\x00\xf2\xf5", "image/x-raw")
    large = os.urandom(3_000_000)
    assert call("negative", "negative", large).data == bytes(255 - b for b in large)


def test_a_body_with_fields_is_sent_as_a_form(app: Ostler) -> None:
    body = Body(b"RIFF", "audio/wav", 'a "b".wav', {"language": "en", "note": "ä"})
    found = app.call_sync("negative", None, body)
    assert found == {"fields": {"language": "en", "note": "ä"}, "files": {"file": ['a "b".wav', "audio/wav", 4]}}


@pytest.mark.parametrize("form", ["sync", "async"])
def test_items_of_a_stream_come_one_by_one(app: Ostler, form: str) -> None:
    assert stream(app, form, "words", None, {"text": "a b c"}) == ["a", "b", "c"]
    assert b"".join(stream(app, form, "drip", None, {})) == b"onetwo"
    assert stream(app, form, "echo", "echo", 1)[0]["payload"] == 1  # one that does not stream is a stream of one


def test_the_result_of_a_model_that_streams_is_the_list_of_its_items(call: Callable[..., Any]) -> None:
    assert call("words", None, {"text": "a b"}) == ["a", "b"]
    assert call("drip", None, {}).data == b"onetwo"


def test_items_are_there_before_the_stream_ends(app: Ostler, tmp_path: Path) -> None:
    go = tmp_path / "go"
    items = app.stream_sync("words", None, {"text": "first wait last", "go": str(go)})
    assert next(items) == "first"
    go.touch()
    assert list(items) == ["wait", "last"]


@pytest.mark.parametrize("form", ["sync", "async"])
def test_an_error_after_some_items_is_raised_after_them(app: Ostler, form: str) -> None:
    seen: list[Any] = []

    async def follow() -> None:
        async for item in app.stream("words", None, {"text": "a boom b"}):
            seen.append(item)  # noqa: PERF401

    with pytest.raises(ModelFailed, match="boom") as failed:
        if form == "async":
            asyncio.run(follow())
        seen.extend(app.stream_sync("words", None, {"text": "boom"}))
    assert failed.value.code == "MODEL_ERROR"
    assert seen == (["a"] if form == "async" else [])


@pytest.mark.parametrize(
    ("what", "kind", "code", "status"),
    [
        (("nothing", None, 1), CallRefused, "UNKNOWN_TASK", 404),
        (("echo", "other", 1), CallRefused, "UNKNOWN_MODEL", 404),
        (("echo", None, 1), CallRefused, "NO_MODEL", 400),
        (("words", None, {"text": "boom"}), ModelFailed, "MODEL_ERROR", 500),
        (("broken", None, 1), ModelFailed, "MODEL_FAILED", 503),
        (("stuck", None, 5.0), CallTimeout, "DEADLINE", 504),
    ],
)
def test_errors_have_their_kind_and_say_which_call_it_was(
    call: Callable[..., Any], what: Any, kind: type[CallError], code: str, status: int
) -> None:
    with pytest.raises(kind) as failed:
        call(*what)
    assert (failed.value.code, failed.value.status) == (code, status)
    assert len(str(failed.value)) > 10
    assert bool(failed.value.request_id) == (code not in ("UNKNOWN_TASK", "UNKNOWN_MODEL", "NO_MODEL"))


def test_a_busy_model_says_when_to_come_back(app: Ostler, tmp_path: Path) -> None:
    go, begun = tmp_path / "go", tmp_path / "begun"
    payload = {"go": str(go), "begun": str(begun)}

    async def overload() -> tuple[list[Any], CallBusy]:
        running = [asyncio.create_task(app.call("slow", None, payload))]
        await asyncio.to_thread(until, begun.exists, "the first to begin")
        running += [asyncio.create_task(app.call("slow", None, payload)) for _ in range(2)]  # these wait
        await asyncio.to_thread(until, lambda: _line(app, "slow:slow") == 3, "three calls")
        with pytest.raises(CallBusy) as busy:
            await app.call("slow", None, payload)
        go.touch()
        return await asyncio.gather(*running), busy.value

    found, busy = asyncio.run(overload())
    assert len(set(found)) == 1
    assert (busy.code, busy.status) == ("BUSY", 429)
    assert busy.retry_after is not None and busy.retry_after >= 1


def _line(app: Ostler, name: str) -> int:
    import json
    import urllib.request

    url = json.loads((Path(app.data or "") / "node.json").read_text())["url"]
    with urllib.request.urlopen(f"{url}/api/v1/health") as response:
        state = json.load(response)["models"][name]
    return int(state["in_flight"] + state["waiting"])


def test_the_timeout_of_a_call_is_the_callers(call: Callable[..., Any], tmp_path: Path) -> None:
    go = tmp_path / "never"
    with pytest.raises(TimeoutError) as late:
        call("wide", None, {"go": str(go), "begun": str(tmp_path / "begun")}, timeout="300ms")
    assert isinstance(late.value, CallTimeout)


def test_cancelling_the_task_cancels_the_call(app: Ostler, tmp_path: Path) -> None:
    go, begun = tmp_path / "go", tmp_path / "begun"

    async def leave() -> None:
        task = asyncio.create_task(app.call("slow", None, {"go": str(go), "begun": str(begun)}))
        await asyncio.to_thread(until, begun.exists, "the call to begin")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    until(lambda: Path(f"{go}.cancelled").exists(), "the model to notice")


@pytest.mark.parametrize("form", ["sync", "async"])
def test_leaving_a_stream_early_cancels_the_call(app: Ostler, form: str, tmp_path: Path) -> None:
    payload = {"text": "one wait two", "go": str(tmp_path / "never")}

    async def follow() -> None:
        async for _ in app.stream("words", None, payload):
            break

    if form == "async":
        asyncio.run(follow())
    else:
        for _ in app.stream_sync("words", None, payload):
            break
    assert app.call_sync("words", None, {"text": "free"}, timeout=30) == ["free"]  # its one place is free again


def test_a_thread_uses_one_connection_again_and_so_does_a_loop(app: Ostler, node: Node) -> None:
    ports: list[Any] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if (
            event == "c_call"
            and getattr(argument, "__name__", "") == "connect"
            and isinstance(getattr(argument, "__self__", None), socket.socket)
        ):
            ports.append(argument.__self__)

    sys.setprofile(note)
    try:
        for _ in range(5):
            app.call_sync("echo", "echo", 1)
    finally:
        sys.setprofile(None)
    assert len(ports) == 1

    async def many() -> int:
        for _ in range(5):
            await app.call("echo", "echo", 1)
        (idle,) = app._caller._looped._idle.values()  # type: ignore[union-attr]
        return len(idle.links)

    assert asyncio.run(many()) == 1


class Fickle(threading.Thread):
    """A server that answers each connection's requests with the same bytes; b"" closes it after the first one."""

    def __init__(self, *behaviour: bytes) -> None:
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self._behaviour = behaviour
        self.requests = self.closed = 0
        self.start()

    def run(self) -> None:
        for answers in self._behaviour:
            try:
                taken, _ = self.listener.accept()
            except OSError:
                return  # the test is over
            with taken:
                while _read_request(taken):
                    self.requests += 1
                    taken.sendall(answers)
                    if not answers or b"connection: close" in answers or b"closes" in answers:
                        break
            self.closed += 1


def _read_request(taken: socket.socket) -> bool:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = taken.recv(65536)
        if not piece:
            return False
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        body += taken.recv(65536)
    return True


def _answer(body: bytes, more: bytes = b"") -> bytes:
    kind = b"content-type: application/json\r\n"
    return b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n%b\r\n%b" % (kind, len(body), more, body)


@pytest.fixture
def fickle(monkeypatch: pytest.MonkeyPatch):
    made: list[Fickle] = []

    def make(*behaviour: bytes) -> tuple[Fickle, Ostler]:
        made.append(server := Fickle(*behaviour))
        monkeypatch.setenv("OSTLER_URL", server.url)
        return server, Ostler()

    yield make
    for server in made:
        server.listener.shutdown(socket.SHUT_RDWR)
        server.listener.close()
        server.join(30)


def test_a_connection_that_was_closed_while_idle_is_replaced_without_a_second_call(fickle) -> None:
    server, app = fickle(_answer(b"1", b"closes: yes\r\n"), _answer(b"2", b"closes: yes\r\n"))
    assert app.call_sync("echo", None, 1) == 1
    until(lambda: server.closed == 1, "the first connection to be closed")
    assert app.call_sync("echo", None, 1) == 2
    assert server.requests == 2


@pytest.mark.parametrize("form", ["sync", "async"])
def test_a_call_that_was_sent_is_not_sent_again(fickle, form: str) -> None:
    """It closes the connection after the request: whether it was run, nobody knows."""
    server, app = fickle(b"", _answer(b"2"))
    with pytest.raises(ModelFailed, match="may have been run") as failed:
        app.call_sync("echo", None, 1) if form == "sync" else asyncio.run(app.call("echo", None, 1))
    assert (failed.value.code, server.requests) == ("BAD_ANSWER", 1)


def test_a_stream_of_somebody_elses_server_ends_where_its_body_ends(fickle) -> None:
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    )
    _, app = fickle(head + b"15\r\ndata: 1\n\ndata: word\n\n\r\n0\r\n\r\n")
    assert list(app.stream_sync("llm", None, 1)) == [1, "word"]


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\nconnection: close\r\n\r\n",
        _answer(b"{", b"connection: close\r\n"),
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\nconnection: close\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000 + b"\r\nconnection: close\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 300 + b"connection: close\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\ndata: 1\n\n",  # and no [DONE]
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        b"9\r\ndata: 1\n\n\r\n",  # and no end of the body
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n" + b" " * 200_000,
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" + b"d" * 200_000,
    ],
)
def test_an_answer_that_is_none_or_has_no_end_is_an_error_and_bounded(
    fickle, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTLER_MAX_BODY", "100000")
    _, app = fickle(answer, answer)
    with pytest.raises(ModelFailed) as failed:
        app.call_sync("echo", None, 1)
    assert failed.value.code == "BAD_ANSWER"
    with pytest.raises(ModelFailed):
        asyncio.run(app.call("echo", None, 1))


def test_where_there_is_no_node_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CallBusy, match="no node is running in .*ostler up") as none:
        Ostler(data=str(tmp_path)).call_sync("echo", None, 1)
    assert none.value.code == "NO_NODE"
    with socket.create_server(("127.0.0.1", 0)) as closed:
        monkeypatch.setenv("OSTLER_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
    for form in (lambda a: a.call_sync("echo", None, 1), lambda a: asyncio.run(a.call("echo", None, 1))):
        with pytest.raises(CallBusy, match="nothing was run"):
            form(Ostler(data=str(tmp_path)))
    monkeypatch.setenv("OSTLER_URL", "ftp://nowhere")
    with pytest.raises(ConfigError, match="must be the URL of a node"):
        Ostler().call_sync("echo", None, 1)


def test_what_cannot_be_sent_is_refused_before_anything_is(app: Ostler) -> None:
    for payload in (object(), {"a": b"bytes"}, float("nan"), Body(b"", "text/plain\r\nx: y")):
        with pytest.raises(BadArguments):
            app.call_sync("echo", "echo", payload)
    for wishes in ({"timeout": 0}, {"timeout": "soon"}, {"keep_alive": "x"}, {"priority": "high"}):
        with pytest.raises(BadArguments):
            app.call_sync("echo", "echo", 1, **wishes)


def test_arrays_are_sent_as_lists(call: Callable[..., Any]) -> None:
    import array

    assert call("echo", "echo", {"v": array.array("d", [0.5, 1.0])})["payload"] == {"v": [0.5, 1.0]}


# ---- jobs


def test_a_job_calls_a_model(node: Node) -> None:
    job = node.wait_job(node.enqueue("ask", task="echo", model="echo", payload={"a": 1}))
    assert (job["status"], job["result"]["payload"]) == ("done", {"a": 1}), job
    job = node.wait_job(node.enqueue("ask_all", task="echo", model="echo", payloads=[1, 2, 3]))
    assert [one["payload"] for one in job["result"]] == [1, 2, 3]


def test_a_jobs_error_says_what_the_model_said(node: Node) -> None:
    job = node.wait_job(node.enqueue("ask", task="echo", model="other", options={"attempts": 1}))
    assert job["status"] == "failed"
    assert "has no model 'other'" in job["error"]["message"]


def test_a_job_calls_models_where_everybody_else_needs_a_token_and_does_not_learn_it(make_node) -> None:
    """The key of the run directory opens calls, and nothing else."""
    secret = "a-secret-token-of-some-length"
    node = make_node(app=MODELS, OSTLER_TOKEN=secret, ready=False)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "ostler",
            "enqueue",
            "ask",
            "task=echo",
            "model=echo",
            "--watch",
            "--data",
            str(node.folder),
        ],
        env={**os.environ, "OSTLER_TOKEN": secret},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    key = (node.folder / "run" / "key").read_text().strip()
    bearer = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    assert node.post("/api/v1/calls/echo?model=echo", {"payload": 1}, **bearer)[0] == 200
    assert node.post("/api/v1/jobs", {"task": "add"}, **bearer)[0] == 401
    assert (node.folder / "run" / "key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(CallRefused, match="requires a token"):
        _with_url(node.url)


def _with_url(url: str) -> Any:
    """A program elsewhere: it knows the address and nothing else."""
    os.environ["OSTLER_URL"] = url
    try:
        return Ostler().call_sync("echo", "echo", 1)
    finally:
        del os.environ["OSTLER_URL"]


def test_a_call_while_the_app_is_loaded_is_refused(node: Node, tmp_path: Path) -> None:
    from ostler.app import load

    file = tmp_path / "eager.py"
    file.write_text("from ostler import Ostler\napp = Ostler()\napp.call_sync('echo', 'echo', 1)\n")
    with pytest.raises(ConfigError, match="calls a model while it is being imported"):
        load(str(file))


def test_a_model_in_another_environment_is_told_that_it_cannot_call(tmp_path: Path) -> None:
    standin = Path(sys.modules["ostler"].__file__ or "").parent / "calls" / "standin"
    code = "import ostler; ostler.Ostler().call_sync('echo', None, 1)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(standin)}, capture_output=True, text=True
    )
    assert "RuntimeError: a model that runs in another environment cannot call models" in done.stderr
