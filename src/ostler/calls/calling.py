"""How an app calls models, from jobs and from other programs. Nothing is loaded before the first call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from ostler import loading
from ostler.calls.model import Duration

if TYPE_CHECKING:
    from ostler.calls.client import Caller
    from ostler.calls.exchange import Answer, Question
    from ostler.config import Settings


class CallOptions(TypedDict, total=False):
    """Options of a call. Times are seconds, or text such as "5m"."""

    timeout: Duration | None
    """How long to wait in total; then the call is cancelled and CallTimeout is raised."""
    keep_alive: Duration | None
    """How long the model stays loaded after this call: 0 unloads it at once, -1 keeps it."""
    priority: int
    """Waiting calls with a higher priority go first."""


class Calling:
    """The methods of an app that call models of the running node. They raise CallError."""

    _caller: Caller | None = None

    def settings(self) -> Settings:
        raise NotImplementedError

    async def call(self, task: str, model: str | None, payload: Any, **options: Unpack[CallOptions]) -> Any:
        """Call a model and return its result. `model` may be None if the task has only one.

        The payload is JSON; bytes and a `Body` are sent unchanged. Bytes are returned as a `Body`, and the items of a stream as a list.
        Cancelling the asyncio task cancels the call. `options`: timeout, keep_alive, priority.
        """
        return (await self.answer(task, model, payload, **options)).result

    def call_sync(self, task: str, model: str | None, payload: Any, **options: Unpack[CallOptions]) -> Any:
        """Like `call`, but blocking."""
        return self.answer_sync(task, model, payload, **options).result

    async def answer(self, task: str, model: str | None, payload: Any, **options: Unpack[CallOptions]) -> Answer:
        """Like `call`, but return the whole response: `result`, `request_id`, `processing_time_ms`, `model`."""
        caller, question = self._question(task, model, payload, options)
        return await caller.answer(question)

    def answer_sync(self, task: str, model: str | None, payload: Any, **options: Unpack[CallOptions]) -> Answer:
        """Like `answer`, but blocking."""
        caller, question = self._question(task, model, payload, options)
        return caller.answer_sync(question)

    def stream(self, task: str, model: str | None, payload: Any, **options: Unpack[CallOptions]) -> AsyncIterator[Any]:
        """Call a model that streams, and yield its items as they arrive. Leaving the loop or cancelling the asyncio task cancels the call."""
        caller, question = self._question(task, model, payload, options)
        return caller.stream(question)

    def stream_sync(self, task: str, model: str | None, payload: Any, **options: Unpack[CallOptions]) -> Iterator[Any]:
        """Like `stream`, but blocking."""
        caller, question = self._question(task, model, payload, options)
        return caller.stream_sync(question)

    def _question(self, task: str, model: str | None, payload: Any, options: CallOptions) -> tuple[Caller, Question]:
        loading.refuse("calls a model")
        if self._caller is None:
            from ostler.calls.client import Caller  # noqa: PLC0415  few workers call models

            self._caller = Caller(self.settings)
        return self._caller, self._caller.ask(task, model, payload, options)
