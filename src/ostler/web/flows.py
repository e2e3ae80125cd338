"""Many jobs at once: bulk enqueue, bulk cancel and retry by filter, batches, and what a job printed."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from ostler.errors import BadArguments
from ostler.jobs.logs import JobLogs
from ostler.lifecycle.logs import last
from ostler.store import now_ms
from ostler.store.rows import JobStatus
from ostler.web.context import Context
from ostler.web.jobs import EnqueueRequest, Id, body, parse, prepared, read
from ostler.web.render import JSONResponse

_MOST = 10_000
_FILTER = 262_144  # bytes: as many ids of any length


class BulkRequest(BaseModel):
    """Jobs to store, all or none."""

    model_config = ConfigDict(extra="forbid")
    jobs: list[EnqueueRequest] = Field(max_length=_MOST)  # type: ignore[valid-type]


class Filter(BaseModel):
    """Which jobs are meant. At least one condition, so that nobody means all of them by accident."""

    model_config = ConfigDict(extra="forbid")
    status: JobStatus | None = None
    queue: str | None = None
    task: str | None = None
    code: str | None = Field(None, description="the code of the job's error, such as TOXIC")
    batch: int | None = None
    ids: list[int] | None = Field(None, max_length=_MOST, description="of these jobs only")
    limit: int = Field(1000, ge=1, le=_MOST)

    def conditions(self) -> dict[str, Any]:
        found = self.model_dump(exclude={"limit"}, exclude_none=True)
        if not found:
            raise BadArguments("name at least one of status, queue, task, code, batch, ids")
        return found


class BulkStored(BaseModel):
    ids: list[int] = Field(description="in the order of the request")


class BulkCancelled(BaseModel):
    cancelled: int
    ids: list[int]
    running: list[int] = Field(description="jobs that were running and were asked to stop")


class BulkRetried(BaseModel):
    retried: int
    ids: list[int]


class BatchView(BaseModel):
    """A batch. `pending` jobs have not ended yet."""

    id: int
    total: int
    pending: int
    failed: int
    callback_job: int | None
    created_at: int
    finished_at: int | None


class ChainStep(BaseModel):
    step: int = Field(description="from 0")
    task: str
    job: int | None = Field(description="null if it is not enqueued yet, or was deleted")
    status: JobStatus | None


class ChainView(BaseModel):
    """A chain, with the steps near a job."""

    first: int = Field(description="the job of its first step")
    total: int = Field(description="how many steps it has")
    broken: bool = Field(description="a nearby step failed or was cancelled, so the steps after it are not enqueued")
    steps: list[ChainStep]


class Related(BaseModel):
    chain: ChainView | None = Field(description="the chain that the job is a step of")
    batch: BatchView | None = Field(description="the batch that the job is part of")
    follows: BatchView | None = Field(description="the batch whose end enqueued the job")


def router(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", tags=["jobs"])
    patience = context.settings.store_patience

    @routes.post(
        "/jobs/bulk",
        status_code=201,
        response_model=BulkStored,
        openapi_extra=body(BulkRequest),
        summary="Enqueue many jobs, all or none",
    )
    async def enqueue_many(request: Request) -> JSONResponse:
        wanted = parse(BulkRequest, await read(request, 64 * 1024 * 1024))
        jobs = [prepared(context, job) for job in wanted.jobs]
        ids = (
            await context.writer.call(lambda store: store.jobs.enqueue(jobs, store.now()), patience=patience)
            if jobs
            else []
        )
        context.dispatcher.ring()
        return JSONResponse({"ids": ids}, 201)

    @routes.post(
        "/jobs/cancel",
        response_model=BulkCancelled,
        openapi_extra=body(Filter),
        summary="Cancel the jobs that match a filter",
    )
    async def cancel_many(request: Request) -> JSONResponse:
        wanted = parse(Filter, await read(request, _FILTER))
        conditions = wanted.conditions()

        found = await context.writer.call(
            lambda store: store.jobs.cancel_many(now_ms(), wanted.limit, **conditions), patience=patience
        )
        ids, running = list(found), [job for job, status in found.items() if status == JobStatus.PROCESSING]
        for job in running:
            context.dispatcher.deadlines.cancel(job)
        context.dispatcher.ring()
        return JSONResponse({"cancelled": len(ids), "ids": ids, "running": running})

    @routes.post(
        "/jobs/retry",
        response_model=BulkRetried,
        openapi_extra=body(Filter),
        summary="Retry the ended jobs that match a filter",
    )
    async def retry_many(request: Request) -> JSONResponse:
        """Without a status, failed ones: this is how dead letters are redriven."""
        wanted = parse(Filter, await read(request, _FILTER))
        conditions = wanted.conditions()
        status = conditions.pop("status", JobStatus.FAILED)
        if status not in ("failed", "cancelled", "done"):
            raise BadArguments(f"only failed, cancelled and done jobs can be retried, not {status}")
        found = await context.writer.call(
            lambda store: store.jobs.retry_many(now_ms(), wanted.limit, status, **conditions), patience=patience
        )
        ids = list(found)
        context.dispatcher.ring()
        return JSONResponse({"retried": len(ids), "ids": ids})

    @routes.get("/jobs/{job}/logs", response_class=PlainTextResponse, summary="Get what a job printed")
    async def logs(job: Id, lines: Annotated[int, Query(ge=1, le=100_000)] = 1000) -> PlainTextResponse:
        await context.reader.call(lambda store: store.jobs.find(job))
        found = await asyncio.to_thread(last, JobLogs(context.settings.data_dir).path(job), lines)
        return PlainTextResponse("".join(f"{line}\n" for line in found))

    @routes.get("/jobs/{job}/related", response_model=Related, summary="Get the chain and the batch of a job")
    async def related(job: Id) -> JSONResponse:
        """Of a chain, at most ten steps on either side of the job."""
        return JSONResponse(await context.reader.call(lambda store: store.jobs.flows.related(job)))

    @routes.get("/batches/{batch}", response_model=BatchView, summary="Get the state of a batch")
    async def batch(batch: Id) -> JSONResponse:
        return JSONResponse(await context.reader.call(lambda store: store.jobs.flows.get_batch(batch)))

    return routes
