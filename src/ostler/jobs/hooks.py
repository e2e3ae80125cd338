"""Code of the app's own around a worker's jobs: once after its start, once before its exit. Standard library alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ostler.errors import ConfigError

log = logging.getLogger("ostler.jobs")

Hook = Callable[[], Any]
F = TypeVar("F", bound=Callable[..., Any])


class Hooks:
    """What an app declares with `on_start` and `on_stop`: (queue or None for all, function)."""

    def __init__(self) -> None:
        self.starting: list[tuple[str | None, Hook]] = []
        self.stopping: list[tuple[str | None, Hook]] = []

    def adding(self, to: list[tuple[str | None, Hook]], queue: str | None, name: str) -> Callable[[F], F]:
        """The decorator that adds a function."""
        if callable(queue):
            raise ConfigError(f'write @app.{name}() with parentheses, or @app.{name}("queue")')

        def add(function: F) -> F:
            to.append((queue, function))
            return function

        return add

    def queues(self) -> set[str]:
        """The queues that are named."""
        return {queue for queue, _ in (*self.starting, *self.stopping) if queue is not None}

    def start(self, queue: str, wait: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        """Run those of a worker of the queue, in the order in which they are declared. What one raises is the worker's end."""
        for function in _of(self.starting, queue):
            _run(function, wait)

    def stop(self, queue: str, wait: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        """Run those of a worker of the queue, the last declared first. One that raises does not keep the others from running."""
        for function in reversed(_of(self.stopping, queue)):
            try:
                _run(function, wait)
            except Exception:
                log.exception("on_stop: %s failed", getattr(function, "__name__", function))


def _of(hooks: list[tuple[str | None, Hook]], queue: str) -> list[Hook]:
    return [function for own, function in hooks if own in (None, queue)]


def _run(function: Hook, wait: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
    found = function()
    if isinstance(found, Coroutine):
        wait(found)
