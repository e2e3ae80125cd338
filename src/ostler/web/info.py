"""Is it up, is it ready, is it well, and what is it: the questions that machines and people ask first."""

from __future__ import annotations

import contextlib
import os
import time

from fastapi import APIRouter

import ostler
from ostler.errors import StoreBusy
from ostler.live.condition import condition, unready
from ostler.store import database, now_ms
from ostler.store.fleet import Fleet, shown
from ostler.store.fleet import read as read_fleet
from ostler.web.context import Context
from ostler.web.render import JSONResponse
from ostler.web.workers import pool_views

_PATIENCE = 1.0  # seconds that health waits for the list of nodes


def router(context: Context) -> APIRouter:
    routes = APIRouter(tags=["node"])
    supervisor, settings = context.supervisor, context.settings

    @routes.get("/healthz", summary="The process answers")
    async def healthz() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @routes.get("/readyz", summary="It can take and run work")
    async def readyz() -> JSONResponse:
        reasons = unready(supervisor, context.lanes)
        return JSONResponse({"ready": not reasons, "reasons": reasons}, 200 if not reasons else 503)

    @routes.get("/api/v1/health", summary="Healthy, degraded or error, with reasons")
    async def health() -> JSONResponse:
        """`nodes` has every node's condition in short; `workers` counts those of all nodes by status."""
        found = Fleet([], [], now_ms())
        with contextlib.suppress(StoreBusy):  # then that is among the errors
            found = await context.reader.call(read_fleet, patience=_PATIENCE)
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
            workers[slot.status] = workers.get(slot.status, 0) + 1
        for worker in found.workers:
            if worker["node_id"] != supervisor.member.id:
                workers[worker["status"]] = workers.get(worker["status"], 0) + 1
        nodes = [shown(node) for node in found.nodes]
        paused = [name for name in supervisor.pools if supervisor.pauses.holds(name)]
        told = {"status": status, "errors": errors, "paused": paused, "nodes": nodes, "workers": workers}
        held = {
            name: {key: pool[key] for key in ("slots", "in_use", "free", "waiting")}
            for name, pool in (context.sessions.capacity() if context.sessions else {}).items()
        }
        return JSONResponse({**told, "models": context.models(), "gpu_lock_held": context.gpu_lock(), "sessions": held})

    @routes.get("/api/v1/info", summary="The node, its pools and queues")
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
                "tasks": sorted(context.tasks.values(), key=lambda t: t["name"]),
            }
        )

    return routes
