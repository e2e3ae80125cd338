"""Libraries and tracks over HTTP: parse, one verb, render. Only the node imports this."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ostler import BadArguments, PayloadTooLarge
from ostler.apps.music import catalogue
from ostler.apps.music.rules import Rules
from ostler.apps.music.tables import now_ms, open_tables
from ostler.web import body as bodies
from ostler.web.extend import NodeApi
from ostler.web.render import JSONResponse

T = TypeVar("T")
_BODY = 262_144  # bytes of a request


def router(node: NodeApi, rules: Rules) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", tags=["music"])
    tables = open_tables(node.settings)

    async def shown(library: int) -> dict[str, Any]:
        return (await _off(lambda: catalogue.listing(tables, now_ms(), library)))[0]

    @routes.post("/libraries", status_code=201, summary="Add a library and scan it", openapi_extra=_ADD)
    async def add(request: Request) -> Response:
        """A directory on the node's machine. On any error nothing was stored."""
        wishes = await _object(request)
        path = wishes.pop("path", None)
        if not isinstance(path, str) or not path:
            raise BadArguments(f"path must be the path of a directory, found {path!r:.100}")
        library = await _off(lambda: catalogue.add(tables, rules, path, wishes))
        job = await node.enqueue("scan", {"library": library})
        return JSONResponse(
            {**await shown(library), "job": job["id"]}, 201, {"Location": f"/api/v1/libraries/{library}"}
        )

    @routes.get("/libraries", summary="All libraries, with counts and progress")
    async def listing() -> Response:
        return JSONResponse({"libraries": await _off(lambda: catalogue.listing(tables, now_ms()))})

    @routes.get("/libraries/{library}", summary="One library, with what its last scan could not read")
    async def one(library: str) -> Response:
        number = await _off(lambda: catalogue.find(tables, library))
        found = await shown(number)
        return JSONResponse({**found, "problems": await _off(lambda: catalogue.problems_of(tables, number, 1000))})

    @routes.patch("/libraries/{library}", summary="Change name, write_to, ignore or watch")
    async def change(library: str, request: Request) -> Response:
        wishes = await _object(request)
        number = await _off(lambda: catalogue.find(tables, library))
        await _off(lambda: catalogue.change(tables, number, wishes))
        if "ignore" in wishes:
            await node.enqueue("scan", {"library": number})
        return JSONResponse(await shown(number))

    @routes.delete("/libraries/{library}", summary="Forget a library; its files are left as they are")
    async def remove(library: str) -> Response:
        number = await _off(lambda: catalogue.find(tables, library))
        return JSONResponse({"library": number, "tracks": await _off(lambda: catalogue.remove(tables, number))})

    @routes.post("/libraries/{library}/scan", summary="Scan a library")
    async def scan(library: str) -> Response:
        number = await _off(lambda: catalogue.find(tables, library))
        await _off(lambda: catalogue.want_scan(tables, number))
        job = await node.enqueue("scan", {"library": number})
        return JSONResponse({"library": number, "job": job["id"]}, 202)

    return routes


_ADD = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["path"],
                    "properties": {
                        "path": {"type": "string"},
                        "name": {"type": "string"},
                        "write_to": {"enum": ["file", "sidecar", "database"]},
                        "ignore": {"type": "array", "items": {"type": "string"}},
                        "watch": {"type": "boolean"},
                    },
                }
            }
        },
    }
}


async def _off(work: Callable[[], T]) -> T:
    """Off the loop: the tables are asked in a thread."""
    return await asyncio.to_thread(work)


async def _object(request: Request) -> dict[str, Any]:
    data = await bodies.read(request, _BODY, PayloadTooLarge(f"the request is larger than {_BODY} bytes"))
    try:
        value = json.loads(data or b"{}")
    except (ValueError, RecursionError) as error:
        raise BadArguments(f"the request is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadArguments(f"the request must be a JSON object, found {type(value).__name__}")
    return value
