"""Every error the API gives has one shape: {"error": {"code", "message", …}}."""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import math
from collections.abc import Collection, Iterable
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exception_handlers import http_exception_handler
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ostler import habits
from ostler.errors import BadArguments, OstlerError, StoreBusy
from ostler.web.render import JSONResponse

log = logging.getLogger("ostler.web")


class Problem(BaseModel):
    model_config = ConfigDict(extra="allow")
    code: str = Field(description="a code for programs, such as `NOT_FOUND`")
    message: str = Field(description="a message for people: what is wrong, and what to do")


class ErrorBody(BaseModel):
    """The body of every error."""

    error: Problem


# What a status means, for the description of the API. A route adds its own with `answers`.
_MEANINGS = {
    400: "The request is malformed.",
    401: "The request has no token, or a wrong one.",
    403: "The request comes from a page of another site, uses a host name that is not this node's, or has a token without the permission.",
    404: "Not found.",
    409: "Its state does not allow this.",
    413: "The body is too large.",
    416: "No byte of the wanted range exists.",
    422: "A parameter or the body is invalid. Nothing was stored.",
    426: "This is for WebSocket clients.",
    429: "Too many at the moment; try again later.",
    499: "The call was cancelled.",
    500: "Something failed inside the node or the model; the message or the node's log says what.",
    502: "Another process or node that is needed for this cannot be reached.",
    503: "The node cannot do this right now, for example because its store is busy. Try again.",
    504: "The call took too long.",
}
_HEADERS = {
    401: {"WWW-Authenticate": "always `Bearer`"},
    429: {"Retry-After": "seconds to wait"},
    503: {"Retry-After": "seconds to wait"},
}


def answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Errors that a route may answer, for its `responses`. `described.py` adds those that follow from a route's shape."""
    return {status: _described(status) for status in statuses}


def _described(status: int) -> dict[str, Any]:
    body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorBody.__name__}"}}}
    headers = {
        name: {"description": text, "schema": {"type": "string"}} for name, text in _HEADERS.get(status, {}).items()
    }
    return {"description": _MEANINGS[status], "content": body, **({"headers": headers} if headers else {})}


def failure(status: int, code: str, message: str, **more: Any) -> JSONResponse:
    """An error response."""
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": {"code": code, "message": message, **more}}, status, headers)


def not_allowed(method: str, path: str, allowed: Iterable[str]) -> JSONResponse:
    """405, with the methods that the path does take."""
    shown = ", ".join(sorted(allowed))
    answer = failure(405, "METHOD_NOT_ALLOWED", f"{path} takes {shown}, not {method}")
    answer.headers["Allow"] = shown
    return answer


def install(app: FastAPI) -> None:
    """Map our errors, FastAPI's and unexpected ones to that shape."""

    @app.exception_handler(OstlerError)
    async def ours(_: Request, error: OstlerError) -> JSONResponse:
        if isinstance(error, StoreBusy):
            log.warning("%s", error)
        known = {name: value for name in ("job", "task", "request_id") if (value := getattr(error, name, None))}
        answer = failure(error.status, error.code, str(error), **known)
        if (after := getattr(error, "retry_after", None)) is not None:
            answer.headers["Retry-After"] = str(math.ceil(after))
        return answer

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return failure(422, "BAD_INPUT", in_words(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        if _is_of_an_app(request):
            return await http_exception_handler(request, error)
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "").split(", ")
            return not_allowed(request.method, request.url.path, allowed)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return failure(error.status_code, {404: "NOT_FOUND"}.get(error.status_code, "HTTP"), message)

    @app.exception_handler(ClientDisconnect)
    async def broke_off(request: Request, _: ClientDisconnect) -> JSONResponse:
        log.info("%s %s: the client disconnected before its request was complete", request.method, request.url.path)
        return failure(400, "BROKE_OFF", "the request is incomplete")  # nobody is there to read it

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        with contextlib.suppress(AttributeError):
            error._logged = True  # type: ignore[attr-defined]  # noqa: SLF001
        message = (
            f"{request.method} {request.url.path} failed with {type(error).__name__}; the node's log has the details"
        )
        return failure(500, "INTERNAL", message)


def _is_of_an_app(request: Request) -> bool:
    """Whether the request is answered by a route of the user's own app. What its HTTPExceptions say is its business."""
    module = getattr(request.scope.get("endpoint"), "__module__", "ostler")
    return module.partition(".")[0] not in ("ostler", "fastapi", "starlette")


async def _known_query(request: Request) -> None:
    if not request.scope["query_string"]:
        return
    known = [str(field.alias) for field in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in known and name != "token":  # which the gate has read
            raise BadArguments(
                f"{request.url.path} has no query parameter {name!r}{closest(name, known)}; known: {', '.join(known)}"
            )


KNOWN_QUERY = [Depends(_known_query)]
"""`dependencies` of a route that lists: a filter that it does not know would silently list everything."""


def closest(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that is not known."""
    found = difflib.get_close_matches(name, [*known], 1)
    return f"; did you mean {found[0]}?" if found else ""


# uvicorn says this of each WebSocket that is refused with an HTTP answer: anybody could fill the log with it.
_REFUSED = "ASGI callable returned without completing handshake."


def is_news(record: logging.LogRecord) -> bool:
    """(a filter for the HTTP server's log) Whether a line tells something that was not logged here already, and is worth a line."""
    error = record.exc_info[1] if record.exc_info else None
    return not getattr(error, "_logged", False) and record.msg != _REFUSED


def in_words(errors: Any, fields: Collection[str] = ()) -> str:
    """Pydantic's complaints as one sentence. `fields` are those of the object that is described."""
    parts: dict[str, str] = {}
    for error in errors:
        where = ".".join(str(p) for p in error["loc"] if p not in ("body", "query", "path"))
        name = str(error["loc"][-1]) if error["loc"] else ""
        if error["type"] == "extra_forbidden" and fields:
            hint = habits.option(name, error["input"]) or closest(name, fields)
            parts[where] = f"there is no field {where!r}{hint}; known: {', '.join(fields)}"
        elif name in ("int", "float"):  # each kind of number complains on its own
            where = where.removesuffix(f".{name}")
            parts[where] = f"{where} must be a number, found {json.dumps(error['input'], default=str)[:100]}"
        else:
            parts[where] = f"{where}: {error['msg'].lower()}" if where else error["msg"]
    return "; ".join(parts.values())
