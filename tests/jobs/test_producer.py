"""The way in from any process."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostler.config import Settings
from ostler.errors import StoreGone
from ostler.jobs.producer import Producer
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
