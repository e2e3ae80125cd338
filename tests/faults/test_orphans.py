"""What jobs leave behind: real orphans, zombies and daemons of a real node."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from ostler.lifecycle import family
from tests.harness import Node, gone, until

APP = """
import subprocess, sys, time
from pathlib import Path
from ostler import Job, Ostler

app = Ostler()

@app.job(queue="a")
def leaves(job: Job, how: str) -> None:
    subprocess.run(how, shell=True, check=True)

@app.job(queue="a")
def starts_daemon(job: Job, pid_file: str, clean: bool, until: str) -> None:
    cleared = "env -i /usr/bin/" if clean else ""
    subprocess.run(f"setsid -f {cleared}sh -c 'echo $$ > {pid_file}; exec sleep 300'", shell=True, check=True)
    job.event("begun")
    while not Path(until).exists():
        time.sleep(0.01)

@app.job(queue="b", timeout=0.2, attempts=1)
def overruns(job: Job) -> None:
    time.sleep(300)

@app.web
def routes(node):
    from fastapi import APIRouter
    router = APIRouter()

    @router.post("/start")
    async def start() -> dict:
        return {"pid": subprocess.Popen(["sleep", "300"], start_new_session=True).pid}

    return router
"""


def start(make_node, tmp_path: Path) -> Node:
    app = tmp_path / "orphans.py"
    app.write_text(APP)
    return make_node("--pool", "a=1", "--pool", "b=1", app=app)


def zombies(node: Node) -> list[int]:
    return [p.pid for p in family.processes() if p.parent == node.pid and p.zombie]


def pid_in(path: Path) -> int:
    until(lambda: path.exists() and path.read_text().strip(), "the daemon to start")
    return int(path.read_text())


def test_orphans_that_exit_are_reaped_while_no_worker_ends(make_node, tmp_path: Path) -> None:
    node = start(make_node, tmp_path)
    # in the worker's session, in one of its own, and one of its own without any environment
    ways = ["sleep 0.01 &", "setsid -f sleep 0.01", "setsid -f env -i /usr/bin/sleep 0.01"]
    body = {"jobs": [{"task": "leaves", "args": {"how": ways[n % 3]}} for n in range(60)]}
    jobs = node.post("/api/v1/jobs/bulk", body)[1]["ids"]
    assert all(node.wait_job(j)["status"] == "done" for j in jobs)
    until(lambda: not zombies(node), "all of them to be reaped")
    assert all(w["restart_count"] == 0 and w["generation"] == 1 for w in node.workers())


def test_the_end_of_one_worker_leaves_helpers_of_another_workers_running_job_alone(make_node, tmp_path: Path) -> None:
    node = start(make_node, tmp_path)
    go = tmp_path / "go"
    for number, clean in enumerate((False, True)):
        path = tmp_path / f"pid{number}"
        job = node.enqueue("starts_daemon", pid_file=str(path), clean=clean, until=str(go))
        node.wait_running(job)
        daemon = pid_in(path)
        for _ in range(2):  # of the second worker of b nobody can say that the daemon is not its own
            assert node.wait_job(node.enqueue("overruns"))["error"]["code"] == "TIMEOUT"
            node.wait_worker("worker:b:0", "to be back", lambda w: w["status"] == "healthy")
            assert not gone(daemon)
        go.touch()
        assert node.wait_job(job)["status"] == "done"
        go.unlink()
        assert not gone(daemon)  # the job has ended, its worker has not
        os.kill(node.worker("worker:a:0")["pid"], signal.SIGKILL)
        until(lambda: gone(daemon), "the daemon to end with its worker")
        node.wait_status("worker:a:0", "healthy")


def test_what_a_route_of_the_app_started_in_a_session_of_its_own_is_left_alone(make_node, tmp_path: Path) -> None:
    node = start(make_node, tmp_path)
    pid = node.post("/start")[1]["pid"]
    try:
        for component in ("worker:a:0", "worker:b:0"):
            node.post(f"/api/v1/workers/{component}/kill")
            node.wait_worker(component, "to be back", lambda w: w["status"] == "healthy" and w["generation"] == 2)
        assert not gone(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_what_the_apps_module_started_when_it_was_loaded_is_left_alone(make_node, tmp_path: Path) -> None:
    app, pid_file = tmp_path / "early.py", tmp_path / "pid"
    early = (
        "import os\n"
        f"if {family.VARIABLE!r} not in os.environ:\n"
        f"    Path({str(pid_file)!r}).write_text(str(subprocess.Popen(['sleep', '300'], start_new_session=True).pid))\n"
    )
    app.write_text(APP + early)
    node = make_node("--pool", "a=1", "--pool", "b=1", app=app)
    pid = pid_in(pid_file)
    try:
        node.wait_job(node.enqueue("overruns"), "failed")  # its worker is ended, with all that it left
        node.wait_status("worker:b:0", "healthy")
        assert not gone(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
