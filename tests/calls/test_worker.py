"""A model's worker, one call at a time: routes, bodies, answers and errors. Real processes, a real socket, a control channel."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.calls.bench import Bench, worker


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    with worker(tmp_path_factory.mktemp("odd"), "odd", max_body=1_000_000) as bench:
        yield bench


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    with worker(tmp_path_factory.mktemp("echo"), "echo", "org/big:7b", max_body=1_000_000) as bench:
        yield bench
        assert bench.process.poll() is None


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    with worker(tmp_path_factory.mktemp("raw"), "raw") as bench:
        yield bench


def test_the_four_routes_answer_as_they_should(echo: Bench) -> None:
    assert echo.get("/healthz").json == {"status": "ok", "model": "org/big:7b", "ready": True}
    info = echo.get("/info").json
    assert info.keys() == {"model", "memory_mb", "gpu_mb", "load_time_ms", "pid", "in_flight"}
    assert (info["model"], info["pid"], info["in_flight"], info["gpu_mb"]) == ("org/big:7b", echo.process.pid, 0, None)
    assert info["memory_mb"] > 5
    answer = echo.call({"text": "é\u2028"}, x_ostler_request_id="r-1")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    spent = answer.json.pop("processing_time_ms")
    assert 0 <= spent < 60_000
    assert answer.json | {"processing_time_ms": 0} == {
        "result": {"text": "é\u2028"}, "request_id": "r-1", "processing_time_ms": 0, "model": "org/big:7b",
    }  # fmt: skip
    assert echo.get("/nothing").error[:2] == (404, "NOT_FOUND")
    client = echo.client()
    assert client.get("/infer").error[:2] == (405, "METHOD_NOT_ALLOWED")
    assert echo.client().post("/healthz").headers["allow"] == "GET"


def test_ready_says_where_and_how_it_is_served(echo: Bench) -> None:
    info = echo.wait("ready")[1]
    python = info.pop("python")
    assert python.startswith("3.")
    assert info == {"socket": "w.0.1.sock", "load_ms": 0.0, "concurrency": 1, "streams": False, "parks": False} | {
        "load_ms": info["load_ms"]
    }
    assert (echo.folder / "w.0.1.sock").stat().st_mode & 0o777 == 0o600


def test_ten_thousand_calls_on_one_connection(echo: Bench) -> None:
    client = echo.client()
    for number in range(10_000):
        assert client.call(number).result == number
    assert echo.get("/info").json["in_flight"] == 0


@pytest.mark.parametrize(
    ("body", "payload"),
    [
        (b'{"model": "m", "payload": [1]}', [1]),
        (b'{"payload": null}', None),
        (b'{"texts": []}', {"texts": []}),
        (b"[1, 2]", [1, 2]),
        (b'"text"', "text"),
    ],
)
def test_the_payload_of_a_json_body_is_its_member_or_the_body_itself(echo: Bench, body: bytes, payload: object) -> None:
    assert echo.client().post("/infer", body, content_type="application/json; charset=utf-8").result == payload


def test_json_that_is_labelled_as_a_form_is_json_and_a_form_is_not(echo: Bench) -> None:
    for body, result in ((b' {"payload": 7}', 7), (b"[1]", [1]), (b"{no", b"{no"), (b"a=1&b=2", b"a=1&b=2")):
        answer = echo.client().post("/infer", body, content_type="application/x-www-form-urlencoded")
        assert (answer.body if isinstance(result, bytes) else answer.result) == result


def test_chunked_bodies_and_expect_continue_are_taken(echo: Bench) -> None:
    client = echo.client()
    client.socket.sendall(
        b"POST /infer HTTP/1.1\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    for part in (b"4\r\n[1, \r\n", b"1;x=y\r\n", b"2\r\n", b"1\r\n]\r\n0\r\nx: y\r\n\r\n"):
        client.socket.sendall(part)
    assert client.answer().result == [1, 2]
    client.socket.sendall(b"POST /infer HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n")
    assert client.answer().status == 100
    client.socket.sendall(b"[16]")
    assert client.answer().result == [16]
    client.socket.sendall(b"POST /infer HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 99999999\r\n\r\n")
    assert client.answer().error[:2] == (413, "PAYLOAD_TOO_LARGE")


def test_a_body_that_comes_byte_by_byte_and_two_requests_at_once_are_taken(echo: Bench) -> None:
    client = echo.client()
    one = b"POST /infer HTTP/1.1\r\ncontent-length: 3\r\n\r\n[7]"
    for byte in one:
        client.socket.sendall(bytes([byte]))
    assert client.answer().result == [7]
    client.socket.sendall(one + one)
    assert (client.answer().result, client.answer().result) == ([7], [7])


def test_http_1_0_and_connection_close_are_answered_and_closed(echo: Bench) -> None:
    for head in (b"POST /infer HTTP/1.0\r\n", b"POST /infer HTTP/1.1\r\nConnection: close\r\n"):
        client = echo.client()
        client.socket.sendall(head + b"content-length: 1\r\n\r\n5")
        answer = client.answer()
        assert (answer.result, answer.headers["connection"]) == (5, "close")
        assert client.ended()


GARBAGE = [
    (b"\x16\x03\x01\x02\x00\x01\x00", 400),
    (b"hello\r\n\r\n", 400),
    (b"GET /healthz\r\n\r\n", 400),
    (b"GET /healthz HTTP/2.0\r\n\r\n", 400),
    (b"POST /infer HTTP/1.1\r\nno colon\r\n\r\n", 400),
    (b"POST /infer HTTP/1.1\r\nbad name: x\r\n\r\n", 400),
    (b"POST /infer HTTP/1.1\r\nx: a\nb: c\r\n\r\n", 400),
    (b"POST /infer HTTP/1.1\r\nx: a\0\r\n\r\n", 400),
    (b"POST /infer HTTP/1.1\r\n folded: x\r\n\r\n", 400),
    (b"POST /infer HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
    (b"POST /infer HTTP/1.1\r\ncontent-length: 1_0\r\n\r\n", 400),
    (b"POST /infer HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
    (b"POST /infer HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", 400),
    (b"POST /infer HTTP/1.1\r\ntransfer-encoding: gzip\r\n\r\n", 501),
    (b"POST /infer HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
    (b"POST /infer HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nab\r\n", 400),
    (b"POST /infer HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + b"1" * 300, 400),
    (b"POST /infer HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nfffffff\r\n", 413),
    (b"POST /infer HTTP/1.1\r\ncontent-length: 1000001\r\n\r\n", 413),
    (b"POST /infer HTTP/1.1\r\ncontent-length: 99999999999999999999999999\r\n\r\n", 413),
    (b"POST /infer HTTP/1.1\r\nx: " + b"y" * 20_000, 431),
    (b"POST /infer HTTP/1.1\r\nx: " + b"y" * 20_000 + b"\r\n\r\n", 431),
    (b"POST /infer HTTP/1.1\r\nx-ostler-request-id: a b\r\ncontent-length: 1\r\n\r\n1", 400),
    (b"POST /infer HTTP/1.1\r\nx-ostler-deadline-ms: soon\r\ncontent-length: 1\r\n\r\n1", 400),
]


@pytest.mark.parametrize(("data", "status"), GARBAGE)
def test_garbage_is_refused_in_words_and_the_connection_closed(echo: Bench, data: bytes, status: int) -> None:
    for warm in (False, True):  # at the door, and on a connection that carries calls
        client = echo.client()
        if warm:
            assert client.call(1).result == 1
        client.socket.sendall(data)
        assert client.answer().error[0] == status
        assert client.ended()


def test_the_answer_to_a_body_that_is_too_large_arrives_although_it_is_still_being_sent(echo: Bench) -> None:
    client = echo.client()
    assert client.call(1).result == 1
    client.socket.sendall(b"POST /infer HTTP/1.1\r\ncontent-length: 2000000\r\n\r\n" + b"x" * 2_000_000)
    assert client.answer().error[:2] == (413, "PAYLOAD_TOO_LARGE")
    client.socket.shutdown(socket.SHUT_WR)
    assert client.ended()


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"",
        b"\xff\xfe",
        b"NaN",
        b'{"a": Infinity}',
        b"[" * 100_000,
        b"[" * 201 + b"]" * 201,
        b'[{"a":' * 150 + b"1" + b"}]" * 150,
    ],
)
def test_a_body_that_is_not_json_or_too_deep_is_the_callers_fault(echo: Bench, body: bytes) -> None:
    client = echo.client()
    assert client.post("/infer", body, content_type="application/json").error[:2] == (400, "BAD_PAYLOAD")
    assert client.call("still here").result == "still here"


def test_brackets_in_texts_are_not_depth(echo: Bench) -> None:
    body = json.dumps({"payload": {"a": "[" * 500, 'b\\"{{{': ["\\", "]}" * 300, [[[]]]]}}).encode()
    assert echo.client().post("/infer", body, content_type="application/json").result["a"] == "[" * 500
    deepest = b"[" * 200 + b"]" * 200
    assert echo.client().post("/infer", deepest, content_type="application/json").status == 200


def test_a_request_id_is_given_when_there_is_none(echo: Bench) -> None:
    first, second = echo.call(1).json["request_id"], echo.call(1).json["request_id"]
    assert first and first != second


# ---- results and errors


@pytest.mark.parametrize(
    ("do", "expected"),
    [
        ("raise", (500, "MODEL_ERROR", "RuntimeError: the model broke: é")),
        ("input", (400, "BAD_PAYLOAD", "text is missing")),
        ("exit", (500, "MODEL_ERROR", "SystemExit: 3")),
        ("memory", (507, "OUT_OF_MEMORY", "MemoryError: no more")),
        ("cuda", (507, "OUT_OF_MEMORY", "RuntimeError: CUDA out of memory. Tried to allocate 20.00 GiB")),
    ],
)
def test_what_a_model_raises_has_its_code(odd: Bench, do: str, expected: tuple) -> None:
    answer = odd.call({"do": do}, x_ostler_request_id="r9")
    assert answer.error == expected
    assert answer.json["error"]["request_id"] == "r9"
    assert odd.call({"do": "nothing"}).result is None
    assert ("test" if do == "input" else "zoo.py") in odd.printed() or do == "input"


@pytest.mark.parametrize(
    ("do", "says"),
    [
        ("nan", "result['scores'][1] is nan"),
        ("numbers_nan", "result[0] is inf"),
        ("bytes_inside", "result['image'] is bytes; return bytes alone"),
        ("key", "of type tuple; keys must be text"),
        ("deep", "nested too deep"),
        ("coroutine", "write `async def infer`"),
        ("bad_type", "not usable as a header"),
    ],
)
def test_a_result_that_cannot_be_sent_is_an_error_that_says_where(odd: Bench, do: str, says: str) -> None:
    status, code, message = odd.call({"do": do}).error
    assert (status, code) == (500, "MODEL_ERROR")
    assert says in message
    assert odd.call({"do": "nothing"}).result is None


@pytest.mark.parametrize("do", ["bad_text", "bad_object", "awaitable", "closed_log"])
def test_no_object_of_a_model_takes_its_worker_down(tmp_path: Path, do: str) -> None:
    with worker(tmp_path, "odd") as bench:
        assert bench.call({"do": do}).error[:2] == (500, "MODEL_ERROR")
        assert bench.call({"do": "nothing"}).result is None


def test_a_child_that_the_model_forks_ends_by_sigterm_and_the_worker_stays(odd: Bench) -> None:
    assert odd.call({"do": "fork"}).result == 143
    assert odd.get("/healthz").status == 200


def test_arrays_and_numbers_of_other_libraries_become_json(odd: Bench) -> None:
    assert odd.call({"do": "numbers"}).result == {"vector": [1.5, 2.5], "n": 3}


def test_bytes_go_out_as_they_are_with_their_type(odd: Bench) -> None:
    answer = odd.call({"do": "bytes"}, x_ostler_request_id="r2")
    assert (answer.status, answer.body, answer.headers["content-type"]) == (
        200,
        b"\x00\x01raw",
        "application/octet-stream",
    )
    assert answer.headers["x-ostler-request-id"] == "r2"
    answer = odd.call({"do": "body"})
    assert (answer.body, answer.headers["content-type"]) == (b"<svg/>", "image/svg+xml")


def test_a_result_over_the_limit_is_refused_and_one_below_it_is_not(odd: Bench) -> None:
    assert len(odd.call({"do": "large", "size": 900_000}).result) == 900_000
    status, _, message = odd.call({"do": "large", "size": 1_000_000}).error
    assert status == 500
    assert "yield it in parts" in message


def test_a_client_that_does_not_read_a_large_answer_does_not_hold_up_others(odd: Bench) -> None:
    deaf = odd.client()
    deaf.start({"do": "large", "size": 900_000})
    for _ in range(20):
        assert odd.call({"do": "nothing"}).result is None
    assert len(deaf.answer().result) == 900_000
    assert deaf.call({"do": "nothing"}).result is None


def test_the_deadline_is_known_to_the_model_and_one_that_is_over_is_not_begun(odd: Bench) -> None:
    assert 50 < odd.call({"do": "deadline"}, x_ostler_deadline_ms="60000").result <= 60
    assert odd.call({"do": "deadline"}).result is None
    assert odd.call({"do": "deadline"}, x_ostler_deadline_ms="0").error[:2] == (504, "DEADLINE")


def test_a_call_runs_on_the_main_thread(odd: Bench) -> None:
    assert odd.call({"do": "thread"}).result is True


def test_an_infer_that_returns_an_iterator_streams_it(odd: Bench) -> None:
    assert odd.call({"do": "generate"}).body == b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"


# ---- bodies that are not JSON


def test_a_raw_body_reaches_the_model_untouched(raw: Bench) -> None:
    data = bytes(range(256)) * 40_000  # 10 MB
    result = raw.client().post("/infer", data, content_type="audio/wav").result
    assert result == {
        "size": len(data), "sum": sum(data[:1000]), "type": "audio/wav", "filename": None, "fields": {}, "files": {},
    }  # fmt: skip
    assert raw.client().post("/infer", b"", content_type="audio/wav").result["size"] == 0
    assert raw.client().post("/infer", b"").result == {"kind": "NoneType"}


def form(*parts: tuple[str, bytes], boundary: str = "b0undary") -> bytes:
    whole = b"".join(
        b"--" + boundary.encode() + b"\r\n" + head.encode() + b"\r\n\r\n" + data + b"\r\n" for head, data in parts
    )
    return whole + b"--" + boundary.encode() + b"--\r\n"


def test_a_form_gives_its_fields_and_files(raw: Bench) -> None:
    body = form(
        ('Content-Disposition: form-data; name="language"', "français".encode()),
        ('Content-Disposition: form-data; name="empty"', b""),
        (
            'Content-Disposition: form-data; name="file"; filename="a \\"b\\".wav"\r\nContent-Type: audio/wav',
            b"\r\n--b0undar\r\n" * 9,
        ),
        ("content-disposition: form-data; name=mask; filename=m.png", b"\x89PNG"),
    )
    for quoted in ("b0undary", '"b0undary"'):
        result = (
            raw.client().post("/infer", body, content_type=f"multipart/form-data; charset=x; boundary={quoted}").result
        )
        assert result["fields"] == {"language": "français", "empty": ""}
        assert (result["size"], result["type"], result["filename"]) == (117, "audio/wav", 'a "b".wav')
        assert result["files"] == {"file": 117, "mask": 4}


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", "multipart/form-data"),
        (b"nothing", "multipart/form-data; boundary=b"),
        (b"--b\r\ncontent-disposition: form-data; name=a\r\n\r\ncut", "multipart/form-data; boundary=b"),
        (b"--b\r\nno head\r\n--b--", "multipart/form-data; boundary=b"),
        (form(("content-type: x", b"y"), boundary="b"), "multipart/form-data; boundary=b"),
        (form(("content-disposition: form-data; name=a", b"\xff"), boundary="b"), "multipart/form-data; boundary=b"),
        (
            b"--b\r\ncontent-disposition: form-data; name=a\r\n\r\n\r\n" * 2000 + b"--b--",
            "multipart/form-data; boundary=b",
        ),
    ],
)
def test_a_broken_form_is_the_callers_fault(raw: Bench, body: bytes, kind: str) -> None:
    client = raw.client()
    assert client.post("/infer", body, content_type=kind).error[:2] == (400, "BAD_PAYLOAD")
    assert client.call(1).result == {"kind": "int"}


def test_connections_are_bounded_and_control_routes_answer_beside_idle_ones(tmp_path: Path) -> None:
    with worker(tmp_path, "echo") as bench:
        crowd = [bench.client() for _ in range(65)]
        extra = bench.client()
        assert extra.answer().error[:2] == (503, "BUSY")
        for client in crowd[:3]:
            client.close()
        crowd[5].socket.sendall(b"POST /infer HTTP/1.1\r\ncontent-length: 5\r\n\r\n12")  # half a call
        assert crowd[6].get("/healthz").status == 200
        assert crowd[7].call(1).result == 1
