"""Who may use the node: those with its token, on loopback also its own user and root, and no web page of another site.

Other nodes of the same store know a secret that is in the store. With it they may read the inner routes, and nothing else.
"""

from __future__ import annotations

import hmac
import os
from urllib.parse import parse_qs, unquote, urlsplit

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ostler import private
from ostler.config import Settings, is_loopback
from ostler.web.connections import PEER
from ostler.web.errors import failure

COOKIE = "ostler_token"

# Open without a token: probes, the way in, and the dashboard's files, which hold no data.
_OPEN = ("/healthz", "/readyz", "/login")
_FILES = "/ui/"
_INNER = "/api/v1/inner/"
_FOR_PEOPLE = ("/", "/docs")
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")


def token(settings: Settings) -> str:
    """The node's token: the configured one, or its own in the data directory."""
    return settings.token or private.token(settings.data_dir)


class Gate:
    """ASGI middleware: refuses before any route is looked at."""

    def __init__(self, app: ASGIApp, settings: Settings, secret: str = "") -> None:
        self._app, self._token, self._secret = app, token(settings), secret
        self._loopback = is_loopback(settings.host)
        self._public = frozenset(name.strip().lower() for name in settings.public.split(",") if name.strip())
        # Users are told apart only where everybody is on this machine, and not behind a proxy: there, all come as its user.
        trusts = self._loopback and not settings.token and not self._public
        self._friends = frozenset({0, os.geteuid()}) if trusts else frozenset()

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
        if self._is_node(scope, headers):
            return None  # it may know us by a name that no client uses
        host, origin = headers.get("host", ""), headers.get("origin")
        # A page from elsewhere can make a browser send requests here; it cannot hide where it comes from.
        if self._loopback and host and not is_loopback(_name(host)) and _name(host) not in self._public:
            return (
                403,
                "FORBIDDEN_HOST",
                f"this node listens on loopback, and Host {host!r} is not a name of it; behind a reverse proxy, set `public`",
            )
        if origin and origin != "null" and not self._is_own(origin.partition("://")[2], host):
            return 403, "FORBIDDEN_ORIGIN", f"requests from pages of {origin} are not taken"
        if origin == "null" and scope.get("method", "GET") not in ("GET", "HEAD"):
            return 403, "FORBIDDEN_ORIGIN", "requests from pages without an origin are not taken"
        if not self._is_open(scope["path"]) and not self._is_friend(scope, headers) and not self._knows(headers, scope):
            return (
                401,
                "UNAUTHORIZED",
                "a token is needed: send the header 'Authorization: Bearer …' (`ostler token` prints it)",
            )
        return None

    def _is_node(self, scope: Scope, headers: Headers) -> bool:
        """Whether another node of the store reads an inner route."""
        if not (self._secret and scope["path"].startswith(_INNER) and scope.get("method") == "GET"):
            return False
        return any(_same(given, self._secret) for given in _bearer(headers))

    def _is_own(self, origin: str, host: str) -> bool:
        return origin == host or _name(origin) in self._public

    def _is_open(self, path: str) -> bool:
        return path in _OPEN or path.startswith(_FILES)

    def _is_friend(self, scope: Scope, headers: Headers) -> bool:
        """Whether the node's own user or root has connected, and not for somebody else."""
        return scope.get(PEER) in self._friends and not any(name in headers for name in _FORWARDED)

    def _knows(self, headers: Headers, scope: Scope) -> bool:
        candidates = _bearer(headers) + parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        for line in headers.getlist("cookie"):
            candidates += cookies(line)
        return any(_same(given, self._token) for given in candidates)


def _bearer(headers: Headers) -> list[str]:
    """The token of an Authorization header. Headers are read as Latin-1; what clients send is UTF-8."""
    given = headers.get("authorization", "")
    return [given[7:].encode("latin-1").decode(errors="replace")] if given[:7].lower() == "bearer " else []


def _same(given: str, wanted: str) -> bool:
    """In a time that tells nothing."""
    return hmac.compare_digest(given.encode(errors="replace"), wanted.encode())


def cookies(line: str) -> list[str]:
    """The values of our cookie in a Cookie header. Cookies of other programs on this host come along, in any shape."""
    pairs = (part.strip().partition("=") for part in line.split(";"))
    return [form for name, _, value in pairs if name == COOKIE for form in (value, unquote(value))]


def _name(host: str) -> str:
    """The name in a Host header, without its port; empty when it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # brackets that are no IPv6 address
        return ""
