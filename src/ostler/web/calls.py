"""Calls over HTTP: the log of those that ended, and the models with their memory.

What is under way is known to the data plane, which answers `running` and `DELETE` itself where there is one. Here they stand for
the description of the API, and for a node without models.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from ostler.errors import BadArguments, NotFound
from ostler.store.calls import OUTCOMES
from ostler.web.context import Context
from ostler.web.render import JSONResponse

_CURSOR = re.compile(r"(\d{1,18})(?:/(.{0,200}))?")


class CallView(BaseModel):
    """A call that has ended. `took_ms` is its time in the worker; null: it never reached one."""

    id: int
    node: str
    request: str = Field(description="the id that the caller knows it by")
    task: str
    model: str
    worker: str | None
    asked_at: int
    waited_ms: float = Field(description="in line, for a worker or a place in one")
    took_ms: float | None
    bytes_in: int
    bytes_out: int
    status: int
    outcome: Literal["done", "error", "refused", "cancelled", "died", "deadline"]
    code: str | None = Field(description="of an error that is not the model's own")
    streamed: bool
    host_mb: float | None = Field(description="the worker's peak until then")
    gpu_mb: float | None


class CallPage(BaseModel):
    calls: list[CallView]
    next: str | None = Field(description="`before` of the next page; null: this is the end")
    left_out: dict[str, int] = Field(
        description="calls since the start of this node that are counted and not in the log"
    )


class RunningCall(BaseModel):
    """A call under way. `leaving`: its caller has gone or was told to, and its worker has not let go of it yet."""

    request: str
    task: str
    model: str
    replica: int | None
    state: Literal["waiting", "running", "streaming", "leaving"]
    priority: int
    asked_at: int
    waited_ms: float
    running_ms: float | None
    bytes_in: int
    bytes_out: int


class RunningCalls(BaseModel):
    calls: list[RunningCall] = Field(description="oldest first, at most 1000")
    total: int


class Cancelled(BaseModel):
    ok: bool
    action: str
    calls: int


def router(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", tags=["calls"])

    @routes.get("/calls", response_model=CallPage, summary="The log of calls, newest first")
    async def listing(
        task: Annotated[str | None, Query(max_length=200)] = None,
        model: Annotated[str | None, Query(max_length=200)] = None,
        outcome: Annotated[str | None, Query(description=f"one of {', '.join(OUTCOMES)}")] = None,
        request: Annotated[str | None, Query(max_length=200, description="the call's own id")] = None,
        before: Annotated[str | None, Query(max_length=250)] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    ) -> JSONResponse:
        """Calls of all nodes. A call is in it about a second after its end; under a flood of calls, a sample of them is."""
        if outcome is not None and outcome not in OUTCOMES:
            raise BadArguments(f"there is no outcome {outcome[:40]!r}; there are: {', '.join(OUTCOMES)}")
        filters = {"task": task, "model": model, "outcome": outcome, "request": request}
        place = None if before is None else _place(before)
        page, following = await context.reader.call(
            lambda store: store.calls.list(limit=limit, before=place, **filters)
        )
        cursor = None if following is None else f"{following[0]}/{following[1]}"
        return JSONResponse({"calls": page, "next": cursor, "left_out": context.calls.left_out})

    @routes.get("/calls/running", response_model=RunningCalls, summary="Calls in line and in workers, of this node")
    async def running() -> JSONResponse:
        return JSONResponse({"calls": [], "total": 0})

    @routes.delete("/calls/{request_id}", response_model=Cancelled, status_code=202, summary="Cancel a call")
    async def cancel(request_id: str) -> JSONResponse:
        """In line or in its worker, on this node. Its caller gets 499 `CANCELLED`. The model sees `cancelled()`."""
        raise NotFound(f"no call {request_id[:128]!r} is under way; this node serves no models")

    @routes.get("/memory", summary="The memory of this node")
    async def memory() -> JSONResponse:
        """`host` and `devices` with who holds how much of them, and who waits for some; in MB. `host` is null until it was read."""
        ledger = context.supervisor.ledger
        return JSONResponse({"host": None, "devices": [], "waiting": []} if ledger is None else ledger.snapshot())

    @routes.get("/models/stats", summary="The models of this node, with what was counted of them")
    async def stats() -> JSONResponse:
        """`models` as in health, with outcomes, loads and evictions since the node started; `tasks` with the ids that they list."""
        found = [{**_named(name), **state} for name, state in context.models().items()]
        for one in found:
            counters = context.calls.of(one["task"], one["model"])
            one |= {"calls": counters.tally.outcomes, "loads": counters.loads, "evictions": counters.evictions}
        return JSONResponse({"models": found, "tasks": context.calls.tasks()})

    @routes.get("/models/series", summary="Calls of the last ten minutes, in steps of ten seconds")
    async def series(
        task: Annotated[str | None, Query(max_length=200)] = None,
        model: Annotated[str | None, Query(max_length=200)] = None,
    ) -> JSONResponse:
        """Of this node, from its memory. Durations are seconds; `in_flight` and `waiting` are the most of that step."""
        return JSONResponse({"points": context.calls.series(task, model)})

    return routes


def _place(before: str) -> tuple[int, str]:
    found = _CURSOR.fullmatch(before)
    if found is None:
        raise BadArguments(f"before must be the `next` of another page, found {before[:40]!r}")
    return int(found[1]), found[2] or ""


def _named(name: str) -> dict[str, Any]:
    """Names of tasks have no colon, ids of models may have several."""
    task, _, model = name.partition(":")
    return {"task": task, "model": model}
