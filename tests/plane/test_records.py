"""What the plane tells of ended calls: all are counted, a bounded number is told one by one, failures first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ostler.calls.tally import BOUNDS, Tally, percentile
from ostler.plane.leases import Refusal
from ostler.plane.records import Records


class Told(list[Any]):
    def __call__(self, *frame: Any) -> None:
        self.append(frame)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def records(told: Told, clock: Clock, dead: bool = False) -> Records:
    return Records(told, clock, lambda: None, dead=lambda key, generation: dead, leave=lambda call: None)


def call(name: str = "one", *, status: int = 200, sent_at: float = 99.5, generation: int = 3) -> Any:
    request = SimpleNamespace(status=status, received=10, sent=20, streamed=False, is_over=False)
    place = SimpleNamespace(replica=0, generation=generation)
    return SimpleNamespace(
        id=name.encode(),
        key=("task", "org/model:1"),
        asked=99.0,
        sent_at=sent_at,
        place=place,
        request=request,
        verdict="",
    )


def test_a_flood_is_counted_in_full_and_told_in_part() -> None:
    told, clock = Told(), Clock()
    kept = records(told, clock)
    for n in range(5000):
        kept.ended(call(f"d{n}"), "done")
    for n in range(1000):
        kept.ended(call(f"e{n}", status=500), "done")
    for n in range(1000):
        refused = call(f"r{n}", sent_at=0.0)
        refused.place = None
        kept.refused(refused, Refusal(429, "BUSY", "busy"))
    kept.report()
    ((kind, rows, left, ((task, model, frame),)),) = told
    assert (kind, task, model) == ("calls", "task", "org/model:1")
    outcomes = [row[11] for row in rows]
    assert {o: outcomes.count(o) for o in set(outcomes)} == {"done": 200, "error": 200, "refused": 20}
    assert left == {"done": 4800, "failed": 800, "refused": 980}
    assert frame[0] == {"done": 5000, "error": 1000, "refused": 1000}
    assert sum(frame[1]) == 6000 == sum(frame[3]), "who was refused neither ran nor waited"
    assert any(int(row[0][1:]) > 1000 for row in rows if row[11] == "done"), "the sample is of the first ones alone"
    kept.report()
    assert len(told) == 1, "nothing has happened since"


def test_an_answer_that_broke_off_is_judged_when_the_node_can_have_said_why() -> None:
    for dead, outcome in ((True, "died"), (False, "error")):
        told, clock = Told(), Clock()
        kept = records(told, clock, dead)
        kept.ended(call(), "cut")
        kept.report()
        assert told == []
        clock.now += 1
        kept.report()
        (row,) = told[0][1]
        assert (row[11], row[6], row[7]) == (outcome, 500.0, 500.0), "the time until the report counts"
        kept.ended(call(), "cut")
        kept.report(last=True)
        assert len(told) == 2


def test_percentiles_are_found_in_the_bins() -> None:
    tally = Tally()
    assert percentile(tally.took, 0.5) is None
    for n in range(100):
        tally.add("done", 0.0, 0.02 if n < 90 else 4.0, 0, 0)
    p50, p95 = percentile(tally.took, 0.5), percentile(tally.took, 0.95)
    assert 0.01 <= (p50 or 0) <= 0.025 and 2.5 <= (p95 or 0) <= 5
    both = Tally()
    both.merge(tally.frame())
    both.merge(tally.frame())
    assert both.outcomes == {"done": 200} and sum(both.took) == 200
    tally.add("done", 0.0, BOUNDS[-1] * 3, 0, 0)
    assert (percentile(tally.took, 1.0) or 0) > BOUNDS[-1]
