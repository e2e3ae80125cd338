"""The description of the API is what the node answers: every reference resolves, every error is named, every answer fits."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from tests.harness import Node, until

OPEN = {"/healthz", "/readyz"}
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
_TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None),
}  # fmt: skip


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("described") / "data"
    running = Node(folder, Path(__file__).parent / "described_app.py", "--pool", "work=1").start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def document(node: Node) -> dict[str, Any]:
    return node.get("/openapi.json")[1]


def ask(node: Node, method: str, path: str, body: Any = None) -> tuple[int, Any, bytes]:
    """(status, headers, body)."""
    data = None if body is None else json.dumps(body).encode()
    head = {"Content-Type": "application/json"} if body is not None else {}
    request = urllib.request.Request(node.url + path, data, head, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield path, method, operation


def found(document: dict[str, Any], path: str) -> str:
    """The described path that a request's path is of: the one with the fewest parameters."""
    path = path.partition("?")[0]
    fits = [p for p in document["paths"] if re.fullmatch(re.sub(r"{\w+}", "[^/]+", p), path)]
    return min(fits, key=lambda p: p.count("{"))


# ---- a small validator of what pydantic writes


def faults(document: dict[str, Any], schema: dict[str, Any], value: Any, where: str = "$") -> list[str]:
    """How a value differs from its schema. A field that the schema does not name is a difference, too."""
    if "$ref" in schema:
        return faults(document, resolved(document, schema["$ref"]), value, where)
    if "anyOf" in schema:
        tried = [faults(document, one, value, where) for one in schema["anyOf"]]
        return [] if [] in tried else min(tried, key=len)
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where}: {value!r} is none of {schema['enum']}"]
    if "const" in schema and value != schema["const"]:
        return [f"{where}: {value!r} is not {schema['const']!r}"]
    kind = schema.get("type")
    if kind and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind in ("integer", "number"))):
        return [f"{where}: {value!r:.80} is no {kind}"]
    if kind == "array":
        return [
            f for i, one in enumerate(value) for f in faults(document, schema.get("items", {}), one, f"{where}[{i}]")
        ]
    return faults_of_object(document, schema, value, where) if kind == "object" else []


def faults_of_object(document: dict[str, Any], schema: dict[str, Any], value: dict[str, Any], where: str) -> list[str]:
    known, more = schema.get("properties", {}), schema.get("additionalProperties", "properties" not in schema)
    wrong = [f"{where}: {name} is missing" for name in schema.get("required", ()) if name not in value]
    for name, one in value.items():
        if name in known or isinstance(more, dict):
            wrong += faults(document, known.get(name, more), one, f"{where}.{name}")
        elif not more:
            wrong.append(f"{where}: {name} is not in the schema")
    return wrong


def resolved(document: dict[str, Any], reference: str) -> Any:
    value: Any = document
    for part in reference.removeprefix("#/").split("/"):
        value = value[part]
    return value


# ---- the document by itself


def test_every_reference_resolves(document: dict[str, Any]) -> None:
    references = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(document)))
    assert len(references) > 40
    for reference in references:
        assert reference.startswith("#/components/")
        assert isinstance(resolved(document, reference), dict), reference
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_operation_ids_are_unique_names(node: Node, document: dict[str, Any]) -> None:
    ids = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)+", one) for one in ids), ids
    assert {"jobs_list", "jobs_get", "jobs_enqueue", "jobs_cancel", "workers_drain", "sessions_capacity"} <= set(ids)
    assert "Duplicate Operation ID" not in node.log()


def test_every_route_names_its_errors_with_the_one_body(document: dict[str, Any]) -> None:
    for path, method, operation in operations(document):
        answers = operation["responses"]
        wanted = set() if path in OPEN else {"401", "403", "503"}
        wanted |= {"422"} if operation.get("parameters") or "requestBody" in operation else set()
        wanted |= {"404"} if "{" in path else set()
        wanted |= {"413"} if "requestBody" in operation else set()
        assert wanted <= answers.keys(), (method, path, wanted - answers.keys())
        for status, answer in answers.items():
            if status >= "400" and path not in OPEN:
                body = answer["content"]["application/json"]["schema"]
                assert body == {"$ref": "#/components/schemas/ErrorBody"}, (method, path, status)


def test_every_success_says_what_it_contains(document: dict[str, Any]) -> None:
    for path, method, operation in operations(document):
        for status, answer in operation["responses"].items():
            if status == "101":
                continue
            for kind, content in ({} if status == "304" else answer["content"]).items():
                assert content.get("schema"), (method, path, status, kind)
    kinds = {kind for _, _, o in operations(document) for a in o["responses"].values() for kind in a.get("content", ())}
    assert kinds == {
        "application/json", "text/plain", "text/event-stream", "multipart/x-mixed-replace", "application/octet-stream", "*/*",
    }  # fmt: skip


# ---- the document and the node


def test_a_method_that_a_path_does_not_take_is_405_with_those_that_it_does(
    node: Node, document: dict[str, Any]
) -> None:
    for path, item in document["paths"].items():
        if path.startswith("/sessions/"):
            continue  # whatever the method, it is told to connect with WebSocket
        asked = re.sub(r"{\w+}", "1", path)
        for method in METHODS:
            if method.lower() not in item:
                status, headers, body = ask(node, method, asked)
                assert status == 405, (method, path, body)
                assert headers["Allow"].replace(" ", "").split(",") == sorted(one.upper() for one in item)
                assert json.loads(body)["error"]["code"] == "METHOD_NOT_ALLOWED"


def check(node: Node, document: dict[str, Any], method: str, path: str, body: Any = None) -> Any:
    """Ask, and hold the answer against the document; returns it."""
    status, headers, data = ask(node, method, path, body)
    operation = document["paths"][found(document, path)][method.lower()]
    assert str(status) in operation["responses"], (method, path, status, data)
    content = operation["responses"][str(status)]["content"]
    kind = headers.get_content_type()
    assert kind in content or "*/*" in content, (method, path, status, kind)
    if kind != "application/json":
        return data
    value = json.loads(data)
    assert faults(document, content[kind]["schema"], value) == [], (method, path, status)
    return value


def test_every_answer_fits_its_schema(node: Node, document: dict[str, Any]) -> None:
    def get(path: str) -> Any:
        return check(node, document, "GET", path)

    def post(path: str, body: Any = None) -> Any:
        return check(node, document, "POST", path, body)

    stored = post("/api/v1/jobs", {"task": "add", "args": {"a": 1}})
    failed = post("/api/v1/jobs", {"task": "fail"})
    later = post("/api/v1/jobs", {"task": "add", "args": {"a": 1}, "delay": 3600, "unique_key": "once"})
    assert post("/api/v1/jobs", {"task": "add", "args": {"a": 1}, "unique_key": "once"})["id"] == later["id"]
    node.wait_job(stored["id"])
    node.wait_job(failed["id"], "failed")
    post("/api/v1/calls/echo", {"payload": [1]})
    assert post("/v1/embeddings", {"model": "plain", "input": "x"})["data"][0]["embedding"] == [0.0]
    assert [get(f"/v1/models/{one['id']}")["id"] for one in get("/v1/models")["data"]] == ["plain"]
    assert get("/sessions/talk")["error"]["code"] == "UPGRADE_REQUIRED"
    until(lambda: get("/api/v1/calls")["calls"], "the call in the log")
    for job in (stored, failed, later):
        get(f"/api/v1/jobs/{job['id']}")
        get(f"/api/v1/jobs/{job['id']}/events")
        assert get(f"/api/v1/jobs/{job['id']}/artifacts")["next"] is None
    published = post("/api/v1/jobs", {"task": "publish"})["id"]
    assert node.wait_job(published)["status"] == "done"
    assert get(f"/api/v1/jobs/{published}")["artifacts"] == get(f"/api/v1/jobs/{published}/artifacts")["artifacts"]
    assert get("/api/v1/artifacts/report.txt") == b"text"
    assert get(f"/api/v1/jobs/{stored['id']}/logs") == b"adding\n"
    assert len(get("/api/v1/jobs?limit=2")["jobs"]) == 2
    more = post("/api/v1/jobs/bulk", {"jobs": [{"task": "add", "args": {"a": 1}, "delay": 3600}] * 2})["ids"]
    assert post(f"/api/v1/jobs/{more[0]}/cancel")["status"] == "cancelled"
    assert post(f"/api/v1/jobs/{more[0]}/cancel")["error"]["code"] == "CONFLICT"
    assert post("/api/v1/jobs/cancel", {"ids": [10**17] * 10_000})["cancelled"] == 0
    assert post("/api/v1/jobs/cancel", {"ids": more})["cancelled"] == 1
    assert post("/api/v1/jobs/retry", {"ids": [failed["id"]]})["retried"] == 1
    node.wait_job(failed["id"], "failed")
    assert post(f"/api/v1/jobs/{failed['id']}/retry")["id"] == failed["id"]
    name = get("/api/v1/workers")["workers"][0]["name"]
    assert get(f"/api/v1/workers/{name}")["name"] == name
    assert isinstance(get(f"/api/v1/workers/{name}/logs"), bytes)
    assert b"ostler_workers" in get("/metrics")
    with connect(f"{node.url.replace('http', 'ws')}/sessions/talk") as client:
        client.send("x")
        assert client.recv() == "x"
        session = get("/api/v1/sessions?state=live")["sessions"][0]["id"]
        get(f"/api/v1/sessions/{session}")
        get("/api/v1/capacity")
        assert get(f"/api/v1/sessions/{session}/view")["error"]["code"] == "CONFLICT"
        assert check(node, document, "DELETE", f"/api/v1/sessions/{session}")["here"]
    for path in ("/healthz", "/readyz", "/api/v1/health", "/api/v1/info", "/api/v1/stats", "/api/v1/incidents", "/api/v1/pools",
                 "/api/v1/models", "/api/v1/models/stats", "/api/v1/models/series", "/api/v1/memory", "/api/v1/envs", "/api/v1/nodes",
                 "/api/v1/schedules", "/api/v1/sessions", "/api/v1/calls/running"):  # fmt: skip
        get(path)
    for verb in ("pause", "resume"):
        post(f"/api/v1/workers/{verb}")
        post(f"/api/v1/pools/work/{verb}")
    for verb in ("restart", "reset"):
        post(f"/api/v1/workers/worker:work:0/{verb}")
    node.wait_status("worker:work:0", "healthy")
    until(lambda: get("/api/v1/workers/worker:work:0")["exits"], "how the worker's last process ended")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/api/v1/jobs/999999", None, 404),
        ("GET", "/api/v1/jobs/abc", None, 422),
        ("GET", "/api/v1/jobs?status=nope", None, 422),
        ("POST", "/api/v1/jobs", {"task": "nope"}, 422),
        ("POST", "/api/v1/jobs", {"task": "add", "args": {"a": "x" * 3_000_000}}, 413),
        ("GET", "/api/v1/jobs/999999/artifacts", None, 404),
        ("GET", "/api/v1/artifacts/nothing", None, 404),
        ("GET", "/api/v1/artifacts/.hidden", None, 422),
        ("GET", "/api/v1/batches/5", None, 404),
        ("POST", "/api/v1/workers/worker:no:0/kill", None, 404),
        ("POST", "/api/v1/pools/no/pause", None, 404),
        ("POST", "/api/v1/workers/worker:plane:0/drain", None, 409),
        ("POST", "/v1/embeddings", {"model": "no", "input": "x"}, 404),
        ("POST", "/v1/embeddings", {"input": "x"}, 400),
        ("GET", "/v1/models/no", None, 404),
        ("GET", "/sessions/no", None, 400),
        ("POST", "/api/v1/calls/no", {"payload": 1}, 404),
        ("POST", "/api/v1/calls/echo", {"model": "no", "payload": 1}, 404),
        ("DELETE", "/api/v1/calls/no", None, 404),
        ("POST", "/api/v1/models/load", {"task": "no"}, 404),
        ("DELETE", "/api/v1/sessions/no", None, 404),
        ("GET", "/api/v1/sessions?before=x", None, 422),
    ],
)
def test_every_refusal_fits_its_schema(
    node: Node, document: dict[str, Any], method: str, path: str, body: Any, status: int
) -> None:
    assert set(check(node, document, method, path, body)) == {"error"}
    assert ask(node, method, path, body)[0] == status


def test_who_has_no_token_is_told_so_in_the_shape_that_is_described(node: Node, document: dict[str, Any]) -> None:
    request = urllib.request.Request(f"{node.url}/api/v1/jobs", headers={"X-Forwarded-For": "10.0.0.1"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    with refused.value as error:
        assert (error.code, error.headers["WWW-Authenticate"]) == (401, "Bearer")
        body = json.loads(error.read())
    assert faults(document, {"$ref": "#/components/schemas/ErrorBody"}, body) == []


def test_the_check_finds_an_answer_that_does_not_fit(document: dict[str, Any]) -> None:
    """The validator itself: what is missing, of another type, or not described."""
    schema = {"$ref": "#/components/schemas/SlotCounts"}
    good = {"slots": 1, "in_use": 0, "free": 1, "waiting": 0}
    assert faults(document, schema, good) == []
    for bad in ({**good, "slots": "1"}, {**good, "more": 1}, {"slots": 1}):
        assert faults(document, schema, bad)
