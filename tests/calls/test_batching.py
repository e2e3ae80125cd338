"""When a batch begins: 100,000 random steps, and a small world in which waiting has to pay."""

from __future__ import annotations

import random

import pytest

from ostler.calls.batching import Batching


@pytest.mark.parametrize("seed", range(4))
def test_it_never_waits_when_idle_or_full_nor_longer_than_it_may(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(25):
        most, wait = chance.randrange(2, 64), chance.choice([0.0, 0.001, 0.01, 0.1])
        batching, now, last = Batching(most, wait), 0.0, 1
        for _ in range(1000):
            now += chance.expovariate(chance.choice([10, 1000, 100_000]))
            step = chance.random()
            if step < 0.5:
                batching.came(now)
            elif step < 0.7:
                last = chance.randrange(1, most + 1)
                batching.ran(last, chance.expovariate(100))
            waiting, first = chance.randrange(1, most + 2), now - chance.random() * 0.02
            found = batching.patience(waiting, first, now)
            assert 0 <= found <= max(0.0, first + wait - now) + 1e-12
            if last == 1 or waiting >= most or not wait:
                assert found == 0
            assert 0 <= batching.fixed <= 10


def test_it_learns_what_a_batch_costs_beside_its_calls() -> None:
    batching, chance = Batching(32, 0.01), random.Random(1)
    for _ in range(200):
        calls = chance.randrange(1, 33)
        batching.ran(calls, 0.020 + 0.001 * calls)
    assert batching.fixed == pytest.approx(0.020, rel=0.05)


def simulate(wait: float, *, gap: float, fixed: float, each: float, calls: int = 3000) -> tuple[float, int]:
    """Calls come every `gap` seconds, or as soon as one of 64 is answered; (calls per second, batches)."""
    batching, chance = Batching(32, wait), random.Random(7)
    now, batches, arrivals, at = 0.0, 0, [], 0.0
    for _ in range(calls):
        at += chance.expovariate(1 / gap)
        arrivals.append(at)
    done = 0
    while done < calls:
        now = max(now, arrivals[done])
        here = done + 1
        batching.came(arrivals[done])
        first = now
        while here < calls and arrivals[here] <= now and here - done < 32:
            batching.came(arrivals[here])
            here += 1
        while (left := batching.patience(here - done, first, now)) > 0:
            if here < calls and arrivals[here] <= now + left:
                now = max(now, arrivals[here])
                batching.came(arrivals[here])
                here += 1
            else:
                now += left
                break
        spent = fixed + each * (here - done)
        batching.ran(here - done, spent)
        now, done, batches = now + spent, here, batches + 1
    return calls / now, batches


def test_under_load_waiting_makes_batches_fuller_and_nothing_slower() -> None:
    eager, many = simulate(0.0, gap=0.005, fixed=0.012, each=0.001)
    patient, fewer = simulate(0.01, gap=0.005, fixed=0.012, each=0.001)
    assert fewer < many and patient >= 0.97 * eager
    alone, batches = simulate(0.01, gap=0.5, fixed=0.010, each=0.001, calls=300)
    assert batches == 300, "calls that come alone run alone"
    assert alone == pytest.approx(simulate(0.0, gap=0.5, fixed=0.010, each=0.001, calls=300)[0])
