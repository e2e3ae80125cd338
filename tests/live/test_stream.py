"""Live state as a client of a real node sees it, over real sockets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ostler.store import Store, now_ms, views
from ostler.store.doorbell import ring
from ostler.store.rows import NewJob
from tests.harness import APP, FAST, Node, call, until
from tests.sse import Stream

QUEUE = {
    "queue", "queue_type", "pending", "scheduled", "running", "completed", "failed", "avg_time", "eta", "paused", "workers",
    "stuck", "recent",
}  # fmt: skip
WORKER = {
    "name", "component", "node", "node_id", "pool", "queue_type", "id", "status", "idle", "pid", "generation", "item", "current_job", "task", "paused", "rss_mb",
    "started_at", "restart_count", "restart_at", "waiting_for", "last_exit",
}  # fmt: skip
JOB = {*views.JOB}
INCIDENT = {"node", "id", "level", "subject", "text", "at", "count", "job", "detail"}


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """Shared by the tests that leave it as it was."""
    running = Node(tmp_path_factory.mktemp("live") / "data", APP, "--pool", "work=2", "--pool", "other=1").start()
    yield running
    assert running.stop() == 0


@pytest.fixture
def follow(node: Node):
    opened: list[Stream] = []

    def make(topics: str = "*", of: Node | None = None, **more) -> Stream:
        opened.append(Stream((of or node).url, topics, **more))
        return opened[-1]

    yield make
    for stream in opened:
        stream.close()


def elsewhere(node: Node, task: str, count: int = 1, **args) -> list[int]:
    """Jobs that another process stores (this one), with a ring of the doorbell."""
    queue = "other" if task == "other" else "work"
    with Store.open("", node.folder) as store:
        ids = store.jobs.enqueue([NewJob(task, queue, json.dumps(args), 3, 600.0)] * count, now_ms())
    ring(node.folder)
    return ids


def cli(node: Node, *args: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ostler", *args, "--data", str(node.folder)],
        capture_output=True, text=True, timeout=90, env={**os.environ, **FAST},
    )  # fmt: skip
    assert done.returncode == 0, done


# ---- shapes


def test_the_snapshot_has_every_topic_in_the_seeds_envelope(node: Node, follow) -> None:
    job = node.enqueue("add", a=1)
    node.wait_job(job)
    stream = follow().live()
    assert (stream.status, "content-type: text/event-stream" in stream.head) == (200, True)
    kinds = {
        "queue:status": ("queue_update", "queue", QUEUE),
        "queue:work:status": ("queue_update", "queue", QUEUE),
        "queue:other:status": ("queue_update", "queue", QUEUE),
        "queue:jobs": ("job_update", "job", JOB),
        "worker:work:0:status": ("worker_update", "worker", WORKER),
        "worker:work:1:status": ("worker_update", "worker", WORKER),
        "worker:other:0:status": ("worker_update", "worker", WORKER),
        "system:health": ("health_update", "health", {"status", "errors"}),
        "system:incidents": ("incident", "incident", INCIDENT),
    }
    assert {topic for topic, _ in stream.state} == kinds.keys()
    assert (stream.events[-1]["topic"], stream.events[-1]["type"]) == ("stream", "live")
    for event in stream.events[:-1]:
        kind, name, keys = kinds[event["topic"]]
        assert list(event) == ["topic", "type", "timestamp", name, "id"]
        assert event["type"] == kind
        assert abs(event["timestamp"] - now_ms()) < 3600_000
        assert set(event[name]) == keys, event
    worker = stream.of("worker:work:1:status")
    assert (worker["component"], worker["queue_type"], worker["id"]) == ("worker:work:1", "work", 1)
    assert worker["pid"] == node.worker("worker:work:1")["pid"]
    assert stream.of("queue:status")["queue_type"] is None
    assert stream.of("system:health") == {"status": "healthy", "errors": []}
    assert any("started" in text for text in stream.incidents())
    shown = stream.job(job)
    assert (shown["status"], shown["task"], json.loads(shown["args"]), shown["result"]) == (
        "done",
        "add",
        {"a": 1},
        "2",
    )


def test_only_what_is_asked_for_is_sent(node: Node, follow) -> None:
    stream = follow("worker:work:*:status,queue:status").live()
    assert {t for t, _ in stream.state} == {"worker:work:0:status", "worker:work:1:status", "queue:status"}
    assert {t for t, _ in follow("worker:*:status").live().state} == {
        "worker:work:0:status", "worker:work:1:status", "worker:other:0:status",
    }  # fmt: skip
    assert follow("call:*:status,session:*:status,queue:nobody:status").live().state == {}


@pytest.mark.parametrize("topics", ["nope", "worker:*", "queue:a b:status", ",".join(["queue:jobs"] * 1000)])
def test_a_wrong_topic_is_refused_with_a_sentence(follow, topics: str) -> None:
    refused = follow(topics)
    assert refused.status == 422
    message = refused.body["error"]["message"]
    assert "there is no topic" in message or "are too many" in message


# ---- what happens is seen


def test_a_job_of_another_process_appears_progresses_and_ends(node: Node, follow, tmp_path: Path) -> None:
    stream = follow("queue:jobs,worker:*:status,queue:work:status").live()
    (job,) = elsewhere(node, "steps", folder=str(tmp_path))
    worker = stream.wait_job(job, "processing")["worker"]
    stream.wait(lambda: stream.of(f"{worker}:status").get("current_job") == job, "the worker to be at it")
    assert stream.of(f"{worker}:status")["task"] == "steps"
    stream.wait(lambda: stream.of("queue:work:status")["running"] == 1, "the queue to count it")
    for pct in (10, 40, 75):
        (tmp_path / str(pct)).touch()
        stream.wait(lambda pct=pct: stream.job(job)["progress"] == pct, f"{pct} %")
        assert stream.job(job)["stage"] == f"step {pct}"
    (tmp_path / "100").touch()
    ended = stream.wait_job(job, "done")
    assert (json.loads(ended["result"]), ended["progress"]) == ("all steps", 100)
    stream.wait(lambda: stream.of(f"{worker}:status")["current_job"] is None, "the worker to be free")
    stream.wait(lambda: stream.of("queue:work:status")["running"] == 0, "the queue to be free")
    seen = [e["job"]["status"] for e in stream.events if e["topic"] == "queue:jobs" and e["job"]["id"] == job]
    assert seen == sorted(seen, key=["queued", "processing", "done"].index)


def test_a_failed_job_shows_its_error_and_an_incident(node: Node, follow) -> None:
    stream = follow("queue:jobs,system:incidents,queue:work:status").live()
    (job,) = elsewhere(node, "gives_up")
    error = stream.wait_job(job, "failed")["error"]
    assert error == {"code": "VALIDATION", "message": "this can never work"}
    stream.wait(
        lambda: any(f"job {job} (gives_up) failed: VALIDATION" in t for t in stream.incidents()), "the incident"
    )
    stream.wait(lambda: (stream.of("queue:work:status")["failed"] or 0) >= 1, "the queue to count it")
    kept = until(
        lambda: [i for i in node.get("/api/v1/incidents")[1]["incidents"] if i["job"] == job], "the store to keep it"
    )
    assert kept[0]["subject"] == "task:gives_up:VALIDATION"


@pytest.mark.parametrize("poll", ["600", "0.1"])
def test_what_another_process_cancels_is_seen(make_node, follow, poll: str) -> None:
    busy = make_node("--pool", "work=0", "--pool", "other=0", ready=False, OSTLER_POLL_INTERVAL=poll)
    stream = follow("queue:jobs,queue:work:status", of=busy).live()
    first, second, third = elsewhere(busy, "noop", 3)
    stream.wait(lambda: stream.of("queue:work:status")["pending"] == 3, "three to wait")
    if poll == "600":
        cli(busy, "cancel", str(first), str(second))  # which rings
    else:
        with Store.open("", busy.folder) as store:  # nobody rings: the poll finds it
            store.jobs.cancel(first, now_ms())
            store.jobs.cancel(second, now_ms())
    stream.wait_job(first, "cancelled")
    stream.wait_job(second, "cancelled")
    stream.wait(lambda: stream.of("queue:work:status")["pending"] == 1, "the queue to count them")
    assert stream.job(third)["status"] == "queued"


def test_more_new_jobs_than_are_told_one_by_one_are_told_as_such(make_node, follow) -> None:
    still = make_node("--pool", "work=0", "--pool", "other=0", ready=False)
    stream = follow("queue:jobs,queue:work:status", of=still).live()
    ids = elsewhere(still, "noop", 250)
    stream.wait(lambda: any(e["topic"] == "queue:jobs" and e["type"] == "resync" for e in stream.events), "the resync")
    stream.wait(lambda: stream.of("queue:work:status")["pending"] == 250, "the queue to count them")
    assert set(stream.jobs()) <= set(ids[-100:])
    assert stream.job(ids[-1])["status"] == "queued"


@pytest.mark.parametrize("how", ["API", "CLI", "store"])
def test_an_ended_job_that_is_put_back_is_seen_though_nobody_runs_it(make_node, follow, how: str) -> None:
    still = make_node("--pool", "work=0", "--pool", "other=0", ready=False)
    watching = follow("queue:jobs", of=still).live()
    (job,) = elsewhere(still, "noop")
    watching.wait_job(job, "queued")
    assert still.post(f"/api/v1/jobs/{job}/cancel")[0] == 200
    watching.wait_job(job, "cancelled")
    if how == "API":
        assert still.post(f"/api/v1/jobs/{job}/retry")[0] == 200
    elif how == "CLI":
        cli(still, "retry", str(job))
    else:
        with Store.open("", still.folder) as store:
            store.jobs.retry(job, now_ms())
    watching.wait_job(job, "queued")
    assert follow("queue:jobs", of=still).live().jobs() == {job: "queued"}


def test_what_was_put_back_while_nobody_looked_is_in_the_next_snapshot(make_node) -> None:
    still = make_node("--pool", "work=0", "--pool", "other=0", ready=False)
    with Stream(still.url, "queue:jobs") as watching:
        (job,) = elsewhere(still, "noop")
        watching.live().wait_job(job, "queued")
        still.post(f"/api/v1/jobs/{job}/cancel")
        watching.wait_job(job, "cancelled")
    until(lambda: _streams(still) == 0, "the node to see the client go")
    still.post(f"/api/v1/jobs/{job}/retry")
    with Stream(still.url, "queue:jobs") as again:
        assert again.live().jobs() == {job: "queued"}


def _streams(node: Node) -> int:
    """How many clients hold a connection to the node."""
    port = node.url.rpartition(":")[2]
    wanted, count = f"{int(port):04X}", 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        count += local.endswith(f":{wanted}") and state in ("01", "08")  # established, or closed by the client alone
    return count


def test_a_killed_worker_is_seen_crashed_and_healthy_again_and_told_in_words(make_node, follow, tmp_path: Path) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0", OSTLER_BACKOFF_MAX="1")  # long enough to be seen
    stream = follow(of=node).live()
    first = stream.of("worker:work:0:status")
    (job,) = elsewhere(node, "wait_for", path=str(tmp_path / "go"))
    node.wait_running(job)
    os.kill(first["pid"], signal.SIGKILL)
    stream.wait(lambda: stream.of("worker:work:0:status")["status"] == "crashed", "the crash")
    crashed = stream.of("worker:work:0:status")
    assert (crashed["pid"], crashed["current_job"], crashed["restart_at"] is not None) == (None, None, True)
    assert crashed["last_exit"] == {
        **crashed["last_exit"],
        "reason": "signal",
        "signal": "SIGKILL",
        "item": f"job:{job}",
    }
    stream.wait(lambda: stream.of("system:health")["status"] != "healthy", "the health to tell")
    told = [e["health"] for e in stream.events if e["topic"] == "system:health"]
    assert told[-1]["errors"] == ["worker:work:0 has crashed: it was killed by SIGKILL; it will be restarted"]
    stream.wait(lambda: stream.of("worker:work:0:status")["status"] == "healthy", "the worker to be back")
    assert stream.of("worker:work:0:status")["generation"] == first["generation"] + 1
    assert stream.of("worker:work:0:status")["pid"] not in (None, first["pid"])
    stream.wait(lambda: stream.of("system:health") == {"status": "healthy", "errors": []}, "all to be well")
    stream.wait(lambda: any("restarted after" in text for text in stream.incidents()), "the incident")
    (text,) = [t for t in stream.incidents() if "SIGKILL" in t]
    assert text.startswith("worker:work:0 was killed by SIGKILL; restarted after ")
    assert text.endswith(f" s, job {job} requeued")
    (tmp_path / "go").touch()
    assert stream.wait_job(job, "done")["crashes"] == 1


def test_a_worker_that_is_given_up_makes_the_health_an_error(make_node, follow) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=1", OSTLER_RESTART_LIMIT="1")
    stream = follow("system:*,worker:*:status", of=node).live()
    elsewhere(node, "crash")
    stream.wait(lambda: stream.of("worker:work:0:status")["status"] == "failed", "the worker to be given up")
    stream.wait(lambda: stream.of("system:health")["status"] == "error", "the health to tell")
    assert "worker:work:0 has failed: it crashed too often" in stream.of("system:health")["errors"][0]
    stream.wait(lambda: any(t.startswith("worker:work:0 has failed: ") for t in stream.incidents()), "the incident")


def test_a_pause_is_seen_at_once_and_not_only_by_the_poll(make_node, follow) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=1", OSTLER_POLL_INTERVAL="600", OSTLER_HEARTBEAT_INTERVAL="5")
    stream = follow("queue:*:status", of=node).live()
    for verb, paused in (("pause", True), ("resume", False)):
        node.post(f"/api/v1/pools/work/{verb}")
        stream.wait(lambda paused=paused: stream.of("queue:work:status")["paused"] is paused, f"the {verb}")
    assert stream.of("queue:other:status")["paused"] is False


def test_a_pause_is_seen_whoever_made_it(node: Node, follow) -> None:
    stream = follow().live()
    for pause, resume in (
        (lambda: node.post("/api/v1/pools/other/pause"), lambda: node.post("/api/v1/pools/other/resume")),
        (lambda: cli(node, "pause", "other"), lambda: cli(node, "resume", "other")),
    ):
        pause()
        stream.wait(lambda: stream.of("queue:other:status")["paused"], "the queue to pause")
        stream.wait(lambda: stream.of("worker:other:0:status")["paused"], "the worker to pause")
        stream.wait(lambda: "pool other paused" in stream.incidents(), "the incident")
        (job,) = elsewhere(node, "other")
        stream.wait(lambda: stream.of("queue:other:status")["pending"] == 1, "a job to wait")
        assert stream.of("queue:other:status")["eta"] is None
        assert stream.of("queue:work:status")["paused"] is False
        resume()
        stream.wait_job(job, "done")
        stream.wait(lambda: not stream.of("queue:other:status")["paused"], "the queue to go on")
        stream.wait(lambda: not stream.of("worker:other:0:status")["paused"], "the worker to go on")


def test_average_and_eta_come_from_real_durations(make_node, follow, tmp_path: Path) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0")
    stream = follow("queue:*:status,queue:status,queue:jobs", of=node).live()
    assert (stream.of("queue:work:status")["avg_time"], stream.of("queue:work:status")["eta"]) == (None, 0.0)
    took = []
    for n in range(3):
        (job,) = elsewhere(node, "wait_for", path=str(tmp_path / f"go{n}"))
        node.wait_running(job)
        (tmp_path / f"go{n}").touch()
        ended = stream.wait_job(job, "done")
        took.append(ended["finished_at"] - ended["started_at"])
    average = sum(took) / 3 / 1000
    stream.wait(lambda: stream.of("queue:work:status")["completed"] == 3, "the queue to count them")
    assert stream.of("queue:work:status")["avg_time"] == pytest.approx(average, abs=0.0002)
    (blocker,) = elsewhere(node, "wait_for", path=str(tmp_path / "last"))
    node.wait_running(blocker)
    behind = elsewhere(node, "noop", 3)
    stream.wait(lambda: stream.of("queue:work:status")["pending"] == 3, "three to wait behind a busy worker")
    state = stream.of("queue:work:status")
    assert (state["running"], state["workers"]) == (1, 1)
    # Three of them, one after another, after whatever is left of the running one.
    assert 3 * average - 0.001 <= state["eta"] <= 4 * average + 0.001
    assert stream.wait(lambda: stream.of("queue:status")["eta"] == state["eta"], "the sum to agree")
    (tmp_path / "last").touch()
    for job in behind:
        stream.wait_job(job, "done")
    stream.wait(lambda: stream.of("queue:work:status")["eta"] == 0.0, "nothing to be left")
    assert stream.of("queue:work:status")["completed"] == 7
    assert stream.of("queue:work:status")["recent"]["done"] <= 7


# ---- coming back


@pytest.mark.parametrize("way", ["header", "query"])
def test_who_comes_back_gets_what_it_missed_and_nothing_else(node: Node, follow, tmp_path: Path, way: str) -> None:
    keeper = follow("queue:jobs").live()  # somebody else stays
    (old,) = elsewhere(node, "noop")
    first = follow("queue:jobs")
    first.live().wait_job(old, "done")
    keeper.wait_job(old, "done")
    first.close()
    jobs = elsewhere(node, "noop", 5)
    for job in jobs:
        keeper.wait_job(job, "done")
    more = {"last": first.last_id} if way == "header" else {"query": f"&last={first.last_id}"}
    again = follow("queue:jobs", **more).live()
    assert again.jobs() == dict.fromkeys(jobs, "done")
    assert [e["type"] for e in again.events] == ["job_update"] * 5 + ["live"]


def test_who_comes_back_after_all_had_left_gets_what_it_missed(make_node) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0")
    with Stream(node.url, "queue:jobs,queue:work:status") as first:
        (old,) = elsewhere(node, "noop")
        first.live().wait_job(old, "done")
        first.wait(lambda: first.of("queue:work:status")["completed"] == 1, "the queue to count it")
    until(lambda: _streams(node) == 0, "the node to see the client go")
    job = node.enqueue("add", a=1)
    node.wait_job(job)
    with Stream(node.url, "queue:jobs,queue:work:status", last=first.last_id) as again:
        again.live()
        assert again.jobs() == {job: "done"}
        assert again.of("queue:work:status")["completed"] == 2
        assert all(e["type"] != "resync" for e in again.events)


def test_after_a_restart_of_the_node_who_comes_back_is_told_to_resync(make_node, follow) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0")
    first = follow("queue:jobs,queue:work:status", of=node)
    (job,) = elsewhere(node, "noop")
    first.live().wait_job(job, "done")
    assert node.stop() == 0
    first.wait(lambda: first.ended or first.pump(), "the stream to end")
    node.start()
    again = follow("queue:jobs,queue:work:status", of=node, last=first.last_id).live()
    assert (again.events[0]["topic"], again.events[0]["type"]) == ("stream", "resync")
    assert again.events[0]["stream"] == {"reason": "the node was started anew"}
    assert again.jobs() == {job: "done"}
    assert again.of("queue:work:status")["completed"] == 1  # counters are kept


@pytest.mark.parametrize("last", ["garbage", "-", "é-²", "x" * 5000])
def test_an_id_from_nowhere_is_answered_with_a_resync(node: Node, follow, last: str) -> None:
    stream = follow("queue:status", last=last).live()
    assert [e["type"] for e in stream.events] == ["resync", "queue_update", "live"]


# ---- silence, and those who do not listen


def test_an_idle_node_says_nothing_but_keep_alives(make_node, follow) -> None:
    node = make_node(
        "--pool", "work=2", "--pool", "other=1", OSTLER_EVENT_KEEPALIVE="0.2", OSTLER_HEARTBEAT_INTERVAL="0.1",
        OSTLER_POLL_INTERVAL="0.1",
    )  # fmt: skip
    node.wait_job(node.enqueue("add", a=1))
    stream = follow(of=node).live()
    marks: list[tuple[int, int]] = []  # (keep-alives, events)

    def quiet() -> bool:
        marks.append((stream.comments, len(stream.events)))
        return any(stream.comments - c >= 8 and len(stream.events) == e for c, e in marks)

    stream.wait(quiet, "eight keep-alives, sixteen beats and polls long, without an event")


def test_a_client_that_does_not_read_holds_up_nobody_and_gets_the_newest_state(make_node, follow) -> None:
    node = make_node("--pool", "work=2", "--pool", "other=1")
    slow = follow("queue:jobs", of=node, buffer=4096)
    fast = follow("queue:jobs,queue:*:status", of=node).live()
    total = 0
    while len(fast.events) < 4000:  # far more than the buffers between us hold
        total += 300
        elsewhere(node, "other", 300, say="x" * 190)
        fast.wait(lambda: fast.of("queue:other:status")["completed"] == total, "the other client to stay live")
    (last,) = elsewhere(node, "add", a=1)
    fast.wait_job(last, "done")
    slow.wait_job(last, "done")
    assert len(slow.events) < len(fast.events) / 2
    assert slow.size < fast.size / 2
    assert set(slow.jobs().values()) == {"done"}


def test_after_a_flood_and_silence_a_new_client_sees_no_job_running(make_node, follow) -> None:
    node = make_node("--pool", "work=2", "--pool", "other=0")
    watcher = follow("queue:jobs,queue:work:status", of=node).live()
    count = 8000
    node.post("/api/v1/workers/pause")
    elsewhere(node, "noop", count)
    node.post("/api/v1/workers/resume")
    watcher.wait(lambda: watcher.of("queue:work:status")["completed"] == count, "the flood to end")
    newcomer = follow("queue:jobs,queue:work:status", of=node).live()
    newcomer.wait(lambda: newcomer.of("queue:work:status")["running"] == 0, "nothing to run")
    until(lambda: node.get("/api/v1/info")[1]["queues"]["work"]["processing"] == 0, "the store to agree")
    again = follow("queue:jobs", of=node).live()
    assert [job for job, status in again.jobs().items() if status != "done"] == []
    assert len(again.jobs()) >= 100
    assert any(e["topic"] == "queue:jobs" and e["type"] == "resync" for e in watcher.events)
    points = node.get("/api/v1/stats?span=1h&queue=work")[1]["points"]
    assert sum(p["done"] for p in points) == count == newcomer.of("queue:work:status")["completed"]
    assert sum(p["failed"] + p["crashed"] + p["retried"] + p["cancelled"] for p in points) == 0
    coarse = node.get("/api/v1/stats?span=24h")[1]["points"]
    assert sum(p["done"] for p in coarse) == count


def test_a_job_that_ended_while_only_others_looked_is_not_shown_running(make_node, follow, tmp_path: Path) -> None:
    """Somebody else's stream (without jobs) keeps the node reading; who asks for jobs again gets no old state."""
    node = make_node("--pool", "work=1", "--pool", "other=1")
    other = follow("queue:*:status", of=node).live()
    with Stream(node.url, "queue:jobs") as first:
        (job,) = elsewhere(node, "wait_for", path=str(tmp_path / "go"))
        first.live().wait_job(job, "processing")
    until(lambda: _streams(node) == 1, "the node to see the client go")
    (tmp_path / "go").touch()
    node.wait_job(job)
    elsewhere(node, "other", 150)  # so many that the job is none of the newest
    other.wait(lambda: other.of("queue:other:status")["completed"] == 150, "them to be done")
    other.wait(lambda: other.of("queue:work:status")["completed"] == 1, "it to be counted")
    with Stream(node.url, "queue:jobs") as second:
        assert second.live().job(job).get("status", "done") == "done"


# ---- who may, and how many


def test_a_token_opens_the_stream_as_header_cookie_or_query(make_node, follow) -> None:
    node = make_node("--pool", "work=0", "--pool", "other=0", OSTLER_TOKEN="sesame", ready=False)
    refused = follow("queue:status", of=node)
    assert (refused.status, refused.body["error"]["code"]) == (401, "UNAUTHORIZED")
    assert follow("queue:status", of=node, headers={"Cookie": "ostler_token=wrong"}).status == 401
    for more in (
        {"headers": {"Authorization": "Bearer sesame"}},
        {"headers": {"Cookie": "ostler_token=sesame"}},
        {"query": "&token=sesame"},
    ):
        stream = follow("queue:status", of=node, **more)
        assert stream.status == 200
        assert stream.live().of("queue:status")


def test_more_streams_than_allowed_are_refused_with_a_sentence_until_one_leaves(make_node, follow) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0", OSTLER_MAX_STREAMS="3")
    streams = [follow("queue:status", of=node).live() for _ in range(2)]
    tail = follow(of=node, path="/api/v1/workers/worker:work:0/logs/follow")  # logs count, too
    tail.wait(lambda: tail.events, "the log")
    for path in ("/api/v1/events", "/api/v1/workers/worker:work:0/logs/follow"):
        refused = follow("queue:status", of=node, path=path)
        assert refused.status == 503
        assert "3 streams are open, which is the limit (max_streams)" in refused.body["error"]["message"]
    assert node.get("/api/v1/info")[0] == 200  # all else goes on
    for leaves in (tail, streams[0]):
        leaves.close()

        def again() -> bool:
            found = follow("queue:status", of=node)
            return found.status == 200

        until(again, "a place to be free")


def test_a_node_with_open_streams_stops_and_ends_them_properly(make_node, follow) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=1")
    streams = [follow(of=node).live() for _ in range(5)]
    tail = follow(of=node, path="/api/v1/workers/worker:other:0/logs/follow")
    tail.wait(lambda: tail.events, "the log")
    node.signal(signal.SIGTERM)
    assert node.wait() == 0
    for stream in (*streams, tail):
        until(lambda s=stream: s.ended or (s.pump(0.1), s.ended)[1], "the stream to end")
        assert stream.complete
    assert "ERROR" not in node.log()  # nothing had to be cut off


def test_a_client_that_does_not_read_does_not_keep_the_node_from_stopping(make_node, follow) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=1")
    reading, deaf = follow(of=node).live(), follow("queue:jobs", of=node, buffer=4096)
    for n in range(5):  # more than it takes without reading
        elsewhere(node, "other", 300, say="x" * 190)
        reading.wait(lambda n=n: reading.of("queue:other:status")["completed"] == 300 * (n + 1), "the jobs")
    node.signal(signal.SIGTERM)
    assert node.wait() == 0
    assert "Traceback" not in node.log()
    deaf.close()


# ---- logs


def test_what_a_job_prints_is_followed_from_its_first_line(node: Node, follow, tmp_path: Path) -> None:
    (job,) = elsewhere(node, "steps", folder=str(tmp_path))
    log = follow(path=f"/api/v1/jobs/{job}/logs/follow")
    assert log.status == 200
    for pct in (10, 40):
        (tmp_path / str(pct)).touch()
        log.wait(lambda pct=pct: f"reached {pct}" in log.lines(), f"the line of {pct}")
    log.close()
    (tmp_path / "75").touch()
    node.wait_worker(node.wait_running(job)["component"], "to be at it", lambda w: w["current_job"] == job)
    again = follow(path=f"/api/v1/jobs/{job}/logs/follow", last=log.last_id)
    (tmp_path / "100").touch()
    again.wait(lambda: "reached 100" in again.lines(), "the last line")
    assert log.lines() == ["reached 10", "reached 40"]
    assert again.lines() == ["reached 75", "reached 100"]
    assert not any(e.get("lost") for e in log.events + again.events)


def test_a_workers_output_is_followed(node: Node, follow) -> None:
    before = [node.enqueue("other", say=f"old {n}") for n in range(3)]
    for job in before:
        node.wait_job(job)
    log = follow(path="/api/v1/workers/worker:other:0/logs/follow", query="&lines=2")
    log.wait(lambda: log.events, "the last lines")
    assert log.lines() == ["old 1", "old 2"]
    none = follow(path="/api/v1/workers/worker:other:0/logs/follow", query="&lines=0")
    none.wait(lambda: none.events, "nothing")
    for n in range(3):
        node.enqueue("other", say=f"new {n}")
    log.wait(lambda: len(log.lines()) == 5, "three more")
    none.wait(lambda: len(none.lines()) == 3, "three")
    assert log.lines()[2:] == none.lines() == ["new 0", "new 1", "new 2"]


@pytest.mark.parametrize("last", ["²-²", "1-" + "9" * 40, "9" * 5000 + "-1", "nonsense"])
def test_a_place_from_nowhere_gives_the_last_lines_and_says_that_some_may_be_lost(
    node: Node, follow, last: str
) -> None:
    node.wait_job(node.enqueue("other", say="hello"))
    log = follow(path="/api/v1/workers/worker:other:0/logs/follow", last=last)
    log.wait(lambda: log.lines(), "the last lines")
    assert (log.events[0]["lost"], log.lines()[-1]) == (True, "hello")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/v1/jobs/999999/logs/follow", 404),
        ("/api/v1/jobs/x/logs/follow", 422),
        ("/api/v1/workers/worker:nope:0/logs/follow", 404),
        ("/api/v1/workers/..%2f..%2fetc/logs/follow", 404),
    ],
)
def test_no_such_log(node: Node, path: str, status: int) -> None:
    found, answer = call(node.url, "GET", path)
    assert (found, bool(answer["error"]["message"])) == (status, True)
