"""Races of the dispatcher, made deterministic: a worker that is only a list of frames, a store in this thread."""

from __future__ import annotations

import asyncio
import time
import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from ostler.config import Settings
from ostler.events import Bus
from ostler.jobs.dispatcher import Dispatcher
from ostler.lifecycle import ends
from ostler.lifecycle.process import Ended
from ostler.lifecycle.recycle import RecycleLimits
from ostler.lifecycle.restart import History, Limits
from ostler.lifecycle.state import Status
from ostler.lifecycle.worker import Exit, Left, Pool, PoolSpec, Slot, Worker
from ostler.lifecycle.membership import Membership
from ostler.store.nodes import NodeRow
from ostler.store import Store, now_ms
from ostler.store.rows import NewJob, Taken, Turn

CRASH = Exit("signal", "crash", -9, "SIGKILL")


class Line:
    """A lane without a thread."""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def call(self, work, *, patience=None, known=False):
        return work(self.store)


class Boss:
    """What the dispatcher needs of a supervisor."""

    stopping, pools = False, {}
    pauses = SimpleNamespace(enabled=True)

    def __init__(self) -> None:
        self.killed: list[tuple[str, str]] = []
        self.woken = 0

    def kill(self, worker: Worker, reason: str, *, on_purpose: bool = False) -> None:
        worker.killing = reason
        self.killed.append((worker.component, reason))

    def terminate(self, worker: Worker, reason: str) -> None:
        worker.parting = reason

    def wake(self) -> None:
        self.woken += 1

    def finished(self, worker: Worker, *, idle: bool) -> None:
        worker.served += 1


class Fake(Worker):
    """A healthy worker that notes what it is told."""

    def __init__(self, n: int = 0, recycle: RecycleLimits | None = None) -> None:
        super().__init__(
            Slot(f"worker:q:{n}", n, Pool(PoolSpec("q", 1, ["x"], recycle=recycle or RecycleLimits()))),
            1,
            0.0,
            status=Status.HEALTHY,
        )
        self.told: list[tuple] = []

    def send(self, *frame: object) -> None:
        self.told.append(frame)

    def in_hand(self) -> list[list]:
        return [job for frame in self.told if frame[0] == "work" for job in frame[1]]


class Desk:
    def __init__(self, store: Store) -> None:
        self.store, self.boss = store, Boss()
        settings = Settings(name="n")
        member = Membership(settings, NodeRow("n", "n", 30_000))
        store.nodes.register(member.row)
        self.dispatcher = Dispatcher(settings, Line(store), Line(store), Bus(), member)
        self.dispatcher.supervisor = self.boss

    def put(self, count: int = 1, **more) -> list[int]:
        return self.store.jobs.enqueue([NewJob("t", "q", "{}", **more) for _ in range(count)], now_ms())

    async def turn(self) -> None:
        await self.dispatcher._once()

    def later(self, worker: Worker, seconds: float) -> None:
        """What the worker is at began so much earlier."""
        self.dispatcher._by_component[worker.component].began -= seconds

    def known_short(self) -> None:
        for _ in range(9):
            self.dispatcher._room.durations.add("q", "t", 0.0001)

    def status(self, *jobs: int) -> list[tuple[str, int, int]]:
        return [(j["status"], j["attempt"], j["crashes"]) for j in map(self.store.jobs.get, jobs)]


@pytest.fixture
def run(store: Store):
    def go(scenario) -> None:
        async def main() -> None:
            desk = Desk(store)
            await scenario(desk)
            for handle in (desk.dispatcher.deadlines._timer, desk.dispatcher._due):
                if handle:
                    handle.cancel()

        asyncio.run(main())

    return go


def test_a_job_that_was_handed_over_and_never_begun_is_not_blamed(run) -> None:
    async def scenario(desk: Desk) -> None:
        worker, (job,) = Fake(), desk.put()
        desk.dispatcher.ready(worker, {})
        await desk.turn()
        assert [j[0] for j in worker.in_hand()] == [job]
        assert desk.dispatcher.gone(worker, CRASH) == Left()
        await desk.turn()
        assert desk.status(job) == [("queued", 0, 0)]

    run(scenario)


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_wrong_clock_of_the_node_neither_hurries_nor_delays_a_retry(
    run, store: Store, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """The store's clock decides when it is due; by it, too, is told when a run began and ended."""
    real = time.time_ns
    monkeypatch.setattr(store.db, "now", lambda: real() // 1_000_000)  # as a server's
    monkeypatch.setattr(time, "time_ns", lambda: real() + hours * 3_600_000_000_000)

    async def scenario(desk: Desk) -> None:
        worker = Fake()
        failing, ending = store.jobs.enqueue([NewJob("t", "q", "{}") for _ in range(2)], store.now())
        desk.dispatcher.ready(worker, {})
        for job, end in ((failing, ["fail", {"code": "X", "message": "x"}, 60.0]), (ending, ["done", "1"])):
            await desk.turn()
            (fence,) = [j[1] for j in worker.in_hand() if j[0] == job]
            desk.dispatcher.heard(worker, ["begin", job, fence])
            kind, *rest = end
            frame = [kind, job, fence, "transient", *rest] if kind == "fail" else [kind, job, fence, *rest]
            desk.dispatcher.heard(worker, frame)
        await desk.turn()
        again, done = store.jobs.get(failing), store.jobs.get(ending)
        assert again["status"] == "queued"
        assert 50_000 < again["run_at"] - store.now() <= 61_000
        for at in (done["started_at"], done["finished_at"], again["events"][-1]["at"]):
            assert abs(at - store.now()) < 10_000

    run(scenario)


def test_an_end_that_the_store_refuses_in_any_form_is_told_again(
    run, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while a trigger on the table fails. Else the job would be held by a living node for ever."""
    take, sleep = store.turns.take, asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda _: sleep(0))

    def refusing(turn: Turn) -> Taken:
        if turn.finishes:
            raise ValueError("refused")
        return take(turn)

    async def scenario(desk: Desk) -> None:
        worker, (job,) = Fake(), desk.put()
        desk.dispatcher.ready(worker, {})
        await desk.turn()
        desk.dispatcher.heard(worker, ["begin", job, 1])
        desk.dispatcher.heard(worker, ["done", job, 1, "42"])
        monkeypatch.setattr(store.turns, "take", refusing)
        for _ in range(2):
            await desk.turn()
            assert desk.status(job) == [("processing", 1, 0)]
            assert desk.dispatcher._outbox.ended() == {(job, 1)}, "a turn that is replayed would run it again"
            desk.dispatcher._outbox._again = 0.0
        monkeypatch.setattr(store.turns, "take", take)
        await desk.turn()
        assert desk.status(job) == [("done", 1, 0)]
        assert store.jobs.get(job)["result"] == 42

    run(scenario)


def test_a_job_that_had_begun_is_blamed_and_those_behind_it_are_not(run) -> None:
    async def scenario(desk: Desk) -> None:
        desk.known_short()
        worker, jobs = Fake(), desk.put(4)
        desk.dispatcher.ready(worker, {})
        await desk.turn()
        desk.dispatcher.heard(worker, ["begin", jobs[0], 1])
        desk.dispatcher.heard(worker, ["done", jobs[0], 1, "null"])  # also the beginning of the second
        assert desk.dispatcher.gone(worker, CRASH) == Left(f"job:{jobs[1]}")
        await desk.turn()
        assert desk.status(*jobs) == [("done", 1, 0), ("queued", 1, 1), ("queued", 0, 0), ("queued", 0, 0)]

    run(scenario)


def test_a_timeout_that_came_too_late_does_not_stick_to_the_next_job(run) -> None:
    async def scenario(desk: Desk) -> None:
        desk.known_short()
        worker = Fake()
        (first,), (second,) = desk.put(timeout=60), desk.put()
        desk.dispatcher.ready(worker, {})
        await desk.turn()
        desk.dispatcher.heard(worker, ["begin", first, 1])
        desk.later(worker, 61)
        desk.dispatcher.deadlines.tick()
        assert desk.boss.killed == [("worker:q:0", "job-timeout")]
        desk.dispatcher.heard(worker, ["done", first, 1, "1"])  # it had finished after all
        assert desk.dispatcher.gone(worker, Exit("job-timeout", "asked", -9, "SIGKILL")).item == f"job:{second}"
        await desk.turn()
        assert desk.status(first, second) == [("done", 1, 0), ("queued", 0, 0)]
        assert "aborted:shutdown" in [e["name"] for e in desk.store.jobs.events(second)]

    run(scenario)


def test_a_cancelled_job_that_comes_back_unbegun_does_not_block_its_worker(run) -> None:
    async def scenario(desk: Desk) -> None:
        desk.known_short()
        worker, jobs = Fake(), desk.put(3)
        desk.dispatcher.ready(worker, {})
        await desk.turn()
        desk.store.jobs.cancel(jobs[0], now_ms())
        desk.dispatcher.deadlines.cancel(jobs[0])
        assert ("cancel", jobs[0]) in worker.told
        desk.dispatcher.heard(worker, ["back", jobs])
        await desk.turn()
        assert [s for s, _, _ in desk.status(*jobs)] == ["cancelled", "processing", "processing"]
        assert [j[0] for j in worker.in_hand()] == [*jobs, *jobs[1:]]

    run(scenario)


def test_cancelling_a_job_that_waits_in_hand_recalls_it(run) -> None:
    async def scenario(desk: Desk) -> None:
        desk.known_short()
        worker, jobs = Fake(), desk.put(3)
        desk.dispatcher.ready(worker, {})
        await desk.turn()
        desk.dispatcher.heard(worker, ["begin", jobs[0], 1])
        desk.store.jobs.cancel(jobs[1], now_ms())
        desk.dispatcher.deadlines.cancel(jobs[1])
        assert worker.told[-1] == ("recall",)
        desk.dispatcher.heard(worker, ["back", jobs[1:]])
        await desk.turn()
        assert [s for s, _, _ in desk.status(*jobs)] == ["processing", "cancelled", "queued"]

    run(scenario)


def test_a_cancel_of_an_older_claim_does_not_touch_the_new_run(run) -> None:
    async def scenario(desk: Desk) -> None:
        worker, (job,) = Fake(), desk.put()
        desk.dispatcher.ready(worker, {})
        await desk.turn()
        desk.dispatcher.deadlines.cancel(job, fence=0)
        assert not any(frame[0] == "cancel" for frame in worker.told)

    run(scenario)


def test_a_cancelled_job_that_overruns_its_timeout_is_cancelled_and_not_blamed(run) -> None:
    async def scenario(desk: Desk) -> None:
        worker, (job,) = Fake(), desk.put(timeout=2)
        desk.dispatcher.ready(worker, {})
        await desk.turn()
        desk.store.jobs.cancel(job, now_ms())
        desk.dispatcher.deadlines.cancel(job)
        desk.dispatcher.heard(worker, ["begin", job, 1])
        desk.later(worker, 3)  # its time is over, and the grace of the cancel is not
        desk.dispatcher.deadlines.tick()
        assert desk.boss.killed == [(worker.component, "cancelled")]
        desk.dispatcher.gone(worker, Exit("cancelled", "asked", -9, "SIGKILL"))
        await desk.turn()
        assert desk.status(job) == [("cancelled", 1, 0)]

    run(scenario)


def test_a_cancel_whose_sigterm_crosses_the_jobs_end_blames_neither_worker_nor_the_next_job(run) -> None:
    async def scenario(desk: Desk) -> None:
        desk.known_short()
        worker = Fake()
        first, second = desk.put(2)
        desk.dispatcher.ready(worker, {})
        await desk.turn()
        desk.dispatcher.heard(worker, ["begin", first, 1])
        desk.dispatcher.deadlines.cancel(first)
        desk.dispatcher._by_component[worker.component].cancel_by -= 60
        desk.dispatcher.deadlines.tick()
        assert worker.parting == "cancelled"
        desk.dispatcher.heard(worker, ["done", first, 1, "1"])  # sent before the signal came
        assert worker.parting == "cancelled" and not worker.accepting  # it is on its way out
        end = ends.judge(worker, Ended(143, 0.0, None), History(), 5, Limits(), memory_ran_out=False)
        assert (end.reason, end.kind) == ("cancelled", "asked")
        desk.dispatcher.gone(worker, end)
        await desk.turn()
        assert desk.status(first, second) == [("done", 1, 0), ("queued", 0, 0)]

    run(scenario)


def test_one_item_that_the_store_refuses_does_not_hold_up_the_others(run) -> None:
    async def scenario(desk: Desk) -> None:
        workers = [Fake(n) for n in range(2)]
        jobs = desk.put(2)
        for worker in workers:
            desk.dispatcher.ready(worker, {})
        await desk.turn()
        for worker, job in zip(workers, jobs, strict=True):
            desk.dispatcher.heard(worker, ["begin", job, 1])
        desk.dispatcher.heard(workers[0], ["done", jobs[0], 1, "1"])
        desk.dispatcher.heard(workers[1], ["fail", jobs[1], 1, "transient", {"code": "ERROR", "message": "x"}, None])
        bad = desk.dispatcher._outbox._requeues[0]
        desk.dispatcher._outbox._requeues[0] = bad._replace(run_at=10**30)  # no integer that SQLite can hold
        await desk.turn()
        assert [s for s, _, _ in desk.status(*jobs)] == ["done", "failed"]
        assert desk.store.jobs.get(jobs[1])["error"]["code"] == "INTERNAL"

    run(scenario)


def test_a_frame_that_cannot_be_understood_does_not_cost_the_job(run) -> None:
    async def scenario(desk: Desk) -> None:
        worker, (job,) = Fake(), desk.put()
        desk.dispatcher.ready(worker, {})
        await desk.turn()
        desk.dispatcher.heard(worker, ["begin", job, 1])
        with contextlib.suppress(Exception):
            desk.dispatcher.heard(worker, ["fail", job, 1, "transient", None, "soon"])
        desk.dispatcher.gone(worker, CRASH)
        await desk.turn()
        assert desk.status(job) == [("queued", 1, 1)]

    run(scenario)


def test_timers_in_the_past_do_not_end_the_clock(run) -> None:
    async def scenario(desk: Desk) -> None:
        workers = [Fake(n) for n in range(3)]
        for worker in workers:
            desk.dispatcher.ready(worker, {})
        desk.put(3, timeout=0.0001)
        await desk.turn()
        async with asyncio.timeout(60):
            while len(desk.boss.killed) < 3:
                await asyncio.sleep(0.001)  # the clock is the loop's own

    run(scenario)


def test_close_gives_back_what_a_turn_under_way_claimed(run) -> None:
    async def scenario(desk: Desk) -> None:
        worker, (job,) = Fake(), desk.put()
        hold, held = asyncio.Event(), asyncio.Event()
        line = desk.dispatcher._outbox._lane

        async def slow(work, *, patience=None, known=False):
            held.set()
            await hold.wait()
            return work(line.store)

        line.call, quick = slow, line.call
        await desk.dispatcher.start()
        desk.dispatcher.ready(worker, {})
        await held.wait()
        worker.leave = True
        closing = asyncio.create_task(desk.dispatcher.stop())
        await asyncio.sleep(0)
        line.call = quick
        hold.set()
        await closing
        assert desk.status(job) == [("queued", 0, 0)]

    run(scenario)


def test_a_warm_pool_serves_on_until_its_replacement_is_there_and_a_cold_one_stops_at_its_count(run) -> None:
    async def scenario(desk: Desk) -> None:
        desk.put(2)
        cold, warm = Fake(0, RecycleLimits(count=3)), Fake(1, RecycleLimits(count=3, warm=True))
        for worker in (cold, warm):
            worker.served = 3
            desk.dispatcher.ready(worker, {})
        assert desk.dispatcher._wants() == {"q": ["worker:q:1"]}

    run(scenario)


_ = Path
