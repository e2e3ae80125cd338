"""Limits, unique keys, batches and chains hold over all nodes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ostler.store.flows import step_of
from ostler.store.rows import NewJob
from tests.nodes.checks import check_intervals, check_rate
from tests.nodes.fleet import FLOCK, Fleet

POOLS = ("--pool", "work=2", "--pool", "narrow=2", "--pool", "paced=2", "--pool", "keys=2")


def test_a_queue_a_key_and_a_rate_are_limited_over_all_nodes(fleet: Fleet, tmp_path: Path) -> None:
    """Six workers of each queue could run at once; the jobs themselves see how many do."""
    intervals = tmp_path / "intervals"
    intervals.mkdir()
    fleet.nodes(3, *POOLS, app=FLOCK, FLOCK=str(intervals))
    jobs = [fleet.enqueue_many("narrow", ["{}"] * 90, queue="narrow")]
    jobs += [fleet.enqueue_many("paced", ["{}"] * 130, queue="paced")]
    for user in "abc":
        args = [f'{{"user": "{user}"}}'] * 40
        jobs += [fleet.enqueue_many("per_user", args, queue="keys", limit_key=f'per_user:"{user}"', limit_max=2)]
    fleet.wait_all([job for some in jobs for job in some])
    most = check_intervals(intervals)
    assert most == {"narrow": 3, "user-a": 2, "user-b": 2, "user-c": 2}, "a limit was exceeded, or never reached"
    check_rate(fleet)
    for queue in ("narrow", "keys"):
        ran = fleet.one("SELECT count(DISTINCT node) FROM ostler.jobs WHERE queue = %s", queue)
        assert ran > 1, f"one node alone ran queue {queue}"


def test_producers_on_several_nodes_that_race_for_a_unique_key_get_one_job(fleet: Fleet) -> None:
    nodes = fleet.nodes(3, *POOLS, app=FLOCK)
    for round_ in range(5):
        with ThreadPoolExecutor(12) as pool:
            body = {"task": "once", "args": {"name": f"k{round_}"}, "delay": 600}
            answers = list(pool.map(lambda n: nodes[n % 3].post("/api/v1/jobs", body), range(12)))
        assert {status for status, _ in answers} <= {200, 201}
        assert len({job["id"] for _, job in answers}) == 1
    assert fleet.one("SELECT count(*) FROM ostler.jobs") == 5


def test_batches_and_chains_go_on_over_nodes(fleet: Fleet) -> None:
    fleet.nodes(3, *POOLS, app=FLOCK)
    with fleet.store() as store:
        after = step_of(NewJob("report", "work", "{}"), "summary")
        told = [NewJob("told", "work", f'{{"n": {n}}}') for n in range(30)]
        store.jobs.flows.batch(told, after, store.now())
        following = json.dumps([step_of(NewJob("add", "work", "{}"), "a")] * 9)
        store.jobs.enqueue([NewJob("add", "work", '{"a": 0}', next=following)], store.now())
    calls = "SELECT count(*) FROM ostler.jobs WHERE task = 'report' AND status = 'done'"
    fleet.until(lambda: fleet.one(calls), "the batch to call back")
    (row,) = fleet.rows("SELECT total, pending, failed FROM ostler.batches")
    assert row == {"total": 30, "pending": 0, "failed": 0}
    assert fleet.one("SELECT count(*) FROM ostler.jobs WHERE task = 'report'") == 1
    assert fleet.one("SELECT count(DISTINCT node) FROM ostler.jobs WHERE task = 'told'") > 1
    added = "SELECT count(*) FROM ostler.jobs WHERE task = 'add' AND status = 'done'"
    fleet.until(lambda: fleet.one(added) == 10, "the chain to end")
    results = fleet.rows("SELECT result FROM ostler.jobs WHERE task = 'add' ORDER BY step")
    assert [int(row["result"]) for row in results] == list(range(1, 11))
