"""The way in from any process."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostler.config import Settings
from ostler.errors import BadArguments, StoreGone
from ostler.jobs.producer import Producer, prepare
from ostler.store.rows import NewJob

JOB = NewJob("t", "q", "{}")


def test_a_producer_notices_that_the_database_was_deleted(tmp_path: Path) -> None:
    producer = Producer(Settings(data=str(tmp_path)))
    producer.enqueue([JOB])
    for path in tmp_path.glob("ostler.db*"):
        path.unlink()
    for _ in range(2):
        with pytest.raises(StoreGone, match="was deleted while it was in use"):
            producer.enqueue([JOB])


def test_a_producer_goes_on_with_the_file_that_replaced_the_database(tmp_path: Path) -> None:
    producer = Producer(Settings(data=str(tmp_path)))
    producer.enqueue([JOB])
    for path in tmp_path.glob("ostler.db*"):
        path.unlink()
    other = Producer(Settings(data=str(tmp_path)))
    other.enqueue([JOB])
    with pytest.raises(StoreGone, match="replaced"):
        producer.enqueue([JOB])
    assert producer.enqueue([JOB]) == [2]


@pytest.mark.parametrize("seconds", [1_790_000_000, 1_790_000_000.5])
def test_run_at_in_seconds_is_refused_with_a_hint(seconds: float) -> None:
    task = {"t": {"queue": "q", "attempts": 3, "timeout": None, "priority": 0, "parameters": [], "policy": {}}}
    with pytest.raises(BadArguments, match="milliseconds UTC .* this looks like seconds: multiply by 1000"):
        prepare(task, "t", {}, 1000, run_at=seconds)
    assert prepare(task, "t", {}, 1000, run_at=int(seconds * 1000)).run_at == int(seconds * 1000)
