"""Libraries and tracks over HTTP: parse, one verb, render. Only the node imports this."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from collections.abc import Callable
from importlib.resources import files
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse, Response

from ostler import BadArguments, NotFound, PayloadTooLarge
from ostler.apps.music import calibration, catalogue, playlists, search
from ostler.apps.music.opening import open_tables
from ostler.apps.music.rules import STATES, Rules
from ostler.apps.music.tables import Tables, now_ms
from ostler.apps.music.walk import plain
from ostler.web import body as bodies
from ostler.web.extend import NodeApi
from ostler.web.render import JSONResponse

log = logging.getLogger("ostler.music")

T = TypeVar("T")
_BODY = 262_144  # bytes of a request
_AGAIN = ("failed", "toxic")
_SOUNDS = {"mp3": "mpeg", "flac": "flac", "ogg": "ogg", "opus": "ogg", "m4a": "mp4", "wav": "wav"}

_Tags = Annotated[
    list[str] | None, Query(alias="tag", max_length=50, description="`rock`, or with a least score: `rock:0.4`")
]
_Without = Annotated[list[str] | None, Query(alias="without", max_length=50, description="a tag that it must not have")]
_Text = Annotated[str, Query(max_length=200, description="words of path, title, artist or album")]
_Library = Annotated[str | None, Query(description="id, name or path of a library")]
_Limit = Annotated[int, Query(ge=1, le=search.MOST)]
_Track = Annotated[int, PathParameter(ge=1, le=2**63 - 1)]
_After = Annotated[int, Query(ge=0, le=10_000_000, description="how many to leave out")]


def router(node: NodeApi, rules: Rules) -> APIRouter:
    routes = APIRouter(tags=["music"])
    routes.include_router(_api(node, rules), prefix="/api/v1")
    routes.include_router(node.page("Music", "/music", files("ostler.apps.music") / "page"))
    return routes


def _api(node: NodeApi, rules: Rules) -> APIRouter:
    routes = APIRouter()
    tables = open_tables(node.settings)
    finder = search.Search(tables, rules.threshold)
    _libraries(routes, node, rules, tables)
    _calibrations(routes, node, tables, finder)
    _tracks(routes, node, tables, finder)
    _playlists(routes, tables, finder)
    # The loop keeps only a weak hold on its tasks; the router lives as long as the node.
    routes.warming = asyncio.get_running_loop().create_task(_warm(finder), name="music-warm")  # type: ignore[attr-defined]
    return routes


async def _warm(finder: search.Search) -> None:
    try:
        await _off(finder.warm)
    except Exception:  # the first question tries again
        log.exception("the tracks could not be read")


def _libraries(routes: APIRouter, node: NodeApi, rules: Rules, tables: Tables) -> None:
    async def shown(library: int) -> dict[str, Any]:
        return (await _off(lambda: catalogue.listing(tables, now_ms(), library)))[0]

    @routes.post("/libraries", status_code=201, summary="Add a library and scan it", openapi_extra=_ADD)
    async def add(request: Request) -> Response:
        """A directory on the node's machine. On any error nothing was stored."""
        wishes = await _object(request)
        path = wishes.pop("path", None)
        if not isinstance(path, str) or not path:
            raise BadArguments(f"path must be the path of a directory, found {path!r:.100}")
        library = await _off(lambda: catalogue.add(tables, rules, path, wishes))
        job = await node.enqueue("scan", {"library": library})
        found = {**await shown(library), "job": job["id"]}
        return JSONResponse(found, 201, {"Location": f"/api/v1/libraries/{library}"})

    @routes.get("/libraries", summary="All libraries, with counts and progress")
    async def listing() -> Response:
        return JSONResponse({"libraries": await _off(lambda: catalogue.listing(tables, now_ms()))})

    @routes.get("/libraries/{library}", summary="One library, with what its last scan could not read")
    async def one(library: str) -> Response:
        number = await _number(tables, library)
        found = await shown(number)
        return JSONResponse({**found, "problems": await _off(lambda: catalogue.problems_of(tables, number, 1000))})

    @routes.patch("/libraries/{library}", summary="Change name, write_to, ignore or watch", openapi_extra=_CHANGE)
    async def change(library: str, request: Request) -> Response:
        """Another `write_to` has all tags written there, and taken away where they were."""
        wishes = await _object(request)
        number = await _number(tables, library)
        await _off(lambda: catalogue.change(tables, number, wishes))
        if "ignore" in wishes:
            await node.enqueue("scan", {"library": number})
        if "write_to" in wishes:
            await node.enqueue("rewrite", {"library": number})
        return JSONResponse(await shown(number))

    @routes.delete("/libraries/{library}", summary="Forget a library; its files are left as they are")
    async def remove(library: str) -> Response:
        number = await _number(tables, library)
        return JSONResponse({"library": number, "tracks": await _off(lambda: catalogue.remove(tables, number))})

    @routes.post("/libraries/{library}/scan", status_code=202, summary="Scan a library")
    async def scan(library: str) -> Response:
        number = await _number(tables, library)
        await _off(lambda: catalogue.want_scan(tables, number))
        job = await node.enqueue("scan", {"library": number})
        return JSONResponse({"library": number, "job": job["id"]}, 202)

    @routes.post("/libraries/{library}/retry", status_code=202, summary="Tag failed and toxic tracks again")
    async def retry(library: str, all: bool = False) -> Response:  # noqa: A002  a parameter of the URL
        """`all`: tagged ones too, after another model was chosen or files were made writable. What is known of their content is used."""
        number = await _number(tables, library)
        found = await _off(lambda: catalogue.retry(tables, number, (*_AGAIN, "tagged") if all else _AGAIN))
        await node.enqueue("queue", {"library": number})
        return JSONResponse({"library": number, "tracks": found.get(number, 0)}, 202)


def _calibrations(routes: APIRouter, node: NodeApi, tables: Tables, finder: search.Search) -> None:
    @routes.post(
        "/libraries/{library}/calibrate", status_code=202, summary="Find thresholds from the library's own scores"
    )
    async def calibrate(library: str, dry_run: bool = False) -> Response:
        """A dry run changes nothing; its job's result says what would change."""
        number = await _number(tables, library)
        job = await node.enqueue("calibrate", {"library": number, "dry_run": dry_run})
        return JSONResponse({"library": number, "job": job["id"]}, 202)

    @routes.get("/libraries/{library}/calibrations", summary="A library's calibrations, the newest first")
    async def listing(library: str) -> Response:
        number = await _number(tables, library)
        return JSONResponse({"calibrations": await _off(lambda: calibration.listing(tables, number))})

    @routes.get("/libraries/{library}/tags", summary="How the scores of each tag are spread, with thresholds")
    async def tags(library: str, bins: Annotated[int, Query(ge=5, le=200)] = 50) -> Response:
        number = await _number(tables, library)
        return JSONResponse(await _off(lambda: finder.distribution(number, bins)))

    @routes.post(
        "/libraries/{library}/undo", status_code=202, summary="Take back the last calibration, or all that was written"
    )
    async def undo(library: str, all: bool = False) -> Response:  # noqa: A002  a parameter of the URL
        """`all`: what was written into files or beside them is taken away, and from then on tags go to the database alone."""
        number = await _number(tables, library)
        told: dict[str, Any] = {"library": number}
        if all:
            told["tracks"] = await _off(lambda: calibration.undo_all(tables, number))
        else:
            told["calibration"] = await _off(lambda: calibration.undo_last(tables, number))
        job = await node.enqueue("rewrite", {"library": number})
        return JSONResponse({**told, "job": job["id"]}, 202)


def _tracks(routes: APIRouter, node: NodeApi, tables: Tables, finder: search.Search) -> None:
    @routes.get("/tracks", summary="Search tracks by tags, scores and words")
    async def find(
        tag: _Tags = None,
        without: _Without = None,
        text: _Text = "",
        library: _Library = None,
        state: str | None = None,
        limit: _Limit = 50,
        after: _After = 0,
    ) -> Response:
        """With tags, those with the highest scores first; else in the order of their paths. A tag without a score means its threshold."""
        query = await _query(tables, tag, without, text, library, limit, state, after)
        return JSONResponse({"tracks": await _off(lambda: finder.find(query))})

    @routes.get("/tracks/{track}", summary="One track with its tags, scores and thresholds")
    async def one(track: _Track) -> Response:
        return JSONResponse(await _off(lambda: finder.one(track)))

    @routes.get("/tracks/{track}/similar", summary="Tracks that sound alike, the nearest first")
    async def similar(track: _Track, limit: _Limit = 20, library: _Library = None) -> Response:
        number = await _number(tables, library) if library else None
        return JSONResponse({"tracks": await _off(lambda: finder.similar(track, limit, number))})

    @routes.post("/tracks/{track}/retry", status_code=202, summary="Tag a track again that failed or was toxic")
    async def retry(track: _Track) -> Response:
        found = await _off(lambda: catalogue.retry(tables, None, _AGAIN, track))
        if not found:
            state = (await _off(lambda: finder.one(track)))["state"]
            raise catalogue.not_failed(track, state)
        (library,) = found
        await node.enqueue("queue", {"library": library})
        return JSONResponse({"track": track, "library": library}, 202)

    @routes.api_route(
        "/tracks/{track}/audio", methods=["GET", "HEAD"], summary="The file itself, whole or a range of it"
    )
    async def audio(track: _Track) -> Response:
        path, kind = await _off(lambda: catalogue.place(tables, track))
        if not await _off(lambda: os.path.isfile(path)):  # noqa: PTH113  bytes
            raise NotFound(f"the file of track {track} is not there; is its library mounted?")
        headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "private, no-cache"}
        return FileResponse(os.fsdecode(path), headers=headers, media_type=f"audio/{_SOUNDS[kind]}")


def _playlists(routes: APIRouter, tables: Tables, finder: search.Search) -> None:
    @routes.get("/playlists/{name}", summary="A search as a playlist: NAME.m3u8, or NAME.nsp for Navidrome")
    async def playlist(
        name: str,
        tag: _Tags = None,
        without: _Without = None,
        text: _Text = "",
        library: _Library = None,
        limit: _Limit = 100,
        similar: Annotated[int | None, Query(ge=1, le=2**63 - 1)] = None,
        relative: bool = False,
    ) -> Response:
        """`similar`: tracks that sound like this one. `relative`: paths from the library's root."""
        title, _, kind = name.rpartition(".")
        query = await _query(tables, tag, without, text, library, limit)
        if kind == "nsp":
            return Response(playlists.smart(title, query), media_type="application/json")
        if kind not in ("m3u", "m3u8"):
            raise NotFound(f"{name!r:.100} is no kind of playlist; ask for NAME.m3u8 or NAME.nsp")

        def made() -> bytes:
            found = (
                finder.find(query)
                if similar is None
                else [finder.one(similar), *finder.similar(similar, limit, query.library)]
            )
            # What could not be decoded can hardly be played.
            sound = [one for one in found if one["state"] not in _AGAIN]
            return playlists.m3u(catalogue.with_places(tables, sound), relative=relative)

        return Response(await _off(made), media_type="audio/x-mpegurl")


_WISHES = {
    "name": {"type": "string"},
    "write_to": {"enum": ["file", "sidecar", "database"]},
    "ignore": {"type": "array", "items": {"type": "string"}},
    "watch": {"type": "boolean"},
}


def _takes(**schema: Any) -> dict[str, Any]:
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object", **schema}}}}
    }


_ADD = _takes(required=["path"], properties={"path": {"type": "string"}, **_WISHES})
_CHANGE = _takes(properties=_WISHES)


async def _off(work: Callable[[], T]) -> T:
    """Off the loop: the tables are asked in a thread."""
    return await asyncio.to_thread(work)


async def _number(tables: Tables, library: str) -> int:
    return await _off(lambda: catalogue.find(tables, library))


async def _query(
    tables: Tables,
    tags: list[str] | None,
    without: list[str] | None,
    text: str,
    library: str | None,
    limit: int,
    state: str | None = None,
    after: int = 0,
) -> search.Query:
    if state is not None and state not in STATES:
        raise BadArguments(f"state must be one of {', '.join(STATES)}, found {state!r:.100}")
    number = await _number(tables, library) if library else None
    return search.Query(tuple(map(_tag, tags or ())), tuple(without or ()), number, state, plain(text), limit, after)


def _tag(text: str) -> tuple[str, float | None]:
    """`rock` or `rock:0.4`."""
    name, colon, score = text.rpartition(":")
    if not colon:
        return text, None
    try:
        least = float(score)
    except ValueError:
        least = math.nan
    if not 0 <= least <= 1:
        raise BadArguments(f"tag must be a name, or a name and a score such as rock:0.4, found {text!r:.100}")
    return name, least


async def _object(request: Request) -> dict[str, Any]:
    data = await bodies.read(request, _BODY, PayloadTooLarge(f"the request is larger than {_BODY} bytes"))
    try:
        value = json.loads(data or b"{}")
    except (ValueError, RecursionError) as error:
        raise BadArguments(f"the request is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadArguments(f"the request must be a JSON object, found {type(value).__name__}")
    return value
