"""Where claims begin to read, with a clock of our own."""

from __future__ import annotations

from ostler.store.frontier import BEGINNING, Frontier, Start


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def slow(frontier: Frontier, times: int = 3, took: float = 0.1) -> None:
    for _ in range(times):
        frontier.read("q", frontier.start("q"), [(0, 500)], took)


def test_claims_begin_at_the_beginning_while_that_is_quick() -> None:
    frontier = Frontier()
    for _ in range(10):
        frontier.read("q", frontier.start("q"), [(0, 500)], 0.001)
    assert frontier.start("q") == BEGINNING
    assert frontier.wait("q") is None


def test_one_slow_reading_says_nothing() -> None:
    frontier = Frontier()
    for took in (0.1, 0.1, 0.001, 0.1, 0.1):
        frontier.read("q", frontier.start("q"), [(0, 500)], took)
    assert frontier.start("q") == BEGINNING


def test_after_slow_readings_claims_begin_where_the_first_job_was_found_for_ten_times_their_cost() -> None:
    clock = Clock()
    frontier = Frontier(clock=clock)
    slow(frontier)
    assert frontier.start("q") == Start(0, 500)
    assert frontier.start("other") == BEGINNING
    assert frontier.wait("q") == 1.0
    clock.now += 0.99
    assert frontier.start("q") == Start(0, 500)
    clock.now += 0.02
    assert frontier.start("q") == BEGINNING


def test_a_quick_reading_from_the_beginning_ends_it() -> None:
    clock = Clock()
    frontier = Frontier(clock=clock)
    slow(frontier)
    clock.now += 2
    frontier.read("q", frontier.start("q"), [(0, 700)], 0.001)
    assert frontier.start("q") == BEGINNING


def test_what_may_be_ready_before_it_is_looked_for_at_once() -> None:
    frontier = Frontier()
    slow(frontier)
    frontier.forget("q")
    assert frontier.start("q") == BEGINNING


def test_a_database_that_leaves_nothing_behind_is_always_read_from_the_beginning() -> None:
    frontier = Frontier(whole=True)
    slow(frontier)
    assert frontier.start("q") == BEGINNING
