"""Memory of slots on demand: a tenant of the tests' own, real processes, devices that the test plays."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ostler.config import Settings
from ostler.events import Bus
from ostler.lifecycle import reserving
from ostler.lifecycle.admission import Need
from ostler.lifecycle.ledger import Ledger
from ostler.lifecycle.membership import Membership
from ostler.lifecycle.recycle import RecycleLimits
from ostler.lifecycle.state import Status
from ostler.lifecycle.supervisor import Supervisor
from ostler.lifecycle.ticket import Demand, Standing
from ostler.lifecycle.worker import PoolSpec, Slot, Worker
from ostler.parts import running
from ostler.store import Store
from ostler.store.footprints import Kind
from ostler.store.lanes import Lane
from ostler.store.nodes import NodeRow
from tests.lifecycle.test_ledger import Box
from tests.lifecycle.test_tenants import SERVING, Sessions


class Models:
    """Needs of models: the key is the number of MB."""

    def __init__(self) -> None:
        self.busy: set[str] = set()
        self.told: list[str] = []
        self.supervisor: Supervisor | None = None

    def demand(self, slot: Slot) -> Demand:
        return Demand(Need(0, float(slot.key)), kind=Kind("model", slot.key), group=slot.key)

    def standing(self, worker: Worker) -> Standing:
        return Standing(busy=worker.component in self.busy)

    def evict(self, worker: Worker, short_of: str) -> bool:
        self.told.append(f"evict {worker.slot.key} {short_of}")
        if worker.component in self.busy:
            worker.ticket.kept()
        else:
            self.supervisor.stop_slot(worker.slot)
        return True

    def waits(self, slot: Slot, why: str) -> None:
        self.told.append(f"waits {slot.key}")

    def refused(self, slot: Slot, why: str) -> None:
        self.told.append(f"refused {slot.key}: {why}")


class Stage:
    def __init__(self, folder: Path) -> None:
        settings = Settings(data=str(folder), name="n1", heartbeat_interval=0.1, stale_after=30, backoff_max=0.1)
        loop = asyncio.get_running_loop()
        self.lanes = [Lane(name, lambda: Store.open("", folder), loop) for name in ("records", "intake")]
        self.needs, self.box = Models(), Box()
        member = Membership(settings, NodeRow("n1", "n1", 30_000))
        with Store.open("", folder) as store:
            store.nodes.register(member.row)
        self.ledger = Ledger(self.box, headroom=Need(), lane=self.lanes[0])
        spec = PoolSpec("models", 0, lambda slot: [sys.executable, str(SERVING), str(slot.key)], on_demand=True)
        spec = replace(spec, tenant=Sessions(), need=self.needs, recycle=RecycleLimits(count=1, warm=True))
        self.supervisor = Supervisor(settings, *self.lanes, Bus(), [spec], member, self.ledger)
        self.needs.supervisor = self.supervisor

    def start(self, key: str) -> Slot:
        slot = self.supervisor.open("models", key)
        self.supervisor.start_slot(slot)
        return slot

    async def until(self, found: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + 60
        while not (value := found()):
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            await asyncio.sleep(0.005)
        return value

    async def up(self, key: str) -> Slot:
        slot = self.start(key)
        await self.until(lambda: slot.status is Status.HEALTHY, f"{key} to be up")
        return slot


def play(folder: Path, scene: Callable[[Stage], Awaitable[None]]) -> None:
    async def main() -> None:
        stage = Stage(folder)
        async with running([*stage.lanes, stage.ledger, stage.supervisor]):
            await scene(stage)

    asyncio.run(main())


def test_a_slot_on_demand_is_started_when_another_has_made_room(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        first = await stage.up("600")
        second = stage.start("700")
        await stage.until(lambda: "evict 600 GPU-0" in stage.needs.told, "the idle one to be told")
        await stage.until(lambda: second.status is Status.HEALTHY, "the second one to be up")
        assert (first.status, first.wanted, first.worker) == (Status.STOPPED, False, None)
        owners = stage.ledger.snapshot()["devices"][0]["owners"]
        assert [(o["owner"], o["need_mb"], o["status"]) for o in owners] == [("worker:models:1", 700, "settled")]

    play(tmp_path, scene)


def test_a_slot_that_is_busy_stays_and_the_next_waits_until_it_is_stopped(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        first = await stage.up("600")
        stage.needs.busy.add(first.component)
        second = stage.start("700")
        await stage.until(lambda: "waits 700" in stage.needs.told, "it to wait")
        assert second.waiting.startswith("waits for memory: it needs 700 MB of GPU memory")
        assert (first.status, second.status, second.worker) == (Status.HEALTHY, Status.STOPPED, None)
        stage.supervisor.stop_slot(first)
        await stage.until(lambda: second.status is Status.HEALTHY, "the second one to be up")
        assert second.waiting is None

    play(tmp_path, scene)


def test_a_slot_that_nobody_wants_any_more_leaves_the_line(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        stage.needs.busy.add((await stage.up("600")).component)
        second = stage.start("700")
        await stage.until(lambda: second.waiting, "it to wait")
        stage.supervisor.stop_slot(second)
        await stage.until(lambda: not stage.ledger.snapshot()["waiting"], "the line to be empty")
        assert (second.ticket, second.waiting, second.generation) == (None, None, 0)

    play(tmp_path, scene)


def test_a_slot_that_can_never_have_its_memory_is_refused_and_other_slots_go_on(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        slot = stage.start("5000")
        await stage.until(lambda: any(t.startswith("refused 5000: it needs 5,000 MB") for t in stage.needs.told), "it")
        assert slot.waiting.startswith("cannot be started")
        await stage.up("300")

    play(tmp_path, scene)


def test_a_crashed_worker_gives_its_memory_back_and_asks_again(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        slot = await stage.up("600")
        worker = slot.worker
        worker.send("die")
        await stage.until(lambda: slot.generation == 2 and slot.status is Status.HEALTHY, "it to be started again")
        assert worker.ticket is None and slot.worker.ticket.granted
        assert len(stage.ledger.snapshot()["devices"][0]["owners"]) == 1

    play(tmp_path, scene)


def test_a_replacement_is_warmed_beside_its_predecessor_where_there_is_memory_for_both(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        slot = await stage.up("400")
        old = slot.worker
        stage.supervisor.began(old)
        heir = await stage.until(lambda: slot.heir, "its replacement")
        assert slot.worker is old and not old.leave, "it serves until the other one is ready"
        owners = stage.ledger.snapshot()["devices"][0]["owners"]
        assert sorted(o["need_mb"] for o in owners) == [400, 400], "both have their memory"
        await stage.until(lambda: slot.worker is heir and not slot.leaving, "the replacement to take over")
        await stage.until(
            lambda: [o["status"] for o in stage.ledger.snapshot()["devices"][0]["owners"]] == ["settled"],
            "the memory of the old one to come back",
        )

    play(tmp_path, scene)


def test_a_worker_leaves_before_its_replacement_is_started_where_there_is_no_memory_for_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reserving, "_BESIDE", 0.3)

    async def scene(stage: Stage) -> None:
        slot = await stage.up("600")
        old = slot.worker
        stage.supervisor.began(old)
        await stage.until(lambda: slot.heir_ticket, "its replacement to ask for memory")
        fresh = await stage.until(lambda: slot.worker is not old and slot.worker, "the next one")
        assert fresh.generation == old.generation + 1
        await stage.until(lambda: slot.status is Status.HEALTHY, "it to be up")
        assert slot.heir is None and slot.heir_ticket is None
        assert slot.pool.recycling is None, "the next one of the pool may recycle"

    play(tmp_path, scene)
