"""10,000 jobs from four processes at once, while workers are killed at random: each is done exactly once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from ostler.store import Store
from tests.harness import until
from tests.stores import rows, value

JOBS = 10_000
PRODUCER = """
import sys, work
from ostler.jobs.producer import prepare
single, bulk = int(sys.argv[1]), int(sys.argv[2])
for _ in range(single):
    work.noop.enqueue()
producer = work.app.producer
for _ in range(bulk // 100):
    producer.enqueue([prepare({"noop": work.noop.row}, "noop", {}, 1000) for _ in range(100)])
"""


@pytest.mark.usefixtures("store_url")
def test_ten_thousand_jobs_survive_random_kills_of_workers(make_node) -> None:
    node = make_node("--pool", "work=3", OSTLER_CRASH_LIMIT="1000", OSTLER_LOG_LEVEL="warning")
    producers = [
        subprocess.Popen([sys.executable, "-c", PRODUCER, "100", str(JOBS // 4 - 100)], env=node.producer_env)
        for _ in range(4)
    ]
    dice = random.Random(42)
    kills = 0

    def step() -> bool:
        nonlocal kills
        alive = [w for w in node.workers() if w["pid"] and w["status"] == "healthy"]
        if alive and kills < 60:
            try:
                os.kill(dice.choice(alive)["pid"], signal.SIGKILL)
                kills += 1
            except ProcessLookupError:
                pass
        depth = node.get("/api/v1/info")[1]["queues"]["work"]
        ended = all(p.poll() is not None for p in producers)
        return ended and not depth["queued"] and not depth["processing"] and not depth["scheduled"]

    began = time.monotonic()
    until(step, "all jobs to end", patience=110)
    assert all(p.wait() == 0 for p in producers)
    assert kills >= 10, f"only {kills} kills in {time.monotonic() - began:.1f} s"
    node.stop()
    with node.open_store() as store:
        each_done_once(store, JOBS)
        # every run is accounted for: it ended in done, in a crash, or was never begun
        ((attempts, crashes),) = rows(store, "SELECT sum(attempt), sum(crashes) FROM jobs")
        assert attempts == JOBS + crashes


def each_done_once(store: Store, jobs: int) -> None:
    """All are done, with exactly one `done` in each timeline, as its last event, and timelines without gaps."""
    assert rows(store, "SELECT status, count(*) FROM jobs GROUP BY status") == [("done", jobs)]
    assert value(store, "SELECT count(*) FROM timeline WHERE name = 'done'") == jobs
    last = "SELECT count(*) FROM jobs JOIN timeline e ON e.job = jobs.id AND e.seq = jobs.seq WHERE e.name = 'done'"
    assert value(store, last) == jobs
    gaps = "SELECT count(*) FROM jobs WHERE seq <> (SELECT count(*) FROM timeline WHERE job = jobs.id)"
    assert value(store, gaps) == 0
