"""One contract of start and stop for every part of a node: before a start, twice, and when a start fails in the middle."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from ostler.app import load
from ostler.config import Settings
from ostler.lifecycle import family
from ostler.parts import Part, running
from ostler.registration import Registration
from ostler.runtime import Node
from ostler.web.server import listen
from tests.harness import APP

# In the order in which a node starts them.
PARTS = [
    "Lanes", "Incidents", "CallLog", "Leave", "Dispatcher", "Ledger", "Supervisor", "Neighbours", "Poll", "Hearing", "Upkeep", "Server", "Watch", "Tails", "Waiters",
]  # fmt: skip


def name(part: Part) -> str:
    return type(part).__name__


class Built:
    """A node's parts, built and not started."""

    def __init__(self, folder: Path) -> None:
        node = Node(Settings(data=str(folder), port=0, workers=1, stop_grace=2.0), load(str(APP)), str(APP))
        self._listening = listen("127.0.0.1", 0)
        node._registration = Registration(node.settings, node.app, folder, node.url)
        node._registration.register()
        self.parts = node._build(folder, self._listening.__enter__()).in_order
        self._threads = set(threading.enumerate())
        self._children = {p.pid for p in family.children()}

    async def left(self) -> list[str]:
        """Tasks, threads and processes that are still there; those that are on their way out get a moment."""
        deadline = time.monotonic() + 20
        while True:
            tasks = {t.get_name() for t in asyncio.all_tasks() if t is not asyncio.current_task()}
            threads = {t.name for t in set(threading.enumerate()) - self._threads if t.name.startswith("ostler")}
            children = {str(p.pid) for p in family.children() if p.pid not in self._children}
            found = sorted(tasks | threads | children)
            if not found or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.01)

    def close(self) -> None:
        self._listening.__exit__(None, None, None)
        os.environ.pop(family.NODE, None)


class Failing:
    """A part whose start fails when it has begun everything."""

    def __init__(self, part: Part) -> None:
        self._part = part

    async def start(self) -> None:
        await self._part.start()
        raise OSError("no more")

    async def stop(self) -> None:
        await self._part.stop()


def play(folder: Path, scene) -> None:
    async def main() -> None:
        built = Built(folder)
        try:
            await asyncio.wait_for(scene(built), 60)
            assert await built.left() == []
        finally:
            built.close()

    asyncio.run(main())


def test_these_are_the_parts_of_a_node(tmp_path: Path) -> None:
    async def scene(built: Built) -> None:
        assert [name(part) for part in built.parts] == PARTS

    play(tmp_path, scene)


def test_every_part_can_be_stopped_before_it_was_started(tmp_path: Path) -> None:
    async def scene(built: Built) -> None:
        for part in built.parts:
            await part.stop()
            await part.stop()

    play(tmp_path, scene)


def test_every_part_stops_and_a_second_stop_does_nothing(tmp_path: Path) -> None:
    async def scene(built: Built) -> None:
        async with running(built.parts):
            pass
        for part in reversed(built.parts):
            await part.stop()

    play(tmp_path, scene)


@pytest.mark.parametrize("number", range(len(PARTS)), ids=PARTS)
def test_a_start_that_fails_in_the_middle_takes_everything_down_again(tmp_path: Path, number: int) -> None:
    async def scene(built: Built) -> None:
        built.parts[number] = Failing(built.parts[number])
        with pytest.raises(OSError, match="no more"):
            async with running(built.parts):
                raise AssertionError("it started")

    play(tmp_path, scene)
