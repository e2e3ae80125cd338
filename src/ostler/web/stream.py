"""Live state over HTTP: server-sent events, and the plain questions beside them (counters over time, incidents)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from pydantic import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ostler.errors import OstlerError, StoreBusy, Unreachable
from ostler.lifecycle.logs import Reader
from ostler.live import rates, remote, states, topics
from ostler.live.broker import KEEP_ALIVE, Client
from ostler.live.tails import Tails
from ostler.store import now_ms
from ostler.store.fleet import read as read_fleet
from ostler.store.store import Store
from ostler.web import fleet
from ostler.web.context import Context
from ostler.web.errors import KNOWN_QUERY, answers
from ostler.web.jobs import LARGEST, Id
from ostler.web.render import JSONResponse

log = logging.getLogger("ostler.web")

_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_EVENTS = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "Events"}}
_SSE: dict[str, Any] = {"response_class": StreamingResponse, "responses": _EVENTS}
_FOLLOWED: dict[str, Any] = {**_SSE, "responses": _EVENTS | answers(409)}
_RETRY = b"retry: 1000\n\n"  # how soon an EventSource comes back
_RETRY_LATER = b"retry: 10000\n\n"
_SLICE = 32_768  # bytes that are handed to a connection at once
_LAST = "like Last-Event-ID, for clients without headers"
_BREATH = 0.1  # between two reads of a log that grows
_ASK, _ASK_LATER = 0.5, 5.0  # between two questions to another node; when it could not be reached


class Span(StrEnum):
    """How far back counters are asked for."""

    TEN_MINUTES = "10m"
    HOUR = "1h"
    DAY = "24h"
    WEEK = "7d"


# span -> (seconds back, seconds per point)
_SPANS = {Span.TEN_MINUTES: (600, 10), Span.HOUR: (3600, 10), Span.DAY: (86_400, 600), Span.WEEK: (604_800, 3600)}


class Point(BaseModel):
    """What ended in `step` seconds from `at` on. Durations are seconds."""

    at: int
    step: int
    done: int
    failed: int
    retried: int
    crashed: int
    cancelled: int
    avg_run: float | None
    run_p50: float | None
    run_p95: float | None
    wait_p50: float | None
    wait_p95: float | None


class Stats(BaseModel):
    span: Span
    step: int
    now: int
    points: list[Point]
    whole: Point


class Incident(BaseModel):
    """`at` is the last time that it changed, `count` how often it happened."""

    node: str
    id: int
    level: Literal["info", "warning", "error"]
    subject: str
    text: str
    count: int
    at: int
    job: int | None
    detail: str | None


class IncidentList(BaseModel):
    incidents: list[Incident]


class EventStream(StreamingResponse):
    """A stream that ends when the client goes or the node stops. One slow client waits here and nowhere else."""

    def __init__(
        self, body: AsyncIterator[bytes], gone: Callable[[], None], media_type: str = "text/event-stream"
    ) -> None:
        super().__init__(body, media_type=media_type, headers=_HEADERS)
        self._chunks, self._gone = body, gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Unlike its base this runs no task group: a thousand of them are held by one process."""
        left = asyncio.ensure_future(self._until_left(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                if left.done():
                    return
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            # The node has stopped, and this client does not read: no more can be done for it.
            log.debug("closed a stream whose client did not read")
        except RuntimeError as error:
            # uvloop: the write before this one found the client gone, and nobody was told yet.
            if "handler is closed" not in str(error):
                raise
        finally:
            left.cancel()
            self._gone()

    async def _until_left(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone()


def router(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", tags=["live"])
    broker, settings = context.broker, context.settings
    open_tails: set[object] = set()

    def admit() -> None:
        if broker.clients + len(open_tails) >= settings.max_streams:
            raise StoreBusy(f"{settings.max_streams} streams are open, which is the limit (max_streams)")
        if broker.closed:
            raise StoreBusy("the node is stopping")

    @routes.get("/events", summary="Follow the state (server-sent events)", **_SSE)
    async def events(
        topics_: Annotated[str, Query(alias="topics", description="comma-separated; * for any segment")] = "*",
        last_event_id: Annotated[str | None, Header()] = None,
        last: Annotated[str | None, Query(description=_LAST)] = None,
        ping: Annotated[
            bool, Query(description="send keep-alives as `ping` events, for clients that do not see comments")
        ] = False,
    ) -> EventStream:
        """First the whole state of what you ask for, then changes only: each event is the new state of one object, as
        `{topic, type, timestamp, <object>}`. With `Last-Event-ID`, what changed since; a `resync` where that cannot be told.
        """
        patterns = topics.parse(topics_)
        admit()
        client = await context.watch.follow(patterns, last_event_id or last, ping=ping)

        def gone() -> None:
            client.close()
            broker.leave(client)

        return EventStream(_events(client), gone)

    async def _events(client: Client) -> AsyncIterator[bytes]:
        yield _RETRY
        while not client.closed:
            began = time.perf_counter()
            data = client.take()
            # In slices: what waits for one slow client is a small copy, and the rest is the one that its group shares.
            for start in range(0, len(data), _SLICE):
                yield data[start : start + _SLICE]
                broker.sent(time.perf_counter() - began)
                began = time.perf_counter()
            if not data:
                await client.wake.wait()

    @routes.get("/workers/{name:path}/logs/follow", summary="Follow a worker's output (SSE)", **_FOLLOWED)
    async def follow_worker(
        name: str,
        request: Request,
        lines: Annotated[int, Query(ge=0, le=10_000)] = 200,
        last_event_id: Annotated[str | None, Header()] = None,
        last: Annotated[str | None, Query(description=_LAST)] = None,
    ) -> EventStream:
        """Events are `{lines: […]}`, with `lost: true` where some could not be had, and `error` where another node that has them
        cannot be reached.
        """
        found = await fleet.read(context)
        worker = found.worker(name)
        return tail(request, found.node(worker["node_id"]), worker["component"], lines, last_event_id or last)

    @routes.get("/jobs/{job}/logs/follow", summary="Follow a job's output (SSE)", **_FOLLOWED)
    async def follow_job(
        job: Id,
        request: Request,
        lines: Annotated[int, Query(ge=0, le=10_000)] = 1000,
        last_event_id: Annotated[str | None, Header()] = None,
        last: Annotated[str | None, Query(description=_LAST)] = None,
    ) -> EventStream:
        """Of a job that ran on several nodes: what its last run printed, with a `note` that says so."""

        def find(store: Store) -> tuple[dict[str, Any] | None, str | None]:
            store.jobs.find(job)
            try:
                return remote.holder(store, read_fleet(store), job), None
            except Unreachable as error:
                return None, str(error)

        node, problem = await context.reader.call(find)
        if problem:
            return told(problem)
        return tail(request, node, f"job:{job}", lines, last_event_id or last)

    def told(problem: str) -> EventStream:
        """A stream that says why there is none. A client that cannot read the body of an error is told, too."""

        async def say() -> AsyncIterator[bytes]:
            yield _RETRY_LATER + _event({"lines": [], "error": problem})

        return EventStream(say(), lambda: None)

    def tail(
        request: Request, node: Mapping[str, Any] | None, subject: str, lines: int, place: str | None
    ) -> EventStream:
        admit()
        wake = context.tails.follow(subject)
        mark, over = object(), asyncio.Event()
        open_tails.add(mark)

        def gone() -> None:
            over.set()
            wake.set()
            open_tails.discard(mark)
            context.tails.leave(subject, wake)

        if node is not None and not fleet.is_own(context, node["id"]):
            fleet.refuse_second(request, node)
            return EventStream(_far(context, node, subject, over, lines, place), gone)
        file = Reader(remote.path_of(settings.data_dir, subject))
        return EventStream(_lines(context.tails, file, wake, over, lines, place, settings.event_keepalive), gone)

    @routes.get("/stats", response_model=Stats, summary="Throughput and latency over time")
    async def stats(span: Span = Span.HOUR, queue: str | None = None) -> JSONResponse:
        """Points with nothing in them are left out; `whole` is the span in one. Times are milliseconds UTC, durations seconds."""
        back, width = _SPANS[span]
        now = now_ms()
        since = now // 1000 - back
        found = await context.reader.call(
            lambda store: store.live.tallies.series(width, since - since % width, queue, now // 1000)
        )
        points = [states.recent(point, width) for point in found]
        whole = states.recent(rates.merged(found, since), back)
        return JSONResponse({"span": span, "step": width, "now": now, "points": points, "whole": whole})

    @routes.get("/incidents", response_model=IncidentList, dependencies=KNOWN_QUERY, summary="Incidents, newest first")
    async def incidents(
        limit: Annotated[int, Query(ge=1, le=1000)] = 50, before: Annotated[int | None, Query(ge=0, le=LARGEST)] = None
    ) -> JSONResponse:
        found = await context.reader.call(lambda store: store.live.incidents(limit, before))
        return JSONResponse({"incidents": found})

    return routes


async def _lines(
    tails: Tails,
    file: Reader,
    wake: asyncio.Event,
    over: asyncio.Event,
    lines: int,
    place: str | None,
    keepalive: float,
) -> AsyncIterator[bytes]:
    """The last lines, then each that is printed."""
    yield _RETRY
    try:
        found = await asyncio.to_thread(file.start, lines, place)
        yield _said(found, file)
        while not (over.is_set() or tails.closed):
            wake.clear()
            if found := await asyncio.to_thread(file.read):
                yield _said(found, file)
                await asyncio.sleep(_BREATH)  # many lines at once are one event
                continue
            try:
                async with asyncio.timeout(keepalive):
                    await wake.wait()
            except TimeoutError:
                yield KEEP_ALIVE
    finally:
        file.close()


async def _far(
    context: Context, node: Mapping[str, Any], subject: str, over: asyncio.Event, lines: int, place: str | None
) -> AsyncIterator[bytes]:
    """The same of another node, which is asked again and again. While it cannot be reached, that is what is said."""
    yield _RETRY
    first, problem, quiet = True, "", 0.0
    while not (over.is_set() or context.tails.closed):
        rest = _ASK
        try:
            found = await fleet.log_of(context, node, subject, lines, place)
        except OstlerError as error:
            rest = _ASK_LATER
            with contextlib.suppress(StoreBusy):  # then it is asked where it was
                node = await fleet.again(context, node)
            if str(error) != problem:
                problem = str(error)
                yield _event({"lines": [], "error": problem}, place)
        else:
            place = found.place or place
            if first or problem or found.lines:
                event: dict[str, Any] = {"lines": found.lines, "note": f"on node {node['label']}"}
                yield _event(event | ({"lost": True} if found.lost else {}), place)
                first, problem, quiet = False, "", 0.0
        quiet += rest
        if quiet > context.settings.event_keepalive:
            quiet = 0.0
            yield KEEP_ALIVE
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rest):
                await over.wait()


def _said(lines: list[str], file: Reader) -> bytes:
    event: dict[str, Any] = {"lines": lines}
    if file.lost:
        event["lost"], file.lost = True, False
    return _event(event, file.place)


def _event(event: dict[str, Any], place: str | None = None) -> bytes:
    return f"id: {place or ''}\ndata: {json.dumps(event)}\n\n".encode()
