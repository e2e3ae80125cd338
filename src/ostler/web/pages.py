"""The dashboard's own files, and the way in where a token is asked for.

The files are ours alone, load nothing from other hosts, and are served with a policy that says so. They hold no data: what they
show comes from the same API that everybody else uses.
"""

from __future__ import annotations

import hashlib
import hmac
import html
import mimetypes
import time
from collections import deque
from collections.abc import Hashable
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from ostler.errors import NotFound
from ostler.plane.access import COOKIE
from ostler.plane.access import token as token_of
from ostler.web.connections import PEER
from ostler.web.context import Context
from ostler.web.errors import failure
from ostler.web.jobs import read

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again each time, answered with 304: an upgrade shows at once
}
_REMEMBERED = 30 * 86_400
_FORM = 4096  # bytes of the form that asks for the token


class Tries:
    """Wrong tokens at /login. After `most` in a minute, no more of that client's are looked at until the minute is over."""

    most, window, clients = 10, 60.0, 1000

    def __init__(self) -> None:
        self._wrong: dict[Hashable, deque[float]] = {}

    def is_over(self, client: Hashable, now: float) -> bool:
        wrong = self._wrong.get(client, deque())
        while wrong and wrong[0] <= now - self.window:
            wrong.popleft()
        return len(wrong) >= self.most

    def note(self, client: Hashable, now: float) -> None:
        wrong = self._wrong.pop(client, deque())
        wrong.append(now)
        self._wrong[client] = wrong  # the newest is last
        if len(self._wrong) > self.clients:
            del self._wrong[next(iter(self._wrong))]


_Files = dict[str, tuple[bytes, str, str]]  # name -> (content, media type, tag)


def _file(name: str, content: bytes) -> tuple[bytes, str, str]:
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return content, kind, f'"{hashlib.sha256(content).hexdigest()[:16]}"'


def _files(folder: Traversable) -> _Files:
    return {path.name: _file(path.name, path.read_bytes()) for path in folder.iterdir() if path.is_file()}


@cache
def _assets() -> _Files:
    """Everything in the dashboard's folder."""
    return _files(files("ostler.web") / "dashboard")


def asset(name: str, request: Request | None = None, status: int = 200, among: _Files | None = None) -> Response:
    """One of the files; 304 when the browser has it already."""
    found = (_assets() if among is None else among).get(name)
    if found is None:
        raise NotFound(f"there is no file {name!r:.200}")
    content, kind, tag = found
    headers = {**_HEADERS, "ETag": tag}
    if request is not None and request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, status, headers, kind)


def app_page(title: str, path: str, folder: Traversable) -> APIRouter:
    """The page of an app at `path`, in the dashboard's frame: `page.js` fills it, and `page.css` adds to the dashboard's style."""
    frame = (
        _assets()["page.html"][0].decode().replace("{title}", html.escape(title)).replace("{path}", html.escape(path))
    )
    own = {"page.css": _file("page.css", b""), **_files(folder), "": _file("page.html", frame.encode())}
    routes = APIRouter(include_in_schema=False)

    @routes.get(path)
    async def page(request: Request) -> Response:
        return asset("", request, among=own)

    @routes.get(path + "/{name}")
    async def file(name: str, request: Request) -> Response:
        return asset(name, request, among=own)

    return routes


def router(context: Context) -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    token, tries = token_of(context.settings), Tries()

    @routes.get("/")
    async def root(request: Request) -> Response:
        if "token" in request.query_params:  # the gate has checked it: keep it where no history shows it
            return _remember(RedirectResponse("/", 303), token, request)
        return asset("index.html", request)

    @routes.get("/ui/{name}")
    async def file(name: str, request: Request) -> Response:
        return asset(name, request)

    @routes.get("/docs")
    async def docs(request: Request) -> Response:
        return asset("docs.html", request)

    @routes.get("/login")
    async def login(request: Request) -> Response:
        return asset("login.html", request)

    @routes.post("/login")
    async def enter(request: Request) -> Response:
        # Nobody is known here yet: a body that is larger than any token is not read to its end.
        given = parse_qs((await read(request, _FORM)).decode("utf-8", "replace")).get("token", [""])[0]
        client, now = _client(request, proxied=bool(context.settings.public)), time.monotonic()
        if tries.is_over(client, now):
            return failure(
                429, "TOO_MANY_TRIES", f"{tries.most} wrong tokens in a minute; wait a minute, then try again"
            )
        if not hmac.compare_digest(given.encode(), token.encode()):
            tries.note(client, now)
            return RedirectResponse("/login?wrong=1", 303)
        return _remember(RedirectResponse("/", 303), token, request)

    @routes.post("/logout")
    async def leave() -> Response:
        answer = RedirectResponse("/login", 303)
        answer.delete_cookie(COOKIE)
        return answer

    return routes


def _client(request: Request, *, proxied: bool) -> Hashable:
    """Whose tries are counted together: a user of this machine, or an address, which a proxy tells in X-Forwarded-For."""
    uid = request.scope.get(PEER)
    return uid if uid is not None and not proxied else request.client and request.client.host


def _remember(answer: Response, token: str, request: Request) -> Response:
    answer.set_cookie(
        COOKIE,
        quote(token, safe=""),
        max_age=_REMEMBERED,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return answer
