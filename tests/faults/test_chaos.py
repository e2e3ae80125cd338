"""10,000 jobs from four processes at once, while workers are killed at random: each is done exactly once."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time

from tests.harness import until

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
    with contextlib.closing(sqlite3.connect(node.folder / "ostler.db")) as connection:
        each_done_once(connection, JOBS)
        # every run is accounted for: it ended in done, in a crash, or was never begun
        attempts, crashes = connection.execute("SELECT sum(attempt), sum(crashes) FROM jobs").fetchone()
        assert attempts == JOBS + crashes


def each_done_once(connection: sqlite3.Connection, jobs: int) -> None:
    """All are done, with exactly one `done` in each timeline, as its last event, and timelines without gaps."""
    assert connection.execute("SELECT status, count(*) FROM jobs GROUP BY status").fetchall() == [("done", jobs)]
    assert connection.execute("SELECT count(*) FROM timeline WHERE name = 'done'").fetchone() == (jobs,)
    last = "SELECT count(*) FROM jobs JOIN timeline e ON e.job = jobs.id AND e.seq = jobs.seq WHERE e.name = 'done'"
    assert connection.execute(last).fetchone() == (jobs,)
    gaps = "SELECT count(*) FROM jobs WHERE seq <> (SELECT count(*) FROM timeline WHERE job = jobs.id)"
    assert connection.execute(gaps).fetchone() == (0,)
