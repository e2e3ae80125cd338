"""What an operator fears for the node: signals, sudden death, and the next start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import Node, family_of, gone, until

pytestmark = pytest.mark.usefixtures("store_url")
once = pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)  # about processes alone


def test_sigterm_drains_running_jobs_finish(make_node, tmp_path: Path) -> None:
    node = make_node("--pool", "work=1", OSTLER_STOP_GRACE="30")
    flag = tmp_path / "go"
    job = node.enqueue("wait_for", path=str(flag))
    node.wait_running(job)
    node.signal(signal.SIGTERM)
    node.wait_status("worker:work:0", "draining")
    assert node.get("/readyz")[0] == 503
    flag.touch()
    assert node.wait() == 0
    assert not (node.folder / "node.json").exists(), "it tells where a node listens that is no more"
    node.start()
    done = node.job(job)
    assert (done["status"], done["attempt"]) == ("done", 1)


def test_sigterm_past_the_grace_sends_jobs_back_without_a_crash_mark(make_node, tmp_path: Path) -> None:
    node = make_node("--pool", "work=2", OSTLER_STOP_GRACE="0.5", OSTLER_TERM_GRACE="0.5")
    note = tmp_path / "tidied"
    tidy, stubborn = node.enqueue("tidy", path=str(note)), node.enqueue("stubborn", path=str(tmp_path / "never"))
    node.wait_running(tidy), node.wait_running(stubborn)
    node.signal(signal.SIGTERM)
    assert node.wait() == 0
    assert note.read_text() == "tidied"  # SIGTERM unwinds the job
    node.start(ready=False)
    for job in (tidy, stubborn):
        found = node.job(job)
        assert found["crashes"] == 0
        assert node.events(job)[:3] == ["created", "processing", "aborted:shutdown"]
    rows = [node.get(f"/api/v1/workers/worker:work:{n}")[1] for n in (0, 1)]
    assert all(r["restart_count"] == 0 for r in rows)
    assert {e["kind"] for r in rows for e in r["exits"]} == {"asked"}


def test_a_second_sigterm_forces(make_node, tmp_path: Path) -> None:
    node = make_node("--pool", "work=1", OSTLER_STOP_GRACE="600")
    job = node.enqueue("stubborn", path=str(tmp_path / "never"))
    node.wait_running(job)
    node.signal(signal.SIGTERM)
    node.wait_status("worker:work:0", "draining")
    node.signal(signal.SIGTERM)
    assert node.wait() == 0
    assert not family_of(node.folder)
    node.start(ready=False)
    found = node.job(job)
    assert found["crashes"] == 0
    assert "aborted:shutdown" in node.events(job)


def test_sigkill_of_the_node_leaves_no_survivor_and_loses_no_job(make_node, tmp_path: Path) -> None:
    node = make_node("--pool", "work=2")
    flag = tmp_path / "go"
    jobs = [node.enqueue("wait_for", path=str(flag), children=2) for _ in range(3)]
    running = [j for j in jobs if node.job(j)["status"] == "processing"]
    until(lambda: len([j for j in jobs if node.job(j)["status"] == "processing"]) == 2, "two to run")
    running = [j for j in jobs if node.job(j)["status"] == "processing"]
    for job in running:
        node.wait_running(job)
    assert len(family_of(node.folder)) >= 2 + 2 * 3
    node.kill()
    until(lambda: not family_of(node.folder), "no survivors", patience=10)
    flag.touch()
    node.start()
    for job in jobs:
        done = node.wait_job(job)
        assert (done["status"], done["crashes"]) == ("done", 0)
    for job in running:
        assert node.events(job)[:3] == ["created", "processing", "requeued:stale"]


@once
def test_what_two_kills_at_once_leave_is_swept_at_the_next_start(make_node, tmp_path: Path) -> None:
    """Node, guard and worker die together: nobody is left to clean up, but the next start does."""
    node = make_node("--pool", "work=1")
    job = node.enqueue("wait_for", path=str(tmp_path / "go"), children=2)
    worker = node.wait_running(job)
    guard = next(p for p in _children(node.pid) if "family.py" in _cmdline(p))
    for pid in (node.pid, guard, worker["pid"]):
        os.kill(pid, signal.SIGSTOP)  # nobody reacts to another's death any more
    for pid in (guard, worker["pid"], node.pid):
        os.kill(pid, signal.SIGKILL)
    node.wait()
    left = family_of(node.folder)
    assert left, "the children of the killed worker should have been left over"
    (tmp_path / "go").touch()
    node.start()
    assert all(gone(pid) for pid in left)
    assert node.wait_job(job)["status"] == "done"


@once
def test_a_killed_guard_is_replaced(make_node) -> None:
    node = make_node("--pool", "work=1", OSTLER_HEARTBEAT_INTERVAL="0.2")
    guard = next(p for p in _children(node.pid) if "family.py" in _cmdline(p))
    os.kill(guard, signal.SIGKILL)
    until(lambda: [p for p in _children(node.pid) if "family.py" in _cmdline(p) and p != guard], "another guard")


@once
def test_a_node_that_was_stopped_for_a_while_does_not_blame_its_workers(make_node, tmp_path: Path) -> None:
    """One of them is stopped with it, as on a machine that sleeps: it has not beaten either when the node looks again."""
    node = make_node("--pool", "work=2", OSTLER_HEARTBEAT_INTERVAL="0.5", OSTLER_STALE_AFTER="2")
    ticks, flag = tmp_path / "ticks", tmp_path / "go"
    job = node.enqueue("ticks", path=str(ticks), until=str(flag))
    busy = node.wait_running(job)["component"]
    idle = next(w for w in node.workers() if w["component"] != busy)
    before = {w["component"]: (w["generation"], w["last_heartbeat"]) for w in node.workers()}
    node.signal(signal.SIGSTOP)
    os.kill(idle["pid"], signal.SIGSTOP)
    first = ticks.stat().st_size
    until(lambda: ticks.stat().st_size > first + 30, "the other worker to run for longer than the stale limit")
    node.signal(signal.SIGCONT)
    until(lambda: "missed heartbeats in that time do not count" in node.log(), "the node to look again")
    os.kill(idle["pid"], signal.SIGCONT)
    for component, (_, beat) in before.items():
        node.wait_worker(component, "to beat again", lambda w: w["last_heartbeat"] > beat + 3000)
    flag.touch()
    assert node.wait_job(job)["attempt"] == 1
    assert {w["component"]: w["generation"] for w in node.workers()} == {c: g for c, (g, _) in before.items()}


def test_a_second_node_on_the_same_data_directory_is_refused(node: Node) -> None:
    argv = [sys.executable, "-m", "ostler", "up", str(node.app), "--data", str(node.folder), "--port", "0"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=node.env)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"pid {node.pid}" in done.stderr
    assert node.wait_job(node.enqueue("add", a=1))["status"] == "done"


@once
def test_a_taken_port_is_refused_and_leaves_nothing_running(node: Node, tmp_path: Path) -> None:
    port = node.url.rpartition(":")[2]
    argv = [sys.executable, "-m", "ostler", "up", str(node.app), "--data", str(tmp_path / "b"), "--port", port]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=node.env)
    assert done.returncode == 2
    assert f"127.0.0.1:{port}" in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr
    assert not family_of(tmp_path / "b")


def test_sigterm_while_starting_ends_cleanly(make_node, tmp_path: Path) -> None:
    app = tmp_path / "slow_start.py"
    app.write_text(
        "import os, time\nfrom ostler import Ostler\nif 'OSTLER_COMPONENT' in os.environ: time.sleep(300)\n"
        "app = Ostler()\n@app.job(queue='q')\ndef hi(job): ...\n"
    )
    node = make_node("--pool", "q=2", app=app, ready=False, OSTLER_STOP_GRACE="0.2", OSTLER_TERM_GRACE="0.2")
    node.wait_status("worker:q:0", "starting")
    assert node.stop() == 0
    assert not family_of(node.folder)


def _children(pid: int) -> list[int]:
    from ostler.lifecycle import family

    return [p.pid for p in family.processes() if p.parent == pid and not p.zombie]


def _cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
    except OSError:
        return ""


def test_a_running_node_recovers_the_jobs_of_one_that_died(make_node) -> None:
    """Another node of the same store went silent with a job in its hands; nobody restarts it."""
    from ostler.store import now_ms
    from ostler.store.nodes import NodeRow
    from ostler.store.rows import NewJob, Turn

    node = make_node(
        "--pool",
        "work=1",
        "--pool",
        "other=1",
        OSTLER_HEARTBEAT_INTERVAL="0.3",
        OSTLER_NODE_LEASE="4",  # for so long after its start it declares nobody dead
    )
    node.post("/api/v1/pools/work/pause")
    with node.open_store() as store:
        store.nodes.register(NodeRow("ghost@1", "ghost", 1000, home="elsewhere", boot_id="another boot", pid=999_999))
        (job,) = store.jobs.enqueue([NewJob("add", "work", '{"a": 1}')], now_ms())
        assert [
            c.id for c in store.turns.take(Turn("ghost@1", now_ms(), wants={"work": ["worker:work:0"]})).claims
        ] == [job]
        (own,) = store.jobs.enqueue([NewJob("add", "work", '{"a": 2}')], now_ms())
    node.post("/api/v1/pools/work/resume")
    assert node.wait_job(own)["result"] == 3
    done = node.wait_job(job)
    assert (done["status"], done["crashes"]) == ("done", 0)
    assert node.events(job) == ["created", "processing", "requeued:stale", "processing", "done"]
