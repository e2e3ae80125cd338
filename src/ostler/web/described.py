"""The description of the API at /openapi.json: FastAPI's, with the errors that routes really answer and schemas that generators can use."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from ostler.plane.access import is_open
from ostler.web.errors import ErrorBody, Problem, answers, not_allowed

log = logging.getLogger("ostler.web")
_SCHEMAS = "#/components/schemas/"
_NAMES = {"listing": "list", "one": "get"}  # of our functions; the rest are verbs already
_METHODS = frozenset({"get", "put", "post", "patch", "delete", "head", "options", "trace"})


def operation_id(route: APIRoute) -> str:
    """What generators name a method after: `jobs_list`, `workers_drain`. Without a tag, the name of the function."""
    name = _NAMES.get(route.name, route.name)
    return f"{route.tags[0]}_{name}" if route.tags else name


# ---- methods


class _Refuse:
    """Answers any method with 405 and those that the path takes."""

    def __init__(self, allowed: set[str]) -> None:
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        await not_allowed(request.method, request.url.path, self._allowed)(scope, receive, send)


def close(routers: Sequence[APIRouter]) -> None:
    """Have each path refuse the methods that it does not take, before a route with a wider path sees the request.

    Without it `GET /api/v1/jobs/bulk` would be a question for the job "bulk", and `Allow` would name the methods of one route of several.
    """
    allowed: dict[str, set[str]] = {}
    last: dict[str, tuple[APIRouter, APIRoute]] = {}
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute):
                shape = re.sub(r"{\w+", "{", route.path)
                allowed.setdefault(shape, set()).update(route.methods or ())
                last[shape] = (router, route)
    for shape, (router, route) in last.items():
        place = router.routes.index(route) + 1
        router.routes.insert(place, Route(route.path, _Refuse(allowed[shape]), include_in_schema=False))


# ---- the document


def install(app: FastAPI, more: dict[str, Any]) -> None:
    """Have the app describe itself so, with more paths than it has; made once, when somebody asks."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            told = _told(app)
            told["paths"] = more | told["paths"]
            app.openapi_schema = _finished(told)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _told(app: FastAPI) -> dict[str, Any]:
    def of(routes: Sequence[BaseRoute]) -> dict[str, Any]:
        about = {"title": app.title, "version": app.version, "description": app.description, "tags": app.openapi_tags}
        with warnings.catch_warnings():
            # Two methods of one route have the same id here; `_finished` tells them apart.
            warnings.filterwarnings("ignore", "Duplicate Operation ID")
            return get_openapi(routes=routes, **about)  # type: ignore[arg-type]

    try:
        return of(app.routes)
    except Exception:  # noqa: BLE001  a route of an app's own must not break the description of the node's
        fine = []
        for route in app.routes:
            try:
                of([route])
            except Exception as error:  # noqa: BLE001
                log.warning(
                    "%s is not in /openapi.json: %s: %s", getattr(route, "path", route), type(error).__name__, error
                )
            else:
                fine.append(route)
        return of(fine)


def _finished(document: dict[str, Any]) -> dict[str, Any]:
    parts = document.setdefault("components", {})
    schemas = parts.setdefault("schemas", {})
    for model in (ErrorBody, Problem):
        _add(schemas, model.__name__, model.model_json_schema(ref_template=_SCHEMAS + "{model}"))
    ids: set[str] = set()
    for path, item in document["paths"].items():
        for method, operation in sorted(item.items(), key=lambda one: (one[0] != "get", one[0])):
            if method in _METHODS:
                _add_errors(path, operation)
                while operation["operationId"] in ids:  # one function for several methods, or of an app's own
                    operation["operationId"] += f"_{method}"
                ids.add(operation["operationId"])
                _lift(operation, schemas)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    parts["securitySchemes"] = {
        "token": {
            "type": "http",
            "scheme": "bearer",
            "description": "`ostler token` prints it. On loopback the node's own user needs none.",
        }
    }
    document["security"] = [{}, {"token": []}]
    return document


def _add_errors(path: str, operation: dict[str, Any]) -> None:
    """The errors that follow from a route's shape, beside those that it names itself."""
    found = operation.setdefault("responses", {})
    inputs = operation.get("parameters", [])
    statuses = set() if is_open(path) else {401, 403, 503}
    if inputs or "requestBody" in operation:
        statuses.add(422)
        if "HTTPValidationError" in str(found.get("422")):
            del found["422"]  # FastAPI's, which no route answers
    if any(one["in"] == "path" for one in inputs):
        statuses.add(404)
    if "requestBody" in operation:
        statuses.add(413)
    for status, answer in answers(*statuses).items():
        found.setdefault(str(status), answer)
    operation["responses"] = dict(sorted(found.items()))


def _lift(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Move the schemas of a body that a route reads by hand to the document's own, where their references lead."""
    for content in operation.get("requestBody", {}).get("content", {}).values():
        schema = content.get("schema", {})
        names = {name: _add(schemas, name, one) for name, one in schema.pop("$defs", {}).items()}
        for name in names.values():
            schemas[name] = _renamed(schemas[name], names)
        schema = _renamed(schema, names)
        if "title" in schema and schema.get("type") == "object":
            schema = {"$ref": _SCHEMAS + _add(schemas, schema["title"], schema)}
        content["schema"] = schema


def _add(schemas: dict[str, Any], name: str, schema: dict[str, Any]) -> str:
    """The name under which a schema is kept: its own, unless another schema has that."""
    schema = {key: one for key, one in schema.items() if key != "$defs"}
    while schemas.setdefault(name, schema) != schema:
        name += "Input"
    return name


def _renamed(value: Any, names: dict[str, str]) -> Any:
    """A schema whose references lead to the document's own schemas."""
    if isinstance(value, list):
        return [_renamed(one, names) for one in value]
    if not isinstance(value, dict):
        return value
    found = {key: _renamed(one, names) for key, one in value.items()}
    if isinstance(to := found.get("$ref"), str) and to.startswith("#/$defs/"):
        known = to.removeprefix("#/$defs/")
        found["$ref"] = _SCHEMAS + names.get(known, known)
    return found
