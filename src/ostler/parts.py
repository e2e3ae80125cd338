"""The contract of a node's parts: how they are started and stopped, and the tasks that end with them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Protocol

log = logging.getLogger("ostler")


class Part(Protocol):
    """One part of a node.

    `start` begins its work; when it raises, `stop` takes down whatever it had begun. `stop` ends the work and returns when
    nothing of it is left; before a start, and a second time, it does nothing.
    """

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class Tasks:
    """What a part does on the loop, until it is stopped. A task that fails is logged."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self.begun = False  # since the last stop

    def begin(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        self.begun = True
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("the task %r failed", task.get_name(), exc_info=error)

    async def stop(self) -> bool:
        """Cancel them; returns when all have ended, with whether any was begun."""
        begun, self.begun = self.begun, False
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        return begun


@contextlib.asynccontextmanager
async def running(parts: Sequence[Part]) -> AsyncIterator[None]:
    """Start the parts in order, and stop them in reverse, however the block ends. A start that fails stops those before it."""
    async with contextlib.AsyncExitStack() as stack:
        for part in parts:
            stack.push_async_callback(part.stop)
            await part.start()
        yield
