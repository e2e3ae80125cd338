"""Why a queued job does not run: the pure answer, and the same answer from the API and the CLI of a real node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ostler.jobs.waiting import Facts, explain, leaving, reason
from ostler.store import Store, now_ms
from ostler.store.limits import QueueLimit
from ostler.store.rows import NewJob
from tests.harness import Node, until

WELL = {"now": 1000, "queue": "q", "nodes": 1, "paused": False, "workers": {"healthy": 2}}


@pytest.mark.parametrize(
    ("facts", "code", "says"),
    [
        ({"run_at": 61_000}, "scheduled", "scheduled to run in 60 s"),
        ({"nodes": 0, "workers": {}}, "no_node", "no node is running"),
        ({"workers": {}}, "no_worker", "no running node has workers for queue 'q'"),
        ({"paused": True}, "paused", "ostler resume q"),
        ({"workers": {"failed": 2}}, "failed", "ostler restart q"),
        ({"workers": {"failed": 1, "crashed": 1}}, "starting", "being started"),
        (
            {"workers": {"crashed": 1}, "crash": "worker:q:0 exited with code 1 (RuntimeError: no database)"},
            "starting",
            "no worker of pool q is ready: worker:q:0 exited with code 1 (RuntimeError: no database). They are restarted",
        ),
        ({"workers": {"stopped": 2}}, "stopped", "ostler resume q"),
        (
            {"workers": {"stopped": 1, "failed": 1}, "memory": "waits for memory: it needs 7 MB"},
            "memory",
            "pool q has no running worker; the next one waits for memory: it needs 7 MB",
        ),
        ({"memory": "waits for memory"}, "next", "it is next"),
        ({"held": "too much"}, "backpressure", "queue q is held: too much"),
        ({"key": "user:7", "key_running": 2, "key_most": 2}, "limit", "2 of at most 2 jobs with limit key 'user:7'"),
        ({"running": 3, "at_once": 3}, "limit", "3 of at most 3 jobs of queue q"),
        ({"next_token": 1500}, "rate", "may begin in 0.5 s"),
        ({"ahead": 1}, "line", "1 job is ahead of it"),
        ({"ahead": 7}, "line", "7 jobs are ahead of it"),
        ({"ahead": 1001}, "line", "more than 1000 jobs are ahead of it"),
        ({}, "next", "it is next"),
    ],
)
def test_the_first_thing_that_holds_it_is_named(facts: dict, code: str, says: str) -> None:
    found = reason(Facts(**{**WELL, **facts}))
    assert found["reason"] == code
    assert says in found["text"]


def test_the_jobs_before_it_are_counted_in_the_order_in_which_they_run(store: Store) -> None:
    first = store.jobs.enqueue([NewJob("t", "q", "{}")] * 3, now_ms())
    urgent = store.jobs.enqueue([NewJob("t", "q", "{}", priority=5)], now_ms())[0]
    store.jobs.enqueue([NewJob("t", "other", "{}", priority=9)] * 5, now_ms())
    assert [store.jobs.standing(j, 1000)["ahead"] for j in (*first, urgent)] == [1, 2, 3, 0]
    assert store.jobs.standing(first[2], 1)["ahead"] == 2  # counted no further than asked


def test_a_queue_is_needed_when_one_of_its_jobs_could_be_claimed_also_one_whose_time_has_come(store: Store) -> None:
    now = now_ms()
    store.jobs.enqueue([NewJob("t", "ready", "{}")], now)
    store.jobs.enqueue(
        [NewJob("t", "due", "{}", run_at=now + 1000), NewJob("t", "later", "{}", run_at=now + 9000)], now
    )
    assert store.jobs.needed(["ready", "due", "later", "none"], now) == ["ready"]
    assert sorted(store.jobs.needed(["ready", "due", "later", "none"], now + 2000)) == ["due", "ready"]


def test_what_has_ended_or_runs_waits_for_nothing(store: Store) -> None:
    job = store.jobs.enqueue([NewJob("t", "q", "{}")], now_ms())[0]
    store.jobs.cancel(job, now_ms())
    assert explain(store, job, now_ms()) is None


def test_without_a_node_the_store_still_answers(store: Store) -> None:
    job = store.jobs.enqueue([NewJob("t", "q", "{}")], now_ms())[0]
    limits = {"q": QueueLimit(rate=0.1)}
    assert explain(store, job, now_ms(), limits=limits)["reason"] == "no_node"


def ostler(node: Node, *argv: str) -> str:
    command = [sys.executable, "-m", "ostler", *argv, "--data", str(node.folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_api_and_the_cli_say_why_a_job_waits(make_node, tmp_path: Path) -> None:
    node: Node = make_node("--pool", "work=1", "--pool", "other=1")
    running = node.enqueue("wait_for", path=str(tmp_path / "go"))
    node.wait_running(running)
    before, after = node.enqueue("noop"), node.enqueue("noop")
    assert node.job(before)["waiting_for"]["reason"] == "next"
    assert node.job(after)["waiting_for"] == {"reason": "line", "text": "1 job is ahead of it", "ahead": 1}
    assert node.job(running)["waiting_for"] is None
    assert "waits    1 job is ahead of it" in ostler(node, "jobs", str(after))
    later = node.enqueue("noop", options={"delay": 3600})
    assert node.job(later)["waiting_for"]["until"] == node.job(later)["run_at"]
    node.post("/api/v1/pools/work/pause")
    assert "to resume: ostler resume work" in ostler(node, "jobs", str(after))
    assert json.loads(ostler(node, "jobs", str(after), "--json"))["waiting_for"]["reason"] == "paused"
    node.post("/api/v1/pools/work/resume")
    (tmp_path / "go").touch()
    assert node.wait_job(after)["waiting_for"] is None
    node.stop()
    assert "waits    it is scheduled to run in" in ostler(node, "jobs", str(later))


LIMITED = """
import time
from pathlib import Path
from ostler import Job, Ostler

app = Ostler()
app.queue("few", at_once=1)
app.queue("slow", rate="1/m")

def wait(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.01)

@app.job(queue="few")
def few(job: Job, go: str) -> None:
    wait(go)

@app.job(queue="slow")
def slow(job: Job) -> None: ...

@app.job(queue="keyed", at_once=1, per="user")
def keyed(job: Job, user: str, go: str) -> None:
    wait(go)

@app.job(queue="broken")
def broken(job: Job) -> None: ...
"""


def test_a_node_knows_limits_rates_and_failed_workers(make_node, tmp_path: Path) -> None:
    app, go = tmp_path / "limited.py", str(tmp_path / "go")
    app.write_text(LIMITED)
    pools = [f"--pool={pool}" for pool in ("few=2", "slow=1", "keyed=2", "broken=1")]
    node: Node = make_node(*pools, app=app, OSTLER_RESTART_LIMIT="1")
    os.kill(node.worker("worker:broken:0")["pid"], signal.SIGKILL)
    node.wait_status("worker:broken:0", "failed")
    jobs = {
        "few": ({"go": go}, "limit", "1 of at most 1 jobs of queue few are running"),
        "slow": ({}, "rate", "the rate of queue slow is reached; the next job may begin in"),
        "keyed": ({"user": "ann", "go": go}, "limit", "1 of at most 1 jobs with limit key 'keyed:\"ann\"' are running"),
    }
    for task, (args, reason, says) in jobs.items():
        first, second = node.enqueue(task, **args), node.enqueue(task, **args)
        node.wait_job(first, "processing", "done")
        waits = node.job(second)["waiting_for"]
        assert (waits["reason"], says in waits["text"]) == (reason, True), waits
        assert says in ostler(node, "jobs", str(second))
    waits = node.job(node.enqueue("broken"))["waiting_for"]
    assert (waits["reason"], "ostler restart broken" in waits["text"]) == ("failed", True)


def test_jobs_in_a_queue_that_nobody_serves_are_named_in_the_log_and_make_health_degraded(
    make_node, tmp_path: Path
) -> None:
    app = tmp_path / "two.py"
    declared = "from ostler import Job, Ostler\napp = Ostler()\n"
    kept = "@app.job(queue='kept')\ndef keep(job: Job) -> None: ...\n"
    gone = "@app.job(queue='gone')\ndef go(job: Job) -> None: ...\n"
    app.write_text(declared + kept + gone)
    node: Node = make_node(app=app)
    node.post("/api/v1/pools/gone/pause")
    jobs = [node.enqueue("go") for _ in range(2)]
    node.stop()
    app.write_text(declared + kept)
    node.start()
    assert "2 jobs wait in queue 'gone', which no running node serves" in node.log()
    health = node.get("/api/v1/health")[1]
    assert health["status"] == "degraded"
    assert any("ostler cancel --queue gone" in error for error in health["errors"])
    assert node.job(jobs[0])["waiting_for"]["reason"] in (
        "no_task",
        "no_worker",
    )  # the first as soon as upkeep has parked it
    ostler(node, "cancel", "--queue", "gone")
    until(lambda: node.get("/api/v1/health")[1]["status"] == "healthy", "health to be well again")


def test_a_running_job_that_was_cancelled_says_when_it_is_killed() -> None:
    events = [{"name": "cancel:requested", "at": 5000}]
    job = {"status": "processing", "cancel_requested": True, "events": events}
    assert leaving(job, 7000, 10.0) == {
        "reason": "cancelling",
        "text": "it was asked to stop, and is killed in 8 s unless it ends first (cancel_grace)",
        "until": 15_000,
    }
    assert "is being killed" in (leaving(job, 16_000, 10.0) or {})["text"]
    assert leaving({**job, "status": "cancelled"}, 7000, 10.0) is None
    assert leaving({**job, "cancel_requested": False}, 7000, 10.0) is None
