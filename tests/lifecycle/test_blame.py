"""Whose fault a crash is: the pure rule, and a simulated pool over random corpora of good and bad jobs."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest

from ostler.jobs.verdict import Policy, Ran, crashed
from ostler.lifecycle import restart
from ostler.lifecycle import worker as lifecycle
from ostler.lifecycle.restart import GiveUp, History, Limits
from ostler.lifecycle.worker import PoolSpec
from ostler.store.rows import Claim, Finish

LIMITS = Limits()


def test_a_crash_with_nothing_in_hand_counts_for_the_worker_whatever_credit_there_is() -> None:
    assert restart.blame(None, True, 20) == (True, 20)


def test_a_first_crash_takes_credit_and_counts_when_none_is_left() -> None:
    assert restart.blame("job:1", True, 20) == (False, 19)
    assert restart.blame("job:1", True, 1) == (False, 0)
    assert restart.blame("job:1", True, 0) == (True, 0)


def test_further_crashes_of_the_same_job_are_charged_to_the_job_alone() -> None:
    assert restart.blame("job:1", False, 20) == (False, 20)
    assert restart.blame("job:1", False, 0) == (False, 0)


def test_where_nothing_finishes_every_crash_counts() -> None:
    assert restart.blame("job:1", False, 0, doubtful=True) == (True, 0)
    assert restart.blame("job:1", True, 0, doubtful=True) == (True, 0)


def test_a_finished_item_ends_the_streak_and_clears_the_window_but_not_the_lifetime_count() -> None:
    history = History()
    for at in (0, 1000, 2000):
        history, _ = restart.after_crash(history, at, LIMITS)
    assert history.marked
    history = restart.after_finished(history)
    assert (history.crashes, history.streak, history.lifetime, history.marked) == ((), 0, 3, False)


@dataclass
class Pool:
    """A pool of workers and a queue, by the real rules and a clock of its own. A job is (position, id, crashes so far)."""

    bad: list[bool]
    workers: int
    pool: lifecycle.Pool = field(default_factory=lambda: lifecycle.Pool(PoolSpec("q", 1, ["x"])))
    histories: list[History] = field(default_factory=list)
    done: int = 0
    toxic: int = 0
    failed: set[int] = field(default_factory=set)

    def run(self) -> Pool:
        self.histories = [History() for _ in range(self.workers)]
        ready = [(n, n, 0) for n in range(len(self.bad))]
        later: list[tuple[float, tuple[int, int, int]]] = []
        free = [(0.0, w) for w in range(self.workers)]
        newest = len(self.bad)
        while (ready or later) and free:
            now, worker = heapq.heappop(free)
            while later and later[0][0] <= now:
                heapq.heappush(ready, heapq.heappop(later)[1])
            if not ready:
                heapq.heappush(free, (later[0][0], worker))
                continue
            position, job, crashes = heapq.heappop(ready)
            now += 0.1
            if not self.bad[job]:
                self.done += 1
                self.pool.finished()
                self.histories[worker] = restart.after_finished(self.histories[worker])
                heapq.heappush(free, (now, worker))
                continue
            claim = Claim(job, 1, "w", "t", "q", "{}", crashes + 1, 3, crashes, 0, None)
            verdict = crashed(
                Ran(claim, 0, int(now * 1000)), "signal", "SIGSEGV", Policy(), doubtful=self.pool.doubtful
            )
            if isinstance(verdict, Finish):
                self.toxic += 1
            else:
                newest += 1
                back = (newest if verdict.last else position, job, crashes + 1)
                at = (verdict.run_at or 0) / 1000
                heapq.heappush(later, (max(now, at), back))
            delay = restart.after_uncounted_crash(LIMITS)
            if self.pool.blames(f"job:{job}", first=crashes == 0):
                self.histories[worker], delay = restart.after_crash(self.histories[worker], int(now * 1000), LIMITS)
            if isinstance(delay, GiveUp):
                self.failed.add(worker)
            else:
                heapq.heappush(free, (now + delay.delay, worker))
        return self


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_bad_jobs_among_good_ones_end_toxic_and_no_worker_fails(workers: int) -> None:
    middle, end = [False] * 20 + [True] * 20 + [False] * 20, [False] * 20 + [True] * 20
    corpora = [middle, end, [False] + end[20:], [n % 3 == 2 for n in range(90)]]
    for seed in range(60):
        draw = random.Random(seed)
        share = draw.choice([0.05, 0.2, 0.5])
        corpora.append([False] * workers + [draw.random() < share for _ in range(draw.randrange(20, 300))])
    for bad in corpora:
        pool = Pool(bad, workers).run()
        assert (pool.done, pool.toxic, pool.failed) == (bad.count(False), bad.count(True), set())
        assert all(history.lifetime == 0 for history in pool.histories) or bad not in (middle, end)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_environment_that_breaks_later_fails_the_workers_when_the_credit_is_used_up_and_turns_nothing_toxic(
    workers: int,
) -> None:
    pool = Pool([False] * 30 + [True] * 60, workers).run()
    assert (pool.done, pool.toxic, pool.failed) == (30, 0, set(range(workers)))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_an_environment_in_which_nothing_succeeds_fails_the_workers_after_five_and_turns_nothing_toxic(
    workers: int,
) -> None:
    pool = Pool([True] * 10 * workers, workers).run()
    assert (pool.done, pool.toxic, pool.failed) == (0, 0, set(range(workers)))
    assert all(len(history.crashes) == 5 for history in pool.histories)
