"""Averages, percentiles and ETAs: pure arithmetic over measured durations."""

from __future__ import annotations

import pytest

from ostler.live import rates, states
from ostler.store.live import BOUNDS, bin_of


def test_bins_are_ordered_and_hold_their_bounds() -> None:
    assert list(BOUNDS) == sorted(set(BOUNDS))
    assert BOUNDS[0] == 1
    assert 2 * 3600 * 1000 <= BOUNDS[-1] * 1.4
    for number, bound in enumerate(BOUNDS):
        assert (bin_of(bound), bin_of(bound + 1)) == (number, number + 1)
    assert bin_of(0) == 0
    assert bin_of(10**12) == len(BOUNDS)


@pytest.mark.parametrize("ms", [0, 1, 3, 40, 999, 12_345, 700_000])
def test_a_percentile_lies_in_the_bin_of_what_was_measured(ms: int) -> None:
    number = bin_of(ms)
    low = BOUNDS[number - 1] if number else 0
    for share in (0.01, 0.5, 0.95, 1.0):
        found = rates.percentile({f"run:{number}": 7, "wait:3": 100}, "run", share)
        assert found is not None
        assert low / 1000 - 1e-4 <= found <= BOUNDS[number] / 1000 + 1e-4


def test_percentiles_tell_fast_from_slow() -> None:
    counts = {f"run:{bin_of(10)}": 95, f"run:{bin_of(5000)}": 5}
    assert rates.percentile(counts, "run", 0.5) < 0.011
    assert rates.percentile(counts, "run", 0.95) < 0.011
    assert rates.percentile(counts, "run", 0.96) > 3
    beyond = rates.percentile({f"run:{len(BOUNDS)}": 1}, "run", 1.0)
    assert beyond == 2 * BOUNDS[-1] / 1000


def test_nothing_counted_is_no_percentile() -> None:
    assert rates.percentile({}, "run", 0.5) is None
    assert rates.percentile({"wait:3": 5, "done": 2, "run:3": 0}, "run", 0.5) is None


@pytest.mark.parametrize(
    ("pending", "elapsed", "average", "workers", "rate", "wanted"),
    [
        (0, [], None, 0, None, 0.0),  # nothing to do: done, whoever could do it
        (4, [], 10.0, 2, None, 20.0),
        (5, [], 10.0, 2, None, 30.0),  # the last one begins after two rounds
        (1, [4.0], 10.0, 1, None, 16.0),  # behind a busy worker
        (1, [4.0], 10.0, 2, None, 10.0),  # beside one
        (0, [4.0], 10.0, 2, None, 6.0),
        (0, [15.0], 10.0, 1, None, 0.0),  # longer than usual: any moment
        (0, [25.0], 10.0, 1, None, None),  # much longer: nobody knows
        (1, [25.0], 10.0, 1, None, 10.0),
        (0, [1.0, 0.0, 0.0], 10.0, 1, None, 30.0),  # claims behind the running one wait
        (100, [], 0.01, 4, 2.0, 50.0),  # the rate is what holds back
        (100, [], 10.0, 1, 2.0, 1000.0),  # the work is
        (3, [], 10.0, 0, None, None),  # paused, or no worker
        (0, [1.0], 10.0, 0, None, None),
        (3, [], None, 2, None, None),  # never measured
        (2000, [5.0], 10.0, 2, None, 10_002.5),
    ],
)
def test_eta(pending, elapsed, average, workers, rate, wanted) -> None:
    assert rates.eta(pending, elapsed, average, workers, rate=rate) == wanted


def test_the_estimate_for_many_is_close_to_working_them_through() -> None:
    exact = rates.eta(1000, [3.0, 7.0], 10.0, 3)
    assert rates.eta(1001, [3.0, 7.0], 10.0, 3) == pytest.approx(exact, rel=0.01)


def queue(name: str = "tag", **more):
    given = {
        "counts": {"queued": 4, "processing": 1, "scheduled": 2, "failed": 3},
        "totals": {"done": 10, "run_ms": 20_000, "failed": 5},
        "average": None,
        "recent": None,
        "running_for": [0.5],
        "workers": 1,
        "paused": False,
    }
    return states.queue(name, **{**given, **more})


def test_a_queue_tells_the_seeds_numbers() -> None:
    found = queue()
    assert {k: found[k] for k in ("queue_type", "pending", "running", "completed", "avg_time")} == {
        "queue_type": "tag",
        "pending": 4,
        "running": 1,
        "completed": 10,
        "avg_time": 2.0,
    }
    assert found["eta"] == 9.5
    assert queue(average=0.25)["avg_time"] == 0.25  # the last hour, where there was one
    assert queue(paused=True)["eta"] is None
    assert queue(workers=0)["eta"] is None
    assert queue(stuck=1)["eta"] is None  # nobody can run it
    assert queue(totals={})["avg_time"] is None
    assert queue(totals={})["eta"] is None
    assert queue(counts={}, running_for=[], paused=True)["eta"] == 0.0


def test_all_queues_in_one() -> None:
    both = states.all_queues([queue(average=1.0), queue("library", average=4.0, totals={"done": 20})], {"done": 1})
    assert {
        k: both[k] for k in ("queue_type", "pending", "running", "completed", "failed", "workers", "scheduled")
    } == {
        "queue_type": None,
        "pending": 8,
        "running": 2,
        "completed": 30,
        "failed": 6,
        "workers": 2,
        "scheduled": 4,
    }
    assert both["avg_time"] == 3.0  # weighed by what was completed
    assert both["eta"] == queue("library", average=4.0)["eta"]  # the last queue decides
    assert both["recent"] == {"done": 1}
    assert both["paused"] is False


def test_all_queues_when_one_cannot_tell_and_when_all_pause_and_when_there_are_none() -> None:
    assert states.all_queues([queue(), queue(workers=0)], None)["eta"] is None
    assert states.all_queues([queue(paused=True), queue()], None)["paused"] is False
    assert states.all_queues([queue(paused=True), queue(paused=True)], None)["paused"] is True
    none = states.all_queues([], None)
    assert (none["avg_time"], none["eta"], none["paused"], none["pending"]) == (None, 0.0, False, 0)
    unmeasured = states.all_queues([queue(totals={})], None)
    assert unmeasured["avg_time"] is None


def test_percentiles_of_a_span_come_from_all_of_its_buckets() -> None:
    slow, quick = bin_of(60_000), bin_of(10)
    buckets = [{"at": 0, "done": 90, f"run:{slow}": 90}, {"at": 10, "done": 10, f"run:{quick}": 10}]
    whole = states.recent(rates.merged(buckets, 0), 600)
    assert (whole["done"], whole["step"]) == (100, 600)
    assert whole["run_p50"] > 30  # not of the newest bucket alone
    assert states.recent(buckets[-1], 10)["run_p50"] < 0.1
