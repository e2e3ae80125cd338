"""The six tasks over HTTP, with the paths of seed 003, and the page to try them. Only the node imports this."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from ostler import Body, PayloadTooLarge
from ostler.apps.models import shapes
from ostler.calls.body import read_form
from ostler.calls.calling import CallOptions
from ostler.calls.exchange import Answer
from ostler.calls.request import BadRequest
from ostler.errors import BadArguments
from ostler.web import body as bodies
from ostler.web.extend import NodeApi
from ostler.web.render import JSONResponse

_JSON = 4_194_304  # bytes of a request that is JSON without a file in it
_FILE_JSON = 33_554_432  # … with a file in it
_IS_JSON = ("application/json", "")


def router(node: NodeApi) -> APIRouter:
    routes = APIRouter(tags=["models"])
    most = node.settings.max_body

    def file_route(path: str, task: str, name: str, asked: type[BaseModel], given: type[BaseModel], what: str) -> None:
        """A task that takes one file."""

        async def run(request: Request) -> Response:
            model, payload = await _file(request, name, asked, most)
            return _reply(await _awaited(request, node.call(task, model, payload, **_wishes(request))))

        routes.post(path, response_model=given, openapi_extra=_takes(asked, name), summary=what, name=task)(run)

    @routes.post(
        "/api/text-to-embedding",
        response_model=shapes.EmbeddingReply,
        openapi_extra=_takes(shapes.EmbeddingRequest),
        summary="Texts to vectors",
    )
    async def embed(request: Request) -> Response:
        asked = await _parsed(request, shapes.EmbeddingRequest, _JSON)
        call = node.call("embedding", asked.model, {"texts": asked.texts}, **_wishes(request))
        return _reply(await _awaited(request, call))

    @routes.post(
        "/api/text-generation",
        response_model=shapes.GenerationReply,
        openapi_extra=_takes(shapes.GenerationRequest),
        summary="Text from a prompt or a conversation, whole or as a stream",
    )
    async def generate(request: Request) -> Response:
        asked = await _parsed(request, shapes.GenerationRequest, _JSON)
        payload = asked.model_dump(exclude={"model", "stream"}, exclude_none=True)
        if asked.stream:
            return await _streamed(node.stream("generation", asked.model, payload, **_wishes(request)))
        call = node.call("generation", asked.model, payload, **_wishes(request))
        return _reply(_joined(await _awaited(request, call), asked.model))

    file_route("/api/image-ocr", "ocr", "image", shapes.OcrRequest, shapes.OcrReply, "Text in an image")
    file_route(
        "/api/automatic-speech-recognition",
        "speech",
        "audio",
        shapes.SpeechRequest,
        shapes.SpeechReply,
        "Speech to text",
    )
    file_route(
        "/api/speaker-diarization",
        "diarization",
        "audio",
        shapes.DiarizationRequest,
        shapes.DiarizationReply,
        "Who speaks when",
    )
    file_route(
        "/api/image-captioning",
        "captioning",
        "image",
        shapes.CaptioningRequest,
        shapes.CaptioningReply,
        "A sentence about an image",
    )

    @routes.get("/api/health", response_model=shapes.Health, summary="The models that are loaded")
    async def health() -> Response:
        return JSONResponse(_health(node))

    routes.include_router(node.page("Models", "/models", files("ostler.apps.models") / "page"))
    return routes


# ---- what comes


async def _parsed(request: Request, shape: type[Any], most: int) -> Any:
    """The request's JSON in its shape; raises what the API answers with 4xx."""
    refusal = PayloadTooLarge(f"the request is larger than {most} bytes")
    return _shaped(await bodies.read(request, most, refusal), shape)


def _shaped(data: bytes, shape: type[Any]) -> Any:
    try:
        return shape.model_validate_json(data)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_context=False, include_input=False)) from None


async def _file(request: Request, name: str, shape: type[BaseModel], most: int) -> tuple[str, Any]:
    """The model that is meant and what it is sent: the file as it came, or the JSON."""
    kind = request.headers.get("content-type", "")
    plain = kind.partition(";")[0].strip().lower()
    default = str(shape.model_fields["model"].default)
    if plain in _IS_JSON:
        advice = f"a request in JSON may have {_FILE_JSON} bytes; send a larger file itself, as the body or in a form"
        asked = _shaped(await bodies.read(request, min(most, _FILE_JSON), PayloadTooLarge(advice)), shape)
        return asked.model, asked.model_dump(exclude={"model"})
    data = await bodies.read(request, most, PayloadTooLarge(f"the request is larger than {most} bytes (max_body)"))
    named = request.query_params.get("model")
    if plain == "multipart/form-data":
        try:
            form = read_form(data, kind)
        except BadRequest as error:
            raise BadArguments(str(error)) from None
        if len(form.files) != 1:
            raise BadArguments(f"the form must have one file, the {name}; found {len(form.files)}")
        return named or form.fields.get("model") or default, Body(data, kind)
    return named or default, Body(data, kind)


def _wishes(request: Request) -> CallOptions:
    """What is asked for beside the call itself, in the headers that a call has."""
    found: CallOptions = {}
    if (timeout := request.headers.get("x-ostler-timeout")) is not None:
        found["timeout"] = timeout
    if (keep := request.headers.get("x-ostler-keep-alive")) is not None:
        found["keep_alive"] = keep
    if (priority := request.headers.get("x-ostler-priority")) is not None:
        try:
            found["priority"] = int(priority)
        except ValueError:
            raise BadArguments(f"x-ostler-priority must be a whole number, found {priority[:40]!r}") from None
    return found


async def _awaited(request: Request, call: Coroutine[Any, Any, Answer]) -> Answer:
    """The answer; if the client leaves before it is there, the call is cancelled in the model, too."""
    working, leaving = asyncio.ensure_future(call), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# ---- what goes


def _reply(answer: Answer) -> Response:
    told = {"model": answer.model, "request_id": answer.request_id, "processing_time_ms": answer.processing_time_ms}
    return JSONResponse({**answer.result, **told})


def _joined(answer: Answer, model: str) -> Answer:
    """The pieces of a stream as one text."""
    *pieces, end = answer.result
    text = "".join(piece["text"] for piece in pieces)
    result = {"text": text, **{name: end[name] for name in ("tokens", "prompt_tokens", "finish_reason")}}
    return Answer(result, answer.request_id, answer.processing_time_ms, answer.model or model)


async def _streamed(items: AsyncIterator[Any]) -> Response:
    """Server-sent events. The first item is awaited: until then an error can still be an answer of its own."""
    first = await anext(items)

    async def events() -> AsyncIterator[bytes]:
        yield _event(first)
        async for item in items:
            yield _event(item)
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def _event(item: Any) -> bytes:
    return b"data: %s\n\n" % json.dumps(item).encode()


def _health(node: NodeApi) -> dict[str, Any]:
    """In the form of seed 003, from memory: nobody waits for a lock."""
    kept = ("state", "socket", "idle_seconds", "memory_mb", "in_flight")
    found = {name: told for name, told in node.models().items() if told["state"] not in ("IDLE", "UNAVAILABLE")}
    workers = {name: {key: told[key] for key in kept} for name, told in found.items()}
    failed = any(told["state"] == "FAILED" for told in found.values())
    status = "degraded" if failed else "healthy"
    return {"status": status, "workers": workers, "gpu_lock_held": node.gpu_lock_held()}


def _takes(shape: type[BaseModel], file: str = "") -> dict[str, Any]:
    """What a route takes, for the API's description."""
    schema = shape.model_json_schema(ref_template="{model}")
    schema = _inlined(schema, schema.pop("$defs", {}))
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if file:
        raw = {"type": "string", "format": "binary"}
        others = {name: one for name, one in schema["properties"].items() if name != file}
        form = {"type": "object", "required": ["file"], "properties": {"file": raw, **others}}
        content |= {"multipart/form-data": {"schema": form}, f"{file}/*": {"schema": raw}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(value: Any, known: dict[str, Any]) -> Any:
    """A schema with what it refers to put in its place: only replies are among the description's components."""
    if isinstance(value, dict):
        named = value.get("$ref")
        return _inlined(known[named], known) if named else {key: _inlined(one, known) for key, one in value.items()}
    return [_inlined(one, known) for one in value] if isinstance(value, list) else value
