"""A job that behaves badly harms itself: the next job on its worker does not notice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ostler.jobs import results
from ostler.jobs.logs import JobLogs
from tests.harness import Node, until
from tests.rough import ODD, ROUGH

APP = Path(__file__).resolve().parent.parent / "rough.py"


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One node with one worker for all of these: each job has to get along with those before it."""
    node = Node(tmp_path_factory.mktemp("rough"), APP, "--pool", "rough=1").start()
    yield node
    node.stop()


def run(node: Node, task: str, **args: Any) -> dict[str, Any]:
    return node.wait_job(node.enqueue(task, **args))


def state(node: Node) -> dict[str, Any]:
    job = run(node, "state")
    assert (job["status"], job["crashes"], job["attempt"]) == ("done", 0, 1), job
    return dict(job["result"])


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("what", ROUGH)
def test_the_next_job_finds_its_worker_as_it_was_after_one_that(one: Node, what: str, fail: bool) -> None:
    before = state(one)
    assert run(one, "rough", what=what, fail=fail)["status"] == ("failed" if fail else "done")
    assert state(one) == before
    assert run(one, "sleeps")["result"] == "slept"
    assert run(one, "gets_a_loop")["result"] == "looped"
    assert one.worker("worker:rough:0")["restart_count"] == 0


@pytest.mark.parametrize(
    "what",
    [
        "leaves for another directory",
        "sets the umask",
        "closes the standard files",
        "changes the environment",
        "lowers its limits",
    ],
)
def test_the_other_jobs_of_a_hand_over_find_their_worker_as_it_was(one: Node, what: str) -> None:
    before = state(one)
    short = [{"task": "state"}] * 10
    one.post("/api/v1/pools/rough/pause")
    body = {"jobs": [*short, {"task": "rough", "args": {"what": what}}, *short]}
    jobs = one.post("/api/v1/jobs/bulk", body)[1]["ids"]
    one.post("/api/v1/pools/rough/resume")
    found = [one.wait_job(job) for job in jobs]
    assert all(job["result"] == before for job in found if job["task"] == "state")


def test_what_is_printed_after_closed_streams_is_in_the_next_jobs_log(one: Node) -> None:
    run(one, "rough", what="closes the standard streams")
    job = run(one, "state")["id"]
    log = JobLogs(one.folder).path(job)
    wanted = {f"said {job}", f"to stderr {job}"}
    until(lambda: log.exists() and wanted <= set(log.read_text().splitlines()), "its lines")


def test_a_worker_whose_hard_limits_were_lowered_leaves_and_the_next_job_has_a_fresh_one(one: Node) -> None:
    before = state(one)
    job = run(one, "lowers_hard_limits")
    assert (job["status"], job["crashes"]) == ("done", 0)
    after = state(one)
    assert {**after, "pid": 0} == {**before, "pid": 0}
    assert one.worker("worker:rough:0")["restart_count"] == 0


@pytest.mark.parametrize("what", ODD)
def test_an_exception_that_cannot_be_shown_ends_its_job_and_not_the_worker(one: Node, what: str) -> None:
    before = state(one)
    job = run(one, "raises", what=what)
    assert (job["status"], job["crashes"]) == ("failed", 0)
    assert job["error"]["message"]
    assert state(one)["pid"] == before["pid"]


def test_a_job_that_changes_its_handle_still_ends(one: Node) -> None:
    assert run(one, "renames_itself")["result"] == "done"


def test_a_forked_child_may_not_report_and_is_told_so(one: Node, tmp_path: Path) -> None:
    before = state(one)
    errors = tmp_path / "errors"
    job = run(one, "forks", errors=str(errors))
    assert (job["status"], job["result"]) == ("done", "forked")
    names = [e["name"] for e in job["events"]]
    assert names.count("from the parent") == 50
    assert "from a child" not in names
    lines = errors.read_text().splitlines()
    assert len(lines) == 12
    assert all("forked child of the worker" in line for line in lines)
    assert state(one)["pid"] == before["pid"]


def test_a_forked_child_that_comes_back_exits_with_1(one: Node) -> None:
    job = run(one, "child_comes_back")
    assert (job["status"], job["result"]) == ("done", 1)


@pytest.mark.parametrize("same", [False, True])
def test_threads_of_one_job_can_publish_at_once(one: Node, same: bool) -> None:
    job = one.wait_job(one.enqueue("publishes_at_once", same=same), patience=30)  # a lost answer takes 60 s
    wanted = [f"{job['id']}/{'one' if same else n}" for n in range(8)]
    assert job["result"] == wanted
    place = results.connect("", one.folder)
    assert all(results.valid(place, key, one.folder, origin=place.find(key).origin) for key in wanted)


@pytest.mark.parametrize("how", ["null", "signal", "hidden"])
def test_a_segfault_leaves_its_python_stack_in_the_exit_record_and_in_the_logs(one: Node, how: str) -> None:
    job = one.enqueue("segfaults", how=how)
    stack = (
        f"before the fault of {job}",
        "Fatal Python error: Segmentation fault",
        "in _into_the_void",
        "in segfaults",
    )
    found = one.wait_job(job, "failed")
    assert (found["crashes"], found["error"]["code"]) == (3, "TOXIC")

    def recorded() -> bool:
        last = one.get("/api/v1/workers/worker:rough:0")[1]["exits"][0]
        return all(any(words in line for line in last["log"]) for words in stack)

    until(recorded, "the stack in the exit record")
    until(lambda: all(words in JobLogs(one.folder).path(job).read_text() for words in stack), "the stack in the log")
    one.wait_status("worker:rough:0", "healthy")


def test_a_job_cannot_read_what_would_let_it_write_into_another_jobs_log(one: Node) -> None:
    """The token that labels output is in no environment; a guess is taken for what it is, a line."""
    found = run(one, "environment")["result"]
    assert "OSTLER_DATA" in found["proc"]
    assert "LABEL" not in found["proc"] + found["own"]
    words = [word for entry in found["proc"].split("\0") for word in re.findall(r"[0-9a-f]{16,}", entry)]
    victim = run(one, "state")["id"]
    job = run(one, "forges", of=victim, tokens=words)["id"]
    log = JobLogs(one.folder)
    until(lambda: "forged" in log.path(job).read_text(), "its own log")
    assert "forged" not in log.path(victim).read_text()
