"""Models over HTTP: how they are, and what an operator asks of them. Calls themselves are the data plane's business."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from ostler.calls.wishes import Wishes
from ostler.errors import NotFound
from ostler.web.context import Context
from ostler.web.errors import answers
from ostler.web.jobs import body, parse, read
from ostler.web.render import JSONResponse

_REFUSALS = answers(404, 409)
_BODY = 65_536  # bytes


class ModelState(BaseModel):
    """How a model is. `IDLE` is not loaded, which is no fault; `UNAVAILABLE` cannot be started as things are."""

    model_config = ConfigDict(extra="allow")
    state: str
    reason: str | None
    in_flight: int
    waiting: int
    idle_seconds: float | None
    memory_mb: float | None


class NamedState(ModelState):
    model: str = Field(description='"task:model"')


class Place(BaseModel):
    """A model of another node, as that last said. `free`: calls that it could take at once."""

    model_config = ConfigDict(extra="allow")
    node: str
    name: str
    task: str
    model: str
    state: str
    free: int
    waiting: int


class ModelList(BaseModel):
    """By "task:model"."""

    models: dict[str, ModelState]
    gpu_lock_held: bool | None
    elsewhere: list[Place]


class Wish(BaseModel):
    """A model; `model` may be left out where its task has one."""

    model_config = ConfigDict(extra="forbid")
    task: str
    model: str | None = None


class Change(Wish):
    """What is put over its options until the node's next start. Without `model`: for all models of the task."""

    idle: float | str | None = None
    timeout: float | str | None = None
    startup: float | str | None = None
    queue: int | None = Field(None, ge=0, le=100_000)
    pinned: bool | None = None


def router(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/api/v1/models", tags=["models"])

    def wishes() -> Wishes:
        if context.wishes is None:
            raise NotFound("this node has no models: declare one with @app.model")
        return context.wishes

    def state(task: str, model: str) -> JSONResponse:
        name = f"{task}:{model}"
        return JSONResponse({"model": name, **context.models().get(name, {})})

    @routes.get("", response_model=ModelList, summary="The models of this node")
    async def listing() -> JSONResponse:
        return JSONResponse(
            {"models": context.models(), "gpu_lock_held": context.gpu_lock(), "elsewhere": context.elsewhere()}
        )

    @routes.post(
        "/load",
        response_model=NamedState,
        responses=_REFUSALS,
        openapi_extra=body(Wish),
        summary="Load a model before anybody calls it",
    )
    async def load(request: Request) -> JSONResponse:
        """It is started as by a call, and leaves when its idle time is over."""
        wish = parse(Wish, await read(request, _BODY))
        return state(wish.task, wishes().load(wish.task, wish.model))

    @routes.post(
        "/unload",
        response_model=NamedState,
        responses=_REFUSALS,
        openapi_extra=body(Wish),
        summary="Unload an idle model now",
    )
    async def unload(request: Request) -> JSONResponse:
        wish = parse(Wish, await read(request, _BODY))
        return state(wish.task, await wishes().unload(wish.task, wish.model))

    @routes.patch(
        "",
        response_model=ModelList,
        responses=_REFUSALS,
        openapi_extra=body(Change),
        summary="Change idle time, deadlines, queue or pinned while it runs",
    )
    async def change(request: Request) -> JSONResponse:
        """Counts from the next call on, until the node's next start."""
        wish = parse(Change, await read(request, _BODY))
        options: dict[str, Any] = wish.model_dump(exclude={"task", "model"}, exclude_none=True)
        wishes().change(wish.task, wish.model, options)
        return JSONResponse(
            {"models": context.models(), "gpu_lock_held": context.gpu_lock(), "elsewhere": context.elsewhere()}
        )

    return routes
