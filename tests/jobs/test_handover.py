"""How many jobs a worker may have in hand."""

from __future__ import annotations

from ostler.jobs.seat import Durations


def test_an_unknown_task_is_handed_over_alone() -> None:
    durations = Durations()
    assert durations.handover("q") == 1
    for _ in range(4):
        durations.add("q", "t", 0.0001)
    assert durations.handover("q") == 1
    durations.add("q", "t", 0.0001)
    assert durations.handover("q") == 100


def test_a_long_task_makes_its_queue_go_one_by_one() -> None:
    durations = Durations()
    for _ in range(10):
        durations.add("q", "short", 0.0001)
        durations.add("q", "long", 2.0)
        durations.add("other", "short", 0.002)
    assert durations.handover("q") == 1
    assert durations.handover("other") == 5


def test_a_new_task_in_a_known_queue_is_unknown_first() -> None:
    durations = Durations()
    for _ in range(10):
        durations.add("q", "short", 0.0001)
    durations.add("q", "new", 0.0001)
    assert durations.handover("q") == 1
