"""Somebody holds an old snapshot, so no dead row can be removed: claims must not slow down."""

from __future__ import annotations

import threading
import time

import psycopg
import pytest

from ostler.store.rows import NewJob
from tests.nodes.fleet import FLOCK, Fleet

RATE, SECONDS = 800, 180


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_snapshot_that_is_held_for_three_minutes_costs_no_tenth_of_the_throughput(fleet: Fleet) -> None:
    fleet.node("--pool", "work=2", "--pool", "narrow=0", "--pool", "paced=0", "--pool", "keys=0", app=FLOCK)
    stop, stored = threading.Event(), [0]

    def produce() -> None:
        """As many as are due by now, ten times a second."""
        began = time.monotonic()
        with fleet.store() as store:
            while not stop.wait(0.1):
                due = int((time.monotonic() - began) * RATE) - stored[0]
                store.jobs.enqueue([NewJob("add", "work", '{"a": 1}')] * due, store.now())
                stored[0] += due

    done, figures = "SELECT count(*) FROM ostler.jobs WHERE status = 'done'", list[float]()
    producer = threading.Thread(target=produce)
    with psycopg.connect(fleet.url) as holder:
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT count(*) FROM ostler.jobs")
        producer.start()
        try:
            began = time.monotonic()
            before, last = 0, began
            while last - began < SECONDS:
                time.sleep(10)
                found, now = int(fleet.one(done)), time.monotonic()
                figures.append((found - before) / (now - last))
                before, last = found, now
        finally:
            stop.set()
            producer.join()
        dead = fleet.one("SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = 'jobs'")
    print([round(figure) for figure in figures], f"{dead} dead rows")
    assert dead > stored[0], "the snapshot held nothing"
    assert min(figures[1:]) >= 0.9 * RATE, figures
    fleet.until(lambda: fleet.one(done) == stored[0], "all to be done")
