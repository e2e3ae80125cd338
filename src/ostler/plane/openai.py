"""OpenAI's routes: which model a request means. It is then called as any other, and its worker speaks OpenAI's language.

A client names a model in the body, most often behind what may be long, so a body whose beginning does not have the name is kept
until the name has come. All that is kept so is bounded.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import weakref
from collections.abc import Generator, Iterator
from typing import Any
from urllib.parse import parse_qs, unquote

from ostler.calls.openai import ROUTES
from ostler.calls.speech import error_object
from ostler.plane.call import Task
from ostler.plane.calls import Calls
from ostler.plane.plan import Peek, Plan, Refuse, Reply, Serve
from ostler.plane.request import Request

PREFIX = "/v1/"
_MODELS = "/v1/models"
# What programs behind `app.server` may also have; a class of ours has no such methods.
_OF_SERVERS = frozenset(
    f"/v1/{name}"
    for name in ("completions", "responses", "rerank", "audio/translations", "audio/speech", "images/generations")
)
_PEEK = 65_536  # bytes in which the name is looked for first
_KEPT = 268_435_456  # bytes of all bodies whose model is not known yet
_AT_ONCE = 2000  # steps of the search through a long body, between which others have their turn
_MOST_PARTS = 1000  # of a form
_STRETCH = 1_048_576  # bytes of one step at the most
_TOP, _INSIDE = re.compile(rb'["{}\[\],]'), re.compile(rb'["{}\[\]]')
_STRING = re.compile(rb'\s*:\s*("(?:[^"\\]|\\.){0,1000}")')
_BOUNDARY = re.compile(rb'boundary=(?:"([^"]{1,200})"|([^\s;"]{1,200}))', re.IGNORECASE)
_NAMED = re.compile(rb'[;\s]name="?model"?\s*(?:;|\r\n|$)', re.IGNORECASE)


def tells(status: int, code: str, message: str) -> bytes:
    """An error in OpenAI's shape."""
    known = "model_not_found" if code in ("UNKNOWN_MODEL", "UNKNOWN_TASK") else code
    param = "model" if code in ("UNKNOWN_MODEL", "BAD_MODEL", "NO_MODEL") else None
    return json.dumps(error_object(status, known, message, param)).encode()


class Routes:
    """The routes under /v1/."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._kept = 0
        self._created = int(time.time())

    def has(self, path: str) -> bool:
        """Whether it is one of these; others, and all where no model has them, are the node's: an app may have such routes itself."""
        if path in _OF_SERVERS:
            return any(task.is_server for task in self._calls.tasks.values())
        if path in ROUTES or path == _MODELS or path.startswith(f"{_MODELS}/"):
            return any(task.speaks or task.is_server for task in self._calls.tasks.values())
        return False

    def route(self, request: Request) -> Plan:
        request.tells = tells
        if why := self._calls.refusal(request):
            return why
        if request.path.startswith(_MODELS):
            return self._models(request)
        if request.method != "POST":
            return Refuse(405, "METHOD_NOT_ALLOWED", f"{request.path} takes POST", {"allow": "POST"})
        if request.length is not None and request.length > self._calls.max_body:
            return Refuse(413, "PAYLOAD_TOO_LARGE", f"the body may have {self._calls.max_body} bytes, found more")
        named = parse_qs(request.query.decode("latin-1")).get("model", [None])[0]
        return self._begin(request, named) if named else Peek(self._peeked, _PEEK)

    # ---- which models there are

    def _candidates(self, path: str | None) -> Iterator[tuple[Task, str]]:
        """The models that answer a path (None: any of them)."""
        for task in self._calls.tasks.values():
            fits = bool(task.speaks) if path is None else ROUTES.get(path) in task.speaks
            if fits or task.is_server:
                yield from ((task, model) for model in task.models)

    def _models(self, request: Request) -> Plan:
        if request.method != "GET":
            return Refuse(405, "METHOD_NOT_ALLOWED", f"{request.path} takes GET", {"allow": "GET"})
        found = list(self._candidates(None))
        ids = [model for _, model in found]
        names = [model if ids.count(model) == 1 else f"{task.name}:{model}" for task, model in found]
        shown = [self._model(name, task) for name, (task, _) in zip(names, found, strict=True)]
        if request.path in (_MODELS, f"{_MODELS}/"):
            return _json({"object": "list", "data": shown})
        wanted = unquote(request.path[len(_MODELS) + 1 :])
        for (task, model), name in zip(found, names, strict=True):
            if wanted in (name, f"{task.name}:{model}"):
                return _json(self._model(wanted, task))
        return self._unknown(wanted, None)

    def _model(self, name: str, task: Task) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "ostler", "task": task.name}

    def _unknown(self, name: str, path: str | None) -> Refuse:
        known = ", ".join(f"{task.name}:{model}" for task, model in self._candidates(path)) or "none"
        where = f" that answers {path}" if path else ""
        return Refuse(404, "UNKNOWN_MODEL", f"there is no model {name[:80]!r}{where}; known: {known}")

    def find(self, name: str, path: str) -> tuple[Task, str] | Refuse:
        """The model that a client calls so: by its id where no other has it, as task:model, or by the name of a task with one model."""
        found = list(self._candidates(path))
        same = [one for one in found if one[1] == name]
        if len(same) == 1:
            return same[0]
        if same:
            names = " or ".join(f"{task.name}:{model}" for task, model in same)
            return Refuse(400, "BAD_MODEL", f"several tasks have a model {name[:80]!r}: call it {names}")
        for task in self._calls.tasks.values():
            if ROUTES.get(path) not in task.speaks and not task.is_server:
                continue
            if name == task.name and task.default is not None:
                return task, task.default
            model = name.removeprefix(f"{task.name}:")
            if model != name and (model in task.models or task.any_model):
                return task, model
        return self._unknown(name, path)

    # ---- which one is meant

    def _peeked(self, request: Request) -> Plan:
        """The first bytes of the body are here."""
        body = request.begun()
        if _is_form(request):
            named: Any = _in_form(request, body)
        elif request.is_whole:
            try:
                told = json.loads(body)
            except (ValueError, RecursionError) as error:
                return Refuse(400, "BAD_JSON", f"the body is not JSON: {error}")
            named = told.get("model") if isinstance(told, dict) else None
        else:
            named = _exhausted(look(body))
        if named is None and not request.is_whole:
            return self._keep(request)
        return self._begin(request, named)

    def _keep(self, request: Request) -> Plan:
        """Have all of the body here, and look for the name in it."""
        size = self._calls.max_body if request.length is None else request.length
        if self._kept + size > _KEPT:
            message = (
                'too many long requests wait for the name of their model; put "model" first, or name it as ?model='
            )
            return Refuse(503, "BUSY", message, {"retry-after": "1"})
        self._kept += size
        weakref.finalize(request, self._free, size)  # it is kept for as long as the request is there
        return Serve(self._search)

    def _free(self, size: int) -> None:
        self._kept -= size

    async def _search(self, request: Request) -> Plan:
        body = await request.read(self._calls.max_body)
        if _is_form(request):
            return self._begin(request, _in_form(request, body))
        search = look(body)
        while True:
            try:
                next(search)
            except StopIteration as found:
                return self._begin(request, found.value)
            await asyncio.sleep(0)

    def _begin(self, request: Request, named: Any) -> Plan:
        if not isinstance(named, str) or not 0 < len(named) <= 300 or not named.isprintable():
            said = "names no model" if named is None else "names a model by something that is not a short text"
            return Refuse(400, "NO_MODEL", f'the request {said}: "model" is one of those that GET /v1/models lists')
        found = self.find(named, request.path)
        if isinstance(found, Refuse):
            return found
        task, model = found
        request.inner = request.path.encode()  # a class's worker has the same routes as a program behind `app.server`
        return self._calls.begin(request, task, model)


def _json(value: Any) -> Reply:
    return Reply(200, {"content-type": "application/json"}, json.dumps(value).encode())


def _text(quoted: bytes) -> Any:
    try:
        return json.loads(quoted)
    except ValueError:
        return None


def _is_form(request: Request) -> bool:
    return (request.get(b"content-type") or b"").lower().startswith(b"multipart/form-data")


def _in_form(request: Request, body: bytes) -> str | None:
    """The field `model` of a form, if all of it is here."""
    said = _BOUNDARY.search(request.get(b"content-type") or b"")
    if said is None:
        return None
    mark = b"--" + (said[1] or said[2])
    at = body.find(mark)
    for _ in range(_MOST_PARTS):
        end = body.find(b"\r\n\r\n", at)
        following = body.find(b"\r\n" + mark, max(end, 0))
        if at < 0 or end < 0 or following < 0:
            return None
        if end - at < 4096 and _NAMED.search(body[at:end]):
            return body[end + 4 : following][:1000].decode(errors="replace")
        at = following + 2
    return None


def look(body: bytes) -> Generator[None, None, Any]:
    """The text under the key "model" of a JSON object, however long the object is. It pauses now and then (yields)."""
    depth, at, is_key, steps = 0, 0, False, 0
    string: int | None = None  # where the string began that it is in
    while at < len(body):
        steps += 1
        if steps % _AT_ONCE == 0:
            yield
        if string is not None:
            at = body.find(b'"', at) + 1
            if not at:
                return None
            if _is_escaped(body, at - 1, string):
                continue
            if depth == 1 and is_key:
                is_key = False
                if body[string : at - 1] == b"model":
                    value = _STRING.match(body, at)
                    return None if value is None else _text(value[1])
            string = None
            continue
        found = (_TOP if depth <= 1 else _INSIDE).search(body, at, at + _STRETCH)
        if found is None:
            at += _STRETCH
            yield
            continue
        at, what = found.end(), found[0]
        if what == b'"':
            string = at
        elif what in b"{[":
            depth += 1
            is_key = what == b"{" and depth == 1
        elif what in b"}]":
            depth -= 1
        elif depth == 1:
            is_key = True
    return None


def _exhausted(search: Generator[None, None, Any]) -> Any:
    """What a search finds, without a pause."""
    while True:
        try:
            next(search)
        except StopIteration as found:
            return found.value


def _is_escaped(body: bytes, quote: int, start: int) -> bool:
    """Whether an odd number of backslashes stands before the quote."""
    size = 64
    while True:
        before = body[max(start, quote - size) : quote]
        run = len(before) - len(before.rstrip(b"\\"))
        if run < len(before) or len(before) < size:
            return run % 2 == 1
        size *= 4
