"""Workers and pools over HTTP: look, pause, resume, drain, restart, reset, kill."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, create_model

from ostler.errors import NotFound
from ostler.lifecycle import ends
from ostler.lifecycle.logs import last, worker_log
from ostler.store import views
from ostler.web.context import Context
from ostler.web.render import JSONResponse

# One worker slot, from the one definition of its shape. Times are milliseconds UTC.
_FIELDS: dict[str, Any] = {name: (kind, ...) for name, kind in views.WORKER.items()}
WorkerView = create_model("WorkerView", __config__=ConfigDict(extra="allow"), **_FIELDS)


class WorkerList(BaseModel):
    workers: list[WorkerView]  # type: ignore[valid-type]


class Accepted(BaseModel):
    """The wish was taken. What comes of it shows in the worker's status."""

    ok: bool
    component: str | None = None
    pool: str | None = None
    action: str
    status: str | None = None


def router(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", tags=["workers"])
    control = context.control

    @routes.get("/workers", response_model=WorkerList, summary="All workers")
    async def listing() -> JSONResponse:
        rows = await context.reader.call(lambda store: store.health.get_all_workers())
        return JSONResponse({"workers": [ends.shown(row) for row in rows]})

    @routes.post("/workers/pause", response_model=Accepted, summary="Pause all workers")
    async def pause_all() -> JSONResponse:
        """They stay alive, finish the job they have, and take nothing new."""
        await control.pause(None)
        return _accepted("pause")

    @routes.post("/workers/resume", response_model=Accepted, summary="Resume all workers")
    async def resume_all() -> JSONResponse:
        """Starts what is stopped, never what is failed. Twice is the same as once."""
        await control.resume(None)
        return _accepted("resume")

    @routes.get("/workers/{component}", response_model=WorkerView, summary="A worker with its history of exits")
    async def one(component: str) -> JSONResponse:
        rows = [
            w
            for w in await context.reader.call(lambda store: store.health.get_all_workers())
            if w["component"] == component
        ]
        if not rows:
            raise NotFound(
                f"there is no worker {component!r}; known are: {', '.join(context.supervisor.slots) or 'none'}"
            )
        node = rows[0]["node"]
        exits = await context.reader.call(lambda store: store.health.exits(node, component))
        return JSONResponse({**ends.shown(rows[0]), "exits": ends.exits(exits)})

    @routes.get("/workers/{component}/logs", summary="The last output of a worker")
    async def logs(component: str, lines: Annotated[int, Query(ge=1, le=100_000)] = 1000) -> PlainTextResponse:
        slot = control.slot(component)
        path = worker_log(context.settings.data_dir, slot.pool.spec.name, slot.number)
        return PlainTextResponse("".join(f"{line}\n" for line in await asyncio.to_thread(last, path, lines)))

    @routes.post("/workers/{component}/drain", response_model=Accepted, summary="Finish, exit, stay stopped")
    async def drain(component: str) -> JSONResponse:
        return _accepted("drain", component=component, status=control.drain(component))

    @routes.post("/workers/{component}/restart", response_model=Accepted, summary="Reset and start")
    async def restart(component: str) -> JSONResponse:
        return _accepted("restart", component=component, status=control.restart(component))

    @routes.post(
        "/workers/{component}/reset", response_model=Accepted, summary="Forget crashes; failed becomes stopped"
    )
    async def reset(component: str) -> JSONResponse:
        return _accepted("reset", component=component, status=control.reset(component))

    @routes.post("/workers/{component}/kill", response_model=Accepted, summary="SIGKILL, now")
    async def kill(component: str) -> JSONResponse:
        return _accepted("kill", component=component, status=control.kill(component))

    @routes.get("/pools", summary="All pools")
    async def pools() -> JSONResponse:
        return JSONResponse({"pools": pool_views(context)})

    @routes.post("/pools/{pool}/pause", response_model=Accepted, summary="Pause the workers of one pool")
    async def pause(pool: str) -> JSONResponse:
        await control.pause(control.pool(pool).spec.name)
        return _accepted("pause", pool=pool)

    @routes.post("/pools/{pool}/resume", response_model=Accepted, summary="Resume the workers of one pool")
    async def resume(pool: str) -> JSONResponse:
        await control.resume(control.pool(pool).spec.name)
        return _accepted("resume", pool=pool)

    return routes


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


def _accepted(action: str, **more: Any) -> JSONResponse:
    return JSONResponse({"ok": True, "action": action, **more})
