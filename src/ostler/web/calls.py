"""Calls over HTTP: the log of those that ended, and the models with their memory.

What is under way is known to the data plane, which answers `running` and `DELETE` itself where there is one. Here they stand for
the description of the API, and for a node without models.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field

from ostler.errors import BadArguments, NotFound
from ostler.web.context import Context
from ostler.web.errors import KNOWN_QUERY, answers
from ostler.web.models import ModelState
from ostler.web.render import JSONResponse

_BYTES = {"schema": {"type": "string", "format": "binary"}}
_CALL_BODY = {
    "type": "object",
    "title": "CallRequest",
    "properties": {
        "model": {"type": "string", "description": "optional if the task has only one model"},
        "payload": {"description": "what the model is given"},
    },
}
_CALL: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": _CALL_BODY},
            "multipart/form-data": {"schema": {"type": "object"}},
            "application/octet-stream": _BYTES,
        },
    },
    "parameters": [
        {"name": name, "in": place, "required": False, "description": text, "schema": {"type": "string"}}
        for name, place, text in (
            ("model", "query", "the model, if the body does not name it"),
            ("x-ostler-timeout", "header", 'seconds, or text such as "5m"'),
            ("x-ostler-keep-alive", "header", "how long the model stays loaded after the call, in the same form"),
            ("x-ostler-priority", "header", "a whole number; higher ones come first"),
            ("x-request-id", "header", "the id of the call; generated if left out"),
        )
    ],
}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}, "application/octet-stream": _BYTES}}
}
_CURSOR = re.compile(r"(\d{1,18})(?:/(.{0,200}))?")

Outcome = Literal["done", "error", "refused", "cancelled", "died", "deadline"]


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
    outcome: Outcome
    code: str | None = Field(description="of an error that is not the model's own")
    streamed: bool
    host_mb: float | None = Field(description="the worker's peak until then")
    gpu_mb: float | None


class CallPage(BaseModel):
    calls: list[CallView]
    next: str | None = Field(description="`before` of the next page; null: this is the end")
    left_out: dict[str, int] = Field(description="calls since the node started that are counted but not in the log")


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


class CallAnswer(BaseModel):
    result: Any
    request_id: str
    processing_time_ms: float
    model: str


class Cancelled(BaseModel):
    ok: bool
    action: str
    calls: int


class MemoryOwner(BaseModel):
    owner: str
    mb: float
    need_mb: float
    status: str


class MemoryView(BaseModel):
    """The memory of the host, or of one GPU."""

    uuid: str
    index: int | None
    name: str
    total_mb: float
    free_mb: float
    reserved_mb: float
    headroom_mb: float
    room_mb: float
    owners: list[MemoryOwner]


class MemoryWaiting(BaseModel):
    owner: str
    host_mb: float
    gpu_mb: float
    seconds: float
    reason: str | None


class MemoryList(BaseModel):
    host: MemoryView | None = Field(description="null until it was read")
    devices: list[MemoryView]
    unreadable: str | None = Field(None, description="why the GPUs cannot be read")
    exclusive: bool = False
    operating: str | None = Field(None, description="with gpu_exclusive, who is loading onto a GPU")
    waiting: list[MemoryWaiting]


class ModelCounts(ModelState):
    """`calls` counts outcomes."""

    task: str
    model: str
    calls: dict[str, int]
    loads: int
    evictions: int


class CallableTask(BaseModel):
    task: str
    models: list[str]
    any_model: bool


class ModelStats(BaseModel):
    models: list[ModelCounts]
    tasks: list[CallableTask]


class CallPoint(BaseModel):
    """Calls that ended in `step` seconds from `at` on, by outcome. Durations are seconds."""

    at: int
    step: int
    done: int
    error: int
    refused: int
    cancelled: int
    died: int
    deadline: int
    took_p50: float | None
    took_p95: float | None
    waited_p95: float | None
    in_flight: int
    waiting: int


class CallSeries(BaseModel):
    points: list[CallPoint]


def router(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", tags=["calls"])

    @routes.get(
        "/calls", response_model=CallPage, dependencies=KNOWN_QUERY, summary="Get the log of calls, newest first"
    )
    async def listing(
        task: Annotated[str | None, Query(max_length=200)] = None,
        model: Annotated[str | None, Query(max_length=200)] = None,
        outcome: Outcome | None = None,
        request: Annotated[str | None, Query(max_length=200, description="the call's own id")] = None,
        before: Annotated[
            str | None, Query(max_length=250, json_schema_extra={"pattern": f"^{_CURSOR.pattern}$"})
        ] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    ) -> JSONResponse:
        """Calls of all nodes. A call is in it about a second after its end; under a flood of calls, a sample of them is."""
        filters = {"task": task, "model": model, "outcome": outcome, "request": request}
        place = None if before is None else _place(before)
        page, following = await context.reader.call(
            lambda store: store.calls.list(limit=limit, before=place, **filters)
        )
        cursor = None if following is None else f"{following[0]}/{following[1]}"
        return JSONResponse({"calls": page, "next": cursor, "left_out": context.calls.left_out})

    @routes.get("/calls/running", response_model=RunningCalls, summary="List waiting and running calls of this node")
    async def running() -> JSONResponse:
        return JSONResponse({"calls": [], "total": 0})

    @routes.delete("/calls/{name}", response_model=Cancelled, status_code=202, summary="Cancel a call")
    async def cancel(name: Annotated[str, Path(description="the call's request id")]) -> JSONResponse:
        """In line or in its worker, on this node. Its caller gets 499 `CANCELLED`. The model sees `cancelled()`."""
        raise NotFound(f"no call {name[:128]!r} is in progress; this node serves no models")

    @routes.post(
        "/calls/{name}",
        response_model=CallAnswer,
        responses=_ANSWERS | answers(400, 413, 429, 499, 500, 502, 504),
        openapi_extra=_CALL,
        summary="Call a model",
    )
    async def call(name: Annotated[str, Path(description="the task")]) -> JSONResponse:
        """Models that stream answer with server-sent events; a model may also answer with bytes of any type. What a server program
        (`app.server`) takes and answers is its own business.
        """
        raise NotFound(f"there is no task {name[:80]!r} to call: this node serves no models")

    @routes.get("/memory", response_model=MemoryList, summary="Get the memory of this node")
    async def memory() -> JSONResponse:
        """`host` and `devices` with who holds how much of them, and who waits for some; in MB. `host` is null until it was read."""
        ledger = context.supervisor.ledger
        return JSONResponse({"host": None, "devices": [], "waiting": []} if ledger is None else ledger.snapshot())

    @routes.get(
        "/models/stats", response_model=ModelStats, summary="Get the models of this node, with their statistics"
    )
    async def model_stats() -> JSONResponse:
        """`models` as in health, with outcomes, loads and evictions since the node started; `tasks` with the ids that they list."""
        found = [{**_named(name), **state} for name, state in context.models().items()]
        for one in found:
            counters = context.calls.of(one["task"], one["model"])
            one |= {"calls": counters.tally.outcomes, "loads": counters.loads, "evictions": counters.evictions}
        return JSONResponse({"models": found, "tasks": context.calls.tasks()})

    @routes.get(
        "/models/series",
        response_model=CallSeries,
        summary="Get the calls of the last ten minutes, in steps of ten seconds",
    )
    async def model_series(
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
