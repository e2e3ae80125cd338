"""Environments over HTTP: which there are, and how they are. They are built from the terminal: `ostler env build`."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from ostler.web.context import Context
from ostler.web.render import JSONResponse


class EnvView(BaseModel):
    """One environment. `usable`: an interpreter is there, also while it is built again or when the last build failed."""

    name: str
    state: str
    reason: str | None
    usable: bool
    python: str | None
    directory: str
    interpreter: str | None
    built_at: int | None
    installer: str | None
    log: str | None
    tail: list[str]
    command: str
    described: dict[str, Any] | None


class EnvList(BaseModel):
    envs: list[EnvView]


def router(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", tags=["environments"])

    @routes.get("/envs", response_model=EnvList, summary="The environments of this node")
    async def listing() -> JSONResponse:
        """`state` is not built, building, ready, outdated or failed; `command` builds it."""
        return JSONResponse({"envs": await asyncio.to_thread(context.envs)})

    return routes
