"""Calls to models in a test's own process, with payloads, results and errors as a node would pass them."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

from ostler.app import Ostler
from ostler.calls.answer import dumps, judge, raw
from ostler.calls.body import Body, payload_of
from ostler.calls.calling import CallOptions
from ostler.calls.client import encoded
from ostler.calls.exchange import Answer, error_of
from ostler.calls.request import Request
from ostler.errors import BadArguments, CallError, CallRefused, InputError
from ostler.names import no_task

_RAW = (bytes, bytearray, memoryview, Body)


class Asked(NamedTuple):
    task: str
    model: str
    payload: Any


class _Items(list[Any]):
    """The items of a stream."""


class Models:
    """Answers calls with what the app declares or the test gives. Nothing waits or is timed."""

    def __init__(self, app: Ostler) -> None:
        self._app = app
        self.answers: dict[str, Callable[[Any], Any]] = {}
        self._loaded: dict[tuple[str, str], Any] = {}

    def ask(self, task: str, model: str | None, payload: Any, _: CallOptions) -> Asked:
        """A call that can be answered. Raises BadArguments or CallRefused."""
        spec = self._app.models.get(task)
        if spec is None:
            raise CallRefused(no_task(task, self._app.models, where=" to call"), "UNKNOWN_TASK", 404)
        if spec.is_server and task not in self.answers:
            raise BadArguments(
                f"no program is started here for {task!r}; answer its calls with bench.model({task!r}, function)"
            )
        path, headers, body = encoded(task, model, payload)
        request = Request("POST", path, False, headers)
        request.body = b"".join(body)
        chosen = model or next(iter(spec.models), task)
        try:
            spec.options(chosen)
        except InputError as error:
            raise CallRefused(str(error), "UNKNOWN_MODEL", 404) from None
        return Asked(task, chosen, payload_of(request))

    def answer_sync(self, asked: Asked) -> Answer:
        return _answer(self._result_sync(asked), asked)

    async def answer(self, asked: Asked) -> Answer:
        return _answer(await self._result(asked), asked)

    def stream_sync(self, asked: Asked) -> Iterator[Any]:
        found = self._result_sync(asked)
        yield from found if isinstance(found, _Items) else [found]

    async def stream(self, asked: Asked) -> AsyncIterator[Any]:
        found = await self._result(asked)
        for item in found if isinstance(found, _Items) else [found]:
            yield item

    def _result_sync(self, asked: Asked) -> Any:
        try:
            found = self._infer(*asked)
            is_async = inspect.isawaitable(found) or inspect.isasyncgen(found)
            return _sent(asyncio.run(_gathered(found)) if is_async else found)
        except Exception as error:
            raise _told(error) from error

    async def _result(self, asked: Asked) -> Any:
        try:
            found = self._infer(*asked)
            is_async = inspect.isawaitable(found) or inspect.isasyncgen(found)
            return _sent(await _gathered(found) if is_async else found)
        except Exception as error:
            raise _told(error) from error

    def _infer(self, task: str, model: str, payload: Any) -> Any:
        if task in self.answers:
            return self.answers[task](payload)
        spec = self._app.models[task]
        if (task, model) not in self._loaded:
            made = spec.target()
            made.load(model)
            self._loaded[task, model] = made
        loaded = self._loaded[task, model]
        if spec.options(model).batch > 1 or not hasattr(loaded, "infer"):
            return loaded.infer_batch([payload])[0]
        return loaded.infer(payload)


async def _gathered(found: Any) -> Any:
    return _Items([item async for item in found]) if inspect.isasyncgen(found) else await found


def _sent(found: Any) -> Any:
    """A result, or the items of a stream, as they arrive at a caller."""
    if isinstance(found, _Items) or inspect.isgenerator(found):
        return _Items(bytes(raw(item)[1]) if isinstance(item, _RAW) else json.loads(dumps(item)) for item in found)
    if isinstance(found, _RAW):
        kind, data = raw(found)
        return Body(data, kind)
    return json.loads(dumps(found))


def _answer(found: Any, asked: Asked) -> Answer:
    if isinstance(found, _Items):
        is_raw = bool(found) and all(isinstance(item, bytes) for item in found)
        found = Body(b"".join(found)) if is_raw else [*found]
    return Answer(found, None, 0.0, asked.model)


def _told(error: Exception) -> CallError:
    """What a caller is told of an exception in a model."""
    if isinstance(error, CallError):  # of a model that it calls itself
        error = RuntimeError(f"{type(error).__name__}: {error}")
    status, code, message = judge(error)
    return error_of(status, code, message)
