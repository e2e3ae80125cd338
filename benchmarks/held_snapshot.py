"""A node on PostgreSQL while somebody holds an old snapshot open: jobs stored at a steady rate, and how many of them run.

    python benchmarks/held_snapshot.py [--rate 800] [--seconds 180] [--free]

`--free` holds no snapshot, to compare. Every ten seconds one line: jobs done a second, waiting, dead rows, and what a claim costs.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import psycopg  # noqa: E402
from jobs import Bench, store_of  # noqa: E402


def feed(producer, job, rate: int, stop: threading.Event) -> None:
    """Ten times a second, so many jobs that the rate is kept."""
    began, stored = time.monotonic(), 0
    while not stop.wait(0.1):
        due = int((time.monotonic() - began) * rate) - stored
        if due > 0:
            producer.enqueue([job] * due)
            stored += due


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=int, default=800)
    parser.add_argument("--seconds", type=int, default=180)
    parser.add_argument("--free", action="store_true")
    options = parser.parse_args()
    with store_of("postgres") as os.environ["OSTLER_STORE"]:
        bench = Bench(2)
        import bench_app

        from ostler.jobs.producer import prepare

        job = prepare({"noop": bench_app.noop.row}, "noop", {}, 1000)
        watcher = psycopg.connect(os.environ["OSTLER_STORE"], autocommit=True)
        holder = psycopg.connect(os.environ["OSTLER_STORE"], autocommit=True)
        if not options.free:
            holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            holder.execute("SELECT count(*) FROM ostler.jobs")
        stop = threading.Event()
        thread = threading.Thread(target=feed, args=(bench_app.app.producer, job, options.rate, stop))
        thread.start()
        before, last, first = 0, time.monotonic(), time.monotonic()
        watcher.execute("SELECT pg_stat_statements_reset()")
        try:
            while time.monotonic() - first < options.seconds:
                time.sleep(10)
                done = watcher.execute("SELECT count(*) FROM ostler.jobs WHERE status = 'done'").fetchone()[0]
                waiting = watcher.execute("SELECT count(*) FROM ostler.jobs WHERE status = 'queued'").fetchone()[0]
                dead = watcher.execute("SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = 'jobs'").fetchone()[
                    0
                ]
                cost = watcher.execute(
                    "SELECT mean_exec_time FROM pg_stat_statements WHERE query LIKE '%SKIP LOCKED%' AND query LIKE '%since%' AND calls > 0 "
                    "ORDER BY calls DESC LIMIT 1"
                ).fetchone()
                watcher.execute("SELECT pg_stat_statements_reset()")
                now = time.monotonic()
                print(
                    f"{now - first:5.0f} s  {(done - before) / (now - last):7,.0f} done/s  {waiting:7,} waiting  {dead:9,} dead rows  "
                    f"a claim {cost[0] if cost else 0:.2f} ms",
                    flush=True,
                )
                before, last = done, now
        finally:
            stop.set()
            thread.join()
            holder.close()
            watcher.close()
            bench.close()


if __name__ == "__main__":
    main()
