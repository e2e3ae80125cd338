"""The HTTP API: routes per noun, one shape of errors, one gate. No logic of its own."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware import Middleware

import ostler
from ostler.web import (
    artifacts,
    calls,
    described,
    elsewhere,
    envs,
    errors,
    fleet,
    flows,
    info,
    jobs,
    metrics,
    models,
    own,
    pages,
    schedules,
    sessions,
    stream,
    workers,
)
from ostler.web.auth import Gate
from ostler.web.context import Context
from ostler.web.extend import NodeApi


def build(context: Context, routes: Sequence[own.Factory] = ()) -> FastAPI:
    """The ASGI app of one node, with the app's own routes."""
    app = FastAPI(
        title="Ostler",
        version=ostler.__version__,
        description="A worker runtime for heavy Python work. Times are milliseconds UTC; errors are `{error: {code, message}}`.",
        middleware=[Middleware(Gate, settings=context.settings, secret=context.secret)],
        docs_url=None,  # ours needs no other host
        redoc_url=None,
        generate_unique_id_function=described.operation_id,
    )
    errors.install(app)
    described.install(app, elsewhere.paths(context))
    parts = (
        pages,
        info,
        metrics,
        stream,
        workers,
        models,
        envs,
        calls,
        sessions,
        fleet,
        flows,
        schedules,
        artifacts,
        jobs,
    )
    routers = [part.router(context) for part in parts] + own.routers(routes, NodeApi(context))
    described.close(routers)
    for router in routers:
        app.include_router(router)
    return app
