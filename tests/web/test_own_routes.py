"""Routes of an app's own (`@app.web`): the node as they see it, and their errors as the API tells them."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.harness import call

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

    @router.get("/job/{job}")
    async def look(job: int):
        return await node.job(job)

    @router.post("/cancel/{job}")
    async def cancel(job: int):
        return await node.cancel(job)

    return router
"""


def test_routes_use_the_node_that_serves_them_and_its_errors_are_the_apis(make_node, tmp_path: Path) -> None:
    file = tmp_path / "routes.py"
    file.write_text(APP)
    url = make_node(app=file, OSTLER_WORKERS="1").url  # its data directory and port are flags, which the app cannot see
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
