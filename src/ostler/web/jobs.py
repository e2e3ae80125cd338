"""Jobs over HTTP: parse, one verb, render."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, ValidationError

from ostler.errors import BadArguments, PayloadTooLarge
from ostler.jobs.producer import prepare
from ostler.store import now_ms
from ostler.store.rows import JobStatus
from ostler.web.context import Context
from ostler.web.errors import in_words
from ostler.web.render import JSONResponse

_ENVELOPE = 4096  # what a request may have besides its arguments


class EnqueueRequest(BaseModel):
    """A job to store. What is left out comes from the task's declaration."""

    model_config = ConfigDict(extra="forbid")
    task: StrictStr
    args: dict[str, Any] = Field(default_factory=dict)
    attempts: StrictInt | None = Field(None, description="runs in all, 1 to 1000")
    timeout: StrictInt | StrictFloat | None = Field(None, description="seconds")
    priority: StrictInt | None = Field(None, description="higher runs first")
    delay: StrictInt | StrictFloat | None = Field(None, ge=0, le=1e9, description="seconds from now")
    run_at: StrictInt | None = Field(None, ge=0, le=10**14, description="milliseconds UTC; not before")


class TimelineEvent(BaseModel):
    seq: int
    at: int
    name: str
    data: Any = None


class JobError(BaseModel):
    model_config = ConfigDict(extra="allow")
    code: str
    message: str


class JobView(BaseModel):
    """A job. Times are milliseconds UTC."""

    id: int
    task: str
    queue: str
    status: JobStatus
    args: dict[str, Any]
    priority: int
    attempt: int
    attempts: int
    crashes: int
    timeout: float | None
    progress: float | None
    stage: str | None
    result: Any
    error: JobError | None
    worker: str | None
    node: str | None
    cancel_requested: bool
    run_at: int | None
    created_at: int
    started_at: int | None
    finished_at: int | None


class JobDetail(JobView):
    events: list[TimelineEvent]


class JobPage(BaseModel):
    jobs: list[JobView]
    next: int | None = Field(description="the cursor of the next page")


def router(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/api/v1/jobs", tags=["jobs"])
    body = {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": EnqueueRequest.model_json_schema()}},
        }
    }

    @routes.post("", status_code=201, response_model=JobDetail, openapi_extra=body, summary="Store a job")
    async def enqueue(request: Request) -> JSONResponse:
        """When this answers 201, the job survives a power cut. On any error nothing was stored."""
        wanted = _parse(await _read(request, context.settings.max_payload + _ENVELOPE))
        run_at = wanted.run_at if wanted.delay is None else now_ms() + int(wanted.delay * 1000)
        job = prepare(
            context.tasks,
            wanted.task,
            wanted.args,
            context.settings.max_payload,
            attempts=wanted.attempts,
            timeout=wanted.timeout,
            priority=wanted.priority,
            run_at=run_at,
        )
        job_id = await context.intake.enqueue(job)
        return JSONResponse(
            await context.reader.call(lambda store: store.jobs.get(job_id)), 201, {"Location": f"/api/v1/jobs/{job_id}"}
        )

    @routes.get("", response_model=JobPage, summary="List jobs, newest first")
    async def listing(
        status: JobStatus | None = None,
        queue: str | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 50,
        cursor: Annotated[int | None, Query(ge=0)] = None,
    ) -> JSONResponse:
        jobs, following = await context.reader.call(
            lambda store: store.jobs.list(status=status, queue=queue, limit=limit, cursor=cursor)
        )
        return JSONResponse({"jobs": jobs, "next": following})

    @routes.get("/{job}", response_model=JobDetail, summary="A job with its timeline")
    async def one(job: int) -> JSONResponse:
        return JSONResponse(await context.reader.call(lambda store: store.jobs.get(job)))

    @routes.post("/{job}/cancel", response_model=JobDetail, summary="Cancel a job")
    async def cancel(job: int) -> JSONResponse:
        """A queued job ends at once. A running one is asked first, then its process group gets SIGTERM and SIGKILL."""
        found = await context.writer.call(
            lambda store: store.jobs.cancel(job, now_ms()), patience=context.settings.store_patience
        )
        if found == JobStatus.PROCESSING:
            context.dispatcher.cancel(job)
        return JSONResponse(await context.reader.call(lambda store: store.jobs.get(job)))

    @routes.post("/{job}/retry", response_model=JobDetail, summary="Put an ended job back into its queue")
    async def retry(job: int) -> JSONResponse:
        await context.writer.call(
            lambda store: store.jobs.retry(job, now_ms()), patience=context.settings.store_patience
        )
        context.dispatcher.ring()
        return JSONResponse(await context.reader.call(lambda store: store.jobs.get(job)))

    return routes


async def _read(request: Request, limit: int) -> bytes:
    """The body, refused as soon as it is too large."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > limit:
            raise PayloadTooLarge(
                f"the request is larger than max_payload ({limit - _ENVELOPE} bytes) allows; pass a path or key instead"
            )
    return bytes(data)


def _parse(data: bytes) -> EnqueueRequest:
    try:
        value = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadArguments(f"the request is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadArguments('the request must be an object such as {"task": "name", "args": {}}')
    try:
        return EnqueueRequest.model_validate(value)
    except ValidationError as error:
        raise BadArguments(in_words(error.errors())) from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
