"""The contract of a node's parts: how they are started and stopped."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Protocol


class Part(Protocol):
    """One part of a node.

    `start` begins its work; when it raises, `stop` takes down whatever it had begun. `stop` ends the work and returns when
    nothing of it is left; before a start, and a second time, it does nothing.
    """

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


@contextlib.asynccontextmanager
async def running(parts: Sequence[Part]) -> AsyncIterator[None]:
    """Start the parts in order, and stop them in reverse, however the block ends. A start that fails stops those before it."""
    async with contextlib.AsyncExitStack() as stack:
        for part in parts:
            stack.push_async_callback(part.stop)
            await part.start()
        yield
