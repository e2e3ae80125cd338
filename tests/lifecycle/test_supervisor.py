"""Single looks of the supervisor's loop, with facts set by hand and no processes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from ostler.config import Settings
from ostler.events import Bus
from ostler.lifecycle.state import Status
from ostler.lifecycle.membership import Membership
from ostler.store.nodes import NodeRow
from ostler.lifecycle.supervisor import Supervisor
from ostler.lifecycle.worker import PoolSpec, Worker


class NoLane:
    """Takes every write and forgets it."""

    def post(self, work) -> None: ...


@pytest.fixture
def supervisor(tmp_path: Path) -> Supervisor:
    settings = Settings(data=str(tmp_path))
    member = Membership(settings, NodeRow("n", "n", 30_000))
    made = Supervisor(settings, NoLane(), NoLane(), Bus(), [PoolSpec("q", 2, ["true"])], member)
    made._leaves = 99  # spawn nothing
    return made


def healthy(supervisor: Supervisor, n: int, last_beat: float) -> Worker:
    slot = supervisor.slots[f"worker:q:{n}"]
    slot.worker = Worker(slot, 1, started=last_beat, status=Status.HEALTHY, ready_at=last_beat, last_beat=last_beat)
    return slot.worker


def test_a_silent_worker_is_killed(supervisor: Supervisor) -> None:
    now = time.monotonic()
    silent, well = healthy(supervisor, 0, now - 31), healthy(supervisor, 1, now - 29)
    supervisor._look()
    assert (silent.killing, well.killing) == ("silence", None)


def test_workers_are_not_blamed_for_the_time_that_the_node_itself_was_away(supervisor: Supervisor) -> None:
    now = time.monotonic()
    worker = healthy(supervisor, 0, now - 40)
    supervisor._last_look = now - 40  # the loop looks at least every beat interval (5 s): it was stopped
    supervisor._look()
    assert worker.killing is None
    supervisor._last_look = time.monotonic()
    worker.last_beat -= 30
    supervisor._look()
    assert worker.killing == "silence"


def test_one_slot_that_fails_does_not_stop_the_look_at_the_others(supervisor: Supervisor) -> None:
    now = time.monotonic()
    broken, silent = healthy(supervisor, 0, now), healthy(supervisor, 1, now - 31)
    broken.last_beat = None
    supervisor._look()
    assert silent.killing == "silence"


def test_beats_that_came_with_the_wake_up_are_not_put_into_the_future(supervisor: Supervisor) -> None:
    now = time.monotonic()
    worker = healthy(supervisor, 0, now)
    supervisor._last_look = now - 60
    supervisor._look()
    assert worker.last_beat <= time.monotonic()


def test_more_than_three_beats_that_cannot_be_written_are_called_degraded(supervisor: Supervisor, caplog) -> None:
    for expected in (False, False, False, False, True, True):
        supervisor.records.beats([])
        assert supervisor.records.degraded is expected
    assert [r.message for r in caplog.records if "HEARTBEAT_DEGRADED" in r.message] == [
        "HEARTBEAT_DEGRADED: the store has not accepted 4 heartbeats in a row; workers continue"
    ]

    class Nodes:
        def beat(self, node) -> None: ...

    supervisor.records._write_beats(type("S", (), {"nodes": Nodes()})(), "n", [])
    assert not supervisor.records.degraded


def test_the_loop_ends_also_when_it_is_woken_in_the_moment_in_which_it_is_cancelled(supervisor: Supervisor) -> None:
    async def woken_and_cancelled() -> bool:
        loop = asyncio.create_task(supervisor._run())
        await asyncio.sleep(0)
        supervisor._wake.set()
        await asyncio.sleep(0)
        loop.cancel()
        await asyncio.wait([loop], timeout=5)
        loop.cancel()
        return loop.done()

    assert asyncio.run(woken_and_cancelled())
