"""A model that serves several calls at once, each on a thread of its own. Standard library, Python 3.9."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ostler.calls import answer
from ostler.calls.connection import Connection, HungUp
from ostler.calls.inline import infer
from ostler.calls.request import BadRequest, Request
from ostler.calls.serving import Service


class Threads:
    """A thread for each connection, and at most `concurrency` of them in the model. The main thread waits, and runs errands."""

    def __init__(self, service: Service, model: Any, concurrency: int) -> None:
        self._service, self._model = service, model
        self._slots = threading.Semaphore(concurrency)
        self._changed = threading.Condition()
        self._errands: deque[Callable[[], None]] = deque()
        self._connections: set[Connection] = set()

    # ---- from other threads

    def adopt(self, connection: Connection) -> None:
        connection.socket.setblocking(True)
        with self._changed:
            self._connections.add(connection)
        try:
            threading.Thread(target=self._attend, args=(connection,), name="ostler-call", daemon=True).start()
        except RuntimeError as error:  # the system has no more threads
            with self._changed:
                self._connections.discard(connection)
            assert self._service.door is not None
            self._service.door.refuse(connection, answer.error(503, "BUSY", str(error), keep=False))

    def errand(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._errands.append(work)
            self._changed.notify_all()

    def wake(self) -> None:
        """May come from a signal handler on the main thread, which may hold the lock: so a thread does it."""
        threading.Thread(target=self._ring, daemon=True).start()

    def _ring(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # ---- the main thread

    def serve(self) -> None:
        """Until the service drains and all that had come is answered."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._errands or self._service.draining)
                work = self._errands.popleft() if self._errands else None
            if work is None:
                break
            work()
        with self._changed:
            for connection in self._connections:
                if connection.call is None and not connection.reader.begun:
                    _end_of_input(connection)  # what has already arrived is still read
            self._changed.wait_for(lambda: not self._connections)

    # ---- a connection's thread

    def _attend(self, connection: Connection) -> None:
        door = self._service.door
        assert door is not None
        try:
            request, connection.whole = connection.whole, None
            while True:
                while request is None:
                    request = connection.receive()
                if not self._answer(connection, request):
                    break
                request = connection.reader.feed(b"")
            door.close(connection)
        except BadRequest as error:
            door.refuse(connection, answer.error(error.status, error.code, str(error), connection.call, keep=False))
        except (HungUp, OSError):
            door.close(connection)
        finally:
            with self._changed:
                self._connections.discard(connection)
                self._changed.notify_all()

    def _answer(self, connection: Connection, request: Request) -> bool:
        """Whether the connection stays open."""
        if request.path not in self._service.speeches or request.method != "POST":
            connection.send(self._service.route(request))
            return request.keep
        call = self._service.begin(connection, request)
        if not self._slots.acquire(blocking=False):
            self._slots.acquire()
            if connection.hung_up():  # while it waited; the door may not have told yet
                call.cancelled = True
        try:
            made = infer(self._service, connection, request, call, self._model.infer)
        finally:
            self._slots.release()
        if made is not None:
            connection.send(made)
        connection.call = None
        if self._service.draining:
            _end_of_input(connection)
        return call.keep and not call.cancelled


def _end_of_input(connection: Connection) -> None:
    try:  # noqa: SIM105
        connection.socket.shutdown(socket.SHUT_RD)
    except OSError:
        pass  # closed meanwhile
