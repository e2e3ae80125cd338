"""The node's log about jobs: a line for each that matters, and one for many in a flood."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from ostler.events import JobEnded, JobTook, RunsDone
from ostler.live import log as node_log


def failed(job: int, message: str = "ZeroDivisionError: division by zero") -> JobEnded:
    return JobEnded(job, "add", "math", "worker:math:0", "failed", 0.12, "RETRIES_EXHAUSTED", message)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """What is logged of these events, in one window."""
    monkeypatch.setattr(node_log, "_WINDOW", 0.05)
    caplog.set_level(logging.INFO, "ostler")

    def play(*events: object) -> list[str]:
        async def main() -> None:
            told = node_log.JobLines()
            for event in events:
                told.tell(event)  # type: ignore[arg-type]
            while told._window is not None:
                await asyncio.sleep(0.01)

        asyncio.run(main())
        return [record.getMessage() for record in caplog.records]

    return play


def test_a_job_that_fails_or_takes_long_is_a_line_and_others_are_none(lines) -> None:
    found = lines(
        RunsDone([("add", "math", 0.01)] * 5),
        failed(12),
        JobTook(13, "count", "worker:slow:1", 4.25),
        JobEnded(
            14, "add", "math", "worker:math:0", "requeued:retry", 0.1, "ERROR", "ValueError: no\nmore lines", 2, 3
        ),
    )
    assert found == [
        "job 12 (add) failed on worker:math:0 after 0.1 s: RETRIES_EXHAUSTED: ZeroDivisionError: division by zero; see: ostler jobs 12",
        "job 13 (count) took 4.2 s on worker:slow:1",
        "job 14 (add) failed in attempt 2 of 3 on worker:math:0 after 0.1 s and is retried: ValueError: no",
    ]


def test_a_flood_is_summed_up(lines) -> None:
    found = lines(RunsDone([("add", "math", 0.01)] * 1500), *(failed(n) for n in range(50)))
    assert len(found) == 11
    assert found[-1] == (
        "in the last 0.05 s: 1,500 jobs done, 50 failed (50 RETRIES_EXHAUSTED); 40 lines about single jobs were left out"
    )


def test_what_a_job_raises_cannot_write_to_the_terminal(lines) -> None:
    found = lines(failed(1, "\x1b[2Jgone" + "x" * 500))
    assert "\x1b" not in found[0] and len(found[0]) < 400


def test_json_lines_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.LogRecord("ostler", logging.WARNING, "", 1, "it is %s", ('"so"\n',), None)
    found = json.loads(node_log._Json().format(record))
    assert (found["level"], found["logger"], found["message"]) == ("warning", "ostler", 'it is "so"\n')
    assert found["time"].endswith("+00:00")
