"""Sessions over HTTP: those under way and those that ended, ending one, what there is room for, and the live view.

What is under way on this node is in its memory; what other nodes have is in the registry, and what has ended is in the store.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response, StreamingResponse

from ostler.errors import BadArguments, Conflict, NotFound, StoreBusy
from ostler.sessions.shown import Sessions
from ostler.store.store import Store
from ostler.web.connections import PEER
from ostler.web.context import Context
from ostler.web.errors import KNOWN_QUERY, answers
from ostler.web.render import JSONResponse
from ostler.web.session_view import Views

_CURSOR = re.compile(r"(live/)?(\d{1,18})/([\x21-\x7e]{1,200})")
# Characters of what clients and workers said.
_CUT = {"owner": 200, "client": 100, "agent": 300, "key": 100, "text": 300}

_PICTURE = {"type": "string", "format": "binary"}
_FRAMES: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"multipart/x-mixed-replace": {"schema": _PICTURE}},
        "description": "JPEG frames (MJPEG)",
    }
}
State = Literal["opening", "live", "detached", "ended"]


class SessionView(BaseModel):
    """One session. `bytes_in` came from the client. Of a session of another node, bytes are as its node has last written them."""

    id: str
    pool: str = Field(description="of its worker")
    serves: str = Field(description="the name that its client connected to")
    node: str = Field(description="the id of the node that has its worker")
    worker: str
    state: State = Field(description="`opening`: its client is not connected yet; `detached`: it may come back")
    owner: str = Field(description="token:NAME, token, user:UID or node:ID")
    client: str | None = Field(description="its address")
    agent: str | None = Field(description="its User-Agent")
    priority: int
    key: str | None = Field(description="the key with which a client can reconnect")
    via: str | None = Field(description="the node that passed it on")
    waited_ms: float = Field(description="in line")
    started_at: int
    ended_at: int | None
    bytes_in: int
    bytes_out: int
    idle: float | None = Field(
        description="seconds since the last traffic; only known on its own node while it is open"
    )
    views: bool = Field(description="whether it can be watched here")
    reason: str | None = Field(description="why it ended")
    text: str | None = Field(description="the same in words")
    code: int | None = Field(description="of the WebSocket's close")


class SessionPage(BaseModel):
    sessions: list[SessionView]
    next: str | None = Field(description="`before` of the next page; null: this is the end")
    live: int = Field(description="open sessions on this node, regardless of filters")


class WorkerSlots(BaseModel):
    """A worker and its slots. After `lifetime` sessions (0: no limit) it is replaced."""

    component: str
    generation: int
    status: str = Field(description="starting, healthy, draining, …")
    serves: bool = Field(description="whether it takes new sessions")
    slots: int
    in_use: int
    served: int
    lifetime: int
    probe_ms: float | None = Field(description="duration of its last probe")
    mb: float | None = Field(description="memory of the worker and its child processes")
    versions: list[str] = Field(description="clients that it serves; empty: any")
    started_at: int | None


class Waiting(BaseModel):
    owner: str
    priority: int
    waited: float = Field(description="seconds")


class Counted(BaseModel):
    """Since the node started."""

    admitted: int
    refused: int
    left: int = Field(description="clients that left before it was their turn")
    expired: int = Field(description="clients that waited too long")
    bytes_in: int
    bytes_out: int
    strikes: int = Field(description="failed connections to a worker that were retried with another")


class PoolCapacity(BaseModel):
    """What serves one name. `free` slots can be had now; `line` has the first of those who wait, `waiting` counts all."""

    name: str
    pools: list[str]
    slots: int
    in_use: int
    free: int
    waiting: int
    paused: bool
    workers: list[WorkerSlots]
    line: list[Waiting]
    counts: Counted


class FarWorker(BaseModel):
    """A worker of another node. A client that finds no free slot here is relayed there."""

    node: str
    name: str = Field(description="of the node")
    url: str | None
    pool: str
    serves: str
    component: str
    status: str = Field(description="available or draining")
    slots: int
    in_use: int
    free: int
    served: int
    lifetime: int
    versions: list[str]


class CapacityView(BaseModel):
    node: str
    pools: list[PoolCapacity]
    elsewhere: list[FarWorker]


class Ending(BaseModel):
    """The session is being ended; its client is told why."""

    ok: bool
    action: str
    session: str
    here: bool = Field(description="false: its node was asked to end it, which takes a second or two")


class _Wanted(NamedTuple):
    """What a listing asks for."""

    state: str
    pool: str | None
    owner: str | None

    def fits(self, row: Mapping[str, Any]) -> bool:
        return self.pool in (None, row["pool"], row["serves"]) and self.owner in (None, row["owner"])


Id = Annotated[str, Path(max_length=200)]


def router(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", tags=["sessions"])
    views = Views()
    context.metrics.sessions.sessions = context.sessions

    @routes.get(
        "/sessions",
        response_model=SessionPage,
        dependencies=KNOWN_QUERY,
        summary="List sessions: open ones first, newest first",
    )
    async def listing(
        state: Annotated[Literal["live", "ended", "all"], Query()] = "all",
        pool: Annotated[
            str | None, Query(max_length=200, description="of the worker, or the name connected to")
        ] = None,
        owner: Annotated[str | None, Query(max_length=200)] = None,
        before: Annotated[
            str | None, Query(max_length=250, json_schema_extra={"pattern": f"^{_CURSOR.pattern}$"})
        ] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    ) -> JSONResponse:
        """Live ones of all nodes that share the registry (at most 1000 of other nodes), ended ones of all that share the store. How
        long their rows are kept is set by `sessions_retention` and `sessions_kept`.
        """
        wanted = _Wanted(state, pool, owner)
        found, following = await _page(context, wanted, None if before is None else _place(before), limit)
        return JSONResponse({"sessions": found, "next": following, "live": len(_own(context))})

    @routes.get("/sessions/{session}", response_model=SessionView, summary="One session")
    async def one(session: Id) -> JSONResponse:
        return JSONResponse(await _find(context, session))

    @routes.delete(
        "/sessions/{session}",
        response_model=Ending,
        status_code=202,
        responses=answers(409),
        summary="End a session",
    )
    async def end(session: Id, request: Request) -> JSONResponse:
        """Its client gets the close code 1008 with a reason; its slot is free at once. Also of another node."""
        pools = context.sessions
        if pools is not None and pools.kill(session, _who(request)):
            return _ending(session, here=True)
        if pools is not None and await pools.end_elsewhere(session):
            return _ending(session, here=False)
        found = await _find(context, session)
        if found["state"] == "ended":
            raise Conflict(f"session {found['id']} has already ended: {found['reason']}")
        raise Conflict(
            f"session {found['id']} belongs to node {found['node']}, which cannot be reached from here; end it there"
        )

    @routes.get(
        "/sessions/{session}/view",
        response_class=StreamingResponse,
        responses=_FRAMES | answers(409, 429, 502),
        summary="Watch a session",
    )
    async def view(session: Id) -> Response:
        """Pictures as the worker makes them, for an `<img>`: as fast as the viewer takes them, and only while something changes. Ends
        with the session. A node has at most 16 viewers at once; one more is answered 429.
        """
        socket = context.sessions.view_socket(session) if context.sessions is not None else None
        if context.sessions is None or socket is None:
            raise await _unseen(context, session)
        return await views.watch(context.sessions, session, socket)

    @routes.get(
        "/capacity", response_model=CapacityView, summary="Get slots, workers and waiting clients of session pools"
    )
    async def capacity() -> JSONResponse:
        """`pools` are of this node, from its memory; `elsewhere` are workers of other nodes, about a second old."""
        sessions = context.sessions
        found = [] if sessions is None else _capacity(sessions)
        far = sessions.neighbours.workers() if sessions is not None and sessions.neighbours is not None else []
        elsewhere = [{key: worker[key] for key in FarWorker.model_fields} for worker in far]
        return JSONResponse({"node": context.supervisor.member.id, "pools": found, "elsewhere": elsewhere})

    return routes


def _who(request: Request) -> str:
    """The operator, as sessions name their owners."""
    uid = request.scope.get(PEER)
    return "token" if uid is None else f"user:{uid}"


def _ending(session: str, *, here: bool) -> JSONResponse:
    return JSONResponse({"ok": True, "action": "end", "session": session, "here": here}, 202)


# ---- sessions


async def _page(
    context: Context, wanted: _Wanted, place: tuple[bool, int, str] | None, limit: int
) -> tuple[list[dict[str, Any]], str | None]:
    """Those under way, then those that ended; each newest first."""
    found: list[dict[str, Any]] = []
    if wanted.state != "ended" and (place is None or place[0]):
        live = await _live(context, wanted)
        rest = [row for row in live if place is None or (row["started_at"], row["id"]) < place[1:]]
        found, more = rest[:limit], len(rest) > limit
        if more or (wanted.state == "all" and len(found) == limit):
            return found, f"live/{found[-1]['started_at']}/{found[-1]['id']}"
        place = None
    if wanted.state == "live":
        return found, None
    below = None if place is None else place[1:]

    def read(store: Store) -> tuple[list[dict[str, Any]], tuple[int, str] | None]:
        page, following = store.sessions.list(
            limit=limit - len(found), before=below, state="ended", pool=wanted.pool, owner=wanted.owner
        )
        return page, following

    page, following = await context.reader.call(read)
    return found + [_shown(row) for row in page], following and f"{following[0]}/{following[1]}"


def _own(context: Context) -> list[dict[str, Any]]:
    """The sessions under way on this node."""
    if context.sessions is None:
        return []
    node = context.supervisor.member.id
    return [_shown({"node": node, **row}) for row in context.sessions.live()]


async def _elsewhere(context: Context) -> list[dict[str, Any]]:
    """Sessions under way on other nodes; none while the registry cannot be asked."""
    neighbours = None if context.sessions is None else context.sessions.neighbours
    if neighbours is None:
        return []
    with contextlib.suppress(StoreBusy):
        return [_shown(row) for row in await neighbours.live()]
    return []


async def _live(context: Context, wanted: _Wanted) -> list[dict[str, Any]]:
    found = [row for row in _own(context) + await _elsewhere(context) if wanted.fits(row)]
    return sorted(found, key=lambda row: (row["started_at"], row["id"]), reverse=True)


async def _find(context: Context, session: str) -> dict[str, Any]:
    """A session of any node; raises NotFound."""
    for row in _own(context):
        if row["id"] == session:
            return row
    known = await context.reader.call(lambda store: store.sessions.find(session))
    if known is not None:
        return _shown(known)
    for row in await _elsewhere(context):  # it may be known to the registry alone
        if row["id"] == session:
            return row
    raise NotFound(f"there is no session {session[:100]!r}; it may have been deleted since it ended")


async def _unseen(context: Context, session: str) -> Exception:
    """Why a session cannot be watched."""
    found = await _find(context, session)
    if found["state"] == "ended":
        return Conflict(f"session {found['id']} has ended: {found['reason']}")
    if found["node"] != context.supervisor.member.id:
        return Conflict(f"session {found['id']} belongs to node {found['node']}; watch it there")
    return Conflict(f"session {found['id']} cannot be watched: workers of pool {found['pool']} show no live view")


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A session as the API shows it, from memory or from the store."""
    ended = row.get("ended_at") is not None
    known: dict[str, Any] = {name: row.get(name) for name in SessionView.model_fields}
    known |= {name: value[:most] for name, most in _CUT.items() if (value := known[name]) is not None}
    state = "ended" if ended else row.get("state") or "live"
    views = bool(row.get("views")) and not ended
    return known | {"worker": row["component"], "state": state, "views": views}


def _place(before: str) -> tuple[bool, int, str]:
    found = _CURSOR.fullmatch(before)
    if found is None:
        raise BadArguments(f"before must be the `next` of another page, found {before[:40]!r}")
    return found[1] is not None, int(found[2]), found[3]


# ---- capacity


def _capacity(sessions: Sessions) -> list[dict[str, Any]]:
    lines, counts = sessions.lines(), sessions.counts()
    found = []
    for name, state in sorted(sessions.capacity().items()):
        line, counted = lines.get(name, {"first": []}), counts.get(name, {})
        shown = {key: state[key] for key in ("pools", "slots", "in_use", "free", "waiting")}
        workers = [{key: worker[key] for key in WorkerSlots.model_fields} for worker in state["workers"]]
        waiting = [
            {"owner": str(owner)[: _CUT["owner"]], "priority": priority, "waited": round(waited, 1)}
            for owner, priority, waited in line["first"]
        ]
        numbers = {key: counted.get(key, 0) for key in Counted.model_fields}
        paused = bool(state.get("paused"))
        found.append({"name": name, **shown, "paused": paused, "workers": workers, "line": waiting, "counts": numbers})
    return found
