"""The API as a caller sees it: shapes, codes, and what bad input does (nothing)."""

from __future__ import annotations

import http.client
import json
import os
from pathlib import Path

import pytest

from ostler.web.pages import Tries
from tests.harness import Node, call


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    running = Node(
        tmp_path_factory.mktemp("api") / "data", Node.__init__.__defaults__[0], "--pool", "work=1", "--pool", "other=1"
    ).start()
    yield running
    running.stop()


@pytest.mark.parametrize(
    ("body", "status", "code", "says"),
    [
        ({"task": "nope"}, 422, "UNKNOWN_TASK", "there is no task 'nope'"),
        (
            {"task": "ad"},
            422,
            "UNKNOWN_TASK",
            "did you mean 'add'? A node knows the tasks of the code that it was started with",
        ),
        ({"task": 5}, 422, "BAD_ARGUMENTS", "task"),
        ({}, 422, "BAD_ARGUMENTS", "task"),
        ({"task": "add"}, 422, "BAD_ARGUMENTS", "'a' is missing"),
        ({"task": "add", "args": {"a": "1"}}, 422, "BAD_ARGUMENTS", "'a' must be int"),
        ({"task": "add", "args": {"a": 1, "z": 2}}, 422, "BAD_ARGUMENTS", "'z' is not a parameter"),
        (
            {"task": "typed", "args": {"at": "soon"}},
            422,
            "BAD_ARGUMENTS",
            "'at' must be datetime (text such as",
        ),
        ({"task": "add", "args": [1]}, 422, "BAD_ARGUMENTS", "args"),
        ({"task": "add", "args": {"a": 1}, "timeout": -1}, 422, "BAD_ARGUMENTS", "timeout must be more than 0"),
        ({"task": "add", "args": {"a": 1}, "timeout": 0}, 422, "BAD_ARGUMENTS", "timeout must be more than 0"),
        ({"task": "add", "args": {"a": 1}, "attempts": 0}, 422, "BAD_ARGUMENTS", "attempts must be"),
        ({"task": "add", "args": {"a": 1}, "delay": -3}, 422, "BAD_ARGUMENTS", "delay"),
        ({"task": "add", "args": {"a": 1}, "wrong": 1}, 422, "BAD_ARGUMENTS", "no field 'wrong'; known: task, args"),
        ({"task": "add", "args": {"a": 1}, "retries": 3}, 422, "BAD_ARGUMENTS", "use attempts=4"),
        ({"task": "add", "kwargs": {"a": 1}}, 422, "BAD_ARGUMENTS", "did you mean args?"),
        ({"task": "add", "args": {"a": 1}, "delay": "5m"}, 422, "BAD_ARGUMENTS", 'delay must be a number, found "5m"'),
        (b"not json", 422, "BAD_ARGUMENTS", "not JSON"),
        (b'{"task": "add", "args": {"a": NaN}}', 422, "BAD_ARGUMENTS", "NaN is not JSON"),
        (b"[1]", 422, "BAD_ARGUMENTS", "must be an object"),
        (b'{"task": "add", "args": ' + b"[" * 100_000, 422, "BAD_ARGUMENTS", "not JSON"),
        (b"\xff\xfe", 422, "BAD_ARGUMENTS", "not JSON"),
        ({"task": "other", "args": {"say": "x" * 1_048_600}}, 413, "PAYLOAD_TOO_LARGE", "max_payload"),
        ({"task": "other", "args": {"say": "x" * 3_000_000}}, 413, "PAYLOAD_TOO_LARGE", "max_payload"),
    ],
)
def test_bad_input_is_refused_in_words_and_nothing_is_stored(
    node: Node, body, status: int, code: str, says: str
) -> None:
    before = node.get("/api/v1/jobs?limit=1")[1]["jobs"]
    found, answer = node.post("/api/v1/jobs", body)
    assert (found, answer["error"]["code"]) == (status, code), answer
    assert says in answer["error"]["message"]
    assert node.get("/api/v1/jobs?limit=1")[1]["jobs"] == before


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/v1/jobs/999999", 404),
        ("GET", "/api/v1/jobs/abc", 422),
        ("POST", "/api/v1/jobs/999999/cancel", 404),
        ("POST", "/api/v1/jobs/999999/retry", 404),
        ("GET", "/api/v1/jobs?status=nope", 422),
        ("GET", "/api/v1/jobs?limit=0", 422),
        ("GET", "/api/v1/workers/worker:nope:0", 404),
        ("POST", "/api/v1/workers/worker:nope:0/drain", 404),
        ("POST", "/api/v1/workers/worker:nope:0/restart", 404),
        ("POST", "/api/v1/workers/worker:nope:0/reset", 404),
        ("POST", "/api/v1/workers/worker:nope:0/kill", 404),
        ("POST", "/api/v1/pools/nope/pause", 404),
        ("GET", "/api/v1/nothing", 404),
        ("DELETE", "/api/v1/jobs", 405),
    ],
)
def test_unknown_things_are_4xx_with_the_one_shape(node: Node, method: str, path: str, status: int) -> None:
    found, answer = call(node.url, method, path)
    assert found == status
    assert set(answer) == {"error"}
    assert answer["error"]["code"]
    assert answer["error"]["message"]


def test_a_job_has_the_promised_fields(node: Node) -> None:
    job = node.wait_job(node.enqueue("add", a=1))
    promised = {
        "id",
        "task",
        "queue",
        "status",
        "attempt",
        "crashes",
        "progress",
        "result",
        "error",
        "worker",
        "node",
        "created_at",
        "started_at",
        "finished_at",
        "errors",
        "last_error",
        "events",
    }
    assert promised <= job.keys()
    assert all({"seq", "at", "name", "data"} == e.keys() for e in job["events"])


def test_a_worker_has_the_promised_fields(node: Node) -> None:
    promised = {
        "name", "component", "node", "node_id", "pool", "status", "pid", "generation", "current_job", "last_heartbeat", "heartbeat_age",
        "restart_count",
        "exit_code", "exit_reason", "rss_mb", "started_at", "metadata",
    }  # fmt: skip
    assert all(promised <= w.keys() for w in node.workers())


def test_listing_filters_and_pages(node: Node) -> None:
    ids = [node.enqueue("other", say=str(n)) for n in range(5)]
    for job in ids:
        node.wait_job(job)
    status, page = node.get("/api/v1/jobs?queue=other&status=done&limit=2")
    assert status == 200
    assert [j["id"] for j in page["jobs"]] == ids[:-3:-1]
    assert page["next"] == ids[-2]
    following = node.get(f"/api/v1/jobs?queue=other&status=done&limit=2&cursor={page['next']}")[1]
    assert [j["id"] for j in following["jobs"]] == [ids[2], ids[1]]
    for path in ("jobs", "calls", "sessions", "incidents", f"jobs/{ids[0]}/events", f"jobs/{ids[0]}/artifacts"):
        status, told = node.get(f"/api/v1/{path}?outcomes=failed")
        assert (status, "no query parameter 'outcomes'" in told["error"]["message"]) == (422, True)
    assert "did you mean status?" in node.get("/api/v1/jobs?state=failed")[1]["error"]["message"]


def test_info_health_and_docs(node: Node) -> None:
    info = node.get("/api/v1/info")[1]
    assert (info["name"], info["worker_enabled"], info["pid"]) == ("ostler", True, node.pid)
    assert {p["pool"] for p in info["pools"]} == {"work", "other"}
    assert info["queues"]["work"]["queued"] == 0
    assert {t["name"] for t in info["tasks"]} >= {"add", "noop"}
    health = node.get("/api/v1/health")[1]
    assert (health["status"], health["errors"], health["workers"]) == ("healthy", [], {"healthy": 2})
    assert health["nodes"][0]["pid"] == node.pid
    assert node.get("/healthz") == (200, {"status": "ok"})
    assert node.get("/readyz")[0] == 200
    spec = node.get("/openapi.json")[1]
    assert "/api/v1/jobs/{job}/cancel" in spec["paths"]
    assert "EnqueueRequest" in json.dumps(spec) or "task" in json.dumps(spec["paths"]["/api/v1/jobs"]["post"])


def _status(node: Node, method: str, path: str, **headers: str) -> int:
    host, port = node.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.putrequest(method, path, skip_host=True)
    for name, value in ({"Host": f"{host}:{port}"} | headers).items():
        connection.putheader(name, value)
    connection.endheaders()
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_page_from_elsewhere_cannot_use_the_node(node: Node) -> None:
    assert _status(node, "POST", "/api/v1/workers/pause", Origin="http://evil.example") == 403
    assert _status(node, "GET", "/api/v1/info", Host="evil.example") == 403
    assert _status(node, "GET", "/api/v1/info", Host="[") == 403
    assert _status(node, "GET", "/api/v1/info", Origin="http://[") == 403
    assert _status(node, "POST", "/api/v1/workers/resume", Origin="null") == 403
    own = node.url
    assert _status(node, "POST", "/api/v1/workers/resume", Origin=own) == 200
    assert node.get("/api/v1/info")[1]["worker_enabled"] is True


def test_a_token_is_asked_where_one_is_set(make_node) -> None:
    secured = make_node("--pool", "work=1", "--pool", "other=0", OSTLER_TOKEN="sésame", start=False)
    secured.start(ready=False)
    assert secured.get("/healthz")[0] == 200
    assert secured.get("/api/v1/info")[0] == 401
    header = "Bearer sésame".encode().decode("latin-1")  # as curl sends it
    for headers in (
        {"Authorization": header},
        {"Cookie": "ostler_token=s%C3%A9same"},
        {"Cookie": 'a(b)=1; j={"a":1}; ostler_token=s%C3%A9same; last'},
    ):
        assert call(secured.url, "GET", "/api/v1/info", headers=headers)[0] == 200
    assert call(secured.url, "GET", "/api/v1/info", headers={"Cookie": "a(b)=1"})[0] == 401
    assert call(secured.url, "GET", "/api/v1/info?token=s%C3%A9same")[0] == 200
    assert call(secured.url, "GET", "/api/v1/info", headers={"Authorization": "Bearer sesam"})[0] == 401
    asked = {"Accept": "text/html"}
    for page in ("/", "/docs"):  # a person is led to where the token is asked for
        assert _status(secured, "GET", page, **asked) == 303
    assert secured.post("/login", b"token=" + b"x" * 5000)[0] == 413, "who has no token cannot fill the memory"


def test_tokens_cannot_be_guessed_at_the_login(make_node) -> None:
    secured = make_node("--pool", "work=1", "--pool", "other=0", ready=False, OSTLER_TOKEN="sesame")
    assert [_login(secured, f"guess{n}") for n in range(10)] == [(303, "/login?wrong=1")] * 10
    assert _login(secured, "guess") == (429, None)
    assert _login(secured, "sesame") == (429, None), "a right guess after the limit tells nothing"
    assert call(secured.url, "GET", "/api/v1/info", headers={"Authorization": "Bearer sesame"})[0] == 200


def test_wrong_tokens_are_forgotten_after_a_minute_and_per_client() -> None:
    tries = Tries()
    for second in range(10):
        assert not tries.is_over("a", second)
        tries.note("a", second)
    assert tries.is_over("a", 59.9)
    assert not tries.is_over("b", 59.9)
    assert not tries.is_over("a", 60)
    for other in range(2000):
        tries.note(other, 61)
    assert not tries.is_over("a", 61), "clients are remembered up to a bound"


def _login(node: Node, token: str) -> tuple[int, str | None]:
    host, port = node.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request("POST", "/login", f"token={token}")
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status, answer.headers["Location"]


_ = (Path, os)


# ---- answers of bounded size, in one shape


def test_a_jobs_timeline_comes_in_pages_and_no_answer_grows_with_it(node: Node) -> None:
    chatty = node.enqueue("tells", times=300, size=50_000)
    node.wait_job(chatty)
    job = node.job(chatty)
    assert len(json.dumps(job)) < 1_000_000
    assert (job["events"][-1]["seq"], job["events"][-1]["name"]) == (job["seq"], "done")
    seen, after = [], 0
    while after is not None:
        status, page = node.get(f"/api/v1/jobs/{chatty}/events?after={after}&limit=1000")
        assert (status, len(json.dumps(page)) < 1_000_000) == (200, True)
        seen += [e["seq"] for e in page["events"]]
        after = page["next"]
    assert seen == list(range(1, job["seq"] + 1))
    assert node.get("/api/v1/jobs/123456/events")[0] == 404
    for path in (f"{2**70}", f"{2**70}/events", f"{2**70}/logs"):
        assert node.get(f"/api/v1/jobs/{path}")[0] == 422


def test_a_listing_has_short_jobs_of_the_same_shape_as_whole_ones(node: Node) -> None:
    jobs = [node.enqueue("other", say="x" * 200_000) for _ in range(5)]
    whole = [node.wait_job(job) for job in jobs][3]
    status, listed = node.get("/api/v1/jobs?limit=5")
    assert (status, [job["id"] for job in listed["jobs"]]) == (200, jobs[::-1])
    assert len(json.dumps(listed)) < 10_000
    short = listed["jobs"][1]
    assert {*whole} - {*short} == {"artifacts", "errors", "events", "waiting_for"}
    assert (short["short"], whole["short"], len(short["args"])) == (True, False, 200)
    cut = {"args", "result", "short"}
    assert {k: v for k, v in short.items() if k not in cut} == {k: whole[k] for k in short if k not in cut}
    documented = node.get("/openapi.json")[1]["components"]["schemas"]["JobView"]["properties"]
    assert [*documented] == [*short]
