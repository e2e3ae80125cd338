"""Every error the API gives has one shape: {"error": {"code", "message", …}}."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exception_handlers import http_exception_handler
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ostler.errors import OstlerError, StoreBusy
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
        return failure(500, "INTERNAL", "something went wrong inside the node; its log has the details")


def _is_of_an_app(request: Request) -> bool:
    """Whether the request is answered by a route of the user's own app. What its HTTPExceptions say is its business."""
    module = getattr(request.scope.get("endpoint"), "__module__", "ostler")
    return module.partition(".")[0] not in ("ostler", "fastapi", "starlette")


def in_words(errors: Any) -> str:
    """Pydantic's complaints as one sentence."""
    parts = []
    for error in errors:
        where = ".".join(str(p) for p in error["loc"] if p not in ("body", "query", "path"))
        parts.append(f"{where}: {error['msg'].lower()}" if where else error["msg"])
    return "; ".join(parts)
