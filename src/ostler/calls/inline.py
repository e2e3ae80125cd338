"""A model that serves one call (or one batch) at a time, on the worker's main thread. Standard library, Python 3.9.

The main thread waits at its connections, reads, infers and writes: a call passes through no other thread. Requests that arrive while
the model is busy wait in their sockets, so whatever waits when it is free again is the next batch.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from ostler.calls import answer
from ostler.calls.batching import Batching
from ostler.calls.connection import Connection, HungUp
from ostler.calls.current import Batch, Call, running
from ostler.calls.guests import TIRED, Guest
from ostler.calls.request import BadRequest, Request
from ostler.calls.serving import Service, show


def infer(
    service: Service, connection: Connection, request: Request, call: Call, function: Callable[[Any], Any]
) -> bytes | None:
    """Run one call; the answer, or None when it was streamed or nobody is there. Never raises, whatever the model does, but HungUp."""
    running.set(call)
    try:
        if call.cancelled:
            return None
        try:
            payload = service.payload(call, request)
            result = function(payload) if call.speech is None else call.speech.run(payload)
            if hasattr(result, "__next__"):
                return stream(connection, call, result)
        except HungUp:
            raise
        except BaseException as error:  # noqa: BLE001  SystemExit too: a model's error does not end its worker
            return None if call.cancelled else service.failed(call, error)
        return None if call.cancelled else service.result(call, result)
    finally:
        running.set(None)


def stream(connection: Connection, call: Call, items: Any) -> bytes | None:
    """Write what a generator yields, each item at once. It is closed when the caller hangs up. Raises HungUp."""
    framing: answer.Stream | None = None
    try:
        for item in items:
            if call.cancelled:
                raise HungUp
            if framing is None:
                opened = answer.Stream(call, item)
                first = opened.begin() + opened.item(item)
                framing = opened
                connection.send(first)
            else:
                connection.send(framing.item(item))
        if framing is None:
            framing = answer.Stream(call, None)
            connection.send(framing.begin())
        connection.send(framing.end())
    except HungUp:
        raise
    except BaseException as error:
        if framing is None:
            raise  # nothing was sent: an ordinary error
        show(call, error)
        connection.send(framing.broken(error))
        raise HungUp from None
    finally:
        close(items, call)
    if call.old:
        raise HungUp  # HTTP/1.0 knows the end of a stream by that of its connection
    return None


def close(items: Any, call: Call) -> None:
    """Let a generator's `finally` blocks run; what they raise is logged."""
    try:
        if hasattr(items, "close"):
            items.close()
    except BaseException as error:  # noqa: BLE001
        show(call, error)


class Inline:
    """Serves on the main thread: one call after another, or batches of those that wait."""

    def __init__(self, service: Service, model: Any, batch: int, wait: float) -> None:
        self._service, self._batch = service, batch
        self._infer: Callable[[Any], Any] = model.infer if batch == 1 else model.infer_batch
        self._epoll = select.epoll()
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._epoll.register(self._woken, select.EPOLLIN)
        self._connections: dict[int, Connection] = {}
        self._arrived: deque[Connection] = deque()
        self._errands: deque[Callable[[], None]] = deque()
        self._waiting: deque[tuple[Connection, Request, Call]] = deque()
        self._again: dict[Connection, None] = {}  # whose next request came together with the last one
        self._guests: list[Guest] = []
        self._look_at = 0.0  # when they are seen to
        self._batching = Batching(batch, wait)

    # ---- from other threads

    def adopt(self, connection: Connection) -> None:
        self._arrived.append(connection)
        self.wake()

    def errand(self, work: Callable[[], None]) -> None:
        """Have something done on the main thread between two calls."""
        self._errands.append(work)
        self.wake()

    def part(self) -> None:
        """Guests are wanted back: they leave when they are answered."""
        self.errand(lambda: self._see_to_guests(time.monotonic()))

    def wake(self) -> None:
        try:  # noqa: SIM105
            os.write(self._waker, b"!")
        except BlockingIOError:
            pass  # it is full: it will wake anyway

    # ---- the main thread

    def serve(self) -> None:
        """Until the service drains and all that had come is answered."""
        poll, connections = self._epoll.poll, self._connections
        while True:
            events = poll(self._patience())
            if not events and self._service.draining and not self._unfinished():
                return
            for descriptor, _ in events:
                connection = connections.get(descriptor)
                if connection is not None:
                    self._attend(connection)
                elif descriptor == self._woken:
                    self._woke()
            if self._again:
                self._take_turns()
            if self._waiting:
                self._gather()
                self._run_batch()
            if self._guests and (now := time.monotonic()) >= self._look_at:
                self._see_to_guests(now)

    def _see_to_guests(self, now: float) -> None:
        """Those that are wanted back, ask nothing or do not read their answer leave; nobody is sent away in the middle of a call."""
        self._look_at = now + TIRED / 4
        for guest in [*self._guests]:
            goes = guest.is_tired(now) or guest.leaves or self._service.draining or self._service.state != "ready"
            if goes and guest.call is None:
                self._close(guest)

    def _patience(self) -> float | None:
        if self._waiting or self._again:
            return 0
        if not self._service.draining:
            return TIRED if self._guests else None
        return 0.2 if self._unfinished() else 0

    def _unfinished(self) -> bool:
        return bool(self._arrived) or any(c.reader.begun or c.out is not None for c in self._connections.values())

    def _woke(self) -> None:
        os.read(self._woken, 4096)
        while self._errands:
            self._errands.popleft()()
        while self._arrived:
            connection = self._arrived.popleft()
            self._connections[connection.socket.fileno()] = connection
            self._epoll.register(connection.socket, select.EPOLLIN)
            if isinstance(connection, Guest):
                self._guests.append(connection)
            request, connection.whole = connection.whole, None
            if request is not None:
                self._take(connection, request)

    def _attend(self, connection: Connection) -> None:
        if (
            connection.call is not None
        ):  # its call waits for a batch: no more is read, and the door tells when the caller hangs up
            self._epoll.modify(connection.socket, select.EPOLLET)
            connection.muted = True
            return
        if connection in self._again:  # what it has sent is not all taken
            return
        try:
            if connection.out is not None:
                self._write(connection, connection.out)
                self._next(connection)
                return
            request = connection.receive()
        except BlockingIOError:
            return
        except BadRequest as error:
            self._refuse(connection, error)
            return
        except (HungUp, OSError):
            self._close(connection)
            return
        if request is not None:
            self._take(connection, request)

    def _take(self, connection: Connection, request: Request) -> None:
        """A whole request: run it, or have it wait for its batch."""
        try:
            if request.path not in self._service.speeches or request.method != "POST":
                connection.last = not request.keep
                self._write(connection, memoryview(self._service.route(request)))
                self._next(connection)
                return
            call = self._service.begin(connection, request)
            if self._batch > 1 and call.speech is None:
                self._waiting.append((connection, request, call))
                self._batching.came(time.monotonic())
                return
            made = infer(self._service, connection, request, call, self._infer)
            self._answer(connection, call, made)
        except BadRequest as error:
            self._refuse(connection, error)
        except (HungUp, OSError):
            self._close(connection)

    def _answer(self, connection: Connection, call: Call, made: bytes | None) -> None:
        connection.call = None
        if call.cancelled:
            raise HungUp
        if connection.muted:
            connection.muted = False
            self._epoll.modify(connection.socket, select.EPOLLIN)
        connection.last = not call.keep
        if made is not None:
            connection.answers(made)
            self._write(connection, memoryview(made))
        self._next(connection)

    def _take_turns(self) -> None:
        """Requests that came together with others: one of each connection, so that nobody waits for all of them."""
        again, self._again = self._again, {}
        for connection in again:
            if self._connections.get(connection.socket.fileno()) is not connection:
                continue  # closed meanwhile
            try:
                request = connection.reader.feed(b"")
            except BadRequest as error:
                self._refuse(connection, error)
                continue
            except HungUp:
                self._close(connection)
                continue
            if request is not None:
                self._take(connection, request)

    def _next(self, connection: Connection) -> None:
        """After an answer: close, or have a request that came together with the last one wait for its turn."""
        if connection.out is not None:
            return
        connection.answered()
        if connection.last or connection.leaves:
            raise HungUp
        if connection.reader.begun and connection.reader.head is None:
            self._again[connection] = None

    def _write(self, connection: Connection, data: memoryview) -> None:
        """Write what the socket takes. The rest waits for the caller to read, and nobody waits for the caller."""
        try:
            sent = connection.socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            raise HungUp from None
        if sent == len(data):
            if connection.out is not None:
                connection.out = None
                self._epoll.modify(connection.socket, select.EPOLLIN)
            return
        if connection.out is None:
            self._epoll.modify(connection.socket, select.EPOLLOUT)
        connection.out = data[sent:]

    def _refuse(self, connection: Connection, error: BadRequest) -> None:
        self._forget(connection)
        made = answer.error(error.status, error.code, str(error), connection.call, keep=False)
        assert self._service.door is not None
        self._service.door.refuse(connection, made)

    def _forget(self, connection: Connection) -> None:
        self._connections.pop(connection.socket.fileno(), None)
        self._epoll.unregister(connection.socket)
        if connection.is_guest:
            self._guests.remove(connection)  # type: ignore[arg-type]

    def _close(self, connection: Connection) -> None:
        self._forget(connection)
        assert self._service.door is not None
        self._service.door.close(connection)

    # ---- batches

    def _gather(self) -> None:
        """Under load, wait for a fuller batch where that pays; a call that comes alone never waits."""
        first = now = time.monotonic()
        while not self._service.draining and (left := self._batching.patience(len(self._waiting), first, now)) > 0:
            before = len(self._waiting)
            events = self._epoll.poll(left)
            now = time.monotonic()
            if not events and len(self._waiting) == before:
                return
            for descriptor, _ in events:
                connection = self._connections.get(descriptor)
                if connection is not None:
                    self._attend(connection)
                elif descriptor == self._woken:
                    self._woke()

    def _run_batch(self) -> None:
        taken = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
        began = time.monotonic()
        outcomes = run_batch(self._service, [(request, call) for _, request, call in taken], self._infer)
        self._batching.ran(len(taken), time.monotonic() - began)
        for (connection, _, call), made in zip(taken, outcomes):
            try:
                self._answer(connection, call, made)
            except BadRequest as error:
                self._refuse(connection, error)
            except (HungUp, OSError):
                self._close(connection)


def run_batch(
    service: Service, taken: list[tuple[Request, Call]], function: Callable[[list[Any]], Any]
) -> list[bytes | None]:
    """The answers of a batch in order, None where nobody is there any more. If the whole batch raises, each call is run alone, once."""
    made: list[bytes | None] = [None] * len(taken)
    ready: list[tuple[int, Call, Any]] = []
    for number, (request, call) in enumerate(taken):
        try:
            if not call.cancelled:
                ready.append((number, call, service.payload(call, request)))
        except BadRequest as error:
            made[number] = service.failed(call, error)
    for number, call, result in _together(ready, function):
        made[number] = settled(service, call, result)
    return made


def _together(
    ready: list[tuple[int, Call, Any]], function: Callable[[list[Any]], Any]
) -> Iterable[tuple[int, Call, Any]]:
    if not ready:
        return
    running.set(Batch([call for _, call, _ in ready]))
    try:
        results = paired(ready, function([payload for _, _, payload in ready]))
    except BaseException as error:  # noqa: BLE001
        if len(ready) == 1:
            results = [error]
        else:
            for one in ready:
                yield from _together([one], function)
            return
    finally:
        running.set(None)
    for (number, call, _), result in zip(ready, results):
        yield number, call, result


def paired(ready: list[Any], results: Any) -> list[Any]:
    """The results of `infer_batch`, one for each call; of a wrong number, an error for each."""
    results = results.tolist() if hasattr(results, "tolist") else results
    if not isinstance(results, (list, tuple)) or len(results) != len(ready):
        found = f"{len(results)} results" if isinstance(results, (list, tuple)) else f"a {type(results).__name__}"
        wrong = RuntimeError(
            f"infer_batch must return a list of one result per payload: {len(ready)} payloads, found {found}"
        )
        return [wrong] * len(ready)
    return list(results)


def settled(service: Service, call: Call, result: Any) -> bytes | None:
    """The answer to one result of a batch: an exception in its place is that call's error."""
    if call.cancelled:
        return None
    return service.failed(call, result) if isinstance(result, BaseException) else service.result(call, result)
