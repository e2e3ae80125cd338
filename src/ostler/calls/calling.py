"""How an app calls models: from any program beside a running node, and from its jobs. Nothing is loaded before the first call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from ostler import loading
from ostler.calls.model import Duration

if TYPE_CHECKING:
    from ostler.calls.client import Caller
    from ostler.calls.exchange import Answer, Question
    from ostler.config import Settings


class Wishes(TypedDict, total=False):
    """What may be said of a call. Times are seconds, or a text such as "5m"."""

    timeout: Duration | None
    """How long you wait in all; then CallTimeout, and the call is cancelled."""
    keep_alive: Duration | None
    """How long the model stays loaded after this call: 0 leaves at once, -1 stays."""
    priority: int
    """Among those that wait, the highest goes first."""


class Calling:
    """The methods of an app that call models of the running node. All of them raise CallError."""

    _caller: Caller | None = None

    def settings(self) -> Settings:
        raise NotImplementedError

    async def call(self, task: str, model: str | None, payload: Any, **wishes: Unpack[Wishes]) -> Any:
        """Call a model; its result. `model` None is the only one that the task has.

        The payload is JSON, or bytes or a `Body`, which are sent as they are. A result of bytes is a `Body`, that of a model that
        streams a list of its items. A task that is cancelled while it awaits this cancels the call. `wishes`: timeout, keep_alive,
        priority.
        """
        return (await self.answer(task, model, payload, **wishes)).result

    def call_sync(self, task: str, model: str | None, payload: Any, **wishes: Unpack[Wishes]) -> Any:
        """`call` for code that is not async: it blocks."""
        return self.answer_sync(task, model, payload, **wishes).result

    async def answer(self, task: str, model: str | None, payload: Any, **wishes: Unpack[Wishes]) -> Answer:
        """`call` with all that the node says: `result`, `request_id`, `processing_time_ms`, `model`."""
        caller, question = self._question(task, model, payload, wishes)
        return await caller.answer(question)

    def answer_sync(self, task: str, model: str | None, payload: Any, **wishes: Unpack[Wishes]) -> Answer:
        """`answer` for code that is not async: it blocks."""
        caller, question = self._question(task, model, payload, wishes)
        return caller.answer_sync(question)

    def stream(self, task: str, model: str | None, payload: Any, **wishes: Unpack[Wishes]) -> AsyncIterator[Any]:
        """Call a model that streams; its items as they come. Leaving the loop, or cancelling its task, cancels the call."""
        caller, question = self._question(task, model, payload, wishes)
        return caller.stream(question)

    def stream_sync(self, task: str, model: str | None, payload: Any, **wishes: Unpack[Wishes]) -> Iterator[Any]:
        """`stream` for code that is not async: it blocks."""
        caller, question = self._question(task, model, payload, wishes)
        return caller.stream_sync(question)

    def _question(self, task: str, model: str | None, payload: Any, wishes: Wishes) -> tuple[Caller, Question]:
        loading.refuse("calls a model")
        if self._caller is None:
            from ostler.calls.client import Caller  # noqa: PLC0415  few workers call models

            self._caller = Caller(self.settings)
        return self._caller, self._caller.ask(task, model, payload, wishes)
