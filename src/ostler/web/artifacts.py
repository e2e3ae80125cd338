"""Artifacts over HTTP: what a job has published, and the files themselves, whole or in ranges, from wherever they are.

Files are read in threads, a piece at a time, as fast as the client takes them: the node's loop never waits for a disk, a bucket or another
node. Whatever a job published, a browser must not run it as a page of this node: only what cannot act is shown, and with a policy that forbids
the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from email.utils import formatdate
from typing import IO, Annotated, Any, NamedTuple
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from fastapi import Path as UrlPath
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send

from ostler.errors import Conflict, NotFound
from ostler.jobs import artifacts, results
from ostler.jobs.artifacts import Found, completed, missing, nearest
from ostler.jobs.results import LocalResults, check_key
from ostler.names import media_type
from ostler.store.artifacts import ArtifactRow, shown
from ostler.store.database import is_postgres
from ostler.store.store import Store
from ostler.web import ranges
from ostler.web.context import Context
from ostler.web.errors import KNOWN_QUERY, answers, failure
from ostler.web.jobs import ArtifactView, Id
from ostler.web.ranges import Piece, Unsatisfiable
from ostler.web.render import JSONResponse

_CHUNK = 1 << 18
_KEY = 1000  # characters
_SAFE = {
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
# Without scripts, forms, an origin of its own or anything from elsewhere.
_POLICY = "sandbox; default-src 'none'; img-src 'self'; media-src 'self'; style-src 'unsafe-inline'"
_SHOWN = ("image/", "video/", "audio/")
_ACTIVE = frozenset({"text/html", "text/css", "text/javascript", "text/xml", "text/x-component"})  # of text/*
# Of a key, for the description of the API; `check_key` decides, and says what is wrong.
_SHAPE: dict[str, Any] = {"pattern": r"^[^/.\\\u0000][^/\\\u0000]*(/[^/.\\\u0000][^/\\\u0000]*)*$"}
# The first is for generators.
_BINARY = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in ("application/octet-stream", "*/*")}


class ArtifactPage(BaseModel):
    artifacts: list[ArtifactView]
    next: str | None = Field(description="`after` of the next page; null: this is the end")


class Source(NamedTuple):
    """An artifact, and how its bytes are had: `begin`, in a thread, from the first byte of a piece on."""

    found: Found
    begin: Callable[[Piece], IO[bytes]]
    close: Callable[[], object] = lambda: None


def router(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", tags=["artifacts"])

    @routes.get(
        "/jobs/{job}/artifacts",
        response_model=ArtifactPage,
        dependencies=KNOWN_QUERY,
        summary="What a job has published",
    )
    async def listing(
        job: Id,
        after: Annotated[str, Query(max_length=_KEY, description="the key of the last artifact that you have")] = "",
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> JSONResponse:
        """In the order of the keys, also what failed runs have published. `url` leads to the file."""

        def read(store: Store) -> list[ArtifactRow]:
            store.jobs.find(job)
            return store.jobs.artifacts.of(job, after, limit + 1)

        rows = await context.glance.call(read)
        page = rows[:limit]
        if any(row.at is None for row in page):
            page = await asyncio.to_thread(lambda: completed(page, _results(context)))
        following = rows[limit - 1].key if len(rows) > limit else None
        return JSONResponse({"artifacts": [shown(row) for row in page], "next": following})

    @routes.api_route(
        "/artifacts/{key:path}",
        methods=["GET", "HEAD"],
        response_class=Response,
        responses={
            200: {"description": "The file", "content": _BINARY},
            206: {"description": "The range of it that was asked for", "content": _BINARY},
            304: {"description": "The client has it already (If-None-Match)"},
            **answers(416, 502),
        },
        summary="A published file, whole or a range of it",
    )
    async def one(
        key: Annotated[str, UrlPath(description="the key that it was published under", json_schema_extra=_SHAPE)],
        request: Request,
        download: Annotated[bool, Query(description="have browsers save it instead of showing it")] = False,
    ) -> Response:
        """One range in a request; several at once are answered with the whole file. `ETag` is the file's SHA-256. HTML, SVG and what else a
        browser could run is sent as a download, under a policy that lets it do nothing.
        """
        return await serve(context, request, key, download=download)

    @routes.get(artifacts.INNER.removeprefix("/api/v1") + "{key:path}", include_in_schema=False)
    async def inner(key: str, request: Request, node: str, sha256: str) -> Response:
        """For other nodes: an artifact in the results of this one. It asks nobody else, so no request is passed on twice."""
        own = context.supervisor.member.id
        if node != own:
            raise Conflict(f"this is node {own}, and not {node}")
        source = await asyncio.to_thread(_take, context, check_key(key))
        if source is None or source.found.sha256 != sha256:
            if source is not None:
                source.close()
            raise NotFound(f"artifact {key} was deleted or replaced")
        return await answer(request, source)

    return routes


async def serve(context: Context, request: Request, key: str, *, download: bool = False) -> Response:
    """The answer to a request for an artifact; raises NotFound, or Unreachable when the node that has it cannot be asked."""
    source = await _find(context, check_key(key))
    try:
        return await answer(request, source, download=download)
    except BaseException:
        source.close()
        raise


# ---- where it is


def _results(context: Context) -> results.Results:
    return results.connect(context.settings.results, context.settings.data_dir)


async def _find(context: Context, key: str) -> Source:
    """In our own results, or, where each node has a directory of its own, on the node that published it last."""
    place, row = _results(context), None
    if is_postgres(context.settings.store) and isinstance(place, LocalResults):
        row = await context.glance.call(lambda store: store.jobs.artifacts.newest(key))
    source = await asyncio.to_thread(_take, context, key)
    home = context.supervisor.member.home
    if row is None or nearest(None, row, home) is None or (source and source.found.sha256 == row.sha256):
        if source is None:
            raise missing(key, row)
        return source
    if source is not None:
        source.close()
    owner = await context.reader.call(lambda store: artifacts.whose(store, row))
    return Source(row, lambda piece: artifacts.fetch(*owner, row, (piece.first, piece.last)))


def _take(context: Context, key: str) -> Source | None:
    """The artifact in our own results, opened."""
    taken = _results(context).take(key)
    if taken is None:
        return None
    found, file = taken

    def begin(piece: Piece) -> IO[bytes]:
        file.seek(piece.first)
        return file

    return Source(found, begin, file.close)


# ---- the answer


async def answer(request: Request, source: Source, *, download: bool = False) -> Response:
    """The artifact, or the piece of it that the request asks for. It takes over the source."""
    found = source.found
    headers = _headers(found, download=download)
    kind, tag = headers.pop("Content-Type"), headers["ETag"]
    if request.method == "GET" and _has_it(request.headers.get("if-none-match"), tag):
        source.close()
        return Response(status_code=304, headers=headers)
    # If-Range with another tag: the client has a piece of another file, so it gets this one whole.
    same = request.headers.get("if-range", tag) == tag and request.method == "GET"
    try:
        piece = ranges.wanted(request.headers.get("range") if same else None, found.size)
    except Unsatisfiable:
        source.close()
        return _past_the_end(found, request.headers["range"])
    part = piece or Piece(0, found.size - 1)
    headers["Content-Length"] = str(part.length)
    if piece:
        headers["Content-Range"] = f"bytes {part.first}-{part.last}/{found.size}"
    if request.method == "HEAD" or not part.length:
        source.close()
        return Response(headers=headers, media_type=kind)
    file = await asyncio.to_thread(source.begin, part)
    return _Streamed(file, part.length, 206 if piece else 200, headers, kind)


class _Streamed(StreamingResponse):
    """So many bytes of a file, which is closed in the end, however that comes. Each read is in a thread."""

    def __init__(self, file: IO[bytes], length: int, status: int, headers: dict[str, str], kind: str) -> None:
        super().__init__(_pieces(file, length), status, headers, kind)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._file.close()


def _pieces(file: IO[bytes], left: int) -> Iterator[bytes]:
    """What ends too soon breaks off, so that nobody takes it for whole."""
    while left and (data := file.read(min(_CHUNK, left))):
        left -= len(data)
        yield data


def _past_the_end(found: Found, wanted: str) -> Response:
    refused = failure(416, "RANGE", f"{found.key} has {found.size} bytes; {wanted!r:.100} is past its end")
    refused.headers["Content-Range"] = f"bytes */{found.size}"
    return refused


def _has_it(given: str | None, tag: str) -> bool:
    return given is not None and (
        given.strip() == "*" or tag in [one.strip().removeprefix("W/") for one in given.split(",")]
    )


def _headers(found: Found, *, download: bool) -> dict[str, str]:
    name = found.key.rpartition("/")[2]
    kind, inline = _served(media_type(name))
    how = "inline" if inline and not download else "attachment"
    # A browser's viewer of PDF does not run under a sandbox; what a PDF does, it does in that viewer.
    policy = {} if kind == "application/pdf" else {"Content-Security-Policy": _POLICY}
    return {
        **_SAFE,
        **policy,
        "Content-Type": kind,
        "Content-Disposition": f"{how}; filename*=UTF-8''{quote(name, safe='')}",
        "ETag": f'"{found.sha256}"',
        "Last-Modified": formatdate(found.at // 1000, usegmt=True),
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, no-cache",
    }


def _served(kind: str) -> tuple[str, bool]:
    """The type that is sent, and whether a browser may show it. What could run as a page, script or style is sent as mere bytes."""
    if kind == "image/svg+xml":
        return kind, False  # a page that shows it as an image runs none of it
    if kind.startswith(_SHOWN) or kind in ("application/json", "application/pdf"):
        return kind, True
    if kind.startswith("text/") and kind not in _ACTIVE:
        return "text/plain; charset=utf-8", True
    return "application/octet-stream", False
