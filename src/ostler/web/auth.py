"""The gate of the node's own server: what `plane/access.py` refuses reaches no route."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ostler.config import Settings
from ostler.plane.access import Access, Refusal
from ostler.web.connections import PEER
from ostler.web.errors import failure

_FOR_PEOPLE = ("/", "/docs")


class Gate:
    """ASGI middleware: refuses before any route is looked at."""

    def __init__(self, app: ASGIApp, settings: Settings, secret: str = "") -> None:
        self._app, self._access = app, Access.of(settings, secret)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and (refusal := self._refusal(scope)):
            if (
                refusal.status == 401
                and scope["path"] in _FOR_PEOPLE
                and "text/html" in Headers(scope=scope).get("accept", "")
            ):
                await RedirectResponse("/login", 303)(scope, receive, send)  # a person with a browser
                return
            await failure(*refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        # A WebSocket may change things, and its peer is in its state: see Connection.handle_websocket_upgrade.
        method, about = ("POST", scope.get("state", {})) if scope["type"] == "websocket" else (scope["method"], scope)
        return self._access.refusal(method, scope["path"], scope["query_string"], scope["headers"], about.get(PEER))
