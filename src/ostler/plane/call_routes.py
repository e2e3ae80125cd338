"""Ostler's own routes for calls: which task and model a request means, from its path, query, headers or the beginning of its body."""

from __future__ import annotations

import json
from urllib.parse import parse_qs, unquote

from ostler.calls.guests import MODEL
from ostler.names import no_task
from ostler.plane.call import PATH, Task, as_text, is_json, may_be_json, read_text
from ostler.plane.calls import Calls
from ostler.plane.forwarding import INNER
from ostler.plane.plan import Peek, Plan, Refuse
from ostler.plane.records import RUNNING
from ostler.plane.request import Request

_PEEK = 65_536  # bytes in which the model's name must be found
_WITH_BODY = ("POST", "PUT", "PATCH")


class Routes:
    """The routes under /api/v1/calls/, and the one on which other nodes ask for a place."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def route(self, request: Request) -> Plan:
        """What is done with a request for a call."""
        seen = request.seen
        if seen is None:
            return self._meant(request)
        access, peer, plan = seen.memo or (None, None, None)
        if access is None or access is not self._calls.access or peer != request.peer:
            plan = self._meant(request)
            seen.memo = (self._calls.access, request.peer, plan) if isinstance(plan, Peek) else None
        # As in `Request.go`: the body is here.
        return plan.then(request) if isinstance(plan, Peek) else plan

    def asked_by_node(self, request: Request) -> Plan:
        """Another node asks for a place."""
        if why := self._calls.refusal(request):
            return why
        given = parse_qs(request.query.decode("latin-1"))
        task, model = unquote(request.path[len(INNER) :]), given.get("model", [""])[0]
        return self._calls.forwarding.route(request, task, model, starts=given.get("starts") == ["1"])

    def _meant(self, request: Request) -> Plan:
        """What its head asks for. A Peek says that it may, and which task is meant."""
        if why := self._calls.refusal(request):
            return why
        if request.method != "POST" and (plan := self._calls.records.route(request, request.path[len(PATH) :])):
            return plan
        name = unquote(request.path[len(PATH) :])
        name, inside, _ = name.partition("/")
        if request.method != "POST" and not inside:
            return Refuse(
                405, "METHOD_NOT_ALLOWED", "use POST to call, and DELETE to cancel", {"allow": "DELETE, POST"}
            )
        task = self._calls.tasks.get(name)
        if task is None and name == RUNNING:
            return Refuse(405, "METHOD_NOT_ALLOWED", f"{request.path} takes GET", {"allow": "GET"})
        if task is None or (inside and not task.is_server):
            return Refuse(404, "UNKNOWN_TASK", no_task(name, self._calls.tasks, where=" to call"))
        given = parse_qs(request.query.decode("latin-1"))
        named = given.get("model", [None])[0] or as_text(request.get(b"x-ostler-model"))
        if task.is_server and named is None and task.default is not None:
            named = task.default  # what its body names is the server's own business
        if named is None and may_be_json(request) and request.method in _WITH_BODY:
            return Peek(lambda r: self._peeked(r, task), _PEEK)
        return self._calls.begin(request, task, named or task.default)

    def _peeked(self, request: Request, task: Task) -> Plan:
        """The first bytes of a JSON body are here."""
        body = request.begun()
        if found := MODEL.match(body):
            return self._calls.begin(request, task, read_text(found[1]))
        if not request.is_whole:
            if task.default is not None:
                return self._calls.begin(request, task, task.default)
            message = f'"model" must be the first key of a large body, or be given as ?model= ; {task.name} has several models'
            return Refuse(400, "NO_MODEL", message)
        try:
            told = json.loads(body)
        except (ValueError, RecursionError) as error:
            if not is_json(request):
                return self._calls.begin(request, task, task.default)
            return Refuse(400, "BAD_JSON", f"the body is not JSON: {error}")
        named = told.get("model") if isinstance(told, dict) else None
        return self._calls.begin(request, task, task.default if named is None else named)
