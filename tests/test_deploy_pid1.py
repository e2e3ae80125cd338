"""The node as PID 1 of a pid namespace, as in a container: it reaps, hears signals, drains, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ostler.lifecycle import family
from tests.harness import PATIENCE, Node, until

UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
LONG = {"OSTLER_HEARTBEAT_INTERVAL": "60", "OSTLER_STALE_AFTER": "180", "OSTLER_NODE_LEASE": "180"}

APP = """
import os, subprocess, sys, time
from pathlib import Path
from ostler import Job, Ostler

app = Ostler()

@app.job(queue="a")
def leaves(job: Job, how: str) -> None:
    subprocess.run(how, shell=True, check=True)

@app.job(queue="a", attempts=1)
def exits(job: Job, code: int) -> None:
    os._exit(code)

@app.job(queue="a")
def daemon(job: Job) -> None:
    subprocess.run("setsid -f sleep 300", shell=True, check=True)

@app.job(queue="b")
def waits(job: Job, until: str) -> str:
    job.event("begun")
    while not Path(until).exists():
        time.sleep(0.01)
    return "finished"
"""
SLOW_APP = """
import time
from pathlib import Path
Path("loading").touch()
time.sleep(300)
"""


def refused() -> str:
    """Why a pid namespace cannot be had here; empty when it can."""
    try:
        tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if tried.returncode == 0 else tried.stderr.strip() or f"exit code {tried.returncode}"


WHY_NOT = refused()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"needs a pid namespace, which this machine refuses: {WHY_NOT}")


class Init(Node):
    """`ostler up` as PID 1. `process` is unshare, which ends with the node and has its exit code."""

    def start_process(self) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "node.json").unlink(missing_ok=True)  # of a node that was killed: it was PID 1, too
        super().start_process()
        self.outer = until(lambda: children(self.pid), "unshare to fork")[0]
        return 1

    def command(self) -> list[str]:
        return [*UNSHARE, *super().command()]

    def signal(self, number: int) -> None:
        os.kill(self.outer, number)

    def inside(self) -> set[int]:
        """All processes of the namespace, exited ones too, by their pids out here."""
        own = namespace(self.pid, "pid_for_children")
        return {p.pid for p in family.processes() if namespace(p.pid) == own or p.parent == self.outer}

    def alone(self) -> bool:
        """Whether PID 1 has no children, living or exited, but its guard and its two workers."""
        return len([p for p in family.processes() if p.parent == self.outer]) == 3


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def namespace(pid: int, which: str = "pid") -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/{which}")
    except OSError:
        return ""


@pytest.fixture
def init(tmp_path: Path):
    nodes: list[Init] = []

    def make(app: str = APP, *, start: bool = True, **env: str) -> Init:
        path = tmp_path / "inside.py"
        path.write_text(app)
        node = (
            Init(tmp_path / "data", path, "--pool", "a=1", "--pool", "b=1", **env)
            if app == APP
            else Init(tmp_path / "data", path, **env)
        )
        nodes.append(node)
        return node.start() if start else node

    yield make
    for node in nodes:
        if node.process is not None and node.process.poll() is None:
            node.process.kill()  # and the namespace with it
            node.process.wait(PATIENCE)


def test_grandchildren_that_a_job_left_are_reaped_and_workers_keep_their_exit_codes(init) -> None:
    node = init()
    assert json.loads((node.folder / "node.json").read_text())["pid"] == 1
    ways = [
        "sleep 0.01 &",
        "setsid -f sleep 0.01",
        "setsid -f env -i /usr/bin/sleep 0.01",
        "(setsid sh -c 'sleep 0.01 &' &)",
    ]
    body = {"jobs": [{"task": "leaves", "args": {"how": ways[n % 4]}} for n in range(40)]}
    jobs = node.post("/api/v1/jobs/bulk", body)[1]["ids"]
    assert all(node.wait_job(j)["status"] == "done" for j in jobs)
    until(node.alone, "all of them to be reaped")
    assert all(w["restart_count"] == 0 and w["generation"] == 1 for w in node.workers())
    node.enqueue("exits", code=7)
    node.wait_worker("worker:a:0", "to be back", lambda w: w["status"] == "healthy" and w["generation"] > 1)
    exits = node.get("/api/v1/workers/worker:a:0")[1]["exits"]
    assert {(e["code"], e["signal"]) for e in exits} == {(7, None)}
    until(node.alone, "the worker to be reaped, too")


def test_they_are_reaped_as_they_exit_and_not_at_the_next_heartbeat(init) -> None:
    node = init(**LONG)
    for how in ("sleep 0.01 &", "setsid -f sleep 0.01"):
        assert node.wait_job(node.enqueue("leaves", how=how))["status"] == "done"
    until(node.alone, "both to be reaped", 30)


def test_what_an_exec_into_the_container_left_is_reaped(init) -> None:
    """Probes and shells (`docker exec`) enter in a session of their own, and their orphans come to PID 1, too."""
    node = init(**LONG)
    enter = [
        "nsenter",
        f"--target={node.outer}",
        "--pid",
        "--mount",
        "setsid",
        "--wait",
        "sh",
        "-c",
        "sleep 0.01 & sleep 0.01 &",
    ]
    for _ in range(5):
        subprocess.run(enter, check=True, timeout=PATIENCE)
    until(node.alone, "all of them to be reaped", 30)
    assert all(w["generation"] == 1 for w in node.workers())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_it_and_leaves_no_process_behind(init, tmp_path: Path, number: int) -> None:
    node = init()
    go = tmp_path / "go"
    node.wait_job(node.enqueue("daemon"), "done")
    job = node.enqueue("waits", until=str(go))
    node.wait_running(job)
    inside = node.inside()
    assert len(inside) >= 5  # the node, its guard, two workers and the daemon
    node.signal(number)
    until(lambda: node.get("/api/v1/info")[1]["stopping"], "the drain")
    go.touch()
    assert node.wait() == 0
    until(lambda: all(family.start_time(pid) is None for pid in inside), "everything to be gone")
    after = init()
    assert after.job(job)["result"] == "finished"
    assert after.events(job).count("processing") == 1


def test_a_second_sigterm_forces(init, tmp_path: Path) -> None:
    node = init(OSTLER_STOP_GRACE="300")
    node.wait_running(node.enqueue("waits", until=str(tmp_path / "never")))
    inside = node.inside()
    node.signal(signal.SIGTERM)
    until(lambda: node.get("/api/v1/info")[1]["stopping"], "the drain")
    node.signal(signal.SIGTERM)
    assert node.wait() == 0
    until(lambda: all(family.start_time(pid) is None for pid in inside), "everything to be gone")


def test_sigterm_while_the_app_is_still_loading_ends_it(init) -> None:
    """The kernel drops a SIGTERM that PID 1 does not handle: the container would be killed at the end of its grace."""
    node = init(SLOW_APP, start=False)
    node.start_process()
    until((node.folder / "loading").exists, "the app to load")
    node.signal(signal.SIGTERM)
    assert node.wait(30) == 128 + signal.SIGTERM


def test_a_container_that_was_killed_and_started_again_takes_up_its_jobs(init, tmp_path: Path) -> None:
    """Both nodes are PID 1: the second must not take itself for the first."""
    node = init()
    go = tmp_path / "go"
    job = node.enqueue("waits", until=str(go))
    node.wait_running(job)
    inside = node.inside()
    node.signal(signal.SIGKILL)
    node.wait()
    until(lambda: all(family.start_time(pid) is None for pid in inside), "everything to be gone")
    go.touch()
    node.start()
    found = node.wait_job(job)
    assert (found["status"], found["result"], found["crashes"]) == ("done", "finished", 0)


def test_two_containers_on_one_machine_do_not_take_each_others_pids_for_their_own() -> None:
    asked = [*UNSHARE, sys.executable, "-c", "from ostler.lifecycle import family; print(family.boot_id())"]
    inside = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    assert inside.split()[0] == family.boot_id().split()[0]
    assert inside != family.boot_id()
