"""Schedules: when they fire, running one now, pausing and resuming."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import BaseModel, Field

from ostler.jobs.schedule import following
from ostler.store import now_ms
from ostler.web.context import Context
from ostler.web.errors import answers
from ostler.web.render import JSONResponse


class ScheduleView(BaseModel):
    """A schedule. A paused one stores no job until it is resumed."""

    name: str
    spec: str
    zone: str
    step: dict[str, Any] = Field(description="the job that it stores")
    next_at: int
    last_at: int | None
    last_job: int | None
    paused: bool


class ScheduleList(BaseModel):
    schedules: list[ScheduleView]


class ScheduleRun(BaseModel):
    """The job that was stored; `new` is false where one with the same unique key was there already."""

    id: int
    new: bool


Name = Annotated[str, Path(max_length=200)]


def router(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/api/v1/schedules", tags=["jobs"])
    patience = context.settings.store_patience

    @routes.get("", response_model=ScheduleList, summary="All schedules with their next time")
    async def schedules() -> JSONResponse:
        return JSONResponse({"schedules": await context.reader.call(lambda store: store.jobs.schedules.all())})

    @routes.post(
        "/{name}/run",
        status_code=201,
        response_model=ScheduleRun,
        responses=answers(404),
        summary="Store a schedule's job now; its next time stays",
    )
    async def run(name: Name) -> JSONResponse:
        job, new = await context.writer.call(lambda store: store.jobs.schedules.run(name, now_ms()), patience=patience)
        context.dispatcher.ring()
        return JSONResponse({"id": job, "new": new}, 201)

    async def paused(name: str, *, wanted: bool) -> JSONResponse:
        found = await context.writer.call(
            lambda store: store.jobs.schedules.pause(name, store.now(), following, paused=wanted), patience=patience
        )
        return JSONResponse(found)

    @routes.post("/{name}/pause", response_model=ScheduleView, responses=answers(404), summary="Pause a schedule")
    async def pause(name: Name) -> JSONResponse:
        return await paused(name, wanted=True)

    @routes.post("/{name}/resume", response_model=ScheduleView, responses=answers(404), summary="Resume a schedule")
    async def resume(name: Name) -> JSONResponse:
        """Its next time is the next one from now; what was missed stays missed."""
        return await paused(name, wanted=False)

    return routes
