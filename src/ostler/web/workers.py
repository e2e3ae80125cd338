"""Workers and pools over HTTP: look, pause, resume, drain, restart, reset, kill."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field, create_model

from ostler.lifecycle import ends
from ostler.lifecycle.logs import last, worker_log
from ostler.store import views
from ostler.web import fleet
from ostler.web.context import Context
from ostler.web.errors import answers
from ostler.web.fleet import accepted
from ostler.web.render import JSONResponse

# One worker slot, from the one definition of its shape. Times are milliseconds UTC.
_FIELDS: dict[str, Any] = {name: (kind, ...) for name, kind in views.WORKER.items()}
WorkerView = create_model("WorkerView", __config__=ConfigDict(extra="allow"), **_FIELDS)


_VERBS = {
    "drain": "Drain: finish the current work, exit and stay stopped",
    "restart": "Restart; also clears a failed state",
    "reset": "Clear the crash history of a failed worker",
    "kill": "SIGKILL, now",
}


class WorkerList(BaseModel):
    workers: list[WorkerView]  # type: ignore[valid-type]


class ExitView(BaseModel):
    """How one process of a worker ended. `counted`: it counts towards the restart limit."""

    generation: int
    at: int
    reason: str
    code: int | None
    signal: int | None
    kind: str
    counted: bool | int
    peak_rss_mb: float | None
    item: int | str | None = Field(description="the job that it had")
    log: list[str] = Field(description="its last lines")
    text: str = Field(description="the reason in words")


WorkerDetail = create_model(
    "WorkerDetail", __base__=WorkerView, exits=(list[ExitView], Field(description="newest first"))
)


class PoolView(BaseModel):
    pool: str
    kind: str = Field(description="jobs, calls, sessions or plane")
    workers: int
    paused: bool
    status: dict[str, int] = Field(description="workers by status")


class PoolList(BaseModel):
    pools: list[PoolView]


class Accepted(BaseModel):
    """The wish was taken. What comes of it shows in the worker's status."""

    ok: bool
    component: str | None = None
    pool: str | None = None
    action: str
    status: str | None = None
    message: str | None = None


def router(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", tags=["workers"])
    control = context.control

    @routes.get("/workers", response_model=WorkerList, summary="List the workers of all nodes")
    async def listing() -> JSONResponse:
        found = await fleet.read(context)
        return JSONResponse({"workers": [ends.shown(row) for row in found.workers]})

    @routes.post("/workers/pause", response_model=Accepted, summary="Pause all workers")
    async def pause_all() -> JSONResponse:
        """They stay alive, finish the job they have, and take nothing new."""
        await control.pause(None)
        return accepted("pause")

    @routes.post("/workers/resume", response_model=Accepted, summary="Resume all workers")
    async def resume_all() -> JSONResponse:
        """Starts what is stopped, never what is failed. Twice is the same as once."""
        await control.resume(None)
        await fleet.start_elsewhere(context, None)
        return accepted("resume")

    @routes.get(
        "/workers/{name:path}/logs",
        response_class=PlainTextResponse,
        responses=answers(409, 502),
        summary="Get the last output of a worker",
    )
    async def logs(
        name: str, request: Request, lines: Annotated[int, Query(ge=1, le=100_000)] = 1000
    ) -> PlainTextResponse:
        """Of a worker of another node, at most 512 KiB and 10,000 lines."""
        found = await fleet.read(context)
        worker = found.worker(name)
        node = found.node(worker["node_id"])
        if fleet.is_own(context, node["id"]):
            path = worker_log(context.settings.data_dir, *_slot(worker))
            kept = await asyncio.to_thread(last, path, lines)
        else:
            fleet.refuse_second(request, node)
            kept = (await fleet.log_of(context, node, worker["component"], min(lines, 10_000))).lines
        return PlainTextResponse("".join(f"{line}\n" for line in kept))

    for verb, words in _VERBS.items():
        _add_verb(routes, context, verb, words)

    @routes.get("/workers/{name:path}", response_model=WorkerDetail, summary="Get a worker with its past exits")
    async def one(name: str) -> JSONResponse:
        """`name` is node/worker:pool:n, or worker:pool:n while that means one worker only."""
        worker = (await fleet.read(context)).worker(name)
        node, component = worker["node_id"], worker["component"]
        exits = await context.reader.call(lambda store: store.health.exits(node, component))
        return JSONResponse({**ends.shown(worker), "exits": ends.exits(exits)})

    @routes.get("/pools", response_model=PoolList, summary="All pools")
    async def pools() -> JSONResponse:
        return JSONResponse({"pools": pool_views(context)})

    @routes.post(
        "/pools/{pool}/pause",
        response_model=Accepted,
        responses=answers(409),
        summary="Pause the workers of one pool, on all nodes",
    )
    async def pause(pool: str) -> JSONResponse:
        await known(pool)
        await control.pause(pool)
        return accepted("pause", pool=pool)

    @routes.post(
        "/pools/{pool}/resume", response_model=Accepted, summary="Resume the workers of one pool, on all nodes"
    )
    async def resume(pool: str) -> JSONResponse:
        await known(pool)
        await control.resume(pool)
        await fleet.start_elsewhere(context, pool)
        return accepted("resume", pool=pool)

    async def known(pool: str) -> None:
        """Raises NotFound for a pool that no node has."""
        here = pool in context.supervisor.pools
        if not here and pool not in {worker["pool"] for worker in (await fleet.read(context)).workers}:
            control.pool(pool)

    return routes


def _add_verb(routes: APIRouter, context: Context, verb: str, words: str) -> None:
    later: dict[int | str, dict[str, Any]] = {
        202: {"model": Accepted, "description": "Asked; the worker's node has not answered yet"}
    }

    @routes.post(
        f"/workers/{{name:path}}/{verb}",
        response_model=Accepted,
        responses=later | answers(409),
        summary=words,
        name=verb,
    )
    async def order(name: str) -> JSONResponse:
        """Of a worker of another node: 202 when it has not answered within 3 seconds."""
        return await fleet.order(context, name, verb)


def _slot(worker: Mapping[str, Any]) -> tuple[str, str]:
    return worker["pool"], worker["component"].rpartition(":")[2]


def pool_views(context: Context) -> list[dict[str, Any]]:
    """The pools of this node as they are now."""
    found = []
    for pool in context.supervisor.pools.values():
        counts: dict[str, int] = {}
        for slot in pool.slots:
            counts[slot.status] = counts.get(slot.status, 0) + 1
        name = pool.spec.name
        paused = context.supervisor.pauses.holds(name)
        kind = pool.spec.tenant.kind
        found.append({"pool": name, "kind": kind, "workers": len(pool.slots), "paused": paused, "status": counts})
    return found
