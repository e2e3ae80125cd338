from __future__ import annotations

import pytest

from ostler.jobs.handle import Job
from ostler.jobs.results import Published
from ostler.jobs.progress import Throttle


def shown(*reports: tuple[float, str | None, float]) -> list[float]:
    throttle = Throttle()
    return [v for v in (throttle.admit(*r) for r in reports) if v is not None]


def test_one_percent_more_is_shown_at_once() -> None:
    assert shown((0, None, 0.0), (0.5, None, 0.1), (0.99, None, 0.2), (1.0, None, 0.3), (2.0, None, 0.3)) == [0, 1, 2]


def test_less_than_one_percent_waits_half_a_second_and_must_be_a_change() -> None:
    assert shown((10, None, 0.0), (10.4, None, 0.4), (10.4, None, 0.5), (10.4, None, 1.2)) == [10, 10.4]


def test_a_new_stage_is_a_change() -> None:
    assert shown((10, "a", 0.0), (10, "b", 0.1), (10, "b", 0.6), (10, "b", 1.2)) == [10, 10]


def test_exactly_one_hundred_is_shown() -> None:
    assert shown((99.9, None, 0.0), (100, None, 0.01), (100, None, 5.0), (100, "x", 9.0), (50, None, 12.0)) == [
        99.9,
        100,
    ]


def test_it_never_goes_back_and_stays_within_bounds() -> None:
    assert shown((50, None, 0.0), (20, None, 5.0), (-5, None, 6.0), (900, None, 7.0)) == [50, 100]


def test_a_run_that_tells_everything_is_cut_and_that_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostler.jobs.handle._EVENTS", 3)
    said: list[str] = []
    job = Job(1, "t", 1, 0, 1, lambda *frame: said.append(frame[3]))
    for n in range(6):
        job.event(f"step:{n}")
    job._tell("uploaded", {"key": "k"}, Published("k", 1, "…", 1, 1))  # as `publish` does
    assert said == ["step:0", "step:1", "step:2", "events:limit", "uploaded"]
