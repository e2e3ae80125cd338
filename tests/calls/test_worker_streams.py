"""Streams: formats, errors after the first byte, backpressure, and generators that are closed when the client hangs up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.calls.bench import Bench, until, worker


@pytest.fixture(scope="module", params=["count", "kept", "acount"])
def bench(request, tmp_path_factory):
    with worker(tmp_path_factory.mktemp(request.param), request.param) as found:
        assert found.wait("ready")[1]["streams"] is (request.param != "kept")
        yield found


def events(body: bytes) -> list[object]:
    assert body.endswith(b"\n\n")
    return [line.removeprefix("data: ") for line in body.decode().split("\n\n")[:-1]]


def test_a_generator_streams_events_and_the_connection_is_used_again(bench: Bench) -> None:
    client = bench.client()
    for _ in range(3):
        answer = client.call({"to": 3}, x_ostler_request_id="s1")
        assert (answer.status, answer.headers["content-type"], answer.whole) == (200, "text/event-stream", True)
        assert answer.headers["x-ostler-request-id"] == "s1"
        assert events(answer.body) == ['{"n":0}', '{"n":1}', '{"n":2}', "[DONE]"]
    assert events(client.call({"to": 0}).body) == ["[DONE]"]


def test_lines_and_bytes_are_streamed_where_they_are_wanted(bench: Bench) -> None:
    answer = bench.call({"to": 2}, accept="application/x-ndjson")
    assert (answer.headers["content-type"], answer.body) == ("application/x-ndjson", b'{"n":0}\n{"n":1}\n')
    answer = bench.call({"to": 2, "size": 3})
    assert (answer.headers["content-type"], answer.body) == ("application/octet-stream", b"xxxxxx")


def test_each_item_is_sent_when_it_is_yielded(bench: Bench) -> None:
    client = bench.client()
    client.start({"to": 1_000_000})
    assert client._to(b"\r\n\r\n").startswith(b"HTTP/1.1 200")
    assert client._to(b"\n\n").endswith(b'data: {"n":0}')
    client.close()


def test_an_error_after_the_first_byte_is_told_and_the_connection_closed(bench: Bench) -> None:
    client = bench.client()
    answer = client.call({"to": 5, "fail_at": 2}, x_ostler_request_id="s2")
    assert answer.status == 200
    assert answer.whole is False
    *before, last = answer.body.decode().strip().split("\n\n")
    assert before == ['data: {"n":0}', 'data: {"n":1}']
    kind, data = last.split("\n")
    assert kind == "event: error"
    error = json.loads(data.removeprefix("data: "))["error"]
    assert error == {"code": "MODEL_ERROR", "message": "RuntimeError: no more numbers", "request_id": "s2"}
    assert client.ended()
    assert "no more numbers" in bench.printed()
    lines = bench.call({"to": 5, "fail_at": 1}, accept="application/x-ndjson")
    assert "error" in json.loads(lines.body.splitlines()[1])
    assert bench.call({"to": 5, "fail_at": 1, "size": 3}).whole is False
    assert bench.call({"to": 1}).whole is True


def test_an_error_before_the_first_byte_is_an_ordinary_one(bench: Bench) -> None:
    client = bench.client()
    assert client.call({"to": 5, "fail_at": 0}).error == (500, "MODEL_ERROR", "RuntimeError: no more numbers")
    assert client.call({"to": 1}).status == 200


def test_a_client_that_does_not_read_stops_the_generator_and_hanging_up_closes_it(bench: Bench) -> None:
    for name in ("closed", "yielded"):
        (bench.folder / name).unlink(missing_ok=True)
    client = bench.client()
    client.start({"to": 10_000, "size": 65_536})
    seen = -1
    while seen != (seen := int(bench.noted("yielded"))):
        until(lambda: bench.heard("beat"), "a beat")
        count = len(bench.heard("beat"))
        until(lambda: len(bench.heard("beat")) > count + 3, "some beats")
    assert seen < 100  # some socket buffers, not 640 MB
    rss = bench.get("/info").json
    assert (rss["in_flight"], rss["memory_mb"] < 150) == (1, True)
    client.close()
    bench.noted("closed")
    until(lambda: bench.get("/info").json["in_flight"] == 0, "the call to end")
    assert bench.call({"to": 1}).status == 200


def test_http_1_0_gets_its_stream_until_the_end_of_the_connection(bench: Bench) -> None:
    client = bench.client()
    client.socket.sendall(b'POST /infer HTTP/1.0\r\ncontent-length: 9\r\n\r\n{"to": 2}')
    answer = client.answer()
    assert "transfer-encoding" not in answer.headers
    assert events(answer.body) == ['{"n":0}', '{"n":1}', "[DONE]"]


def test_items_that_are_not_json_are_errors(tmp_path: Path) -> None:
    with worker(tmp_path, "stream_odd") as bench:
        assert bench.call("first").error == (400, "BAD_PAYLOAD", "no such thing")
        assert "result is nan" in bench.call("nan").error[2]
        assert events(bench.call("empty").body) == ["[DONE]"]
        answer = bench.call("later")
        assert answer.whole is False
        assert b"result is nan" in answer.body
