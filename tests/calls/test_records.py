"""What the node adds up of calls: labels are bounded, a locked store holds up nothing, and memory is bounded."""

from __future__ import annotations

import asyncio
from typing import Any

from ostler.calls.model import ModelOptions, ModelSpec
from ostler.calls.records import OTHER, CallLog
from ostler.calls.tally import Tally
from ostler.events import Bus, CallsTouched


class SlowLane:
    """A store that answers when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.go = asyncio.Event()

    async def call(self, work: Any) -> None:
        self.waiting.append(work)
        await self.go.wait()

    def post(self, work: Any) -> None:
        self.waiting.append(work)


class Written:
    """A store that remembers what was added."""

    def __init__(self) -> None:
        self.calls, self.rows = self, list[Any]()

    def add(self, rows: list[Any]) -> None:
        self.rows += rows


def made(lane: Any) -> tuple[CallLog, list[Any]]:
    spec = ModelSpec(name="zoo", target="x", models={"listed": ModelOptions()}, any_model=True)
    bus, heard = Bus(), []
    bus.listen(heard.append)
    return CallLog({"zoo": spec}, lane, bus, lambda: "node@1"), heard


def row(name: str, model: str = "listed", outcome: str = "done") -> list[Any]:
    return [name, "zoo", model, 0, 1, 1000, 0.5, 2.0, 10, 20, 200, outcome, None, 0]


def tally(n: int = 1) -> list[Any]:
    one = Tally()
    for _ in range(n):
        one.add("done", 0.001, 0.01, 1, 1)
    return one.frame()


def test_ids_beyond_a_number_share_one_label_and_listed_ones_have_their_own() -> None:
    async def main() -> None:
        log, _ = made(SlowLane())
        log.take([], {}, [["zoo", f"id-{n}", tally()] for n in range(200)] + [["zoo", "listed", tally()]])
        assert len(log.counters) == 52
        assert log.counters["zoo", OTHER].tally.outcomes == {"done": 150}
        assert log.counters["zoo", "listed"].tally.outcomes == {"done": 1}

    asyncio.run(main())


def test_rows_that_the_store_does_not_take_are_held_up_to_a_bound_and_counted_beyond() -> None:
    async def main() -> None:
        lane = SlowLane()
        log, heard = made(lane)
        await log.start()
        log.take([row("first")], {"done": 7}, [["zoo", "listed", tally(8)]])
        while not lane.waiting:
            await asyncio.sleep(0)
        for n in range(60):
            log.take([row(f"{n}-{k}", outcome="died" if k % 2 else "done") for k in range(100)], {}, [])
        assert CallsTouched() in heard
        assert log.left_out == {"done": 507, "failed": 500}
        await log.stop()  # what is left is handed to the lane, which is stopped after it
        store = Written()
        for work in lane.waiting:
            work(store)
        assert len(store.rows) == 5001
        ids = [one.id for one in store.rows]
        assert ids == sorted(set(ids)), "ids are not in order, or one was given twice"
        assert {one.node for one in store.rows} == {"node@1"}

    asyncio.run(main())


def test_the_plots_have_what_each_step_of_time_brought() -> None:
    async def main() -> None:
        log, _ = made(SlowLane())
        assert log.series(None, None) == []
        log.take([], {}, [["zoo", "listed", tally(3)], ["zoo", "another", tally(2)]])
        log.facts({"zoo\nlisted": {"in_flight": 4, "waiting": 9}, "zoo\nidle": {"in_flight": 0, "waiting": 0}})
        found = log.series("zoo", "listed")
        assert sum(p["done"] for p in found) == 3 and max(p["waiting"] for p in found) == 9
        assert sum(p["done"] for p in log.series("zoo", None)) == 5
        assert log.series("other", None) == []
        assert found[0]["took_p50"] is not None and found[0]["at"] % 10_000 == 0

    asyncio.run(main())
