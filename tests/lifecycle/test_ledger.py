"""The ledger: grants by what is really free, in real time, with devices that the test plays."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ostler.lifecycle import returning
from ostler.lifecycle.admission import HOST, Need
from ostler.lifecycle.devices import Device, Devices, Reading, Unreadable
from ostler.lifecycle.footprints import Peaks
from ostler.lifecycle.ledger import Ledger
from ostler.lifecycle.ticket import Demand, Standing, Ticket
from ostler.parts import running
from ostler.store import Store
from ostler.store.footprints import Kind
from ostler.store.lanes import Lane

KIND = Kind("embedding", "org/minilm")


class Box(Devices):
    """GPUs of 1000 MB and a host of 8000 MB; `used` says by session what is taken."""

    def __init__(self, gpus: int = 1) -> None:
        self.used: dict[str, dict[int, float]] = {f"GPU-{n}": {} for n in range(gpus)}
        self.foreign = 0.0
        self.host_free = 8000.0
        self.tells = True
        self.broken: str | None = None
        self.hangs = threading.Event()
        self.hangs.set()
        self.reads = 0

    def read(self) -> list[Reading]:
        self.hangs.wait(30)
        self.reads += 1
        if self.broken:
            raise Unreadable(self.broken)
        return [
            Reading(
                Device(uuid, n, "Fake", 1000),
                1000 - self.foreign - sum(used.values()),
                dict(used) if self.tells else None,
            )
            for n, (uuid, used) in enumerate(self.used.items())
        ]

    def host(self) -> Reading:
        return Reading(Device(HOST, -1, HOST, 8000), self.host_free)


class Holder:
    """Someone who holds or wants memory, and what the ledger told it."""

    def __init__(self, stage: Stage, owner: str, **demand: Any) -> None:
        self.stage, self.owner = stage, owner
        self.told: list[str] = []
        self.standing = Standing(busy=False)
        need = Need(demand.pop("host", 0.0), demand.pop("gpu", 0.0))
        self.ticket = stage.ledger.reserve(
            owner,
            Demand(need, **demand),
            granted=lambda t: self.told.append("granted"),
            refused=lambda t, why: self.told.append(f"refused: {why}"),
            waiting=lambda t, why: self.told.append(f"waits: {why}"),
            standing=lambda: self.standing,
            evict=lambda short_of: self.told.append(f"evict {short_of}"),
        )

    async def until(self, word: str) -> Holder:
        await until(lambda: any(word in text for text in self.told), f"{self.owner} to be told: {word}")
        return self

    def loads(self, mb: float, pid: int | None = None) -> Holder:
        """Its worker is up and uses so much."""
        device = self.ticket.device
        self.session = pid or os.getsid(0)
        if device:
            self.stage.box.used[device][self.session] = mb
        self.ticket.running(self.session)
        self.ticket.settled(load_ms=1500)
        return self

    def dies(self) -> None:
        if self.ticket.device:
            self.stage.box.used[self.ticket.device].pop(self.session, None)
        self.ticket.release()


class Stage:
    def __init__(self, box: Box, **how: Any) -> None:
        self.box = box
        self.ledger = Ledger(box, headroom=how.pop("headroom", Need()), **how)

    def ask(self, owner: str, gpu: float = 0.0, host: float = 0.0, **demand: Any) -> Holder:
        return Holder(self, owner, gpu=gpu, host=host, **demand)

    def device(self, n: int = 0) -> dict[str, Any]:
        return self.ledger.snapshot()["devices"][n]


async def until(found: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 30
    while not (value := found()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        await asyncio.sleep(0.005)
    return value


def play(scene: Callable[[Stage], Awaitable[None]], box: Box | None = None, **how: Any) -> None:
    async def main() -> None:
        stage = Stage(box or Box(), **how)
        async with running([stage.ledger]):
            await scene(stage)

    asyncio.run(main())


@pytest.fixture(autouse=True)
def sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of the test's devices are named by their session."""
    monkeypatch.setattr("ostler.lifecycle.readings.os.getsid", lambda pid: pid)


def test_what_is_granted_is_reserved_until_a_reading_shows_it(sessions: None) -> None:
    async def scene(stage: Stage) -> None:
        a = await stage.ask("a", gpu=600).until("granted")
        b = await stage.ask("b", gpu=600).until("waits")  # nothing of a is seen on the device yet
        assert (stage.device()["free_mb"], stage.device()["reserved_mb"]) == (1000, 600)
        a.loads(600, 41)
        a.standing = Standing(busy=True)
        await until(lambda: stage.device()["reserved_mb"] == 0, "the memory to be seen")
        assert stage.device()["free_mb"] == 400  # counted once
        assert b.told[0].startswith("waits: it needs 600 MB of GPU memory; 400 MB of a GPU")
        a.dies()
        await b.until("granted")

    play(scene)


def test_an_idle_one_is_claimed_at_once_and_its_memory_is_given_only_when_it_is_really_back() -> None:
    async def scene(stage: Stage) -> None:
        a = (await stage.ask("a", gpu=600).until("granted")).loads(600, 41)
        b = stage.ask("b", gpu=600)
        await a.until("evict GPU-0")
        assert a.ticket.claimed
        c = stage.ask("c", gpu=600)
        a.ticket.release()  # its processes are gone, and the device still shows their memory
        await c.until("waits")
        assert "granted" not in b.told
        del stage.box.used["GPU-0"][41]
        await b.until("granted")
        assert a.told.count("evict GPU-0") == 1 and "granted" not in c.told

    play(scene)


def test_memory_that_does_not_come_back_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returning, "_BACK", 0.3)

    async def scene(stage: Stage) -> None:
        a = (await stage.ask("a", gpu=400).until("granted")).loads(400, 41)
        other = (await stage.ask("other", gpu=500).until("granted")).loads(500, 42)
        b = await stage.ask("b", gpu=450).until("unloads")  # the cheaper one leaves
        first, second = (a, other) if a.ticket.claimed else (other, a)
        first.ticket.release()  # and the device goes on to show its memory
        await second.until("evict")  # so the next one must go
        second.dies()
        await b.until("granted")

    play(scene)


def test_one_that_is_needed_after_all_is_kept_and_another_goes() -> None:
    async def scene(stage: Stage) -> None:
        a = (await stage.ask("a", gpu=400).until("granted")).loads(400, 41)
        b = (await stage.ask("b", gpu=500).until("granted")).loads(500, 42)
        b.standing = Standing(busy=False, reload_s=50)
        stage.ask("c", gpu=450)
        await a.until("evict")
        a.standing = Standing(busy=True)  # a call came in between
        a.ticket.kept()
        await b.until("evict")

    play(scene)


def test_what_can_never_fit_is_refused_and_what_waits_can_leave_the_line() -> None:
    async def scene(stage: Stage) -> None:
        await stage.ask("large", gpu=1001).until("refused: it needs 1,001 MB of GPU memory")
        a = (await stage.ask("a", gpu=900).until("granted")).loads(900, 41)
        a.standing = Standing(busy=True)
        b = await stage.ask("b", gpu=500).until("waits")
        b.ticket.release()
        b.ticket.release()
        assert stage.ledger.snapshot()["waiting"] == []

    play(scene)


def test_who_needs_no_gpu_does_not_even_wait_for_a_driver_that_hangs() -> None:
    async def scene(stage: Stage) -> None:
        stage.box.hangs.clear()
        gpu = stage.ask("gpu", gpu=100)
        await stage.ask("cpu", host=500).until("granted")
        assert gpu.told == []
        stage.box.hangs.set()
        await gpu.until("granted")

    play(scene)


def test_gpus_that_cannot_be_read_are_not_given_away() -> None:
    async def scene(stage: Stage) -> None:
        await stage.ask("a", gpu=100).until("granted")
        stage.box.broken = "the driver is gone"
        stage.ledger.look()
        await until(lambda: stage.ledger.snapshot()["unreadable"], "it to be noticed")
        b = await stage.ask("b", gpu=100).until("waits: the GPUs cannot be read: the driver is gone")
        stage.box.broken = None
        await b.until("granted")

    play(scene)


def test_without_a_gpu_what_is_meant_for_it_is_counted_on_the_host() -> None:
    async def scene(stage: Stage) -> None:
        a = await stage.ask("a", gpu=6000, host=1000).until("granted")
        assert (a.ticket.need, a.ticket.device) == (Need(7000, 0), None)
        await stage.ask("b", gpu=1500).until("waits: it needs 1,500 MB of host memory")

    play(scene, Box(gpus=0))


def test_a_worker_that_has_settled_keeps_what_it_may_still_take() -> None:
    async def scene(stage: Stage) -> None:
        a = (await stage.ask("jobs", gpu=600).until("granted")).loads(0.0, 41)  # it allocates when a job runs
        a.standing = Standing(busy=True)
        await stage.ask("b", gpu=500).until("waits")
        stage.box.used["GPU-0"][41] = 550
        await until(lambda: stage.device()["reserved_mb"] == 50, "the rest to be reserved")

    play(scene)


def test_where_the_driver_does_not_tell_what_the_worker_reports_counts() -> None:
    async def scene(stage: Stage) -> None:
        stage.box.tells = False
        a = await stage.ask("a", gpu=600).until("granted")
        stage.box.foreign = 500  # it is a's
        a.ticket.running(41)
        a.ticket.settled(Need(0, 500))
        await until(lambda: stage.device()["reserved_mb"] == 100, "its own figure to count")
        assert a.ticket.peak == Need(0, 500)

    play(scene)


def test_the_peak_of_a_run_is_what_the_next_one_reserves_also_after_a_restart_of_the_node(tmp_path: Path) -> None:
    async def run(first: bool) -> None:
        lane = Lane("records", lambda: Store.open("", tmp_path), asyncio.get_running_loop())
        stage = Stage(Box(), lane=lane)
        async with running([lane, stage.ledger]):
            a = await stage.ask("a", gpu=900, kind=KIND).until("granted")
            assert a.ticket.need == Need(0, 900 if first else 620)
            a.loads(600, 41)
            await until(lambda: a.ticket.peak.gpu_mb == 600, "the first reading")
            stage.box.used["GPU-0"][41] = 620
            stage.ledger.look()
            await until(lambda: a.ticket.peak.gpu_mb == 620, "the peak")
            a.dies()
            b = await stage.ask("a", gpu=900, kind=KIND).until("granted")
            assert b.ticket.need == Need(0, 620)
            assert stage.ledger.reload_seconds(KIND) == 1.5

    asyncio.run(run(True))
    asyncio.run(run(False))
    with Store.open("", tmp_path) as store:
        (row,) = store.footprints.all()
        assert (row["model"], row["device"], row["gpu_mb"], row["runs"]) == ("org/minilm", "Fake", 620, 2)


def test_a_worker_that_uses_a_gpu_and_declares_nothing_is_found_out(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        other = (await stage.ask("other", gpu=100).until("granted")).loads(100, 42)  # so that the GPUs are looked at
        a = await stage.ask("a", host=10, kind=KIND).until("granted")
        assert a.ticket.device is None
        stage.box.used["GPU-0"][41] = 300
        a.loads(300, 41)
        await until(lambda: a.ticket.peak.gpu_mb == 300, "it to be seen")
        a.dies()
        b = await stage.ask("a", host=10, kind=KIND).until("granted")
        assert (b.ticket.need.gpu_mb, b.ticket.device) == (300, "GPU-0")
        other.dies()

    play(scene)


def test_after_running_out_of_memory_more_is_reserved_but_never_more_than_there_is() -> None:
    async def scene(stage: Stage) -> None:
        for reserved in (600, 750, 937.5, 1000):
            a = await stage.ask("a", gpu=600, kind=KIND, declared_only=True).until("granted")
            assert a.ticket.need.gpu_mb == pytest.approx(reserved)
            a.ticket.ran_out("GPU-0")
            a.ticket.release()
        for reserved in (1000, 900, 825):  # each run that ends well brings it nearer to what is declared
            a = await stage.ask("a", gpu=600, kind=KIND, declared_only=True).until("granted")
            assert a.ticket.need.gpu_mb == pytest.approx(reserved)
            a.ticket.settled()
            a.ticket.release()

    play(scene)


def test_a_guess_gives_way_to_what_is_measured() -> None:
    async def scene(stage: Stage) -> None:
        a = await stage.ask("a", guess=Need(0, 800)).until("granted")
        stage.box.used["GPU-0"][41] = 300
        a.ticket.running(41)
        a.ticket.settled(Need(0, 300))
        await stage.ask("b", gpu=650).until("granted")

    play(scene)


def test_what_is_parked_holds_host_memory_and_wakes_on_the_same_device() -> None:
    async def scene(stage: Stage) -> None:
        a = (await stage.ask("a", gpu=600, host=700).until("granted")).loads(600, 41)
        b = stage.ask("b", gpu=900)
        await a.until("evict GPU-0")
        del stage.box.used["GPU-0"][41]
        a.ticket.parked()
        await b.until("granted")
        b.loads(900, 42)
        stage.box.used["GPU-1"] = {}
        assert a.ticket.status == "parked" and stage.device()["owners"][0]["owner"] == "b"
        assert stage.ledger.snapshot()["host"]["owners"] == [
            {"owner": "a", "mb": 0, "need_mb": 700, "status": "parked"}
        ]
        told: list[str] = []
        a.ticket.wake(lambda t: told.append("awake"), lambda t, why: told.append(why))
        await b.until("evict GPU-0")  # though the other device is free: it can only go back to its own
        b.dies()
        await until(lambda: told == ["awake"], "it to wake")
        assert (a.ticket.status, a.ticket.device) == ("settled", "GPU-0")

    play(scene)


def test_in_exclusive_mode_loads_take_turns() -> None:
    async def scene(stage: Stage) -> None:
        a = await stage.ask("a", gpu=100).until("granted")
        b = stage.ask("b", gpu=100)
        await stage.ask("cpu", host=100).until("granted")
        await b.until("gpu_exclusive")
        assert stage.ledger.operating() == "a"
        a.loads(100, 41)
        await b.until("granted")
        assert stage.ledger.operating() == "b"

    play(scene, exclusive=True)


def test_two_devices_are_filled_by_best_fit_and_each_is_shown() -> None:
    async def scene(stage: Stage) -> None:
        a = (await stage.ask("a", gpu=600).until("granted")).loads(600, 41)
        b = await stage.ask("b", gpu=300).until("granted")
        c = await stage.ask("c", gpu=800).until("granted")
        assert (a.ticket.device, b.ticket.device, c.ticket.device) == ("GPU-0", "GPU-0", "GPU-1")
        await until(lambda: stage.device()["owners"][0]["mb"] == 600, "the reading")
        found = stage.ledger.snapshot()
        assert [d["room_mb"] for d in found["devices"]] == [100, 200]
        assert found["host"]["total_mb"] == 8000
        assert (found["waiting"], found["exclusive"], found["unreadable"]) == ([], False, None)

    play(scene, Box(gpus=2))


def test_the_headroom_stays_free() -> None:
    async def scene(stage: Stage) -> None:
        await stage.ask("a", gpu=901).until("refused")
        await stage.ask("b", gpu=900, host=7500).until("granted")
        await stage.ask("c", host=1).until("waits")

    play(scene, headroom=Need(500, 100))


def test_gpus_are_not_read_again_and_again_for_workers_that_need_none() -> None:
    async def scene(stage: Stage) -> None:
        await stage.ask("a", gpu=1).until("granted")
        (await stage.ask("b", gpu=1).until("granted")).dies
        for holder in (*stage.ledger._held.values(),):
            holder.release()
        await until(lambda: not stage.ledger._left, "all to be back")
        a = await stage.ask("cpu", host=1).until("granted")
        asked = time.monotonic()
        stage.ledger._readers[1].ask()
        await until(lambda: stage.ledger._gpus.at >= asked, "the readings that were asked for until now")
        reads = stage.box.reads
        for n in range(20):
            (await stage.ask(f"cpu{n}", host=1).until("granted")).ticket.settled()
        assert stage.box.reads == reads
        a.ticket.release()

    play(scene)


def test_a_ledger_stops_before_a_start_and_twice_and_a_holder_that_fails_does_not_stop_the_others() -> None:
    async def main() -> None:
        stage = Stage(Box())
        await stage.ledger.stop()
        await stage.ledger.start()

        def fail(ticket: Ticket) -> None:
            raise ValueError("no")

        stage.ledger.reserve("bad", Demand(Need(0, 10)), granted=fail, refused=lambda t, why: None)
        await stage.ask("good", gpu=10).until("granted")
        await stage.ledger.stop()
        await stage.ledger.stop()

    asyncio.run(main())


def test_peaks_that_are_not_known_are_nothing() -> None:
    assert Peaks().known(None, ["cpu"]) is None
    assert Peaks().reload_seconds(KIND, ["cpu"]) is None
