"""Who may call which worker: decisions without a clock, a socket or a process."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from ostler.plane.leases import Leases, Place, Refusal, Terms

KEY = ("embed", "org/m:1")


@dataclass(eq=False)
class Asked:
    priority: int = 0
    deadline: float = 1e9
    keep: float | None = None
    place: Place | None = None
    why: Refusal | None = None
    told: int = 0

    def granted(self, place: Place) -> None:
        self.place, self.told = place, self.told + 1

    def refused(self, why: Refusal) -> None:
        self.why, self.told = why, self.told + 1


@dataclass
class Desk:
    """The leases, and what they said to the node."""

    said: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.leases = Leases(lambda *frame: self.said.append(frame))

    def ask(self, terms: Terms | None = None, now: float = 0.0, **how: Any) -> Asked:
        call = Asked(**how)
        found = self.leases.ask(KEY, terms or Terms(), call, now)
        if isinstance(found, Place):
            call.granted(found)
        elif found is not None:
            call.refused(found)
        return call


def test_a_call_to_a_cold_model_waits_and_the_node_is_asked_once() -> None:
    desk = Desk()
    calls = [desk.ask() for _ in range(3)]
    assert desk.said == [("want", *KEY, 0)]
    desk.leases.up(KEY, 0, 1, "sock", 1.0)
    assert [c.place is not None for c in calls] == [True, False, False]
    for call in calls:
        assert call.place is not None
        desk.leases.done(call.place, 2.0, 0.1)
    assert [c.told for c in calls] == [1, 1, 1]


def test_the_idle_time_runs_only_while_nobody_is_in_it_and_closes_before_the_node_is_told() -> None:
    desk = Desk()
    call = desk.ask(Terms(idle=60))
    desk.leases.up(KEY, 0, 1, "sock", 0.0)
    assert call.place
    assert desk.leases.tick(500.0) > 500.0
    assert ("idle", *KEY, 0, 1) not in desk.said
    desk.leases.done(call.place, 500.0)
    assert desk.leases.tick(559.9) == 560.0
    desk.leases.tick(560.0)
    assert desk.said[-1] == ("idle", *KEY, 0, 1)
    late = desk.ask(now=560.0)
    assert late.place is None, "a call got a place in a worker that was told to go"
    assert desk.said[-1] == ("want", *KEY, 0)
    desk.leases.down(KEY, 0, 1, 561.0)
    desk.leases.up(KEY, 0, 2, "other", 562.0)
    assert late.place and late.place.generation == 2


@pytest.mark.parametrize(("keep", "until"), [(0.0, 10.0), (5.0, 15.0)])
def test_a_call_says_how_long_the_worker_stays_after_it(keep: float, until: float) -> None:
    desk = Desk()
    call = desk.ask(keep=keep)
    desk.leases.up(KEY, 0, 1, "sock", 0.0)
    assert call.place
    desk.leases.done(call.place, 10.0)
    desk.leases.tick(until)
    assert desk.said[-1] == ("idle", *KEY, 0, 1)


def test_for_ever_and_pinned_are_never_idle() -> None:
    for how, terms in (({"keep": -1.0}, Terms(idle=1)), ({}, Terms(idle=1, pinned=True))):
        desk = Desk()
        call = desk.ask(terms, **how)
        desk.leases.up(KEY, 0, 1, "sock", 0.0)
        assert call.place
        desk.leases.done(call.place, 1.0)
        desk.leases.tick(1e6)
        assert [f for f in desk.said if f[0] == "idle"] == []
        assert desk.leases.evict(KEY, 0, 1) is not terms.pinned


def test_more_than_may_wait_are_refused_with_a_time_to_come_back() -> None:
    desk = Desk()
    terms = Terms(queue=2)
    desk.ask(terms)
    desk.ask(terms)
    third = desk.ask(terms)
    assert third.why and (third.why.status, third.why.code) == (429, "BUSY")
    assert third.why.retry and third.why.retry >= 1


def test_without_a_queue_a_cold_model_is_still_started_for_the_first_call() -> None:
    desk = Desk()
    assert desk.ask(Terms(queue=0)).why is None
    assert desk.ask(Terms(queue=0)).why is not None


def test_the_highest_priority_goes_first_and_among_equals_the_first() -> None:
    desk = Desk()
    running = desk.ask()
    desk.leases.up(KEY, 0, 1, "sock", 0.0)
    calls = [desk.ask(priority=p) for p in (0, 5, 0, 5)]
    order = []
    place = running.place
    assert place
    for _ in calls:
        desk.leases.done(place, 1.0)
        order.append(next(n for n, c in enumerate(calls) if c.place and n not in order))
    assert order == [1, 3, 0, 2]


def test_who_leaves_the_line_gets_no_place_and_who_waited_too_long_is_told() -> None:
    desk = Desk()
    gone, late, patient = desk.ask(), desk.ask(deadline=5.0), desk.ask()
    assert desk.leases.leave(gone) and not desk.leases.leave(gone)
    desk.leases.tick(5.0)
    assert late.why and late.why.status == 504
    desk.leases.up(KEY, 0, 1, "sock", 6.0)
    assert (gone.told, late.told, patient.told) == (0, 1, 1)


def test_a_busy_worker_is_not_evicted_and_an_idle_one_is_claimed_at_once() -> None:
    desk = Desk()
    call = desk.ask()
    desk.leases.up(KEY, 0, 1, "sock", 0.0)
    assert call.place and not desk.leases.evict(KEY, 0, 1)
    desk.leases.done(call.place, 1.0)
    assert desk.leases.evict(KEY, 0, 1)
    assert desk.ask(now=1.0).place is None


def test_a_broken_model_refuses_who_waits_and_who_comes_until_it_may_work_again() -> None:
    desk = Desk()
    waited = desk.ask()
    why = Refusal(503, "MODEL_FAILED", "no such file")
    desk.leases.fail(KEY, why, 1.0, until=11.0)
    assert waited.why and waited.why.retry == 10.0
    later = desk.ask(now=6.0)
    assert later.why and later.why.retry == 5.0
    assert desk.ask(now=11.0).told == 0
    assert desk.said[-1] == ("want", *KEY, 0)


def test_several_workers_of_one_model_are_asked_for_as_the_line_grows() -> None:
    desk = Desk()
    terms = Terms(room=2, workers=3)
    for _ in range(2):
        desk.ask(terms)
    assert desk.said == [("want", *KEY, 0)]
    desk.ask(terms)
    assert desk.said[-1] == ("want", *KEY, 1)
    for _ in range(20):
        desk.ask(terms)
    assert [f[3] for f in desk.said] == [0, 1, 2]


@pytest.mark.parametrize("seed", range(4))
def test_random_steps_lose_no_call_and_run_none_twice(seed: int) -> None:
    """A node that starts and stops workers as it is told (and crashes them at random), clients that come, leave and finish."""
    rng = random.Random(seed)
    desk = Desk()
    leases = desk.leases
    terms = {
        ("t", f"m{n}"): Terms(rng.randint(1, 3), rng.randint(1, 3), rng.randint(0, 5), rng.choice([0, 1, 5]))
        for n in range(4)
    }
    now, generation, heard = 0.0, 0, 0
    coming: list[tuple[Any, int]] = []  # wanted workers
    up: dict[tuple[Any, int], int] = {}
    going: set[tuple[Any, int, int]] = set()
    calls: list[Asked] = []
    held: list[Asked] = []
    for _ in range(25_000):
        now += rng.choice([0.0, 0.01, 0.3])
        step = rng.random()
        if step < 0.35:
            key = rng.choice([*terms])
            call = Asked(rng.randint(0, 2), now + rng.choice([1.0, 50.0]), rng.choice([None, None, 0.0, 2.0]))
            found = leases.ask(key, terms[key], call, now)
            calls.append(call)
            if isinstance(found, Place):
                call.granted(found)
            elif found is not None:
                call.refused(found)
        elif step < 0.65 and (held := [c for c in held if c.place]):
            call = held.pop(rng.randrange(len(held)))
            place, call.place = call.place, None
            assert place
            leases.done(place, now, 0.1)
        elif step < 0.8 and (free := [c for c in coming if c not in up]):
            coming.remove((key_replica := rng.choice(free)))
            key, replica = key_replica
            generation += 1
            up[key, replica] = generation
            leases.up(key, replica, generation, "sock", now)
        elif step < 0.86 and going:
            key, replica, gen = going.pop()
            assert up.pop((key, replica)) == gen
            leases.down(key, replica, gen, now)
        elif step < 0.88 and up:
            (key, replica), gen = rng.choice([*up.items()])
            if (key, replica, gen) not in going:  # a crash: those in it see their connection break
                del up[key, replica]
                for call in [c for c in held if c.place and c.place.line.key == key and c.place.generation == gen]:
                    place, call.place = call.place, None
                    assert place
                    leases.done(place, now)
                leases.down(key, replica, gen, now)
        elif step < 0.90:
            waiting = [c for c in calls if not c.told]
            if waiting and leases.leave(gone := rng.choice(waiting)):
                gone.told = 1
        elif step < 0.92 and up:
            (key, replica), gen = rng.choice([*up.items()])
            if (key, replica, gen) not in going and leases.evict(key, replica, gen):
                assert not [c for c in held if c.place and c.place.line.key == key and c.place.generation == gen]
                going.add((key, replica, gen))
        leases.tick(now)
        for frame in desk.said[heard:]:
            key = (frame[1], frame[2])
            if frame[0] == "want":
                assert (key, frame[3]) not in up or (key, frame[3], up[key, frame[3]]) in going, "it serves already"
                coming.append((key, frame[3]))
            else:
                assert up[key, frame[3]] == frame[4]
                going.add((key, frame[3], frame[4]))
        heard = len(desk.said)
        # A worker that is wanted again while it still goes comes up after it has gone.
        coming = [c for c in dict.fromkeys(coming)]
        for call in calls:
            if call.place is not None and call not in held:
                held.append(call)
        for key, line in leases.lines.items():
            assert len(line.places) <= terms[key].workers
            for place in line.places.values():
                assert 0 <= place.held <= place.room
                assert place.held == sum(1 for c in held if c.place is place)
        if len(calls) > 400:
            calls = [c for c in calls if not c.told or c.place is not None]
        assert all(call.told <= 1 for call in calls)
    # All that still wait are served when the workers come: nobody is forgotten.
    for _ in range(5000):
        for call in [c for c in calls if c.place]:
            place, call.place = call.place, None
            assert place
            leases.done(place, now, 0.1)
        for key, replica, gen in [*going]:
            going.discard((key, replica, gen))
            up.pop((key, replica), None)
            leases.down(key, replica, gen, now)
        for frame in desk.said[heard:]:
            key = (frame[1], frame[2])
            if frame[0] == "want":
                coming.append((key, frame[3]))
            else:
                going.add((key, frame[3], frame[4]))
        heard = len(desk.said)
        for key, replica in dict.fromkeys(coming):
            if (key, replica) not in up:
                generation += 1
                up[key, replica] = generation
                leases.up(key, replica, generation, "sock", now)
        coming = []
        if all(call.told for call in calls):
            break
    assert all(call.told == 1 for call in calls)
