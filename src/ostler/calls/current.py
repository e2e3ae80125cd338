"""What a model can ask while it serves a call or loads: is the call cancelled, how much time is left. Standard library, Python 3.9."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any


class Call:
    """One call in a worker. `cancelled` is set from another thread when the caller hangs up."""

    __slots__ = ("accept", "cancelled", "due", "id", "keep", "old", "speech", "started")

    def __init__(self, id: str, due: float | None, accept: str, keep: bool, old: bool) -> None:  # noqa: A002
        self.id = id
        self.due = due
        self.accept = accept
        self.keep = keep
        self.old = old
        self.started = time.perf_counter()
        self.cancelled = False
        self.speech: Any = None  # of a call by one of OpenAI's routes

    def left(self) -> float | None:
        return None if self.due is None else max(0.0, self.due - time.monotonic())


class Batch:
    """Calls that run together: cancelled when all of them are; the earliest deadline is theirs."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls

    @property
    def cancelled(self) -> bool:
        return all(call.cancelled for call in self._calls)

    def left(self) -> float | None:
        return min((left for call in self._calls if (left := call.left()) is not None), default=None)


running: ContextVar[Call | Batch | None] = ContextVar("running", default=None)
progress: Callable[[float], None] | None = None  # set by the worker while it loads


def cancelled() -> bool:
    """Whether the caller of this call is gone: what the model does now is for nobody. False outside of a call.

    Look at it between steps of a long computation, and return. It also works in threads started by `asyncio.to_thread`.
    """
    call = running.get()
    return call is not None and call.cancelled


def deadline() -> float | None:
    """Seconds left until the caller's deadline, never below 0. None if there is none, and outside of a call."""
    call = running.get()
    return None if call is None else call.left()


def loading_progress(fraction: float) -> None:
    """Tell how much of the model is loaded, from 0 to 1. For `load()`; does nothing anywhere else.

    A model that reports progress is not killed at its startup deadline while the figure grows.
    """
    if progress is not None:
        progress(fraction)
