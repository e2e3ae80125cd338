"""A model whose `infer` is async: an event loop on the worker's main thread. Standard library, Python 3.9."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from ostler.calls import answer
from ostler.calls.batching import Batching
from ostler.calls.connection import Connection, HungUp
from ostler.calls.current import Batch, Call, running
from ostler.calls.inline import paired, settled
from ostler.calls.request import BadRequest, Request
from ostler.calls.serving import Service, show

_LINGER = 5.0


class Looped:
    """At most `concurrency` calls at once, or batches of those that wait. A caller that hangs up cancels its task alone."""

    def __init__(
        self, service: Service, model: Any, loop: asyncio.AbstractEventLoop, concurrency: int, batch: int, wait: float
    ) -> None:
        self.service, self.loop = service, loop
        self._model, self._batch = model, batch
        self._concurrency = concurrency
        self._slots: asyncio.Semaphore
        self._protocols: set[_Protocol] = set()
        self._waiting: deque[tuple[_Protocol, Request, Call]] = deque()
        self._batching: asyncio.Task[None] | None = None
        self._decides = Batching(batch, wait)
        self._more: asyncio.Event

    # ---- from other threads

    def adopt(self, connection: Connection) -> None:
        self.loop.call_soon_threadsafe(self._open, connection)

    def errand(self, work: Callable[[], None]) -> None:
        self.loop.call_soon_threadsafe(work)

    def wake(self) -> None:
        """Look whether all is done, once what has arrived is read."""
        self.loop.call_soon_threadsafe(self.loop.call_soon, self._look)

    # ---- the loop

    def serve(self) -> None:
        """Until the service drains and all that had come is answered."""
        self.loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._slots, self._done = asyncio.Semaphore(self._concurrency), asyncio.Event()
        self._more = asyncio.Event()
        self._look()
        await self._done.wait()

    def _look(self) -> None:
        if not self.service.draining:
            return
        for protocol in list(self._protocols):
            if not protocol.busy:
                protocol.transport.close()
        if not self._protocols:
            self._done.set()

    def _open(self, connection: Connection) -> None:
        protocol = _Protocol(self, connection)
        self._protocols.add(protocol)
        opening = self.loop.connect_accepted_socket(lambda: protocol, sock=connection.socket)
        protocol.opening = self.loop.create_task(opening)
        protocol.opening.add_done_callback(protocol.opened)

    def closed(self, protocol: _Protocol) -> None:
        self._protocols.discard(protocol)
        self._look()

    def begin(self, protocol: _Protocol, request: Request, call: Call) -> None:
        """Start a call, or have it wait for its batch."""
        if self._batch > 1 and call.speech is None:
            self._waiting.append((protocol, request, call))
            self._decides.came(self.loop.time())
            self._more.set()
            if self._batching is None:
                self._batching = self.loop.create_task(self._batches())
            return
        protocol.task = self.loop.create_task(self._call(protocol, request, call))

    async def _call(self, protocol: _Protocol, request: Request, call: Call) -> None:
        running.set(call)
        made: bytes | None = None
        try:
            async with self._slots:
                if protocol.connection.hung_up():
                    call.cancelled = True
                    raise HungUp
                payload = self.service.payload(call, request)
                result = self._model.infer(payload) if call.speech is None else call.speech.later(payload)
                if hasattr(result, "__anext__"):
                    await self._stream(protocol, call, result)
                else:
                    made = self.service.result(call, await result)
        except HungUp:
            protocol.transport.abort()
            return
        except BaseException as error:  # noqa: BLE001  a model's error does not end its worker
            made = None if call.cancelled else self.service.failed(call, error)
        protocol.finish(call, made)

    async def _stream(self, protocol: _Protocol, call: Call, items: Any) -> None:
        """Write what an async generator yields, each item at once. It is closed when the caller hangs up. Raises HungUp."""
        framing: answer.Stream | None = None
        try:
            async for item in items:
                if call.cancelled:
                    raise HungUp
                if framing is None:
                    opened = answer.Stream(call, item)
                    first = opened.begin() + opened.item(item)
                    framing = opened
                    await protocol.send(first)
                else:
                    await protocol.send(framing.item(item))
            if framing is None:
                framing = answer.Stream(call, None)
                await protocol.send(framing.begin())
            await protocol.send(framing.end())
        except HungUp:
            raise
        except BaseException as error:
            if framing is None or call.cancelled:
                raise
            show(call, error)
            protocol.transport.write(framing.broken(error))
            protocol.transport.close()
            call.keep = False
        finally:
            await _close(items, call)
        if call.old:
            call.keep = False

    # ---- batches

    async def _batches(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(0)
                await self._gather()
                taken = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
                began = self.loop.time()
                await self._run(taken)
                self._decides.ran(len(taken), self.loop.time() - began)
        finally:
            self._batching = None

    async def _gather(self) -> None:
        """Under load, wait for a fuller batch where that pays; a call that comes alone never waits."""
        first = self.loop.time()
        while (left := self._decides.patience(len(self._waiting), first, self.loop.time())) > 0:
            before = len(self._waiting)
            self._more.clear()
            try:
                await asyncio.wait_for(self._more.wait(), left)
            except asyncio.TimeoutError:
                if len(self._waiting) == before:
                    return

    async def _run(self, taken: list[tuple[_Protocol, Request, Call]]) -> None:
        ready: list[tuple[_Protocol, Call, Any]] = []
        for protocol, request, call in taken:
            try:
                if not call.cancelled:
                    ready.append((protocol, call, self.service.payload(call, request)))
                    continue
                protocol.finish(call, None)
            except BadRequest as error:
                protocol.finish(call, self.service.failed(call, error))
        if ready:
            await self._together(ready)

    async def _together(self, ready: list[tuple[_Protocol, Call, Any]]) -> None:
        running.set(Batch([call for _, call, _ in ready]))
        try:
            results = paired(ready, await self._model.infer_batch([payload for _, _, payload in ready]))
        except BaseException as error:  # noqa: BLE001
            if len(ready) > 1:
                for one in ready:
                    await self._together([one])
                return
            results = [error]
        for (protocol, call, _), result in zip(ready, results):
            protocol.finish(call, settled(self.service, call, result))


async def _close(items: Any, call: Call) -> None:
    try:
        if hasattr(items, "aclose"):
            await items.aclose()
    except BaseException as error:  # noqa: BLE001
        show(call, error)


class _Protocol(asyncio.Protocol):
    """One connection."""

    transport: asyncio.Transport

    def __init__(self, server: Looped, connection: Connection) -> None:
        self._server, self.connection = server, connection
        self._descriptor = connection.socket.fileno()
        self.opening: asyncio.Task[Any]
        self.task: asyncio.Task[Any] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._refused = False

    @property
    def busy(self) -> bool:
        return self.connection.call is not None or self.connection.reader.begun or self.connection.whole is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.connection.cancel = self._cancel_soon
        request, self.connection.whole = self.connection.whole, None
        if request is not None:
            self._take(request)

    def opened(self, opening: asyncio.Task[Any]) -> None:
        if opening.cancelled() or opening.exception() is not None:
            self._server.closed(self)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self.connection.call is not None:  # more than was asked for: it waits, and no further bytes are read
            self.connection.reader.keep(data)
            self.transport.pause_reading()
            return
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        reader = self.connection.reader
        try:
            request = reader.feed(data)
            if request is not None:
                self._take(request)
            elif reader.head is not None and reader.head.expects:
                reader.head.expects = False
                self.transport.write(answer.CONTINUE)
        except BadRequest as error:
            self._refuse(answer.error(error.status, error.code, str(error), self.connection.call, keep=False))

    def _take(self, request: Request) -> None:
        service = self._server.service
        if request.path not in service.speeches or request.method != "POST":
            self.transport.write(service.route(request))
            if not request.keep:
                self.transport.close()
            return
        try:
            call = service.begin(self.connection, request)
        except BadRequest as error:
            self._refuse(answer.error(error.status, error.code, str(error), keep=False))
            return
        self._server.begin(self, request, call)
        if call.cancelled:
            self._cancel()

    def _refuse(self, last: bytes) -> None:
        """Send a last answer, and read on for a while: closing at once would take it away from a caller that is still sending."""
        self._refused = True
        self.connection.call = None
        self.transport.write(last)
        self.transport.write_eof()
        self._server.loop.call_later(_LINGER, self.transport.abort)

    def finish(self, call: Call, made: bytes | None) -> None:
        """The call is over."""
        self.connection.call = self.task = None
        if made is not None:
            self.transport.write(made)
        if call.cancelled:
            self.transport.abort()
        elif not call.keep or self._server.service.draining:
            self.transport.close()
        elif self.connection.reader.begun:
            self._feed(b"")
            self.transport.resume_reading()

    def _cancel_soon(self) -> None:
        """From any thread."""
        self._server.loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        """The caller is gone."""
        if self.connection.call is not None:
            self.connection.call.cancelled = True
        if self.task is not None:
            self.task.cancel()
        if self._writable is not None and not self._writable.done():
            self._writable.set_exception(HungUp())

    # ---- writing

    async def send(self, data: bytes) -> None:
        """Write, and wait while the caller does not read. Raises HungUp."""
        if self.transport.is_closing():
            raise HungUp
        self.transport.write(data)
        if self._writable is not None:
            await self._writable

    def pause_writing(self) -> None:
        self._writable = self._server.loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def eof_received(self) -> bool:
        return self.connection.call is not None  # it may have said all and still wait for the answer

    def connection_lost(self, exc: BaseException | None) -> None:
        self._cancel()
        door = self._server.service.door
        assert door is not None
        door.connections.pop(self._descriptor, None)
        self.connection.call = None
        self._server.closed(self)
