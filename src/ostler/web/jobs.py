"""Jobs over HTTP: parse, one verb, render."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, ValidationError, create_model

from ostler.errors import BadArguments, PayloadTooLarge
from ostler.jobs.options import OPTIONS
from ostler.jobs.producer import prepare
from ostler.jobs.waiting import explain, leaving
from ostler.live.waiters import LONGEST
from ostler.store import now_ms, views
from ostler.store.artifacts import SHOWN
from ostler.store.reading import ERRORS
from ostler.store.rows import ENDED, JobStatus, NewJob
from ostler.store.store import Store
from ostler.web import body as bodies
from ostler.web.context import Context
from ostler.web.errors import KNOWN_QUERY, answers, in_words
from ostler.web.render import JSONResponse

_WAIT = Query(ge=0, le=LONGEST, description="seconds to wait for the job to end; 503 if too many requests already wait")
LARGEST = 2**63 - 1  # the largest number that a store can hold
Id = Annotated[int, Path(ge=0, le=LARGEST)]
_ENVELOPE = 4096  # what a request may have besides its arguments


class _Wanted(BaseModel):
    """A job to store. What is left out comes from the task's declaration."""

    model_config = ConfigDict(extra="forbid")
    task: StrictStr
    args: dict[str, Any] = Field(default_factory=dict)


_KINDS: dict[type, Any] = {int: StrictInt | None, float: StrictInt | StrictFloat | None, str: StrictStr | None}
_OPTIONS: dict[str, Any] = {
    name: (_KINDS[option.kind], Field(None, description=f"{option.doc}: {option.wanted}"))
    for name, option in OPTIONS.items()
}
EnqueueRequest = create_model("EnqueueRequest", __base__=_Wanted, __doc__=_Wanted.__doc__, **_OPTIONS)


class TimelineEvent(BaseModel):
    seq: int
    at: int
    name: str
    data: Any = None


# A job, from the one definition of its shape. Times are milliseconds UTC.
_FIELDS: dict[str, Any] = {name: (kind, ...) for name, kind in views.JOB.items()}
_FIELDS["status"] = (JobStatus, ...)
_FIELDS["attempt"] = (
    int,
    Field(
        description="the current attempt, or how many were used while it waits; runs that ended through no fault of the job do "
        "not count, and a retry starts again"
    ),
)
_FIELDS["attempts"] = (int, Field(description="the maximum number of attempts"))
_FIELDS["last_error"] = (str | None, Field(description="its error in one line, or null"))
_FIELDS["seq"] = (int, Field(description="the number of its newest event"))
_FIELDS["short"] = (
    bool,
    Field(description="true in listings: args and result are JSON text, cut off at 200 characters"),
)
JobView = create_model("JobView", **_FIELDS)
_RUN_FIELDS: dict[str, Any] = {name: (kind, ...) for name, kind in views.RUN_ERROR.items()}
RunError = create_model("RunError", **_RUN_FIELDS)
_ERRORS = Field(
    description=f"the errors of failed runs, oldest first, including those before a retry; the newest {ERRORS} are kept, with up to "
    "8,000 characters of each traceback. `kind`: exception, timeout, crash, lost or cancelled"
)
_EVENTS = Field(description="the newest events; GET /api/v1/jobs/{job}/events returns all of them")
_WAITING = Field(
    None,
    description="why a queued job is not running yet, or when a running one that was cancelled is killed: `reason`, `text`, and the numbers behind them",
)
_PUBLISHED: dict[str, Any] = {name: (kind, ...) for name, kind in views.ARTIFACT.items()}
ArtifactView = create_model("ArtifactView", **_PUBLISHED)
_ARTIFACTS = Field(description=f"the first {SHOWN} artifacts; GET /api/v1/jobs/{{job}}/artifacts returns all of them")
JobDetail = create_model(
    "JobDetail",
    __base__=JobView,
    errors=(list[RunError], _ERRORS),  # type: ignore[valid-type]
    events=(list[TimelineEvent], _EVENTS),
    artifacts=(list[ArtifactView], _ARTIFACTS),  # type: ignore[valid-type]
    waiting_for=(dict[str, Any] | None, _WAITING),
)
_DUPLICATE = Field(description="whether a unique job already existed")
Stored = create_model("Stored", __base__=JobDetail, duplicate=(bool, _DUPLICATE))


class EventPage(BaseModel):
    events: list[TimelineEvent]
    next: int | None = Field(description="`after` of the next page; null at the end")


class JobPage(BaseModel):
    jobs: list[JobView]  # type: ignore[valid-type]
    next: int | None = Field(description="the cursor of the next page")


def router(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/api/v1/jobs", tags=["jobs"])

    @routes.post(
        "",
        status_code=201,
        response_model=Stored,
        responses={200: {"model": Stored, "description": "A unique job that already existed"}},
        openapi_extra=body(EnqueueRequest),
        summary="Enqueue a job",
    )
    async def enqueue(request: Request) -> JSONResponse:
        """When this answers 201, the job survives a power cut. On any error nothing was stored."""
        wanted = parse(EnqueueRequest, await read(request, context.settings.max_payload + _ENVELOPE))
        job_id, new = await context.intake.enqueue(prepared(context, wanted))
        job = await context.glance.call(lambda store: store.jobs.get(job_id))
        # Of a unique job that was there already, that one is shown, with 200.
        return JSONResponse({**job, "duplicate": not new}, 201 if new else 200, {"Location": f"/api/v1/jobs/{job_id}"})

    @routes.get("", response_model=JobPage, dependencies=KNOWN_QUERY, summary="List jobs, newest first")
    async def listing(
        status: JobStatus | None = None,
        queue: str | None = None,
        task: str | None = None,
        code: str | None = None,
        batch: Annotated[int | None, Query(ge=0, le=LARGEST)] = None,
        search: Annotated[
            str | None, Query(max_length=200, description="search in id, task, arguments and error")
        ] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 50,
        cursor: Annotated[int | None, Query(ge=0, le=LARGEST)] = None,
    ) -> JSONResponse:
        """Jobs are shown short: `args`, `result` and the error's message are cut off; a job by its id has them whole."""
        filters: dict[str, Any] = {
            "status": status,
            "queue": queue,
            "task": task,
            "code": code,
            "batch": batch,
            "search": search,
        }
        jobs, following = await context.reader.call(
            lambda store: store.jobs.list(**filters, limit=limit, cursor=cursor)
        )
        return JSONResponse({"jobs": jobs, "next": following})

    @routes.get("/{job}", response_model=JobDetail, summary="Get a job with its newest events")
    async def one(request: Request, job: Id, wait: Annotated[float, _WAIT] = 0) -> JSONResponse:
        """With `wait`, the answer comes when the job has ended, or as it is after so many seconds."""
        if not wait:
            return JSONResponse(await look(job))
        with context.waiters.waiting(job) as ended:
            found = await look(job)
            if found["status"] in ENDED or not await _in_time(request, ended, wait):
                return JSONResponse(found)
        return JSONResponse(await look(job))

    async def look(job: int) -> dict[str, Any]:
        limits = context.dispatcher.limits
        held = context.dispatcher.pressure.reasons(time.monotonic())

        def read(store: Store) -> dict[str, Any]:
            found = store.jobs.get(job)
            waiting = leaving(found, now_ms(), context.settings.cancel_grace)
            return {**found, "waiting_for": waiting or explain(store, job, now_ms(), limits=limits, held=held)}

        return await context.glance.call(read)

    @routes.get(
        "/{job}/events",
        response_model=EventPage,
        dependencies=KNOWN_QUERY,
        summary="Get a job's timeline, oldest first",
    )
    async def events(
        job: Id,
        after: Annotated[int, Query(ge=0, le=LARGEST, description="the number of the last event that you have")] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    ) -> JSONResponse:
        """A page has at most `limit` events and about 512 KiB of data; `next` names where the next one begins."""

        def read(store: Store) -> tuple[list[dict[str, Any]], int | None]:
            store.jobs.find(job)
            return store.jobs.event_page(job, after, limit)

        page, following = await context.reader.call(read)
        return JSONResponse({"events": page, "next": following})

    @routes.post("/{job}/cancel", response_model=JobDetail, responses=answers(409), summary="Cancel a job")
    async def cancel(job: Id) -> JSONResponse:
        """A queued job ends at once. A running one is asked first; `cancel_grace` seconds later (10) its process group gets SIGTERM and SIGKILL."""
        # The answer is read before the worker is told: it shows the request, not how fast the job heeded it.
        found, view = await context.writer.call(
            lambda store: (store.jobs.cancel(job, now_ms()), store.jobs.get(job)),
            patience=context.settings.store_patience,
        )
        if found == JobStatus.PROCESSING:
            context.dispatcher.deadlines.cancel(job)
        context.dispatcher.ring(job)
        return JSONResponse(view)

    @routes.post("/{job}/retry", response_model=JobDetail, responses=answers(409), summary="Run an ended job again")
    async def retry(job: Id) -> JSONResponse:
        await context.writer.call(
            lambda store: store.jobs.retry(job, now_ms()), patience=context.settings.store_patience
        )
        context.dispatcher.ring(job)
        return JSONResponse(await context.glance.call(lambda store: store.jobs.get(job)))

    return routes


async def _in_time(request: Request, ended: asyncio.Future[None], seconds: float) -> bool:
    """Wait for the future, for so many seconds; False when the client has left meanwhile."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.ensure_future(left())
    try:
        await asyncio.wait({ended, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return not gone.done()
    finally:
        gone.cancel()


def body(model: type[BaseModel]) -> dict[str, Any]:
    """The request's body for the documentation; it is read by hand, so that `curl -d` works and limits hold."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


def prepared(context: Context, wanted: _Wanted) -> NewJob:
    """The job that a request asks for, checked; raises InputError."""
    options = wanted.model_dump(exclude={"task", "args"}, exclude_none=True)
    return prepare(context.tasks, wanted.task, wanted.args, context.settings.max_payload, **options)


async def read(request: Request, limit: int) -> bytes:
    """The body, refused as soon as it is too large."""
    message = f"the request is larger than {limit} bytes (max_payload); put the data into a file and pass its path"
    return await bodies.read(request, limit, PayloadTooLarge(message))


Model = TypeVar("Model", bound=BaseModel)


def parse(model: type[Model], data: bytes) -> Model:
    """The body as a model; raises BadArguments in words."""
    try:
        value = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadArguments(f"the request is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadArguments('the request must be an object such as {"task": "name", "args": {}}')
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise BadArguments(in_words(error.errors(), _fields(model))) from error


def _fields(model: type[BaseModel]) -> Collection[str]:
    """What the object has that people write: of many jobs, that of one."""
    return EnqueueRequest.model_fields if "jobs" in model.model_fields else model.model_fields


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
