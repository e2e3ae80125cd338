"""Job pools with a need of memory on a real node, with real workers and a fake GPU of 1000 MB."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ostler import ConfigError, Job, Ostler
from tests.harness import Node, until

APP = Path(__file__).parent / "memory_app.py"
PLAIN = ("--pool", "plain=1")
NONE = {"left": 0, "right": 0, "plain": 0, "huge": 0, "hungry": 0}


def pools(**sizes: int) -> list[str]:
    return [word for name, size in {**NONE, **sizes}.items() for word in ("--pool", f"{name}={size}")]


@pytest.fixture
def start(make_node, store_url: str, tmp_path: Path):
    """A node on a machine with one GPU of 1000 MB, and a host of 2000 MB."""
    (tmp_path / "used").mkdir()
    gpus = tmp_path / "gpus.json"

    def write(**table: Any) -> None:
        fresh = tmp_path / "gpus.new"
        fresh.write_text(json.dumps({"gpus": [{"uuid": "GPU-0", "total_mb": 1000}], "folder": "used", **table}))
        fresh.rename(gpus)

    def node(*, ready: bool = True, env: dict[str, str] | None = None, **sizes: int) -> Node:
        write(host={"total_mb": 2000})
        settings = {
            "OSTLER_FAKE_GPUS": str(gpus),
            "TEST_GPU_USED": str(tmp_path / "used"),
            "OSTLER_GPU_HEADROOM_MB": "0",
            "OSTLER_MEMORY_HEADROOM_MB": "0",
            "OSTLER_POLL_INTERVAL": "0.1",
            **(env or {}),
        }
        return make_node(*pools(**sizes), app=APP, ready=ready, **settings)

    node.write = write
    return node


def waiting(node: Node, component: str) -> str:
    """What a stopped worker says it waits for."""
    return node.wait_worker(
        component, "to wait for memory", lambda w: w["status"] == "stopped" and "memory" in (w["exit_text"] or "")
    )["exit_text"]


def test_two_pools_that_do_not_fit_together_take_turns(start) -> None:
    node: Node = start(left=1, right=1, ready=False)
    jobs = [node.enqueue(task, seconds=0.3) for task in ("left", "right", "left", "right")] + [node.enqueue("small")]
    results = [node.wait_job(job) for job in jobs]
    assert [(r["status"], r["result"]) for r in results] == [("done", "GPU-0")] * 5, results
    assert any("needs memory (" in line for line in node.log().splitlines())


def test_a_busy_worker_is_not_disturbed_and_the_waiting_job_says_why_it_waits(start, tmp_path: Path) -> None:
    node: Node = start(left=1, right=1, ready=False)
    gate = tmp_path / "gate"
    running = node.enqueue("left", path=str(gate))
    pid = node.wait_running(running)["pid"]
    job = node.enqueue("right")
    text = waiting(node, "worker:right:0")
    assert "waits for memory: it needs 700 MB of GPU memory" in text
    until(lambda: node.job(job)["waiting_for"]["reason"] == "memory", "the job to say why")
    assert "pool right has no running worker; the next one waits for memory" in node.job(job)["waiting_for"]["text"]
    until(lambda: node.get("/api/v1/health")[1]["status"] == "degraded", "health to say it")
    assert any("waits for memory" in e for e in node.get("/api/v1/health")[1]["errors"])
    assert node.worker("worker:left:0")["pid"] == pid
    gate.touch()
    assert node.wait_job(running)["status"] == "done"
    assert node.wait_job(job)["status"] == "done"
    until(lambda: node.get("/api/v1/health")[1]["status"] == "healthy", "health to be well again")


def test_a_pool_that_is_never_idle_yields_to_one_that_has_waited_long_and_no_job_is_lost(start) -> None:
    node: Node = start(left=1, right=1, ready=False, env={"OSTLER_MEMORY_PATIENCE": "0.5"})
    lefts = [node.enqueue("left", seconds=0.3) for _ in range(25)]
    node.wait_job(lefts[0])
    job = node.enqueue("right")
    assert node.wait_job(job)["status"] == "done"
    assert node.job(lefts[-1])["status"] == "queued"  # it did not have to wait for all of them
    assert {node.wait_job(j)["status"] for j in lefts} == {"done"}
    assert all(node.job(j)["attempt"] == 1 for j in lefts)


def test_workers_are_started_where_nothing_is_declared_and_see_all_gpus(start) -> None:
    node: Node = start(plain=1)
    assert node.wait_job(node.enqueue("plain"))["result"] is None


def test_idle_pools_do_not_push_each_other_out_and_the_node_is_ready(start) -> None:
    node: Node = start(left=2, right=1, ready=False)
    until(lambda: [w["status"] for w in node.workers()].count("healthy") == 1, "one to be granted")
    waiting(node, "worker:right:0" if node.worker("worker:right:0")["status"] == "stopped" else "worker:left:0")
    until(lambda: node.get("/readyz")[0] == 200, "the node to be ready")
    assert node.get("/api/v1/health")[1]["status"] == "healthy"
    assert "needs memory (" not in node.log()


def test_what_can_never_fit_is_said_with_the_figures(start) -> None:
    node: Node = start(huge=1, plain=1, ready=False)
    text = waiting(node, "worker:huge:0")
    assert "cannot be started: it needs 5,000 MB of GPU memory, and no GPU can ever give it more than 1,000 MB" in text
    job = node.enqueue("huge")
    assert "cannot be started" in node.job(job)["waiting_for"]["text"]
    assert any("cannot be started" in e for e in node.get("/api/v1/health")[1]["errors"])


def test_the_memory_of_a_killed_worker_is_given_on_when_it_is_back(start, tmp_path: Path) -> None:
    node: Node = start(left=1, right=1, ready=False)
    gate = tmp_path / "gate"
    running = node.enqueue("left", path=str(gate))
    worker = node.wait_running(running)
    job = node.enqueue("right")
    waiting(node, "worker:right:0")

    os.kill(worker["pid"], signal.SIGKILL)
    gate.touch()
    assert node.wait_job(job)["status"] == "done"
    assert node.wait_job(running)["status"] == "done"  # run again, when right had made room


def test_other_programs_count_and_a_worker_waits_until_their_memory_is_free(start) -> None:
    node: Node = start(left=1, ready=False)
    node.wait_status("worker:left:0", "healthy")
    node.stop()
    start.write(gpus=[{"uuid": "GPU-0", "total_mb": 1000, "used_mb": 500}])
    node.start(ready=False)
    assert "500 MB of a GPU is available now" in waiting(node, "worker:left:0")
    start.write()
    node.wait_status("worker:left:0", "healthy")


def test_host_memory_is_reserved_likewise(start) -> None:
    node: Node = start(hungry=2, ready=False)
    until(lambda: [w["status"] for w in node.workers()].count("healthy") == 1, "one of two to start")
    stopped = next(w["component"] for w in node.workers() if w["status"] == "stopped")
    assert "it needs 1,500 MB of host memory" in waiting(node, stopped)
    assert node.wait_job(node.enqueue("hungry"))["status"] == "done"


def test_a_drained_slot_leaves_the_line_and_a_resumed_one_asks_again(start) -> None:
    node: Node = start(left=1, right=1, ready=False)
    until(lambda: [w["status"] for w in node.workers()].count("healthy") == 1, "one to be granted")
    healthy = next(w["component"] for w in node.workers() if w["status"] == "healthy")
    other = next(w["component"] for w in node.workers() if w["component"] != healthy)
    waiting(node, other)
    node.post(f"/api/v1/workers/{other}/drain")
    node.wait_worker(other, "to wait no more", lambda w: "memory" not in (w["exit_text"] or ""))
    node.post(f"/api/v1/workers/{healthy}/drain")
    node.wait_status(healthy, "stopped")
    node.post(f"/api/v1/pools/{other.split(':')[1]}/resume")
    node.wait_status(other, "healthy")


def test_nothing_waits_where_the_need_is_too_small_to_matter(start) -> None:
    node: Node = start(left=1, plain=1)
    assert node.wait_job(node.enqueue("small"))["status"] == "done"
    command = [sys.executable, "-m", "ostler", "workers", "--data", str(node.folder)]
    assert "memory" not in subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("options", [{"gpu_mb": -1}, {"memory_mb": True}, {"gpu_mb": "9 GB"}, {"memory_mb": 1e9}])
def test_a_need_that_is_no_number_of_megabytes_is_refused(options: dict) -> None:
    app = Ostler()
    with pytest.raises(ConfigError, match=r"job 'work': (gpu|memory)_mb must be a number of megabytes from 0"):

        @app.job(**options)
        def work(job: Job) -> None: ...


def test_a_need_is_shown_with_the_task() -> None:
    app = Ostler()

    @app.job(gpu_mb=900)
    def work(job: Job) -> None: ...

    assert work.row["policy"] == {"gpu_mb": 900}
