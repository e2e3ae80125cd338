"""What an operator fears for workers, done to real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.harness import Node, gone, until

# Only what is told by rows of the store runs on both databases; the rest is about processes.
both = pytest.mark.usefixtures("store_url")


@both
def test_kill_9_in_mid_job_sends_the_job_back_with_a_crash_mark(node: Node, tmp_path: Path) -> None:
    flag = tmp_path / "go"
    job = node.enqueue("wait_for", path=str(flag))
    victim = node.wait_running(job)
    os.kill(victim["pid"], signal.SIGKILL)
    until(lambda: "requeued:crash" in node.events(job), "the job to be back")
    flag.touch()
    done = node.wait_job(job, "done")
    assert done["result"] == "seen"
    assert (done["attempt"], done["crashes"]) == (2, 1)
    assert node.events(job) == ["created", "processing", "requeued:crash", "processing", "done"]
    assert "SIGKILL" in next(e for e in done["events"] if e["name"] == "requeued:crash")["data"]["message"]


@both
def test_a_killed_worker_comes_back_as_the_next_generation_with_an_exit_record(node: Node) -> None:
    before = node.worker("worker:work:0")
    os.kill(before["pid"], signal.SIGKILL)
    after = node.wait_worker(
        "worker:work:0", "a new generation", lambda w: w["status"] == "healthy" and w["generation"] == 2
    )
    assert after["pid"] != before["pid"]
    assert after["restart_count"] == 1
    exits = node.get("/api/v1/workers/worker:work:0")[1]["exits"]
    assert [(e["reason"], e["code"], e["signal"], e["kind"]) for e in exits] == [("signal", -9, "SIGKILL", "crash")]
    assert exits[0]["peak_rss_mb"] > 5


def test_the_exit_record_has_the_last_log_lines_and_the_job(node: Node) -> None:
    job = node.enqueue("crash", code=7, times=1)
    assert node.wait_job(job)["status"] == "done"
    exits = [e for n in (0, 1) for e in node.get(f"/api/v1/workers/worker:work:{n}")[1]["exits"]]
    record = next(e for e in exits if e["code"] == 7)
    assert record["reason"] == "exit"
    assert record["item"] == f"job:{job}"
    assert f"last words of {job}" in record["log"]


def test_kill_9_before_the_first_beat_is_noticed_and_restarted(make_node, tmp_path: Path) -> None:
    """A worker that dies while it imports its app has no beat and no ready: its death is seen all the same."""
    app = tmp_path / "dies.py"
    app.write_text(
        "import os, signal, pathlib\n"
        "from ostler import Ostler\n"
        "tries = pathlib.Path(__file__).with_name('tries')\n"
        "if 'OSTLER_COMPONENT' in os.environ:\n"
        "    n = len(tries.read_text()) if tries.exists() else 0\n"
        "    tries.write_text('x' * (n + 1))\n"
        "    if n < 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "app = Ostler()\n"
        "@app.job(queue='q')\n"
        "def hi(job): return 'hi'\n"
    )
    node = make_node("--pool", "q=1", app=app)
    worker = node.worker("worker:q:0")
    assert (worker["status"], worker["generation"], worker["restart_count"]) == ("healthy", 3, 2)
    assert node.wait_job(node.enqueue("hi"))["result"] == "hi"


@both
def test_the_third_crash_makes_a_job_toxic_and_the_worker_goes_on(make_node) -> None:
    node = make_node("--pool", "work=1")
    bad, good = node.enqueue("crash"), node.enqueue("add", a=1, b=2)
    failed = node.wait_job(bad)
    assert (failed["status"], failed["error"]["code"], failed["crashes"], failed["attempt"]) == (
        "failed",
        "TOXIC",
        3,
        3,
    )
    assert node.events(bad) == ["created", *["processing", "requeued:crash"] * 2, "processing", "failed"]
    assert node.wait_job(good)["result"] == 3


def test_an_unasked_exit_0_in_mid_job_is_a_crash_for_the_job_but_not_for_the_worker(make_node) -> None:
    node = make_node("--pool", "work=1")
    job = node.wait_job(node.enqueue("crash", code=0, times=1))
    assert (job["status"], job["crashes"]) == ("done", 1)
    assert node.worker("worker:work:0")["restart_count"] == 0


@both
def test_sigstop_past_stale_is_silence_and_the_ghost_is_refused(make_node, tmp_path: Path) -> None:
    node = make_node("--pool", "work=1", OSTLER_HEARTBEAT_INTERVAL="0.5", OSTLER_STALE_AFTER="2")
    flag = tmp_path / "go"
    job = node.enqueue("wait_for", path=str(flag))
    ghost = node.wait_running(job)
    os.kill(ghost["pid"], signal.SIGSTOP)
    flag.touch()  # the ghost would finish at once if it ever ran again
    node.wait_worker("worker:work:0", "a successor", lambda w: w["generation"] > ghost["generation"])
    try:
        os.kill(ghost["pid"], signal.SIGCONT)
    except ProcessLookupError:
        pass
    done = node.wait_job(job)
    assert (done["status"], done["attempt"], done["crashes"]) == ("done", 2, 1)
    exits = node.get("/api/v1/workers/worker:work:0")[1]["exits"]
    assert exits[-1]["reason"] == "silence"
    assert gone(ghost["pid"])


def test_silence_shows_seed_code_minus_2_in_the_health_row(make_node, tmp_path: Path) -> None:
    node = make_node(
        "--pool", "work=1", OSTLER_HEARTBEAT_INTERVAL="0.5", OSTLER_STALE_AFTER="1.5", OSTLER_RESTART_LIMIT="1"
    )
    os.kill(node.worker("worker:work:0")["pid"], signal.SIGSTOP)
    row = node.wait_status("worker:work:0", "failed")
    assert (row["exit_code"], row["exit_reason"]) == (-2, "silence")


def test_a_job_longer_than_the_stale_limit_is_not_killed(make_node, tmp_path: Path) -> None:
    node = make_node("--pool", "work=1", OSTLER_HEARTBEAT_INTERVAL="0.4", OSTLER_STALE_AFTER="2")
    flag = tmp_path / "go"
    job = node.enqueue("wait_for", path=str(flag))
    worker = node.wait_running(job)
    node.wait_worker("worker:work:0", "beats for twice the stale limit", _beaten_for(worker, 4.0))
    flag.touch()
    done = node.wait_job(job)
    assert (done["status"], done["attempt"]) == ("done", 1)
    assert node.worker("worker:work:0")["generation"] == worker["generation"] == 1


def _beaten_for(worker: dict, seconds: float):
    """Whether a worker has gone on beating so long since it was seen."""
    return lambda w: w["last_heartbeat"] > worker["last_heartbeat"] + 1000 * seconds


def _crash_until_failed(node: Node, component: str) -> int:
    """Kill the worker each time it is healthy, until the supervisor gives up."""
    kills = 0
    while True:
        row = node.wait_status(component, "healthy", "failed")
        if row["status"] == "failed":
            return kills
        os.kill(row["pid"], signal.SIGKILL)
        kills += 1
        pid = row["pid"]
        node.wait_worker(component, "to notice", lambda w: w["pid"] != pid)


@both
def test_five_crashes_make_a_worker_failed_and_it_stays_so_until_reset(make_node) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=1", OSTLER_RESTART_LIMIT="5")
    assert _crash_until_failed(node, "worker:work:0") == 5
    row = node.worker("worker:work:0")
    assert (row["status"], row["restart_count"], row["exit_code"], row["pid"]) == ("failed", 5, -9, None)

    for action in ("pause", "resume", "resume"):
        assert node.post(f"/api/v1/workers/{action}")[0] == 200
    beats = node.worker("worker:other:0")["last_heartbeat"]
    node.wait_worker("worker:other:0", "three more beats", lambda w: w["last_heartbeat"] > beats + 1500)
    assert node.worker("worker:work:0")["status"] == "failed"
    health = node.get("/api/v1/health")[1]
    assert health["status"] == "error"
    assert "then run: ostler restart worker:work:0" in health["errors"][0]
    assert node.get("/readyz")[0] == 503

    # … and after a restart of the node, because the history is durable
    node.stop()
    node.start(ready=False)
    node.wait_status("worker:other:0", "healthy")
    assert node.worker("worker:work:0")["status"] == "failed"

    assert node.post("/api/v1/workers/worker:work:0/reset")[0] == 200
    row = node.wait_status("worker:work:0", "stopped")
    assert row["restart_count"] == 0
    assert node.post("/api/v1/workers/worker:work:0/restart")[0] == 200
    node.wait_status("worker:work:0", "healthy")
    assert node.wait_job(node.enqueue("add", a=2, b=2))["result"] == 4


@both
@pytest.mark.parametrize("restarted", [False, True])
def test_a_finished_job_clears_the_window_of_its_worker_and_not_the_lifetime_count(make_node, restarted: bool) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0", OSTLER_RESTART_LIMIT="3")

    def crash() -> None:
        row = node.wait_status("worker:work:0", "healthy")
        os.kill(row["pid"], signal.SIGKILL)
        node.wait_worker("worker:work:0", "to notice", lambda w: w["pid"] != row["pid"])

    for _ in range(2):
        crash()
    assert node.wait_job(node.enqueue("add", a=1))["status"] == "done"
    if restarted:  # what is forgiven stays so
        node.stop()
        node.start()
    for _ in range(2):
        crash()
    assert node.wait_status("worker:work:0", "healthy")["restart_count"] == 4
    assert _crash_until_failed(node, "worker:work:0") == 1


def test_restart_alone_revives_a_failed_worker(make_node) -> None:
    node = make_node("--pool", "work=1", OSTLER_RESTART_LIMIT="1")
    assert _crash_until_failed(node, "worker:work:0") == 1
    node.post("/api/v1/workers/worker:work:0/restart")
    assert node.wait_status("worker:work:0", "healthy")["restart_count"] == 0


@both
def test_the_lifetime_limit_counts_across_restarts_of_the_node(make_node) -> None:
    node = make_node("--pool", "work=1", OSTLER_RESTART_LIFETIME="3", OSTLER_RESTART_WINDOW="0.001")
    for generation in (1, 2):
        row = node.wait_worker(
            "worker:work:0", "healthy", lambda w: w["status"] == "healthy" and w["generation"] == generation
        )
        os.kill(row["pid"], signal.SIGKILL)
    node.wait_worker("worker:work:0", "third generation", lambda w: w["status"] == "healthy" and w["generation"] == 3)
    node.stop()
    node.start()
    assert _crash_until_failed(node, "worker:work:0") == 1


def test_resume_twice_starts_nothing_twice(node: Node) -> None:
    before = {w["component"]: (w["pid"], w["generation"]) for w in node.workers()}
    for action in ("pause", "resume", "resume", "resume"):
        assert node.post(f"/api/v1/workers/{action}") == (200, {"ok": True, "action": action})
    assert node.wait_job(node.enqueue("add", a=1))["result"] == 2
    assert {w["component"]: (w["pid"], w["generation"]) for w in node.workers()} == before


def test_pause_during_a_long_job_lets_it_finish_and_takes_nothing_new(make_node, tmp_path: Path) -> None:
    node = make_node("--pool", "work=1")
    flag = tmp_path / "go"
    running = node.enqueue("wait_for", path=str(flag))
    worker = node.wait_running(running)
    node.post("/api/v1/workers/pause")
    waiting = node.enqueue("add", a=1)
    flag.touch()
    assert node.wait_job(running)["status"] == "done"
    beat = node.worker("worker:work:0")["last_heartbeat"]
    row = node.wait_worker("worker:work:0", "to beat on", lambda w: w["last_heartbeat"] > beat)
    assert (row["status"], row["pid"], row["current_job"]) == ("healthy", worker["pid"], None)
    assert node.job(waiting)["status"] == "queued"
    assert node.get("/api/v1/info")[1]["worker_enabled"] is False
    node.post("/api/v1/workers/resume")
    assert node.wait_job(waiting)["status"] == "done"


@both
def test_a_pause_outlives_the_node(make_node) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=1")
    node.post("/api/v1/pools/work/pause")
    node.stop()
    node.start()
    paused, free = node.enqueue("add", a=1), node.enqueue("other")
    assert node.wait_job(free)["status"] == "done"
    assert node.job(paused)["status"] == "queued"
    node.post("/api/v1/pools/work/resume")
    assert node.wait_job(paused)["status"] == "done"


@both
def test_drain_finishes_the_job_then_the_worker_stays_stopped(make_node, tmp_path: Path) -> None:
    node = make_node("--pool", "work=1")
    flag = tmp_path / "go"
    job = node.enqueue("wait_for", path=str(flag))
    node.wait_running(job)
    assert node.post("/api/v1/workers/worker:work:0/drain")[0] == 200
    node.wait_status("worker:work:0", "draining")
    behind = node.enqueue("add", a=1)
    flag.touch()
    assert node.wait_job(job)["status"] == "done"
    row = node.wait_status("worker:work:0", "stopped")
    assert (row["exit_code"], row["exit_reason"]) == (0, "stopped")
    assert node.job(behind)["status"] == "queued"
    assert node.post("/api/v1/workers/worker:work:0/drain")[0] == 409
    node.post("/api/v1/workers/worker:work:0/restart")
    assert node.wait_job(behind)["status"] == "done"


@both
def test_an_operators_kill_blames_neither_the_job_nor_the_worker(make_node, tmp_path: Path) -> None:
    node = make_node("--pool", "work=1")
    flag = tmp_path / "go"
    job = node.enqueue("wait_for", path=str(flag))
    node.wait_running(job)
    assert node.post("/api/v1/workers/worker:work:0/kill")[0] == 200
    node.wait_worker("worker:work:0", "next generation", lambda w: w["generation"] == 2 and w["status"] == "healthy")
    flag.touch()
    done = node.wait_job(job)
    assert (done["status"], done["crashes"], done["attempt"]) == ("done", 0, 1)
    assert node.events(job) == ["created", "processing", "aborted:killed", "processing", "done"]
    why = next(e["data"]["reason"] for e in done["events"] if e["name"] == "aborted:killed")
    assert why == "worker:work:0: killed by an operator"
    assert node.worker("worker:work:0")["restart_count"] == 0
    told = f"worker:work:0 was killed by an operator, job {job} requeued"
    until(lambda: told in [i["text"] for i in node.get("/api/v1/incidents")[1]["incidents"]], "the incident")


def test_what_a_killed_worker_left_behind_is_ended_even_in_other_sessions(make_node, tmp_path: Path) -> None:
    node = make_node("--pool", "work=1")
    job = node.enqueue("wait_for", path=str(tmp_path / "never"), children=3)
    victim = node.wait_running(job)
    kids = next(e for e in node.job(job)["events"] if e["name"] == "begun")["data"]["kids"]
    assert not any(gone(kid) for kid in kids)
    os.kill(victim["pid"], signal.SIGKILL)
    until(lambda: all(gone(kid) for kid in kids), "the children to be gone")
    node.wait_worker("worker:work:0", "next generation", lambda w: w["generation"] == 2)


def test_a_startup_deadline_kills_and_counts(make_node, tmp_path: Path) -> None:
    app = tmp_path / "slow_import.py"
    app.write_text(
        "import os, time\nfrom ostler import Ostler\nif 'OSTLER_COMPONENT' in os.environ: time.sleep(300)\n"
        "app = Ostler()\n@app.job(queue='q')\ndef hi(job): ...\n"
    )
    node = make_node("--pool", "q=1", app=app, ready=False, OSTLER_STARTUP_DEADLINE="1", OSTLER_RESTART_LIMIT="2")
    row = node.wait_status("worker:q:0", "failed")
    assert (row["exit_reason"], row["restart_count"]) == ("startup-deadline", 2)


def test_an_app_that_breaks_in_the_worker_is_named_in_its_exit_record(make_node, tmp_path: Path) -> None:
    app = tmp_path / "broken.py"
    app.write_text(
        "import os\nfrom ostler import Ostler\nif 'OSTLER_COMPONENT' in os.environ: raise RuntimeError('no models here')\n"
        "app = Ostler()\n@app.job(queue='q')\ndef hi(job): ...\n"
    )
    node = make_node("--pool", "q=1", app=app, ready=False, OSTLER_RESTART_LIMIT="2")
    row = node.wait_status("worker:q:0", "failed")
    assert (row["exit_reason"], row["exit_code"]) == ("app-load", 70)
    assert any("no models here" in line for line in row["metadata"]["log"])


@both
def test_recycling_by_count_never_interrupts_and_loses_nothing(make_node) -> None:
    node = make_node("--pool", "work=2", OSTLER_RECYCLE_COUNT="3")
    results = [node.wait_job(j) for j in [node.enqueue("who") for _ in range(12)]]
    assert all(r["status"] == "done" and r["crashes"] == 0 for r in results)
    served: dict[int, int] = {}
    for r in results:
        served[r["result"]] = served.get(r["result"], 0) + 1
    assert len(served) >= 4
    assert max(served.values()) <= 3
    assert all(w["restart_count"] == 0 for w in node.workers())


def test_a_warmed_replacement_takes_over_while_the_old_worker_still_serves(make_node, tmp_path: Path) -> None:
    node = make_node("--pool", "work=1", OSTLER_RECYCLE_COUNT="1", OSTLER_RECYCLE_WARM="true")
    old = node.worker("worker:work:0")["pid"]
    flag = tmp_path / "go"
    assert node.wait_job(node.enqueue("who"))["result"] == old
    long = node.enqueue("wait_for", path=str(flag))
    row = node.wait_worker(
        "worker:work:0", "the replacement", lambda w: w["generation"] == 2 and w["status"] == "healthy"
    )
    assert row["pid"] != old
    # The old one either was still idle when its replacement came, or finishes what it has.
    assert node.wait_job(node.enqueue("who"))["result"] != old
    flag.touch()
    done = node.wait_job(long)
    assert (done["status"], done["attempt"], done["crashes"]) == ("done", 1, 0)
    until(lambda: gone(old), "the old one to leave")
    assert node.worker("worker:work:0")["restart_count"] == 0


def test_recycling_by_memory(make_node) -> None:
    node = make_node("--pool", "work=1", OSTLER_RECYCLE_RSS_MB="150", OSTLER_HEARTBEAT_INTERVAL="0.2")
    first = node.wait_job(node.enqueue("grows", mb=200))["result"]
    node.wait_worker("worker:work:0", "a fresh worker", lambda w: w["generation"] == 2 and w["status"] == "healthy")
    assert node.wait_job(node.enqueue("who"))["result"] != first
    assert node.worker("worker:work:0")["restart_count"] == 0


def test_recycling_by_age(make_node) -> None:
    node = make_node("--pool", "work=1", OSTLER_RECYCLE_AGE="0.5")
    row = node.wait_worker("worker:work:0", "the third generation", lambda w: w["generation"] >= 3)
    assert row["restart_count"] == 0


def test_a_draining_worker_tells_its_job(make_node, tmp_path: Path) -> None:
    app = tmp_path / "polite.py"
    app.write_text(
        "import time\nfrom ostler import Ostler\napp = Ostler()\n"
        "@app.job(queue='q')\ndef polite(job):\n    job.event('begun')\n    while not job.stopping: time.sleep(0.01)\n    return 'left early'\n"
    )
    node = make_node("--pool", "q=1", app=app)
    job = node.enqueue("polite")
    node.wait_running(job)
    node.post("/api/v1/workers/worker:q:0/drain")
    assert node.wait_job(job)["result"] == "left early"
    node.wait_status("worker:q:0", "stopped")


def test_a_worker_that_dies_while_its_replacement_warms_is_succeeded_by_it(make_node, tmp_path: Path) -> None:
    """The replacement, not a third one, takes the slot; the row follows it."""
    app = tmp_path / "slowly.py"
    app.write_text(
        "import os, time, pathlib\nfrom ostler import Ostler\napp = Ostler()\nhere = pathlib.Path(__file__).parent\n"
        "if 'OSTLER_COMPONENT' in os.environ and (here / 'slow').exists():\n"
        "    (here / 'warming').write_text(str(os.getpid()))\n    while (here / 'slow').exists(): time.sleep(0.01)\n"
        "@app.job(queue='q')\ndef who(job): return os.getpid()\n"
    )
    node = make_node("--pool", "q=1", app=app, OSTLER_RECYCLE_COUNT="1", OSTLER_RECYCLE_WARM="true")
    (tmp_path / "slow").touch()
    old = node.wait_job(node.enqueue("who"))["result"]
    until(lambda: (tmp_path / "warming").exists() and (tmp_path / "warming").read_text(), "the replacement to warm")
    heir = int((tmp_path / "warming").read_text())
    os.kill(old, signal.SIGKILL)
    row = node.wait_worker("worker:q:0", "the heir in the row", lambda w: w["pid"] == heir)
    assert (row["status"], row["generation"], row["restart_count"]) == ("starting", 2, 1)
    (tmp_path / "slow").unlink()
    node.wait_status("worker:q:0", "healthy")
    assert node.wait_job(node.enqueue("who"))["result"] == heir


def test_garbage_on_the_control_channel_ends_the_worker_with_seed_code_minus_3(make_node, tmp_path: Path) -> None:
    app = tmp_path / "rude.py"
    app.write_text(
        "import os, socket, time\nfrom ostler import Ostler\napp = Ostler()\n"
        "@app.job(queue='q')\ndef rude(job, text: str):\n"
        "    for fd in range(3, 50):\n"
        "        try:\n"
        "            if os.readlink(f'/proc/self/fd/{fd}').startswith('socket:'): os.write(fd, text.encode())\n"
        "        except OSError: pass\n"
        "    time.sleep(60)\n"
    )
    node = make_node("--pool", "q=1", app=app, OSTLER_CRASH_LIMIT="0")
    for text in ("not a frame\n", '["beat", "x", []]\n'):
        job = node.wait_job(node.enqueue("rude", text=text))
        assert job["error"]["code"] == "TOXIC"
    exits = node.get("/api/v1/workers/worker:q:0")[1]["exits"]
    assert [e["reason"] for e in exits] == ["protocol", "protocol"]


def _app(folder: Path, *lines: str) -> Path:
    path = folder / "odd.py"
    path.write_text(
        "\n".join(
            [
                "import os, signal, subprocess, sys, time, pathlib",
                "from ostler import Ostler, Retry",
                "app = Ostler()",
                *lines,
            ]
        )
        + "\n"
    )
    return path


def test_a_child_that_cleared_its_environment_and_session_does_not_outlive_its_worker(
    make_node, tmp_path: Path
) -> None:
    app = _app(
        tmp_path,
        "@app.job(queue='q', timeout=2)",
        "def hides(job):",
        "    child = subprocess.Popen(['sleep', '300'], env={}, executable='/bin/sleep', start_new_session=True)",
        "    job.event('begun', child.pid)",
        "    time.sleep(300)",
    )
    node = make_node("--pool", "q=1", app=app)
    first = node.enqueue("hides")
    worker = node.wait_running(first)
    child = next(e["data"] for e in node.job(first)["events"] if e["name"] == "begun")
    os.kill(worker["pid"], signal.SIGKILL)
    until(lambda: gone(child), "the hidden child to be gone")
    until(lambda: len([e for e in node.job(first)["events"] if e["name"] == "begun"]) == 2, "the second run")
    again = [e["data"] for e in node.job(first)["events"] if e["name"] == "begun"][1]
    until(lambda: gone(again), "the child of the run that timed out to be gone")


def test_the_old_run_is_gone_before_the_next_one_begins(make_node, tmp_path: Path) -> None:
    """The child of the first run writes as long as it lives; no line of it may come after the second run began."""
    trail = tmp_path / "trail"
    app = _app(
        tmp_path,
        "@app.job(queue='q')",
        "def overlaps(job, trail: str):",
        "    if job.attempt == 2:",
        "        pathlib.Path(trail).open('a').write('second\\n'); time.sleep(0.2); return",
        '    code = f\'import time\\nwhile True: open({trail!r}, "a").write("first\\\\n"); time.sleep(0.0005)\'',
        "    subprocess.Popen([sys.executable, '-c', code], start_new_session=True)",
        "    while not pathlib.Path(trail).exists(): time.sleep(0.01)",
        "    os.kill(os.getpid(), signal.SIGKILL)",
    )
    node = make_node("--pool", "q=2", app=app)
    node.wait_job(node.enqueue("overlaps", trail=str(trail)))
    lines = trail.read_text().split()
    assert "first" in lines
    assert lines[-1] == "second"


def test_a_job_that_forks_and_comes_back_twice_does_not_double_what_is_in_hand(make_node, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    app = _app(
        tmp_path,
        "@app.job(queue='q')",
        "def noop(job, fork: bool = False):",
        "    if fork: os.fork(); return",
        f"    pathlib.Path({str(marks)!r}).open('a').write(f'{{job.id}}\\n')",
    )
    node = make_node("--pool", "q=1", app=app)
    for job in [node.enqueue("noop") for _ in range(10)]:
        node.wait_job(job)
    node.post("/api/v1/workers/pause")
    jobs = [node.enqueue("noop", fork=True), *[node.enqueue("noop") for _ in range(8)]]
    node.post("/api/v1/workers/resume")
    assert all(node.wait_job(j)["status"] == "done" for j in jobs)
    ran = marks.read_text().split()
    assert len(ran) == len(set(ran)) == 18


def test_a_worker_that_cannot_be_spawned_fails_in_the_open_and_the_node_still_stops(make_node, tmp_path: Path) -> None:
    app = _app(
        tmp_path,
        "app.command('odd', ['sleep', '5'], env={'X': 'a\\0b'})",
        "@app.job(queue='q')",
        "def fine(job): return 1",
    )
    node = make_node("--pool", "q=1", app=app, ready=False, OSTLER_RESTART_LIMIT="2")
    row = node.wait_status("worker:odd:0", "failed")
    assert (row["exit_reason"], row["exit_code"]) == ("spawn", -1)
    node.wait_status("worker:q:0", "healthy")
    assert node.wait_job(node.enqueue("fine"))["result"] == 1
    assert node.stop() == 0


def test_a_replacement_that_cannot_start_does_not_stop_the_old_worker_from_serving(make_node, tmp_path: Path) -> None:
    flag = tmp_path / "broken"
    app = _app(
        tmp_path,
        f"if 'OSTLER_COMPONENT' in os.environ and os.path.exists({str(flag)!r}): raise SystemExit(3)",
        "@app.job(queue='q')",
        "def who(job): return os.getpid()",
    )
    node = make_node("--pool", "q=1", app=app, OSTLER_RECYCLE_COUNT="2", OSTLER_RECYCLE_WARM="true")
    flag.touch()
    results = [node.wait_job(node.enqueue("who")) for _ in range(8)]
    assert {r["status"] for r in results} == {"done"}
    assert len({r["result"] for r in results}) == 1
    until(lambda: "its replacement did not start" in node.log(), "the warning")
    assert node.worker("worker:q:0")["status"] == "healthy"
    exits = node.get("/api/v1/workers/worker:q:0")[1]["exits"]
    assert exits and not any(e["counted"] for e in exits)  # also not at the next start of the node
    flag.unlink()
    old = results[0]["result"]
    node.wait_worker(
        "worker:q:0", "a replacement at last", lambda w: w["pid"] not in (None, old) and w["status"] == "healthy"
    )


def test_one_long_job_does_not_hold_up_the_recycling_of_the_others(make_node, tmp_path: Path) -> None:
    node = make_node("--pool", "work=2", OSTLER_RECYCLE_COUNT="3", OSTLER_RECYCLE_AGE="0.5")
    flag = tmp_path / "go"
    long = node.enqueue("wait_for", path=str(flag))
    busy = node.wait_running(long)
    jobs = [node.enqueue("who") for _ in range(8)]
    assert all(node.wait_job(j)["status"] == "done" for j in jobs)
    assert node.worker(busy["component"])["pid"] == busy["pid"]
    flag.touch()
    assert node.wait_job(long)["attempt"] == 1
    node.wait_worker(busy["component"], "its own turn", lambda w: w["pid"] not in (None, busy["pid"]))


def test_a_worker_that_crashes_while_it_drains_stays_stopped(make_node, tmp_path: Path) -> None:
    node = make_node("--pool", "work=1")
    job = node.enqueue("wait_for", path=str(tmp_path / "never"))
    worker = node.wait_running(job)
    node.post("/api/v1/workers/worker:work:0/drain")
    node.wait_status("worker:work:0", "draining")
    os.kill(worker["pid"], signal.SIGKILL)
    row = node.wait_status("worker:work:0", "stopped")
    assert row["restart_count"] == 1
    health = node.get("/api/v1/health")[1]
    assert (health["status"], health["errors"]) == (
        "degraded",
        ["pool work has no running worker; start them with: ostler resume work"],
    )


def test_strange_endings_of_jobs_are_plain_failures(make_node, tmp_path: Path) -> None:
    app = _app(
        tmp_path,
        "class Mute(Exception):",
        "    def __str__(self): raise RuntimeError('no words')",
        "@app.job(queue='q', attempts=1)",
        "def odd(job, how: str):",
        "    if how == 'mute': raise Mute",
        "    if how == 'inf': raise Retry(after=float('inf'))",
        "    if how == 'text': raise Retry(after='5')",
        "    if how == 'surrogate': job.progress(5, 'a\\ud800'); job.event('b\\ud800', 'c\\ud800'); return 'd\\ud800'",
        "    raise OSError('e\\ud800')",
    )
    node = make_node("--pool", "q=1", app=app)
    for how in ("mute", "inf", "text", "message"):
        job = node.wait_job(node.enqueue("odd", how=how))
        assert (job["status"], job["error"]["code"], job["crashes"]) == ("failed", "RETRIES_EXHAUSTED", 0), how
    assert job["error"]["message"] == "OSError: e?"
    found = node.wait_job(node.enqueue("odd", how="surrogate"))
    assert (found["status"], found["result"], found["stage"]) == ("done", "d\ud800", "a?")
    assert len(node.get("/api/v1/jobs")[1]["jobs"]) == 5
    assert node.wait_worker("worker:q:0", "the first generation", lambda w: w["generation"] == 1)


@both
def test_a_result_that_was_sent_before_the_kill_counts(make_node, tmp_path: Path) -> None:
    """The node sleeps while the worker finishes and dies: on waking, the result comes before the death."""
    app = _app(
        tmp_path,
        "import sys, threading, time",
        "from pathlib import Path",
        "def tell(sent):",
        "    # The main thread waits for the next job: the result of this one is on its way.",
        "    main = threading.main_thread().ident",
        "    while sys._current_frames()[main].f_code is not threading.Condition.wait.__code__: time.sleep(0.01)",
        "    Path(sent).touch()",
        "@app.job(queue='q')",
        "def last(job, go: str, sent: str, runs: str):",
        "    with open(runs, 'a') as file: file.write(f'{job.attempt}\\n')",
        "    job.event('begun')",
        "    while not Path(go).exists(): time.sleep(0.01)",
        "    threading.Thread(target=tell, args=(sent,), daemon=True).start()",
        "    return 'seen'",
    )
    node = make_node("--pool", "q=1", app=app)
    go, sent, runs = tmp_path / "go", tmp_path / "sent", tmp_path / "runs"
    job = node.enqueue("last", go=str(go), sent=str(sent), runs=str(runs))
    worker = node.wait_running(job)
    node.signal(signal.SIGSTOP)
    go.touch()
    until(sent.exists, "the worker to have sent its result")
    os.kill(worker["pid"], signal.SIGKILL)
    threads = Path(f"/proc/{worker['pid']}/task")
    until(lambda: gone(worker["pid"]) and len(list(threads.iterdir())) == 1, "the worker to be dead, not reaped")
    node.signal(signal.SIGCONT)
    done = node.wait_job(job)
    assert (done["status"], done["result"], done["attempt"], done["crashes"]) == ("done", "seen", 1, 0)
    node.wait_worker("worker:q:0", "the next generation", lambda w: w["generation"] == 2 and w["status"] == "healthy")
    assert runs.read_text() == "1\n"
