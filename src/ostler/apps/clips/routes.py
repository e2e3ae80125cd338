"""Clips over HTTP: parse, one verb, render. Only the node imports this."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect

from ostler import InputError, NotFound, StoreBusy
from ostler.apps.clips import result as clips
from ostler.apps.clips import source, uploads
from ostler.apps.clips.rules import ENDED, Refused, Rules
from ostler.web import body
from ostler.web.extend import NodeApi
from ostler.web.render import JSONResponse

log = logging.getLogger("ostler.clips")

_BODY = 65_536  # bytes of a request without a file
_SWEEP_EVERY = 2.0
_EXPIRE_EVERY = 600.0
_NUMBER = {"type": "number", "description": "seconds from the source's beginning"}
_DOCS = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["source", "start", "end"],
                    "properties": {"source": {"type": "string"}, "start": _NUMBER, "end": _NUMBER},
                }
            },
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "start", "end"],
                    "properties": {"file": {"type": "string", "format": "binary"}, "start": _NUMBER, "end": _NUMBER},
                }
            },
        },
    }
}


def router(node: NodeApi, rules: Rules) -> APIRouter:
    routes = APIRouter(prefix="/api/v1/clips", tags=["clips"])
    data = node.settings.data_dir
    sweeping = asyncio.get_running_loop().create_task(_sweep(node, rules), name="clips-uploads")

    @routes.post("", status_code=201, openapi_extra=_DOCS, summary="Cut a clip")
    async def create(request: Request) -> Response:
        """From a path or URL (JSON) or an upload (a form). On any error nothing was stored."""
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        if kind == b"multipart/form-data":
            job = await _from_form(node, rules, request, options.get(b"boundary", b""))
        else:
            wanted = _parse(await _read(request))
            rules.check_cut(wanted["start"], wanted["end"])
            await asyncio.to_thread(source.check, wanted["source"], rules, data)
            job = await node.enqueue("clip", wanted)
        return JSONResponse(job, 201, {"Location": f"/api/v1/clips/{job['id']}"})

    @routes.get("/{job}", summary="A clip's job with its timeline")
    async def one(job: int) -> Response:
        return JSONResponse(await _clip_job(node, job))

    @routes.api_route("/{job}/result", methods=["GET", "HEAD"], summary="The clip, whole or a range of it")
    async def result(job: int, request: Request) -> Response:
        found = await clips.find(node, rules, await _clip_job(node, job))
        return await clips.answer(node, request, found)

    # The loop keeps only a weak hold on its tasks; the router lives as long as the node.
    routes.sweeping = sweeping  # type: ignore[attr-defined]
    return routes


async def _from_form(node: NodeApi, rules: Rules, request: Request, boundary: bytes) -> dict[str, Any]:
    """Take the upload, then store its job. An upload without a job is deleted at once, or by age if the node dies here."""
    data, stream = node.settings.data_dir, request.stream()
    try:
        if (length := request.headers.get("content-length", "")).isdigit():
            rules.check_size(int(length) - uploads.FORM, "the upload")  # refused before a byte of it is taken
        upload = await uploads.receive(stream, boundary, rules, data)
    except Refused:
        await body.drop(request, stream)
        raise
    except ClientDisconnect:
        raise Refused("VALIDATION", "the upload broke off; send it again") from None
    except OSError as error:
        raise StoreBusy(f"the upload could not be written: {error.strerror}; nothing was stored, try again") from error
    try:
        start, end = (_seconds(upload.fields, name) for name in ("start", "end"))
        rules.check_cut(start, end)
        job = await node.enqueue("clip", {"source": source.UPLOAD + upload.token, "start": start, "end": end})
    except (InputError, StoreBusy, Refused):  # these, and no others, promise that nothing was stored
        upload.discard()
        raise
    await asyncio.to_thread(uploads.assign, data, upload.token, job["id"])
    return job


def _seconds(fields: dict[str, str], name: str) -> float:
    try:
        return float(fields[name])
    except KeyError:
        raise Refused("VALIDATION", f"the form has no {name!r}; send start and end in seconds") from None
    except ValueError:
        raise Refused("VALIDATION", f"{name} must be a number of seconds, found {fields[name]!r}") from None


async def _read(request: Request) -> bytes:
    message = f"the request is larger than {_BODY} bytes; send a video as the part 'file' of a form"
    return await body.read(request, _BODY, Refused("INPUT_TOO_LARGE", message))


def _parse(body: bytes) -> dict[str, Any]:
    """The request, when it has a source and two numbers and nothing else."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused("VALIDATION", f"the request is not JSON: {error}") from None
    if not isinstance(value, dict) or value.keys() != {"source", "start", "end"}:
        raise Refused("VALIDATION", 'the request must be {"source": path, "start": seconds, "end": seconds}')
    if not isinstance(value["source"], str) or not value["source"]:
        raise Refused("VALIDATION", f"source must be text, found {value['source']!r:.100}")
    for name in ("start", "end"):
        number = value[name]
        if isinstance(number, bool) or not isinstance(number, int | float) or abs(number) > 1e9:
            raise Refused("VALIDATION", f"{name} must be a number of seconds, found {number!r:.100}")
    return value


async def _clip_job(node: NodeApi, job: int) -> dict[str, Any]:
    found = await node.job(job)
    if found["task"] != "clip":
        raise NotFound(f"job {job} is no clip, but {found['task']!r}; look at /api/v1/jobs/{job}")
    return found


async def _sweep(node: NodeApi, rules: Rules) -> None:
    """Delete what nobody needs any more, again and again, for as long as the node runs."""

    async def live(job: int) -> bool:
        try:
            return (await node.job(job))["status"] not in ENDED
        except NotFound:
            return False

    expire_at = 0.0
    while True:
        began = time.monotonic()
        try:
            await uploads.sweep(node.settings.data_dir, rules, live, time.time())
            if began >= expire_at:
                await asyncio.to_thread(clips.expire, node.results, rules.result_ttl, time.time())
                expire_at = began + _EXPIRE_EVERY
        except Exception:  # the next look may do better
            log.exception("old uploads and clips could not be swept")
        # A look at thousands of uploads takes its time: never more than a twentieth of it is spent looking.
        await asyncio.sleep(max(_SWEEP_EVERY, 20 * (time.monotonic() - began)))
