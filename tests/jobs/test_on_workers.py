"""Jobs through a real node and real workers."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ostler.store.rows import NewJob
from tests.harness import APP, Node, gone, until
from tests.sse import Stream
from tests.stores import rows, store_of


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def node(request: pytest.FixtureRequest, tmp_path_factory):
    with store_of(request) as url:
        folder = tmp_path_factory.mktemp("jobs") / "data"
        running = Node(folder, APP, "--pool", "work=2", "--pool", "other=1", OSTLER_STORE=url).start()
        yield running
        running.kill()


@pytest.fixture
def make_node(store_url: str, make_node):
    """On both databases."""
    return make_node


def generations(node: Node) -> list[int]:
    until(lambda: all(w["status"] == "healthy" for w in node.workers()), "all workers to be healthy")
    return [worker["generation"] for worker in node.workers()]


def test_a_job_runs_and_its_row_and_timeline_say_so(node: Node) -> None:
    done = node.wait_job(node.enqueue("add", a=2, b=3))
    assert done["result"] == 5
    assert {k: done[k] for k in ("task", "queue", "status", "attempt", "crashes", "error")} == {
        "task": "add", "queue": "work", "status": "done", "attempt": 1, "crashes": 0, "error": None,
    }  # fmt: skip
    assert done["worker"].startswith("worker:work:")
    assert done["created_at"] <= done["started_at"] <= done["finished_at"]
    assert [(e["seq"], e["name"]) for e in done["events"]] == [(1, "created"), (2, "processing"), (3, "done")]


def test_async_jobs_run_too(node: Node) -> None:
    assert node.wait_job(node.enqueue("add_async", a=2, b=3))["result"] == 5


def test_a_worker_runs_async_jobs_one_at_a_time(node: Node) -> None:
    jobs = [node.enqueue("company") for _ in range(20)]
    assert {node.wait_job(job)["result"] for job in jobs} == {1}


def test_transient_errors_are_retried_with_backoff_then_exhausted(node: Node) -> None:
    job = node.wait_job(node.enqueue("fails"))
    assert (job["status"], job["attempt"], job["error"]["code"]) == ("failed", 3, "RETRIES_EXHAUSTED")
    assert "try 3 failed" in job["error"]["message"]
    assert "OSError" in job["error"]["traceback"]
    assert node.events(job["id"]) == ["created", *["processing", "requeued:retry"] * 2, "processing", "failed"]
    assert node.wait_job(node.enqueue("fails", times=2))["result"] == 3


def test_a_permanent_failure_runs_once(node: Node) -> None:
    job = node.wait_job(node.enqueue("gives_up"))
    assert (job["status"], job["attempt"], job["error"]["code"], job["error"]["message"]) == (
        "failed",
        1,
        "VALIDATION",
        "this can never work",
    )


def test_retry_asks_for_another_run(node: Node) -> None:
    assert node.wait_job(node.enqueue("asks_again"))["result"] == 3


@pytest.mark.parametrize(
    ("what", "code"),
    [("set", "BAD_RESULT"), ("nan", "BAD_RESULT"), ("nested", "BAD_RESULT"), ("big", "RESULT_TOO_LARGE")],
)
def test_a_result_that_cannot_be_stored_fails_with_a_code_that_says_so(node: Node, what: str, code: str) -> None:
    job = node.wait_job(node.enqueue("returns", what=what))
    assert (job["status"], job["attempt"], job["error"]["code"]) == ("failed", 1, code)
    assert node.wait_job(node.enqueue("returns", what="deep"))["result"] == {"a": [1, None]}


def test_sys_exit_in_a_job_ends_the_job_not_the_worker(node: Node) -> None:
    before = generations(node)
    job = node.wait_job(node.enqueue("exits"))
    assert (job["status"], job["error"]["code"], job["crashes"]) == ("failed", "RETRIES_EXHAUSTED", 0)
    assert node.wait_job(node.enqueue("noop"))["status"] == "done"
    assert generations(node) == before


def test_a_timeout_kills_the_process_group_and_is_retried_then_final(node: Node) -> None:
    restarts = sum(w["restart_count"] for w in node.workers())
    job = node.wait_job(node.enqueue("overruns"))
    assert (job["status"], job["attempt"], job["crashes"], job["error"]["code"]) == ("failed", 2, 0, "TIMEOUT")
    children = [e["data"] for e in job["events"] if e["name"] == "child"]
    assert len(children) == 2
    until(lambda: all(gone(pid) for pid in children), "the job's children to be gone")
    # It says nothing against the worker.
    assert sum(w["restart_count"] for w in node.workers()) == restarts
    assert node.wait_job(node.enqueue("overruns", times=1))["result"] == "in time"


def test_progress_is_throttled_monotonic_and_ends_with_one_100(node: Node) -> None:
    job = node.wait_job(node.enqueue("counts", to=1000))
    shown = [e["data"]["pct"] for e in job["events"] if e["name"] == "progress"]
    assert shown == sorted(shown)
    assert shown.count(100) == 1
    assert len(shown) <= 101
    assert (job["progress"], job["stage"]) == (100, "step 1000")


def test_a_queued_job_is_cancelled_at_once(node: Node) -> None:
    node.post("/api/v1/workers/pause")
    job = node.enqueue("add", a=1)
    assert node.post(f"/api/v1/jobs/{job}/cancel")[0] == 200
    node.post("/api/v1/workers/resume")
    found = node.job(job)
    assert (found["status"], found["attempt"], found["error"]["code"]) == ("cancelled", 0, "CANCELLED")
    assert node.post(f"/api/v1/jobs/{job}/cancel")[0] == 409


@pytest.mark.parametrize("task", ["listens", "listens_async"])
def test_a_running_job_that_listens_is_cancelled_without_a_kill(node: Node, task: str) -> None:
    job = node.enqueue(task)
    node.wait_running(job)
    before = generations(node)
    assert node.post(f"/api/v1/jobs/{job}/cancel")[0] == 200
    assert node.wait_job(job)["status"] == "cancelled"
    assert node.events(job) == ["created", "processing", "cancel:requested", "cancelled"]
    assert node.wait_job(node.enqueue("noop"))["status"] == "done"
    assert generations(node) == before


def test_a_running_job_that_does_not_listen_is_killed_with_its_children(make_node, tmp_path: Path) -> None:
    node = make_node("--pool", "work=1", OSTLER_CANCEL_GRACE="0.3", OSTLER_TERM_GRACE="0.3")
    job = node.enqueue("wait_for", path=str(tmp_path / "never"), children=2)
    node.wait_running(job)
    kids = next(e for e in node.job(job)["events"] if e["name"] == "begun")["data"]["kids"]
    node.post(f"/api/v1/jobs/{job}/cancel")
    assert node.wait_job(job)["status"] == "cancelled"
    until(lambda: all(gone(k) for k in kids), "its children to be gone")
    stubborn = node.enqueue("stubborn", path=str(tmp_path / "never"))
    node.wait_running(stubborn)
    node.post(f"/api/v1/jobs/{stubborn}/cancel")
    assert node.wait_job(stubborn)["status"] == "cancelled"
    assert node.wait_job(node.enqueue("add", a=1))["status"] == "done"
    assert node.worker("worker:work:0")["restart_count"] == 0


def test_an_ended_job_can_be_retried_with_a_fresh_budget(node: Node) -> None:
    job = node.wait_job(node.enqueue("crash", times=3))
    assert job["error"]["code"] == "TOXIC"
    status, again = node.post(f"/api/v1/jobs/{job['id']}/retry")
    assert (status, again["crashes"]) == (200, 0)
    assert again["status"] in ("queued", "processing")  # it may have begun by now
    # Its crash count starts anew, so it crashes three times more and is toxic again; the timeline keeps all of it.
    failed = node.wait_job(job["id"], "failed")
    assert (failed["attempt"], [error["attempt"] for error in failed["errors"]]) == (3, [1, 2, 3, 1, 2, 3])
    assert node.events(job["id"]).count("retried") == 1


def test_a_job_can_enqueue_another_into_the_same_store(node: Node) -> None:
    first = node.wait_job(node.enqueue("enqueues", a=41))
    assert node.wait_job(first["result"])["result"] == 42


def test_delayed_jobs_wait_and_higher_priority_goes_first(make_node) -> None:
    node = make_node("--pool", "work=1")
    node.post("/api/v1/workers/pause")
    low, high = node.enqueue("noop"), node.enqueue("noop", options={"priority": 5})
    later = node.enqueue("noop", options={"delay": 1.0})
    node.post("/api/v1/workers/resume")
    low_job, high_job, later_job = (node.wait_job(j) for j in (low, high, later))
    assert high_job["started_at"] <= low_job["started_at"]
    assert later_job["started_at"] >= later_job["run_at"] > later_job["created_at"]


def test_the_doorbell_wakes_the_node_when_another_process_enqueues(make_node) -> None:
    """With a poll interval of an hour only the ring can have done it."""
    node = make_node("--pool", "work=1", OSTLER_POLL_INTERVAL="3600")
    code = (
        "import work, asyncio; print(int(work.add.enqueue(a=20, b=22)), int(asyncio.run(work.add.enqueue_async(a=1))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=node.producer_env, check=True
    )
    first, second = map(int, done.stdout.split())
    assert node.wait_job(first)["result"] == 42
    assert node.wait_job(second)["result"] == 2


def test_a_lost_ring_costs_one_poll(make_node) -> None:
    node = make_node("--pool", "work=1", OSTLER_POLL_INTERVAL="0.2")
    with node.open_store() as store:
        if store.db.shared:
            mine = "datname = current_database() AND application_name = 'ostler listens'"
            assert rows(store, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {mine}") == [(True,)]
        else:
            (node.folder / "doorbell").unlink()
    code = "import work; print(int(work.add.enqueue(a=20, b=22)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=node.producer_env, check=True
    )
    assert node.wait_job(int(done.stdout))["result"] == 42


def test_a_job_that_turns_long_does_not_hide_others_behind_it(make_node, tmp_path: Path) -> None:
    """Once the task is known to be short it is handed over many at a time; then one of them is long."""
    node = make_node("--pool", "work=1")
    for job in [node.enqueue("mixed") for _ in range(40)]:
        node.wait_job(job)
    flag = tmp_path / "go"
    node.post("/api/v1/workers/pause")
    long = node.enqueue("mixed", path=str(flag))
    others = [node.enqueue("mixed") for _ in range(10)]
    node.post("/api/v1/workers/resume")
    node.wait_running(long)
    # Those behind it come back to the queue, without a mark.
    until(lambda: all(node.job(j)["status"] == "queued" for j in others), "the others to be back in the queue")
    assert all((node.job(j)["attempt"], node.job(j)["crashes"]) == (0, 0) for j in others)
    flag.touch()
    assert all(node.wait_job(j)["attempt"] == 1 for j in [long, *others])


def test_a_crash_blames_only_the_job_that_ran(make_node, tmp_path: Path) -> None:
    node = make_node("--pool", "work=1")
    for job in [node.enqueue("noop") for _ in range(40)]:
        node.wait_job(job)
    node.post("/api/v1/workers/pause")
    jobs = [node.enqueue("noop") for _ in range(5)]
    bad = node.enqueue("crash", times=1)
    jobs += [node.enqueue("noop") for _ in range(20)]
    node.post("/api/v1/workers/resume")
    assert node.wait_job(bad)["crashes"] == 1
    assert all(node.wait_job(j)["crashes"] == 0 for j in jobs)
    assert all(node.job(j)["attempt"] == 1 for j in jobs)


def test_what_a_job_prints_is_in_the_workers_log(node: Node) -> None:
    node.wait_job(node.enqueue("other", say="a line to remember"))
    until(lambda: "a line to remember" in (node.folder / "logs" / "other-0.log").read_text(), "the line")


def test_jobs_of_a_task_that_is_no_longer_declared_wait_until_it_is_again(make_node, tmp_path: Path) -> None:
    app = tmp_path / "one.py"
    both = "from ostler import Ostler\napp = Ostler()\n@app.job(queue='q')\ndef old(job): return 2\n@app.job(queue='q')\ndef kept(job): return 1\n"
    app.write_text(both)
    node = make_node(
        "--pool", "q=1", app=app, OSTLER_POLL_INTERVAL="0.2"
    )  # the upkeep, once a minute, has no part in it
    assert node.wait_job(node.enqueue("kept"))["result"] == 1
    node.post("/api/v1/workers/pause")
    job = node.enqueue("old")
    node.stop()
    app.write_text("from ostler import Ostler\napp = Ostler()\n@app.job(queue='q')\ndef kept(job): return 1\n")
    node.start()
    node.post("/api/v1/workers/resume")
    assert node.wait_job(node.enqueue("kept"))["result"] == 1
    assert node.post("/api/v1/jobs", {"task": "old"})[0] == 422
    with node.open_store() as store:  # a program that has newer code than the node
        (later,) = store.jobs.enqueue([NewJob("new", "q", "{}")], store.now())
    for job_, task in ((job, "old"), (later, "new")):
        until(lambda j=job_: node.job(j)["waiting_for"]["reason"] == "no_task", "the job to wait for its task")
        said = f"1 job waits for task {task!r}, which no running node declares; if the task is new, restart the node"
        until(lambda s=said: s in " ".join(node.get("/api/v1/health")[1]["errors"]), "health to say so")
    stream = Stream(node.url, "queue:q:status")
    stream.wait(lambda: stream.of("queue:q:status")["stuck"] == 2, "the queue to say that they cannot run")
    assert stream.of("queue:q:status")["eta"] is None
    stream.close()
    watching = [sys.executable, "-m", "ostler", "jobs", str(job), "--watch", "--data", str(node.folder)]
    with subprocess.Popen(watching, stdout=subprocess.PIPE, text=True, env=node.env) as watch:
        assert any("waits: no running node declares task 'old'" in line for line in watch.stdout)
        watch.kill()
    node.stop()
    app.write_text(both)
    node.start()
    assert node.wait_job(job)["result"] == 2


_ = time
