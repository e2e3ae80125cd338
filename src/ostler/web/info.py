"""Is it up, is it ready, is it well, and what is it: the questions that machines and people ask first."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

import ostler
from ostler.errors import ConfigError, StoreBusy
from ostler.jobs import signature
from ostler.live.condition import condition, unready
from ostler.live.incidents import failed_lately
from ostler.store import database, now_ms
from ostler.store.fleet import Fleet, is_idle, shown
from ostler.store.fleet import read as read_fleet
from ostler.web.context import Context
from ostler.web.fleet import NodeView
from ostler.web.models import ModelState
from ostler.web.render import JSONResponse
from ostler.web.workers import PoolView, pool_views

_PATIENCE = 1.0  # seconds that health waits for the list of nodes


class Alive(BaseModel):
    status: Literal["ok"]


class Readiness(BaseModel):
    ready: bool
    reasons: list[str] = Field(description="why it is not ready")


class SlotCounts(BaseModel):
    slots: int
    in_use: int
    free: int
    waiting: int


class Failing(BaseModel):
    task: str
    code: str
    count: int


class Health(BaseModel):
    """`models` are those of this node by "task:model", `sessions` its session pools by name."""

    status: Literal["healthy", "degraded", "error"]
    errors: list[str]
    failing: list[Failing] = Field(
        description="jobs that failed for good in the last hour, by task and code, while any job is failed. They do not change the status"
    )
    paused: list[str] = Field(description="pools of this node")
    nodes: list[NodeView]
    workers: dict[str, int] = Field(description="workers of all nodes, by status; `idle`: models that no call needs")
    models: dict[str, ModelState]
    gpu_lock_held: bool | None
    sessions: dict[str, SlotCounts]


class Held(BaseModel):
    held: dict[str, str] = Field(description="queues that are held at the moment, and why")
    pauses: int = Field(description="how often queues were held since the node started")


class QueueCounts(BaseModel):
    queued: int
    scheduled: int
    processing: int
    failed: int
    cancelled: int


class TaskView(BaseModel):
    """A task that this node declares."""

    name: str
    queue: str
    attempts: int
    timeout: float | None
    priority: int
    policy: dict[str, Any]
    parameters: list[dict[str, Any]]
    signature: str = Field(description="the parameters in words")


class PageView(BaseModel):
    """A page of the app's own."""

    title: str
    path: str


class Info(BaseModel):
    name: str
    version: str
    node: str
    node_id: str
    pid: int
    url: str
    started_at: int
    uptime: float = Field(description="seconds")
    store: str
    data: str = Field(description="the data directory")
    worker_enabled: bool = Field(description="false: all workers are paused")
    stopping: bool
    running: int = Field(description="jobs of this node")
    backpressure: Held
    pools: list[PoolView]
    queues: dict[str, QueueCounts]
    tasks: list[TaskView]
    pages: list[PageView]


def router(context: Context) -> APIRouter:
    routes = APIRouter(tags=["node"])
    supervisor, settings = context.supervisor, context.settings

    @routes.get("/healthz", response_model=Alive, summary="Liveness: the process answers")
    async def healthz() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @routes.get(
        "/readyz",
        response_model=Readiness,
        responses={503: {"model": Readiness, "description": "It cannot"}},
        summary="Readiness: it can accept and run work",
    )
    async def readyz() -> JSONResponse:
        reasons = unready(supervisor, context.lanes)
        return JSONResponse({"ready": not reasons, "reasons": reasons}, 200 if not reasons else 503)

    @routes.get(
        "/api/v1/health", response_model=Health, summary="Get the health: healthy, degraded or error, with reasons"
    )
    async def health() -> JSONResponse:
        """`nodes` has every node's condition in short; `workers` counts those of all nodes by status."""
        found, fails = Fleet([], [], now_ms()), list[dict[str, Any]]()
        with contextlib.suppress(StoreBusy, ConfigError):  # then that is among the errors
            found, fails = await context.reader.call(
                lambda store: (read_fleet(store), failed_lately(store)), patience=_PATIENCE
            )
        status, errors = condition(
            supervisor,
            context.lanes,
            context.dispatcher.pressure,
            context.poll.stranded,
            found,
            context.sessions,
        )
        workers: dict[str, int] = {}
        for slot in supervisor.slots.values():
            status_ = "idle" if is_idle(slot.status, slot.key) else str(slot.status)
            workers[status_] = workers.get(status_, 0) + 1
        for worker in found.workers:
            if worker["node_id"] != supervisor.member.id:
                status_ = "idle" if is_idle(worker["status"], worker.get("key")) else worker["status"]
                workers[status_] = workers.get(status_, 0) + 1
        nodes = [shown(node) for node in found.nodes]
        paused = [name for name in supervisor.pools if supervisor.pauses.holds(name)]
        told: dict[str, Any] = {"status": status, "errors": errors, "failing": fails, "paused": paused}
        told |= {"nodes": nodes, "workers": workers}
        held = {
            name: {key: pool[key] for key in ("slots", "in_use", "free", "waiting")}
            for name, pool in (context.sessions.capacity() if context.sessions else {}).items()
        }
        return JSONResponse({**told, "models": context.models(), "gpu_lock_held": context.gpu_lock(), "sessions": held})

    @routes.get("/api/v1/info", response_model=Info, summary="Get the node, its pools and queues")
    async def info() -> JSONResponse:
        depths = await context.reader.call(lambda store: store.jobs.depths())
        queues = {q: depths.get(q, {}) for q in {*depths, *(t["queue"] for t in context.tasks.values())}}
        return JSONResponse(
            {
                "name": "ostler",
                "version": ostler.__version__,
                "node": settings.node,
                "node_id": supervisor.member.id,
                "pid": os.getpid(),
                "url": context.url,
                "started_at": context.started_at,
                "uptime": round((now_ms() - context.started_at) / 1000, 1),
                "store": database.shown(settings.store),
                "data": str(settings.data_dir),
                "worker_enabled": supervisor.pauses.enabled,
                "stopping": supervisor.stopping,
                "running": context.dispatcher.running(),
                "backpressure": {
                    "held": context.dispatcher.pressure.reasons(time.monotonic()),
                    "pauses": context.dispatcher.pressure.count,
                },
                "pools": pool_views(context),
                "queues": {
                    q: {s: n.get(s, 0) for s in ("queued", "scheduled", "processing", "failed", "cancelled")}
                    for q, n in sorted(queues.items())
                },
                "tasks": [
                    {**task, "signature": signature.words(task["parameters"])}
                    for task in sorted(context.tasks.values(), key=lambda t: t["name"])
                ],
                "pages": context.pages,
            }
        )

    return routes
