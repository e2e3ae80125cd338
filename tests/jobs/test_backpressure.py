"""Holding a queue while other programs need the machine: the pure part, and a real node beside a real busy loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from ostler.config import Settings
from ostler.events import Backpressure, Bus
from ostler.jobs import backpressure
from ostler.jobs.backpressure import Pressure, Sample, foreign_load, reason
from ostler.lifecycle import family
from tests.harness import Node, until

BUSY = "while True: pass"


def test_a_queue_is_held_only_when_it_is_long_and_others_need_the_machine() -> None:
    limits = {"high_watermark": 500, "load_threshold": 0.7}
    assert reason(501, 0.71, **limits) == (
        "more than 500 jobs are ready and other programs use 0.71 of each core, above load_threshold (0.7)"
    )
    assert reason(500, 0.99, **limits) is None
    assert reason(10_000, 0.7, **limits) is None
    assert reason(10_000, None, **limits) is None  # nothing measured yet
    assert reason(10_000, 1.0, high_watermark=0, load_threshold=0.7) is None


def test_backpressure_is_off_unless_somebody_asks_for_it() -> None:
    assert Settings().high_watermark == 0
    assert Pressure({"q": 0}, 0.7, 3.0, Bus(), lambda: None).watermarks == {}


def test_the_load_of_our_own_does_not_count() -> None:
    before = Sample(at=100.0, busy=50.0, own=20.0)
    assert foreign_load(before, Sample(105.0, 60.0, 30.0), cores=2) == 0.0
    assert foreign_load(before, Sample(105.0, 60.0, 20.0), cores=2) == 1.0
    assert foreign_load(before, Sample(105.0, 60.0, 25.0), cores=2) == 0.5
    assert foreign_load(before, Sample(105.0, 60.0, 31.0), cores=2) == 0.0  # clocks of processes are coarse


def test_the_cpu_time_of_our_own_has_that_of_descendants_and_of_those_that_ended() -> None:
    before = family.cpu_seconds()
    child = subprocess.Popen(["sh", "-c", f"{sys.executable} -c '{BUSY}'"])
    try:
        until(lambda: family.cpu_seconds() > before + 0.3, "the child's CPU time to be seen")
    finally:
        subprocess.run(["pkill", "-P", str(child.pid)], check=False)
        child.wait()
    assert family.cpu_seconds() > before + 0.3


def test_a_queue_is_not_held_twice_without_a_claim_in_between_and_others_are_not_held() -> None:
    async def main() -> None:
        bus, said = Bus(), []
        bus.listen(lambda event: said.append(event) if isinstance(event, Backpressure) else None)
        over = asyncio.Event()
        pressure = Pressure({"q": 3, "calm": 3}, 0.5, 0.0, bus, over.set)
        pressure._load = 0.9
        pressure.press({"q": 4, "calm": 3, "other": 9000}, now=10.0)
        assert [event.queue for event in said] == ["q"]
        pressure._holds["q"] = (13.0, pressure._holds["q"][1])
        assert pressure.holds("q", 12.9) and not pressure.holds("q", 13.0)
        assert not pressure.holds("calm", 12.9) and not pressure.holds("other", 12.9)
        assert list(pressure.reasons(12.9)) == ["q"] and pressure.reasons(13.0) == {}
        pressure.press({"q": 4}, now=13.0)
        assert not pressure.holds("q", 13.0)  # claims first
        pressure.claimed("q")
        pressure.press({"q": 4}, now=14.0)
        assert len(said) == pressure.count == 2
        await asyncio.wait_for(over.wait(), 10)  # the end of a hold wakes the dispatcher

    asyncio.run(main())


def test_a_busy_machine_holds_the_long_queue_alone_health_says_so_and_every_job_is_done(
    make_node, store_url: str
) -> None:
    node: Node = make_node(
        "--pool",
        "work=1",
        "--pool",
        "other=1",
        OSTLER_HIGH_WATERMARK="3",
        OSTLER_LOAD_THRESHOLD="0.02",
        OSTLER_BACKPRESSURE_PAUSE="6",
        OSTLER_POLL_INTERVAL="0.2",
    )
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    try:
        node.post("/api/v1/pools/work/pause")
        body = {"jobs": [{"task": "add", "args": {"a": n}} for n in range(20)]}
        jobs = node.post("/api/v1/jobs/bulk", body)[1]["ids"]

        def held():
            health = node.get("/api/v1/health")[1]
            return health if any("queue work is held: more than 3 jobs" in e for e in health["errors"]) else None

        assert until(held, "the queue to be held")["status"] == "degraded"
        assert node.get("/api/v1/info")[1]["backpressure"]["held"].keys() == {"work"}
        node.post("/api/v1/pools/work/resume")
        assert node.wait_job(node.enqueue("other"))["status"] == "done"
        assert node.job(jobs[0])["waiting_for"]["reason"] == "backpressure"  # nobody has claimed it meanwhile
        assert all(node.wait_job(j)["status"] == "done" for j in jobs)
    finally:
        for process in others:
            process.kill()
            process.wait()
    until(lambda: node.get("/api/v1/health")[1]["status"] == "healthy", "the hold to end")


_ = backpressure
