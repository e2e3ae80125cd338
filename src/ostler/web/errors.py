"""Every error the API gives has one shape: {"error": {"code", "message", …}}."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ostler.errors import OstlerError, StoreBusy
from ostler.web.render import JSONResponse

log = logging.getLogger("ostler.web")


def failure(status: int, code: str, message: str, **more: Any) -> JSONResponse:
    """An error response."""
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": {"code": code, "message": message, **more}}, status, headers)


def install(app: FastAPI) -> None:
    """Map our errors, FastAPI's and unexpected ones to that shape."""

    @app.exception_handler(OstlerError)
    async def ours(_: Request, error: OstlerError) -> JSONResponse:
        if isinstance(error, StoreBusy):
            log.warning("%s", error)
        return failure(error.status, error.code, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return failure(422, "BAD_INPUT", in_words(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return failure(
            error.status_code, {404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED"}.get(error.status_code, "HTTP"), message
        )

    @app.exception_handler(ClientDisconnect)
    async def broke_off(request: Request, _: ClientDisconnect) -> JSONResponse:
        log.info("%s %s: the client left before its request was whole", request.method, request.url.path)
        return failure(400, "BROKE_OFF", "the request broke off")  # nobody is there to read it

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return failure(500, "INTERNAL", "something went wrong inside the node; its log has the details")


def in_words(errors: Any) -> str:
    """Pydantic's complaints as one sentence."""
    parts = []
    for error in errors:
        where = ".".join(str(p) for p in error["loc"] if p not in ("body", "query", "path"))
        parts.append(f"{where}: {error['msg'].lower()}" if where else error["msg"])
    return "; ".join(parts)
