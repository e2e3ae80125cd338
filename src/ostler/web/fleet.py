"""All nodes over HTTP: who they are, what operators ask of any of them, and logs that another node has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, create_model

from ostler.errors import Conflict, Unreachable
from ostler.lifecycle.control import ALL
from ostler.live import remote
from ostler.live.remote import BY, Tail
from ostler.store import fleet
from ostler.store.fleet import Fleet
from ostler.store.store import Store
from ostler.store.views import NODE
from ostler.web.context import Context
from ostler.web.errors import failure
from ostler.web.render import JSONResponse

_ANSWER = 3.0  # seconds that an operator's request waits for the node that it is about
_LOOKS = (0.02, 0.05, 0.1, 0.2, 0.3)  # seconds between two looks for the answer; the last one repeats

# One node, from the one definition of its shape. Times are milliseconds UTC.
_FIELDS: dict[str, Any] = {name: (kind, ...) for name, kind in NODE.items()}
NodeView = create_model("NodeView", **_FIELDS)


class NodeList(BaseModel):
    nodes: list[NodeView]  # type: ignore[valid-type]
    own: str
    """The id of the one that answers."""


def router(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", tags=["nodes"])

    @routes.get("/nodes", response_model=NodeList, summary="List all nodes of the store")
    async def listing() -> JSONResponse:
        """Those that live, and those that died and have not come back."""
        found = await read(context)
        own = context.supervisor.member.id
        return JSONResponse({"nodes": [fleet.shown(node) for node in found.nodes], "own": own})

    @routes.get(remote.PATH.removeprefix("/api/v1"), include_in_schema=False)
    async def log(
        node: str,
        subject: str,
        lines: Annotated[int, Query(ge=0, le=10_000)] = 200,
        last: str | None = None,
    ) -> JSONResponse:
        """For other nodes: a log of this one. It asks nobody else, so no request is passed on twice."""
        own = context.supervisor.member.id
        if node != own:
            raise Conflict(f"this is node {own}, not {node}")
        path = remote.path_of(context.settings.data_dir, subject)
        return JSONResponse((await asyncio.to_thread(remote.read, path, lines, last))._asdict())

    return routes


async def read(context: Context) -> Fleet:
    """The nodes and workers of the store, now."""
    return await context.reader.call(fleet.read)


def is_own(context: Context, node: str | None) -> bool:
    return node is None or node == context.supervisor.member.id


async def order(context: Context, name: str, verb: str) -> JSONResponse:
    """Have a worker of any node do something. Of another node it is asked through the store, and answers there."""
    own = context.supervisor.slots.get(name) if context.poll.nodes < 2 else None
    worker: Mapping[str, Any]
    worker = {"name": name, "component": name, "node_id": None} if own else (await read(context)).worker(name)
    if is_own(context, worker["node_id"]):
        status: Any = context.control.ask(worker["component"], verb)
        return accepted(verb, component=worker["name"], status=status)
    node, component = worker["node_id"], worker["component"]
    patience = context.settings.store_patience
    wish = await context.writer.call(lambda store: store.nodes.wish(node, verb, component), patience=patience)
    answer = await _answer(context, wish)
    if answer is None:
        words = f"requested; node {worker['node']} has not answered yet"
        return accepted(verb, 202, component=worker["name"], status=worker["status"], message=words)
    if error := answer.get("error"):
        return failure(error["status"], error["code"], error["message"])
    return accepted(verb, component=worker["name"], status=answer["status"])


async def _answer(context: Context, wish: int) -> dict[str, Any] | None:
    """What the other node answers, within a few seconds."""
    until, looks = time.monotonic() + _ANSWER, iter(_LOOKS)
    while (left := until - time.monotonic()) > 0:
        await asyncio.sleep(min(next(looks, _LOOKS[-1]), left))
        if (answer := await context.glance.call(lambda store: store.nodes.answer(wish))) is not None:
            return answer
    return None


async def start_elsewhere(context: Context, pool: str | None) -> None:
    """After a resume: the other nodes start their stopped workers, too. Pauses themselves are flags that all of them read."""
    own = context.supervisor.member.id

    def ask(store: Store) -> None:
        for node in store.nodes.alive() if store.db.shared else ():
            if node["id"] != own:
                store.nodes.wish(node["id"], "resume", pool or ALL)

    await context.writer.call(ask, patience=context.settings.store_patience)


async def log_of(
    context: Context, node: Mapping[str, Any] | None, subject: str, lines: int, place: str | None = None
) -> Tail:
    """A log of this node (None) or of another one."""
    if node is None or is_own(context, node["id"]):
        path = remote.path_of(context.settings.data_dir, subject)
        return await asyncio.to_thread(remote.read, path, lines, place)
    by = context.supervisor.member.id
    asked = asyncio.to_thread(remote.ask, node, context.secret, by, subject, lines, place)
    try:
        return await asyncio.wait_for(asked, 10.0)
    except TimeoutError:
        raise Unreachable(f"node {node['label']} at {node['url']} has not answered within 10 s") from None


async def again(context: Context, node: Mapping[str, Any]) -> Mapping[str, Any]:
    """The node as it is now; when it was started anew, its successor on the same data directory."""
    living = (await read(context)).living
    same = [n for n in living if n["id"] == node["id"]] or [n for n in living if n["home"] == node["home"]]
    return same[0] if same else node


def refuse_second(request: Request, node: Mapping[str, Any]) -> None:
    """What was passed on once is not passed on again."""
    if BY in request.headers:
        raise Conflict(f"this request was already forwarded, and node {node['label']} is not this one")


def accepted(action: str, status_: int = 200, /, **more: Any) -> JSONResponse:
    return JSONResponse({"ok": True, "action": action, **more}, status_)
