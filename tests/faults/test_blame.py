"""Bad input cannot stop a pool, and a broken environment turns no queue toxic: real workers that really die."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Node, until

both = pytest.mark.usefixtures("store_url")

APP = """
import os, signal
from ostler import Job, Ostler

app = Ostler()

@app.job(queue="files")
def read(job: Job, bad: bool) -> str:
    if bad:
        os.kill(os.getpid(), signal.SIGSEGV)
    return "read"
"""
# The default limits on crashes, with short waits: what counts is how many, not how long.
LIMITS = {
    "OSTLER_RESTART_LIMIT": "5",
    "OSTLER_RESTART_LIFETIME": "20",
    "OSTLER_CRASH_DELAY": "0.3",
    "OSTLER_BACKOFF_MAX": "0.02",
}


@pytest.fixture
def start(make_node, tmp_path: Path):
    def go(workers: int, **env: str) -> Node:
        app = tmp_path / "files.py"
        app.write_text(APP)
        return make_node("--pool", f"files={workers}", app=app, **{**LIMITS, **env})

    return go


def put(node: Node, *bad: bool) -> list[int]:
    jobs = [{"task": "read", "args": {"bad": b}} for b in bad]
    return list(node.post("/api/v1/jobs/bulk", {"jobs": jobs})[1]["ids"])


def counts(node: Node) -> tuple[int, int, int]:
    """(done, TOXIC, anything else that ended)"""
    done, failed = (node.get(f"/api/v1/jobs?limit=1000&status={s}")[1]["jobs"] for s in ("done", "failed"))
    toxic = [j for j in failed if j["error"]["code"] == "TOXIC"]
    return len(done), len(toxic), len(failed) - len(toxic)


@pytest.mark.parametrize(
    ("workers", "after"),
    [
        pytest.param(1, 20, marks=pytest.mark.soak),
        (2, 20),
        pytest.param(1, 0, id="1-at the end"),
        pytest.param(2, 0, id="2-at the end", marks=pytest.mark.soak),
    ],
)
def test_twenty_bad_jobs_among_good_ones_end_toxic_and_no_worker_is_failed(start, workers: int, after: int) -> None:
    node = start(workers)
    jobs = put(node, *[False] * 20, *[True] * 20, *[False] * after)
    until(lambda: sum(counts(node)) == len(jobs), "all jobs to end", 110)
    assert counts(node) == (20 + after, 20, 0)
    assert all((w["status"] != "failed", w["restart_count"]) == (True, 0) for w in node.workers())
    until(lambda: node.get("/api/v1/health")[1]["status"] == "healthy", "the node to be healthy")


@both
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_every_third_job_bad_stops_nothing(start, workers: int) -> None:
    node = start(workers)
    jobs = put(node, *[n % 3 == 2 for n in range(18)])
    until(lambda: sum(counts(node)) == len(jobs), "all jobs to end", 110)
    assert counts(node) == (12, 6, 0)
    assert all(w["status"] != "failed" for w in node.workers())


@both
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_fresh_pool_in_which_nothing_succeeds_is_failed_after_five_and_turns_nothing_toxic(
    start, workers: int
) -> None:
    node = start(workers, OSTLER_CRASH_DELAY="600")
    put(node, *[True] * 20)
    for n in range(workers):
        assert node.wait_status(f"worker:files:{n}", "failed")["restart_count"] == 5
    assert counts(node) == (0, 0, 0)
    assert node.get("/api/v1/health")[1]["status"] == "error"


def test_restarting_the_workers_of_a_broken_environment_turns_nothing_toxic_either(start, tmp_path: Path) -> None:
    node = start(1)
    jobs = put(node, *[True] * 8)
    for _ in range(3):
        assert node.wait_status("worker:files:0", "failed")["restart_count"] == 5
        assert counts(node) == (0, 0, 0)
        node.post("/api/v1/workers/worker:files:0/restart")
        node.wait_worker("worker:files:0", "to start anew", lambda w: w["restart_count"] < 5)
    node.wait_status("worker:files:0", "failed")
    app = tmp_path / "files.py"
    app.write_text(APP.replace("if bad:", "if False:"))  # the environment is mended
    node.post("/api/v1/workers/worker:files:0/restart")
    assert all(node.wait_job(j)["status"] == "done" for j in jobs)


@both
def test_a_job_that_crashed_twice_waits_behind_everything_that_was_queued(start) -> None:
    node = start(1, OSTLER_CRASH_DELAY="0")
    node.post("/api/v1/pools/files/pause")
    jobs = put(node, False, True, *[False] * 5)
    node.post("/api/v1/pools/files/resume")
    bad = node.wait_job(jobs[1])
    last = max(node.wait_job(j)["finished_at"] for j in jobs if j != jobs[1])
    assert (bad["attempt"], bad["error"]["code"]) == (3, "TOXIC")
    assert bad["started_at"] >= last  # of its last run


@both
def test_a_node_that_starts_with_failed_workers_says_so_in_the_log_and_in_health(start) -> None:
    node = start(1, OSTLER_CRASH_DELAY="600")
    put(node, *[True] * 6)
    node.wait_status("worker:files:0", "failed")
    node.stop()
    node.start(ready=False)
    until(lambda: "worker:files:0 is still failed, as before" in node.log(), "the log to say so")
    health = node.get("/api/v1/health")[1]
    assert health["status"] == "error"
    assert any("worker:files:0 has failed" in error for error in health["errors"])
