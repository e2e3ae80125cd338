"""Paths that the data plane answers by itself, for the description of the API: sessions, and OpenAI's where a model has them.

They are not among the node's routes: an app without such models may have these paths itself.
"""

from __future__ import annotations

from typing import Any

from ostler.calls.openai import ROUTES
from ostler.web.context import Context
from ostler.web.errors import answers

_OBJECT = {"application/json": {"schema": {"type": "object", "additionalProperties": True}}}
_FORM = {"multipart/form-data": {"schema": {"type": "object", "additionalProperties": True}}}
_EVENTS = {"text/event-stream": {"schema": {"type": "string"}}}


def paths(context: Context) -> dict[str, dict[str, Any]]:
    """Those that this node has, as OpenAPI describes paths."""
    spoken = context.calls.spoken()
    found = {path: {"post": _call(method)} for path, method in ROUTES.items() if method in spoken}
    if spoken:
        found["/v1/models"] = {"get": _listing("list", "The models that can be called so")}
        found["/v1/models/{model}"] = {
            "get": {**_listing("get", "One model"), "parameters": [_named("model", "its id")]}
        }
    if context.sessions is not None:
        found["/sessions/{name}"] = {"get": _session()}
    return found


def _call(method: str) -> dict[str, Any]:
    content = {**_OBJECT, **(_EVENTS if method == "chat" else {})}
    return {
        "tags": ["openai"],
        "operationId": f"openai_{method}",
        "summary": "Call a model as OpenAI's API does",
        "requestBody": {"required": True, "content": _FORM if method == "transcribe" else _OBJECT},
        "responses": _told({200: _given(content), **answers(400, 404, 429, 499, 500, 502, 504)}),
    }


def _listing(name: str, summary: str) -> dict[str, Any]:
    return {
        "tags": ["openai"],
        "operationId": f"openai_{name}",
        "summary": summary,
        "responses": _told({200: _given(_OBJECT)}),
    }


def _session() -> dict[str, Any]:
    begins = {"description": "The session begins: from here on the connection is a WebSocket to its worker."}
    return {
        "tags": ["sessions"],
        "operationId": "sessions_connect",
        "summary": "Open a session (WebSocket)",
        "parameters": [_named("name", "of a session pool")],
        "responses": _told({101: begins, **answers(400, 409, 426, 429)}),
    }


def _named(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "description": text, "schema": {"type": "string"}}


def _given(content: dict[str, Any]) -> dict[str, Any]:
    return {"description": "The answer", "content": content}


def _told(responses: dict[Any, Any]) -> dict[str, Any]:
    return {str(status): answer for status, answer in responses.items()}
