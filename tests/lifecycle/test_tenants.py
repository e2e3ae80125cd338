"""The seam between the lifecycle and what workers serve: a tenant of the tests' own, real processes, a real store."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ostler.config import Settings
from ostler.events import Bus, PoolPaused
from ostler.jobs.backpressure import Pressure
from ostler.lifecycle.recycle import RecycleLimits
from ostler.lifecycle.state import Status
from ostler.lifecycle.membership import Membership
from ostler.store.nodes import NodeRow
from ostler.lifecycle.supervisor import Supervisor
from ostler.lifecycle.worker import Doing, Exit, Left, Nothing, PoolSpec, Slot, Worker
from ostler.live.condition import condition
from ostler.parts import running
from ostler.store import Store
from ostler.store.lanes import Lane

SERVING = Path(__file__).parent / "serving.py"


class Sessions(Nothing):
    """A tenant that has nothing to do with jobs."""

    kind = "sessions"

    def __init__(self) -> None:
        self.infos: list[dict[str, Any]] = []
        self.beats: list[Any] = []
        self.frames: list[list[Any]] = []
        self.exits: list[tuple[str, str]] = []
        self.at: str | None = None
        self.paused: list[str] = []

    def ready(self, worker: Worker, info: Any) -> None:
        self.infos.append(dict(info))

    def beat(self, worker: Worker, facts: Any) -> Any:
        self.beats.append(facts)
        return {"drain": False}

    def heard(self, worker: Worker, frame: list[Any]) -> None:
        self.frames.append(frame)

    def busy(self, worker: Worker) -> bool:
        return self.at is not None

    def doing(self, worker: Worker) -> Doing | None:
        return Doing(self.at, "a browser") if self.at else None

    def pause(self, worker: Worker) -> None:
        self.paused.append("pause")

    def resume(self, worker: Worker) -> None:
        self.paused.append("resume")

    def gone(self, worker: Worker, end: Exit) -> Left:
        self.exits.append((end.reason, end.kind))
        return Left(self.at)


class Stage:
    """A supervisor with one pool on demand, on a store of its own."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.settings = Settings(data=str(folder), name="n1", heartbeat_interval=0.1, stale_after=30, backoff_max=0.1)
        self.tenant, self.bus = Sessions(), Bus()
        loop = asyncio.get_running_loop()
        self.lanes = [Lane(name, lambda: Store.open("", folder), loop) for name in ("records", "intake")]
        spec = PoolSpec("browsers", 0, lambda slot: [sys.executable, str(SERVING), str(slot.key)], **limits)
        spec = PoolSpec(
            **{f: getattr(spec, f) for f in PoolSpec.__slots__} | {"tenant": self.tenant, "on_demand": True}
        )
        member = Membership(self.settings, NodeRow("n1", "n1", 30_000))
        with Store.open("", folder) as store:
            if not store.db.run("node", id="n1"):
                store.nodes.register(member.row)
        self.supervisor = Supervisor(self.settings, *self.lanes, self.bus, [spec], member)

    async def until(self, found: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + 60
        while not (value := found()):
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            await asyncio.sleep(0.005)
        return value

    async def up(self, slot: Slot) -> Worker:
        self.supervisor.start_slot(slot)
        await self.until(lambda: slot.status is Status.HEALTHY, "the worker to be healthy")
        assert slot.worker is not None
        return slot.worker

    def health(self) -> tuple[str, list[str]]:
        return condition(self.supervisor, [], Pressure({}, 1, 1, self.bus, lambda: None), {})


def play(folder: Path, scene: Callable[[Stage], Awaitable[None]], **limits: Any) -> None:
    async def main() -> None:
        stage = Stage(folder, **limits)
        async with running([*stage.lanes, stage.supervisor]):
            await scene(stage)

    asyncio.run(main())


def test_slots_are_opened_started_and_stopped_on_demand_and_one_that_nobody_wants_is_no_fault(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        supervisor = stage.supervisor
        assert (supervisor.slots, stage.health()) == ({}, ("healthy", []))
        a, b = supervisor.open("browsers", "org/a:1"), supervisor.open("browsers", "org/b:2")
        assert (a.component, b.component) == ("worker:browsers:0", "worker:browsers:1")
        assert supervisor.open("browsers", "org/a:1") is a
        assert a.status is Status.STOPPED and stage.health() == ("healthy", [])  # opened, and not wanted yet
        await stage.up(a)
        assert stage.tenant.infos == [{"endpoint": "org/a:1", "slot": "worker:browsers:0"}]  # argv depends on the slot
        supervisor.stop_slot(a)
        await stage.until(lambda: a.status is Status.STOPPED and a.worker is None, "it to stop")
        assert stage.tenant.exits == [("stopped", "asked")]
        assert (a.history.lifetime, stage.health()) == (0, ("healthy", []))
        await stage.up(a)
        assert a.generation == 2

    play(tmp_path, scene)


def test_the_number_and_the_history_of_a_slot_stay_with_its_key_when_the_node_starts_anew(tmp_path: Path) -> None:
    async def first(stage: Stage) -> None:
        stage.supervisor.open("browsers", "other")
        slot = stage.supervisor.open("browsers", "mine")
        worker = await stage.up(slot)
        worker.send("die")
        await stage.until(lambda: slot.history.lifetime == 1, "the crash to count")

    async def second(stage: Stage) -> None:
        slot = stage.supervisor.open("browsers", "mine")
        assert (slot.component, slot.history.lifetime, slot.wanted) == ("worker:browsers:1", 1, False)
        assert stage.supervisor.open("browsers", "third").number == 2

    play(tmp_path, first)
    play(tmp_path, second)


def test_heartbeats_reach_the_tenant_and_its_answer_is_the_wanted_state(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        slot = stage.supervisor.open("browsers", "k")
        worker = await stage.up(slot)
        await stage.until(lambda: ["echo", ["wanted", {"drain": False}]] in stage.tenant.frames, "the answer to a beat")
        assert stage.tenant.beats[0] == {"sessions": 3}
        worker.send("anything", 1)
        await stage.until(lambda: ["echo", ["anything", 1]] in stage.tenant.frames, "a frame of its own")

    play(tmp_path, scene)


def test_the_exit_record_names_the_tenants_item_and_its_crash_is_charged_by_the_same_rule(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        slot = stage.supervisor.open("browsers", "k")
        worker = await stage.up(slot)
        stage.supervisor.finished(worker, idle=True)
        stage.tenant.at = "session:7f"
        worker.send("die")
        await stage.until(lambda: slot.last_exit and slot.generation == 2, "the next generation")
        assert (slot.last_exit.item, slot.last_exit.counted, slot.history.lifetime) == ("session:7f", False, 0)
        assert slot.pool.credit == 19

    play(tmp_path, scene)


def test_a_kill_on_purpose_has_the_tenants_reason_and_blames_nobody(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        slot = stage.supervisor.open("browsers", "k")
        stage.supervisor.kill(await stage.up(slot), "session-limit", on_purpose=True)
        await stage.until(lambda: slot.last_exit, "the exit")
        assert (slot.last_exit.reason, slot.last_exit.kind, slot.history.lifetime) == ("session-limit", "asked", 0)
        again = await stage.up(slot)
        stage.supervisor.terminate(again, "session-limit")
        assert not again.accepting
        await stage.until(lambda: slot.generation == 3 and slot.status is Status.HEALTHY, "a fresh worker")
        assert (slot.last_exit.reason, slot.last_exit.kind) == ("session-limit", "asked")

    play(tmp_path, scene)


def test_a_worker_over_its_memory_while_busy_serves_on_when_its_memory_has_fallen(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        slot = stage.supervisor.open("browsers", "k")
        worker = await stage.up(slot)
        stage.tenant.at = "session:1"
        worker.rss_mb = 9000.0
        stage.supervisor._recycling.consider(slot, worker, time.monotonic())
        assert slot.pool.retiring is slot and not worker.accepting
        worker.rss_mb = 10.0
        stage.supervisor._recycling.consider(slot, worker, time.monotonic())
        assert slot.pool.retiring is None and worker.accepting
        assert stage.tenant.paused == ["resume"]
        stage.tenant.at = None

    play(tmp_path, scene, recycle=RecycleLimits(rss_mb=5000.0))


def test_a_worker_that_says_it_is_tired_is_recycled_when_it_is_idle(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        slot = stage.supervisor.open("browsers", "k")
        worker = await stage.up(slot)
        stage.tenant.at = "session:1"
        stage.supervisor._starts._heard(worker, ["tired", "its limits were lowered"])
        assert not worker.accepting
        await asyncio.sleep(0)
        assert slot.generation == 1
        stage.tenant.at = None
        stage.supervisor.finished(worker, idle=True)
        await stage.until(lambda: slot.generation == 2 and slot.status is Status.HEALTHY, "a fresh worker")
        assert (slot.last_exit.kind, slot.history.lifetime) == ("asked", 0)

    play(tmp_path, scene)


def test_two_pauses_at_once_and_a_read_in_between_undo_nothing(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        supervisor, pauses = stage.supervisor, stage.supervisor.pauses
        said: list[Any] = []
        stage.bus.listen(lambda e: said.append(e) if isinstance(e, PoolPaused) else None)
        before = pauses.mark()
        one = asyncio.ensure_future(pauses.set("browsers", paused=True))
        two = asyncio.ensure_future(pauses.set(None, paused=True))
        await asyncio.sleep(0)
        assert pauses.mark() is None  # what is read now may be older than what is being written
        assert not pauses.seen(before, True, frozenset())
        await asyncio.gather(one, two)
        assert not pauses.seen(before, True, frozenset())  # read before, told after
        assert (pauses.enabled, supervisor.pools["browsers"].paused, len(said)) == (False, True, 2)
        with Store.open("", Path(stage.settings.data), read_only=True) as store:
            assert store.meta.pauses() == (False, frozenset({"browsers"}))
        assert pauses.seen(pauses.mark(), True, frozenset())  # another process has resumed both
        assert (pauses.enabled, supervisor.pools["browsers"].paused) == (True, False)

    play(tmp_path, scene)


def test_heartbeats_are_written_again_after_a_write_that_failed_for_another_reason_than_busy(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        records, lane = stage.supervisor.records, stage.lanes[0]
        broken = {"left": 2}

        async def written() -> int:
            return (await lane.call(lambda store: store.nodes.all()))[0]["beat_at"]

        def break_once(store: Store) -> None:
            good = store.nodes.beat

            def beat(node: str) -> None:
                if broken["left"]:
                    broken["left"] -= 1
                    raise ValueError("a write that fails in its own way")
                good(node)

            store.nodes.beat = beat  # type: ignore[method-assign]

        await lane.call(break_once)
        await stage.until(lambda: not broken["left"], "the failures")
        before = await written()
        while await written() == before:
            await asyncio.sleep(0.02)
        assert not records.degraded

    play(tmp_path, scene)
