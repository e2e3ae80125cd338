"""The worker's HTTP/1.1 server: the door that accepts connections, and what all ways to run a model share. Standard library, Python 3.9.

The door is a side thread. It accepts, answers `/healthz`, `/info` and `/shutdown`, also while the model loads or computes, and hands a
connection over to the model's own thread with its first `/infer`. From then on that thread alone reads and writes it, and the door only
watches for the caller to hang up, which cancels the call.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import count
from typing import Any

from ostler.calls import answer, guests
from ostler.calls.body import payload_of
from ostler.calls.connection import AT_ONCE, Connection, HungUp
from ostler.calls.current import Call
from ostler.calls.request import BadRequest, Request
from ostler.lifecycle import child

_SPARE = 64  # connections beside those that carry calls
_LINGER = 5.0  # seconds for which the rest of a refused request is read
_ID = re.compile(r"[\x21-\x7e]{1,200}")


class Service:
    """The model as it is served: its state, and the steps that every call takes."""

    def __init__(self, task: str, model_id: str, max_body: int) -> None:
        self.task, self.model_id, self.max_body = task, model_id, max_body
        self.state = "loading"
        self.progress = 0.0
        self.load_ms = 0.0
        self.draining = False
        self.door: Door | None = None
        self.adopt: Callable[[Connection], None] | None = None  # the model's own thread takes a connection
        self.part: Callable[[], None] | None = (
            None  # … and lets those go that are wanted back; None: it takes no guests
        )
        self.stop: Callable[[], None] = lambda: None
        self.writer = answer.Writer(model_id, max_body)
        self.speeches: dict[str, Any] = {"/infer": None}  # the paths of calls; OpenAI's where the model speaks them
        self._ids = count(1)

    # ---- a call, step by step

    def begin(self, connection: Connection, request: Request) -> Call:
        """The call that a request makes; raises BadRequest."""
        if self.state != "ready":
            raise BadRequest(503, "NOT_READY", f"model {self.model_id} takes no calls: it is {self.state}")
        headers = request.headers
        due = None
        if (left := headers.get("x-ostler-deadline-ms")) is not None:
            if not (left.isascii() and left.isdigit() and len(left) < 13):
                raise BadRequest(400, "BAD_REQUEST", f"x-ostler-deadline-ms is not a number: {left[:40]!r}")
            due = time.monotonic() + int(left) / 1000
        name = headers.get("x-ostler-request-id") or f"w{os.getpid()}-{next(self._ids)}"
        if not _ID.fullmatch(name):
            raise BadRequest(400, "BAD_REQUEST", "x-ostler-request-id must be 1 to 200 visible ASCII characters")
        keep = request.keep and not self.draining
        connection.call = call = Call(name, due, headers.get("accept", ""), keep, request.old)
        if (speech := self.speeches[request.path]) is not None:
            call.speech, call.accept = speech, ""
        if connection.gone:  # looked at after the call was set: the door does it the other way round
            call.cancelled = True
        return call

    def payload(self, call: Call, request: Request) -> Any:
        """What the model is given; raises BadRequest."""
        if call.due is not None and call.due <= time.monotonic():
            raise BadRequest(504, "DEADLINE", "the deadline of this call passed before the model began")
        return payload_of(request) if call.speech is None else call.speech.read(request)

    def result(self, call: Call, result: Any) -> bytes:
        """The answer to a result, or to what is wrong with it."""
        try:
            if hasattr(result, "__await__"):
                if hasattr(result, "close"):
                    result.close()
                raise answer.NotJson("it is a coroutine; write `async def infer`")
            return self.writer.result(call, result) if call.speech is None else self.writer.plain(call, result)
        except Exception as error:  # noqa: BLE001  an object may do anything when it is looked at
            return self.failed(call, error)

    def unwritable(self, call: Call, error: answer.NotJson) -> bytes:
        message = f"the result of model {self.model_id} cannot be sent: {error}"
        say(f"call {call.id}: {message}\n")
        return answer.error(500, "MODEL_ERROR", message, call, keep=call.keep)

    def failed(self, call: Call, error: BaseException) -> bytes:
        """The answer to what a model raised. Its traceback goes to the log, except for what the caller did wrong."""
        if isinstance(error, answer.NotJson):
            return self.unwritable(call, error)
        made = answer.failed(call, error)
        if answer.judge(error)[0] >= 500 and not isinstance(error, BadRequest):
            show(call, error)
        return made

    def route(self, request: Request) -> bytes:
        """The answer to everything but a call."""
        keep = request.keep and not self.draining
        wanted = {"/healthz": "GET", "/info": "GET", "/shutdown": "POST"}.get(request.path)
        if request.path in self.speeches:
            wanted = "POST"
        if wanted is None:
            return answer.error(404, "NOT_FOUND", f"there is no {request.path[:80]}", keep=keep)
        if request.method != wanted:
            allow = f"allow: {wanted}\r\n"
            return answer.error(405, "METHOD_NOT_ALLOWED", f"{request.path} takes {wanted}", keep=keep, more=allow)
        if request.path == "/healthz":
            return self._health(keep)
        if request.path == "/info":
            return answer.plain(200, self._info(), keep=keep)
        self.stop()
        return answer.plain(202, {"status": "draining", "model": self.model_id}, keep=False)

    def _health(self, keep: bool) -> bytes:
        if self.draining:
            return answer.plain(503, {"status": "draining", "model": self.model_id, "ready": False}, keep=keep)
        if self.state == "ready":
            return answer.plain(200, {"status": "ok", "model": self.model_id, "ready": True}, keep=keep)
        said = {"status": self.state, "model": self.model_id, "ready": False, "progress": self.progress}
        return answer.plain(503, said, keep=keep)

    def _info(self) -> dict[str, Any]:
        return {
            "model": self.model_id,
            "memory_mb": child.memory_mb()[0],
            "gpu_mb": gpu_mb(),
            "load_time_ms": self.load_ms,
            "pid": os.getpid(),
            "in_flight": self.in_flight(),
        }

    def in_flight(self) -> int:
        """Calls that run, and those on their first way to the model."""
        found = [] if self.door is None else list(self.door.connections.values())
        return sum(c.call is not None or c.whole is not None for c in found)

    def calls(self) -> list[Connection]:
        """The connections that carry a call now."""
        return [] if self.door is None else [c for c in list(self.door.connections.values()) if c.call is not None]

    def facts(self) -> dict[str, Any]:
        """What travels with each heartbeat."""
        return {"in_flight": self.in_flight(), "gpu_mb": gpu_mb()}


def show(call: Call, error: BaseException) -> None:
    """The traceback of a model's error, without the server's own frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    lines = "".join(traceback.format_exception(type(error), error, trace))
    say(f"call {call.id} failed:\n{lines}")


def say(text: str) -> None:
    """Write into the worker's log, if the model has not closed it."""
    with contextlib.suppress(Exception):
        sys.stderr.write(text)
        sys.stderr.flush()


_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep  # noqa: PTH100, PTH120


def gpu_mb() -> float | None:
    """Device memory that torch holds in this process; None unless the model itself has loaded torch and used a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or getattr(getattr(torch, "__spec__", None), "_initializing", False):
        return None
    try:
        cuda = torch.cuda
        if not cuda.is_initialized():
            return None
        return float(round(sum(cuda.memory_reserved(n) for n in range(cuda.device_count())) / 1e6, 1))
    except Exception:  # noqa: BLE001  whatever it is, a figure is not worth a heartbeat
        return None


class Door(threading.Thread):
    """Accepts connections, answers what is not a call, and notices callers that hang up."""

    def __init__(self, service: Service, listener: socket.socket, most: int) -> None:
        super().__init__(name="ostler-door", daemon=True)
        self._service, self._listener, self._most = service, listener, most + _SPARE
        self._epoll = select.epoll()
        self._epoll.register(listener, select.EPOLLIN)
        self.connections: dict[int, Connection] = {}
        self._refused: set[int] = set()

    def run(self) -> None:
        try:
            while True:
                self._turn()
        except BaseException:  # noqa: BLE001  a worker that nobody can reach is of no use: a fresh one takes its place
            traceback.print_exc()
            os._exit(1)

    def _turn(self) -> None:
        for descriptor, _ in self._epoll.poll(_LINGER):
            if descriptor == self._listener.fileno():
                self._accept()
            elif (connection := self.connections.get(descriptor)) is not None:
                self._look(connection)
        for descriptor in list(self._refused):
            found = self.connections.get(descriptor)
            if found is None or found.refused is None:
                self._refused.discard(descriptor)
            elif time.monotonic() - found.refused > _LINGER:
                self.close(found)

    def shut(self) -> None:
        """Accept nothing more. From any thread."""
        self._listener.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return
        accepted.setblocking(False)
        connection = Connection(accepted, self._service.max_body)
        self.connections[accepted.fileno()] = connection
        self._epoll.register(accepted, select.EPOLLIN)
        if len(self.connections) > self._most:
            self.refuse(
                connection, answer.error(503, "BUSY", f"there are already {self._most} connections", keep=False)
            )

    def _look(self, connection: Connection) -> None:
        """Something happened at a connection: of one that is lent, only the end is told."""
        if connection.lent:
            if connection.hung_up():
                connection.gone = True
                if (call := connection.call) is not None:
                    call.cancelled = True
                if (cancel := connection.cancel) is not None:
                    cancel()
            return
        try:
            if connection.refused is not None:
                if not connection.socket.recv(AT_ONCE):
                    self.close(connection)
                return
            if isinstance(connection, guests.Channel):
                self._welcome(connection)
                return
            request = connection.receive()
            while request is not None and request.path not in self._service.speeches:
                if request.path == guests.PATH and self._service.part is not None:
                    self._open(connection)
                    return
                reply = self._service.route(request)
                if connection.socket.send(reply) < len(reply):
                    raise HungUp  # it asks and asks, and reads nothing
                if not request.keep:
                    self.refuse(connection, b"")
                    return
                request = connection.reader.feed(b"")
            self._pass_on(connection, request)
        except BlockingIOError:
            return
        except BadRequest as error:
            self.refuse(connection, answer.error(error.status, error.code, str(error), keep=False))
        except (HungUp, OSError):
            self.close(connection)

    def _open(self, connection: Connection) -> None:
        """The plane asks for a channel for guests. Neither it nor they take the place of others."""
        self._most += 1 + guests.CELLS
        self.connections[connection.socket.fileno()] = guests.Channel(connection.socket)
        connection.socket.send(guests.WELCOME)

    def _welcome(self, channel: guests.Channel) -> None:
        """Guests come to stay with the model's own thread, or are wanted back. They leave with the channel."""
        try:
            heard = channel.hear()
        except BlockingIOError:
            return
        except (HungUp, OSError):
            left, channel.guests = channel.guests, {}
            for alone in left.values():
                alone.leaves = True
            self.close(channel)
            heard = [None] if left else []
        for guest in heard:
            if guest is None or self._service.adopt is None:
                assert self._service.part is not None
                self._service.part()
                continue
            guest.lent = True
            self.connections[guest.socket.fileno()] = guest
            self._epoll.register(guest.socket, select.EPOLLET | select.EPOLLRDHUP)
            self._service.adopt(guest)

    def _pass_on(self, connection: Connection, request: Request | None) -> None:
        """A call goes to the model's own thread as soon as its head is there."""
        head = request or connection.reader.head
        if head is None or head.path not in self._service.speeches:
            return
        if head.method != "POST":
            self.refuse(connection, self._service.route(head))
        elif self._service.adopt is None or self._service.draining:
            said = "it is being stopped" if self._service.draining else "it is loading"
            message = f"model {self._service.model_id} takes no calls: {said}"
            self.refuse(connection, answer.error(503, "NOT_READY", message, keep=False, more="retry-after: 1\r\n"))
        else:
            connection.whole = request
            connection.lent = True
            self._epoll.modify(connection.socket, select.EPOLLET | select.EPOLLRDHUP)  # from now on: hang-ups alone
            self._service.adopt(connection)

    def refuse(self, connection: Connection, last: bytes) -> None:
        """Send a last answer, and read on for a while: closing at once would take it away from a caller that is still sending."""
        with contextlib.suppress(OSError):
            connection.socket.setblocking(False)
            connection.socket.send(last)
            connection.socket.shutdown(socket.SHUT_WR)
            connection.call, connection.refused, connection.lent = None, time.monotonic(), False
            self._refused.add(connection.socket.fileno())
            self._epoll.modify(connection.socket, select.EPOLLIN)
            return
        self.close(connection)

    def close(self, connection: Connection) -> None:
        """From the thread that it belongs to."""
        self.connections.pop(connection.socket.fileno(), None)
        if connection.is_guest:  # the plane has it open, too: closing alone would not end the watch
            with contextlib.suppress(OSError):
                self._epoll.unregister(connection.socket)
        connection.call = None
        connection.close()
