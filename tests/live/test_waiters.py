"""Requests that wait for the end of a job."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from ostler.events import Bus, JobsTouched
from ostler.live.waiters import TooManyWait, Waiters
from ostler.web.jobs import _in_time


class Lane:
    """A store in which these jobs have ended; it counts who looks."""

    def __init__(self) -> None:
        self.ended: set[int] = set()
        self.looks: list[list[int]] = []

    async def call(self, work: Any, patience: float) -> Any:
        def ended(ids: list[int]) -> set[int]:
            self.looks.append(sorted(ids))
            return self.ended & {*ids}

        return work(SimpleNamespace(jobs=SimpleNamespace(ended=ended)))


def run(test: Any, **how: Any) -> None:
    async def main() -> None:
        bus, lane = Bus(), Lane()
        waiters = Waiters(bus, lane, how.pop("poll_interval", 3600), **how)
        await waiters.start()
        async with asyncio.timeout(60):
            await test(bus, lane, waiters)
        await waiters.stop()
        await waiters.stop()

    asyncio.run(main())


def test_a_waiter_is_woken_by_the_end_of_its_job_and_by_nothing_else() -> None:
    async def test(bus: Bus, lane: Lane, waiters: Waiters) -> None:
        bus.send(JobsTouched([1, 2], others=True))  # nobody waits: nobody looks
        with waiters.waiting(1) as one, waiters.waiting(1) as same, waiters.waiting(2) as two:
            bus.send(JobsTouched([3]))
            lane.ended = {1}
            bus.send(JobsTouched([1, 3]))
            await asyncio.gather(one, same)
            assert not two.done() and lane.looks == [[1]]
            lane.ended = {2}
            bus.send(JobsTouched([], others=True))  # another process has written something
            await two
        assert lane.looks == [[1], [1, 2]]

    run(test)


def test_what_nobody_told_is_found_by_the_poll() -> None:
    async def test(bus: Bus, lane: Lane, waiters: Waiters) -> None:
        lane.ended = {7}
        with waiters.waiting(7) as ended:
            await ended

    run(test, poll_interval=0.01)


def test_no_more_wait_than_the_node_allows() -> None:
    async def test(bus: Bus, lane: Lane, waiters: Waiters) -> None:
        with waiters.waiting(1), waiters.waiting(2):
            with pytest.raises(TooManyWait, match="2 requests already wait") as refused, waiters.waiting(3):
                pass
            assert refused.value.status == 503
        with waiters.waiting(3):  # who has left makes room
            pass

    run(test, most=2)


def test_a_node_that_stops_keeps_nobody_waiting() -> None:
    async def test(bus: Bus, lane: Lane, waiters: Waiters) -> None:
        with waiters.waiting(1) as ended:
            await waiters.stop()
            await ended
            with waiters.waiting(1) as late:
                await late

    run(test)


def test_a_client_that_leaves_does_not_keep_its_place() -> None:
    async def main() -> None:
        told = asyncio.Queue[dict[str, str]]()
        request: Any = SimpleNamespace(receive=told.get)
        told.put_nowait({"type": "http.request"})
        told.put_nowait({"type": "http.disconnect"})
        assert not await _in_time(request, asyncio.get_running_loop().create_future(), 3600)
        assert await _in_time(request, asyncio.get_running_loop().create_future(), 0.01)

    asyncio.run(main())
