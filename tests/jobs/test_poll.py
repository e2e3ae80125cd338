"""What a ring means: the turn for a new job first, then everything else."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from ostler.jobs.poll import Poll


def test_a_ring_wakes_the_dispatcher_at_once_and_tells_the_others_once_a_moment_later() -> None:
    heard: list[str] = []
    dispatcher: Any = SimpleNamespace(wake=lambda: heard.append("wake"), tell=lambda: heard.append("tell"))

    async def rung() -> None:
        poll = Poll(*[None] * 4, dispatcher, None)  # type: ignore[arg-type]
        for _ in range(3):
            poll.ring()
        assert heard == ["wake"] * 3
        async with asyncio.timeout(30):
            await poll._rung.wait()
        assert heard == ["wake"] * 3 + ["tell"]
        poll.ring()
        assert heard[4:] == ["wake"]
        await poll.stop()  # before the rest of it
        assert poll._later is not None and poll._later.cancelled()

    asyncio.run(rung())
