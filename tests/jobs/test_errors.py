"""The errors of a job's runs, as the API, the terminal, Python and the node's log tell them: one count in all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostler import JobCancelled, JobFailed, Ostler
from tests.harness import Node, until
from tests.stores import store_of

APP = Path(__file__).with_name("errors_app.py")


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def node(request: pytest.FixtureRequest, tmp_path_factory):
    with store_of(request) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OSTLER_STORE", url)
        running = Node(tmp_path_factory.mktemp("errors") / "data", APP, "--pool", "work=1").start()
        yield running
        running.kill()


@pytest.fixture(scope="module")
def app(node: Node) -> Iterator[Ostler]:
    found = Ostler(data=str(node.folder))
    yield found
    found.producer.close()


def cli(node: Node, *args: object) -> str:
    command = [sys.executable, "-m", "ostler", *map(str, args), "--data", str(node.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "300"})
    return done.stdout


def test_each_run_keeps_its_error_and_has_one_number_everywhere(node: Node, app: Ostler, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job = node.enqueue("unlucky", gate=str(gate))
    failed = node.wait_job(job, "failed")
    raised, crash, timeout = failed["errors"]
    assert [(e["attempt"], e["kind"], e["code"]) for e in failed["errors"]] == [
        (1, "exception", "ERROR"),
        (2, "crash", "CRASH"),
        (3, "timeout", "TIMEOUT"),
    ]
    assert all(e["worker"] == "worker:work:0" and e["node"] == failed["node"] for e in failed["errors"])
    assert raised["message"] == "ValueError: not found"
    assert raised["traceback"].startswith("Traceback") and "KeyError: 'key'" in raised["traceback"]
    assert crash["traceback"].startswith("run 2, attempt 2\n") and "in unlucky" in crash["traceback"]
    assert timeout["traceback"].startswith("run 3, attempt 3\n") and "in hangs" in timeout["traceback"]
    assert timeout["duration_ms"] >= 5000 > raised["duration_ms"]
    assert [e["data"]["attempt"] for e in failed["events"] if e["name"] == "processing"] == [1, 2, 3]
    assert (failed["attempt"], failed["attempts"], failed["crashes"]) == (3, 3, 1)
    words = "ran longer than its timeout of 5 s and was killed with its processes (attempt 3 of 3)"
    assert failed["last_error"] == node.get("/api/v1/jobs?status=failed")[1]["jobs"][0]["last_error"] == words

    with pytest.raises(JobFailed, match="TIMEOUT") as told:
        app.find(job).result()
    assert told.value.errors == app.find(job).errors() == failed["errors"]
    assert f"job {job} (unlucky) failed in attempt 1 of 3 on worker:work:0" in node.log()
    shown = cli(node, "jobs", job)
    assert "attempt 3 of 3, 1 of its runs crashed\n" in shown
    assert "attempt 2, " in shown and "crash on worker:work:0" in shown and "in hangs" in shown
    assert "3 of 3 " in cli(node, "jobs") and words[:60] in cli(node, "jobs")

    cli(node, "retry", job)
    until(gate.exists, "the fourth run to have begun")
    again = node.job(job)
    assert (again["attempt"], again["last_error"], again["errors"]) == (1, None, failed["errors"])
    node.signal(signal.SIGKILL)
    node.wait()
    node.start()
    done = node.wait_job(job, "done")
    assert (done["attempt"], done["result"], done["last_error"], done["error"]) == (1, 1, None, None)
    assert [(e["attempt"], e["kind"]) for e in done["errors"][3:]] == [(1, "lost")]
    assert done["errors"][:3] == failed["errors"]


def test_a_traceback_is_cut_in_its_middle(node: Node) -> None:
    trace = node.wait_job(node.enqueue("long_story"))["errors"][0]["traceback"]
    assert 8000 <= len(trace) < 8100
    assert trace.startswith("Traceback (most recent call last):\n") and "in long_story" in trace[:2000]
    assert " characters left out …\n" in trace and trace.endswith("RuntimeError: at the bottom\n")


def test_a_job_that_cancels_itself_says_why_everywhere(node: Node, app: Ostler) -> None:
    job = node.enqueue("unwanted")
    found = node.wait_job(job, "cancelled")
    assert found["error"]["message"] == found["last_error"] == found["errors"][0]["message"] == "nobody wants it"
    assert found["events"][-1]["data"]["message"] == "nobody wants it"
    with pytest.raises(JobCancelled, match="nobody wants it"):
        app.find(job).result()
    assert "nobody wants it" in cli(node, "jobs", job)


def test_a_done_job_is_at_a_hundred_percent_whatever_it_said_last(node: Node, app: Ostler) -> None:
    job = node.enqueue("half")
    assert node.wait_job(job)["progress"] == app.find(job).progress() == 100
    assert node.get("/api/v1/jobs?task=half")[1]["jobs"][0]["progress"] == 100
    assert "100 %" in cli(node, "jobs", "--task", "half")


@pytest.mark.parametrize("verb", ["cancel", "retry"])
def test_the_advice_of_a_command_names_options_that_it_has(node: Node, verb: str) -> None:
    command = [sys.executable, "-m", "ostler", verb, "--data", str(node.folder)]
    refused = subprocess.run(command, capture_output=True, text=True)
    advised = refused.stderr.partition("filter (")[2].partition(")")[0].split(", ")
    assert refused.returncode and len(advised) >= 4
    options = cli(node, verb, "--help")
    assert all(f"{option} " in options for option in advised)
