"""Routes of an app's own (`@app.web`): the node as they see it, and their errors as the API tells them."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import pytest
from fastapi import FastAPI, Query
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from ostler import ConfigError, load
from ostler.check import check_routes
from ostler.config import Settings
from ostler.web import described
from tests import users
from tests.harness import call
from tests.users import as_root, place

_ = place

APP = """
from fastapi import APIRouter, HTTPException
from ostler import CallBusy, Fail, Ostler

app = Ostler()


@app.job(queue="a")
def double(job, n: int) -> int:
    return 2 * n


@app.job(queue="a")
def fails(job):
    raise Fail("NO_LUCK", "not today")


@app.web
def routes(node):
    router = APIRouter()

    @router.post("/by-node")
    async def by_node(n: int):
        return await node.enqueue("double", {"n": n}, priority=3)

    @router.post("/by-app")
    async def by_app(n: int):
        return await (await double.enqueue_async(n=n)).result_async(timeout=60)

    @router.get("/result/{job}")
    async def result(job: int, timeout: int = 60):
        return await app.find(job).result_async(timeout=timeout)

    @router.get("/busy")
    async def busy():
        raise CallBusy("too many", "QUEUE_FULL", 429, "r-1", 2.5)

    @router.get("/tea")
    async def tea():
        raise HTTPException(418, {"field": "pot"}, headers={"X-Why": "tea"})

    @router.get("/broken")
    async def broken():
        raise LookupError("a bug of mine")

    @router.get("/job/{job}")
    async def look(job: int):
        return await node.job(job)

    @router.post("/cancel/{job}")
    async def cancel(job: int):
        return await node.cancel(job)

    return router
"""


WEBSOCKET = """
from fastapi import APIRouter, WebSocket
from ostler import Ostler

app = Ostler()


@app.job(queue="a")
def anything(job): ...


@app.web
def routes(node):
    router = APIRouter()

    @router.websocket("/chat")
    async def chat(socket: WebSocket):
        await socket.accept()
        await socket.send_text("hello")
        await socket.close()

    return router
"""


def test_a_websocket_of_an_app_is_for_the_nodes_user_and_who_has_the_token(make_node, place: Path) -> None:
    (place / "chat.py").write_text(WEBSOCKET)
    node = make_node(app=place / "chat.py", folder=place / "data", OSTLER_WORKERS="1")
    url = node.url.replace("http", "ws") + "/chat"
    bearer = {"Authorization": f"Bearer {(node.folder / 'token').read_text().strip()}"}

    def answer(**how: Any) -> str | int:
        try:
            with connect(url, **how) as socket:
                return str(socket.recv())
        except InvalidStatus as refused:
            return refused.response.status_code

    assert answer() == "hello"
    assert answer(additional_headers={"X-Forwarded-For": "203.0.113.9"}) == 401
    assert answer(additional_headers={"X-Forwarded-For": "203.0.113.9", **bearer}) == "hello"
    assert [answer(origin=origin) for origin in ("https://evil.example", "null")] == [403, 403]
    assert "handshake" not in node.log()  # nobody fills the log by knocking


@as_root
def test_a_websocket_of_an_app_is_not_for_other_users(make_node, place: Path) -> None:
    (place / "chat.py").write_text(WEBSOCKET)
    node = make_node(app=place / "chat.py", folder=place / "data", OSTLER_WORKERS="1")
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    assert users.status(users.NOBODY, f"{node.url}/chat", **upgrade) == 401


def test_routes_use_the_node_that_serves_them_and_its_errors_are_the_apis(make_node, tmp_path: Path) -> None:
    file = tmp_path / "routes.py"
    file.write_text(APP)
    node = make_node(app=file, OSTLER_WORKERS="1")
    url = node.url  # its data directory and port are flags, which the app cannot see
    status, job = call(url, "POST", "/by-node?n=4")
    assert (status, job["task"], job["priority"]) == (200, "double", 3)
    assert call(url, "GET", f"/result/{job['id']}") == (200, 8)
    assert call(url, "POST", "/by-app?n=21") == (200, 42)
    assert call(url, "GET", f"/job/{job['id']}")[1]["status"] == "done"
    for method, path, wanted in (
        ("GET", "/job/999", (404, "NOT_FOUND")),
        ("GET", "/result/999", (404, "NOT_FOUND")),
        ("POST", f"/cancel/{job['id']}", (409, "CONFLICT")),
        ("POST", "/by-node?n=x", (422, "BAD_INPUT")),
    ):
        status, body = call(url, method, path)
        assert (status, body["error"]["code"]) == wanted
    failed, late = (
        call(url, "POST", "/api/v1/jobs", job)[1]["id"] for job in ({"task": "fails"}, {"task": "fails", "delay": 3600})
    )
    status, body = call(url, "GET", f"/result/{failed}")
    message = f"job {failed} (fails) failed with NO_LUCK: not today"
    assert (status, body) == (502, {"error": {"code": "NO_LUCK", "message": message, "job": failed, "task": "fails"}})
    status, body = call(url, "GET", f"/result/{late}?timeout=0")
    assert (status, body["error"]["code"], body["error"]["job"]) == (504, "TIMEOUT", late)
    with pytest.raises(urllib.error.HTTPError) as busy:
        urllib.request.urlopen(f"{url}/busy")
    assert (busy.value.code, busy.value.headers["Retry-After"]) == (429, "3")
    busy.value.close()
    with pytest.raises(urllib.error.HTTPError) as tea:  # an HTTPException of the app is answered as FastAPI does
        urllib.request.urlopen(f"{url}/tea")
    assert (tea.value.code, tea.value.headers["X-Why"]) == (418, "tea")
    assert tea.value.read() == b'{"detail":{"field":"pot"}}'
    tea.value.close()
    status, told = call(url, "GET", "/broken")
    assert (status, told["error"]["message"][:35]) == (500, "GET /broken failed with LookupError")
    assert call(url, "GET", "/busy")[0] == 429  # whatever the server logged of the one before is there
    assert node.log().count("LookupError: a bug of mine") == 1


FUTURE = """
from __future__ import annotations
from ostler import Ostler
app = Ostler()
@app.web
def routes(node):
    from fastapi import APIRouter, Response, UploadFile
    router = APIRouter()
    @router.post("/photos"{option})
    async def upload({takes}) -> {gives}: ...
    return router
"""


@pytest.mark.parametrize(
    ("takes", "gives", "option", "missing"),
    [
        ("photo: UploadFile", "None", "", "UploadFile"),
        ("", "Response", "", "Response"),
        ("", "Response", ", response_model=None", None),
        ("photo: int", "int", "", None),
    ],
)
def test_a_route_whose_annotations_fastapi_cannot_find_is_refused_with_its_line(
    tmp_path: Path, takes: str, gives: str, option: str, missing: str | None
) -> None:
    file = tmp_path / "desk.py"
    file.write_text(FUTURE.format(takes=takes, gives=gives, option=option))
    app = load(str(file))
    if missing is None:
        check_routes(Settings(), app)
        return
    with pytest.raises(
        ConfigError, match=rf"route /photos: upload \(desk\.py, line 9\) .* import {missing} at the top"
    ):
        check_routes(Settings(), app)


def test_a_route_that_cannot_be_described_does_not_break_the_description_of_the_others() -> None:
    app = FastAPI()
    described.install(app, {})

    @app.get("/fine")
    async def fine() -> int:
        return 1

    @app.get("/odd")
    async def odd(of: Annotated[Any, Query(json_schema_extra=lambda schema: 1 / 0)] = None) -> None: ...

    assert [*app.openapi()["paths"]] == ["/fine"]
