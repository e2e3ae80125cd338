"""One call on its way, the task that it is for, and what its request says beside the payload."""

from __future__ import annotations

import json
import math
import random
import re
import time
from typing import TYPE_CHECKING, Any

from ostler.calls.model import leads_out
from ostler.plane.exchange import OWN
from ostler.plane.leases import Key, Line, Place, Refusal, Terms
from ostler.plane.plan import Refuse
from ostler.plane.request import Request
from ostler.plane.timers import Timer

if TYPE_CHECKING:
    from ostler.plane.calls import Calls

PATH = "/api/v1/calls/"
_LONGEST_ID = 200
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_DURATION = re.compile(r"(-?\d+(?:\.\d+)?)(ms|s|m|h)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
_JSON = b"application/json"
FOR_WORKERS = (b"content-type", b"accept", b"content-encoding")
_NOT_FOR_SERVERS = OWN | {b"authorization", b"cookie", b"host", b"expect", b"x-request-id"}


class Task:
    """A task of the catalog."""

    def __init__(self, name: str, told: dict[str, Any]) -> None:
        self.name = name
        self.models: dict[str, dict[str, Any]] = told["models"]
        self.common: dict[str, Any] = told["common"]
        self.any_model: bool = told["any_model"]
        self.max_models: int = told["max_models"]
        self.speaks: list[str] = told["speaks"]  # methods for OpenAI's routes
        self.path: str | None = told["path"]  # of a server: where calls are posted

    @property
    def is_server(self) -> bool:
        """Somebody else's program answers, and gets requests as they came."""
        return self.path is not None

    def told(self, model: str) -> dict[str, Any]:
        """The terms of one of its models."""
        return self.models.get(model, self.common)

    def terms(self, model: str) -> Terms:
        """… as the leases have them."""
        told = self.told(model)
        return Terms(told["room"], told["workers"], told["queue"], told["idle"], told["pinned"], gpu=told["gpu"])

    @property
    def default(self) -> str | None:
        """The model that is meant where none is named."""
        return next(iter(self.models)) if len(self.models) == 1 else None

    def refusal(self, model: Any, lines: dict[Key, Line]) -> Refuse | None:
        """Why this model cannot be called; None when it can. `lines`: of all models that were called lately; where there may be no more of
        this task, one that is idle makes room.
        """
        if not isinstance(model, str) or not 0 < len(model) <= _LONGEST_ID or not model.isprintable():
            return Refuse(400, "BAD_MODEL", f"a model id has 1 to {_LONGEST_ID} printable characters")
        if model in self.models:
            return None
        if not self.any_model:
            known = ", ".join(sorted(self.models))
            return Refuse(404, "UNKNOWN_MODEL", f"{self.name} has no model {model[:80]!r}; known: {known}")
        if leads_out(model):
            return Refuse(400, "BAD_MODEL", f"the model id {model[:80]!r} is a path that leaves its directory")
        if (self.name, model) in lines:
            return None
        own = [line for key, line in lines.items() if key[0] == self.name and key[1] not in self.models]
        if len(own) < self.max_models:
            return None
        for line in sorted(own, key=lambda line: line.used_at):
            if line.idle():
                del lines[line.key]
                return None
        message = f"{self.name} may have {self.max_models} models at once, and all of them are in use; try again later"
        return Refuse(503, "TOO_MANY_MODELS", message, {"retry-after": "5"})


class Call:
    """One call on its way: also what the leases know of it."""

    def __init__(self, calls: Calls, request: Request, key: Key, now: float) -> None:
        self._calls, self.request, self.key, self.asked = calls, request, key, now
        self.id = b""
        self.priority = 0
        self.deadline = math.inf  # of the client's patience, in line and in the worker
        self.timeout = math.inf  # that the worker has
        self.keep: float | None = None
        self.place: Place | None = None
        self.clock: Timer | None = None
        self.sent_at = 0.0
        self.tried = False
        self.kills = False  # its worker may be killed when it is cancelled and does not end
        self.target: bytes | None = None  # at a server: the path and query that it gets
        self.came, self.sent = time.monotonic(), 0.0  # for its record: the loop's clock has milliseconds
        self.verdict = ""  # why its worker was told to stop: deadline, or cancelled by an operator

    @property
    def name(self) -> str:
        """Its id, as others have it."""
        return self.id.decode("latin-1")

    def granted(self, place: Place) -> None:
        self.request.go(self._calls.forward(self, place))

    def refused(self, why: Refusal) -> None:
        self._calls.turns.over(self)
        self._calls.records.refused(self, why)
        self.request.go(refused_by(why, self))


def read_wishes(call: Call, task: Task) -> Refuse | None:
    """What the client asks for beside the call itself."""
    request = call.request
    given = request.get(b"x-request-id")
    if given is not None and not _REQUEST_ID.fullmatch(given):
        return Refuse(400, "BAD_REQUEST_ID", "x-request-id may have 1 to 128 printable ASCII characters without spaces")
    call.id = given or b"%016x" % random.getrandbits(64)
    told = task.told(call.key[1])
    call.timeout, call.kills = float(told["timeout"]), told["kill_on_cancel"]
    patience = call.timeout + float(told["startup"])
    for name, is_patience in ((b"x-ostler-timeout", True), (b"x-ostler-keep-alive", False)):
        said = as_text(request.get(name))
        if said is None:
            continue
        seconds = _seconds(said)
        if seconds is None or (is_patience and seconds <= 0):
            shown = name.decode()
            return Refuse(400, "BAD_HEADER", f'{shown} must be seconds or text such as "5m", found {said[:40]!r}')
        if is_patience:
            patience = min(patience, seconds)
        else:
            call.keep = seconds
    priority = as_text(request.get(b"x-ostler-priority"))
    if priority is not None:
        if not re.fullmatch(r"-?\d{1,4}", priority):
            return Refuse(400, "BAD_HEADER", f"x-ostler-priority must be a whole number, found {priority[:40]!r}")
        call.priority = int(priority)
    call.deadline = call.asked + patience
    return None


def failure(status: int, code: str, message: str, name: str) -> Refuse:
    """The end of the call of that id, which may have run: OpenAI's clients, which repeat what fails, are told not to."""
    return Refuse(status, code, message, {"x-ostler-request-id": name, "x-should-retry": "false"})


def refused_by(why: Refusal, call: Call) -> Refuse:
    headers = {"x-ostler-request-id": call.id.decode("latin-1")}
    if why.retry is not None:
        headers["retry-after"] = str(max(1, math.ceil(why.retry)))
    return Refuse(why.status, why.code, why.message, headers)


def target_at(request: Request, path: str) -> bytes:
    """What a server is asked for: its own path for calls, or what follows the task's name."""
    _, inside, rest = request.target.partition(PATH.encode())[2].partition(b"?")[0].partition(b"/")
    found = b"/" + rest if inside else path.encode()
    return found + b"?" + request.query if request.query else found


def head_at(request: Request, call: Call) -> bytes:
    """The client's own headers, without what is between it and the node."""
    assert call.target is not None
    out = [
        request.method.encode(),
        b" ",
        call.target,
        b" HTTP/1.1\r\nhost: localhost\r\nx-request-id: ",
        call.id,
        b"\r\n",
    ]
    for name, value in request.headers:
        if name not in _NOT_FOR_SERVERS and not name.startswith(b"x-ostler-"):
            out += (name, b": ", value, b"\r\n")
    return b"".join(out)


def head_for_worker(request: Request, call: Call, seconds: float) -> bytes:
    """What the worker of a class is told with a call that has so many seconds left."""
    head = [b"POST ", request.inner, b" HTTP/1.1\r\nhost: worker\r\nx-ostler-request-id: ", call.id]
    head += (b"\r\nx-ostler-deadline-ms: %d\r\n" % max(1, int(seconds * 1000)),)
    for name in FOR_WORKERS:
        if (value := request.get(name)) is not None:
            head += (name, b": ", value, b"\r\n")
    return b"".join(head)


def read_text(quoted: bytes) -> str | None:
    """A text of JSON."""
    try:
        return quoted[1:-1].decode() if b"\\" not in quoted else str(json.loads(quoted))
    except ValueError:
        return None


def is_json(request: Request) -> bool:
    kind = (request.get(b"content-type") or _JSON).partition(b";")[0].strip().lower()
    return kind == _JSON or kind.endswith(b"+json")


def may_be_json(request: Request) -> bool:
    """Whether its body is JSON, or has the type that `curl -d` gives to anything."""
    kind = (request.get(b"content-type") or b"").partition(b";")[0].strip().lower()
    return is_json(request) or kind == b"application/x-www-form-urlencoded"


def as_text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")


def _seconds(text: str) -> float | None:
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        return None
    seconds = float(found[1]) * _UNITS[found[2]]
    return -1.0 if seconds < 0 else seconds
