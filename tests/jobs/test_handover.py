"""How many jobs a worker may have in hand."""

from __future__ import annotations

import random

from ostler.jobs.room import in_turn
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


def test_free_places_are_filled_one_after_another_the_emptiest_first() -> None:
    draw = random.Random(1)
    for workers in range(1, 6):
        for most in (1, 3, 40):
            rooms = [
                (held, draw.randint(held + 1, most + 2), f"worker:q:{n}")
                for n in range(workers)
                for held in [draw.randrange(most)]
            ]
            alike = [(0, most, f"worker:q:{n}") for n in range(workers)]
            for places in (rooms, alike):
                wanted = sorted((place, held, name) for held, depth, name in places for place in range(held, depth))
                assert in_turn(places[::-1]) == [name for _, _, name in wanted]
