"""Who may speak to the node: a token where one is set, and on loopback no web page of somebody else's."""

from __future__ import annotations

import hmac
from http.cookies import SimpleCookie
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ostler.config import Settings, is_loopback
from ostler.web.errors import failure

COOKIE = "ostler_token"

# Open without a token: probes, the way in, and the dashboard's files, which hold no data.
_OPEN = ("/healthz", "/readyz", "/login")
_FILES = "/ui/"
_FOR_PEOPLE = ("/", "/docs")


class Gate:
    """ASGI middleware: refuses before any route is looked at."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and (refusal := self._refusal(scope)):
            status, code, message = refusal
            if status == 401 and scope["path"] in _FOR_PEOPLE and "text/html" in Headers(scope=scope).get("accept", ""):
                await RedirectResponse("/login", 303)(scope, receive, send)  # a person with a browser
                return
            await failure(status, code, message)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str, str] | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        # A page from elsewhere can make a browser send requests here; it cannot hide where it comes from.
        if is_loopback(self._settings.host) and host and not is_loopback(_name(host)):
            return 403, "FORBIDDEN_HOST", f"this node listens on loopback only; Host {host!r} is not a name of it"
        origin = headers.get("origin")
        if origin and origin != "null" and origin.partition("://")[2] != host:
            return 403, "FORBIDDEN_ORIGIN", f"requests from pages of {origin} are not taken"
        if origin == "null" and scope.get("method", "GET") not in ("GET", "HEAD"):
            return 403, "FORBIDDEN_ORIGIN", "requests from pages without an origin are not taken"
        if self._settings.token and not self._is_open(scope["path"]) and not self._known(headers, scope):
            return 401, "UNAUTHORIZED", "a token is needed: send the header 'Authorization: Bearer …'"
        return None

    def _is_open(self, path: str) -> bool:
        return path in _OPEN or path.startswith(_FILES)

    def _known(self, headers: Headers, scope: Scope) -> bool:
        given = headers.get("authorization", "")
        # Headers are read as Latin-1; what clients send is UTF-8.
        candidates = [given[7:].encode("latin-1").decode(errors="replace")] if given[:7].lower() == "bearer " else []
        candidates += parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        if (cookie := SimpleCookie(headers.get("cookie", "")).get(COOKIE)) is not None:
            candidates.append(cookie.value)
        return any(hmac.compare_digest(c.encode(), self._settings.token.encode()) for c in candidates)


def _name(host: str) -> str:
    """The name in a Host header, without its port; empty when it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # brackets that are no IPv6 address
        return ""
