from pathlib import Path

import pytest
from reader import app, report

from ostler import JobFailed
from ostler.testing import Bench, kill_at


@pytest.fixture
def book(tmp_path: Path) -> str:
    path = tmp_path / "book.txt"
    path.write_text("The cat sat. The dog ran.\nThe cat ran.\n")
    return str(path)


def test_words_are_counted(book: str) -> None:
    with Bench(app) as bench:
        job = bench.enqueue(report, path=book)
        assert job.result()["words"] == 9  # in a bench, this runs the job
        assert "counted" in bench.events(job)


def test_a_report_survives_a_crash(book: str) -> None:
    with Bench(app) as bench:
        job = bench.enqueue(report, path=book)
        with kill_at("counted"):  # the worker is killed when the job reports this event
            bench.run()
        assert job.status() == "queued"
        assert job.result()["words"] == 9


def test_a_missing_file_fails_without_a_retry() -> None:
    with Bench(app) as bench:
        job = bench.enqueue(report, path="nowhere.txt")
        with pytest.raises(JobFailed, match=r"NO_FILE: nowhere\.txt does not exist"):
            job.result()
