"""The ordinary life of nodes: they stop, share a name, and are forgotten."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.nodes.fleet import Fleet

FOR_EVER = "600"  # a lease that no test sees the end of


def test_a_clean_shutdown_releases_at_once(fleet: Fleet, tmp_path: Path) -> None:
    flag = tmp_path / "go"
    quick = {"OSTLER_STOP_GRACE": "0.2", "OSTLER_TERM_GRACE": "0.2", "OSTLER_NODE_LEASE": FOR_EVER}
    first = fleet.node("--pool", "work=1", "--pool", "other=0", **quick)
    job = first.enqueue("wait_for", path=str(flag))
    fleet.wait_begun(job)
    other = fleet.node("--pool", "work=1", "--pool", "other=0", OSTLER_NODE_LEASE=FOR_EVER)
    stopped = first.id(fleet)
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    (row,) = fleet.rows("SELECT status, released FROM ostler.nodes WHERE id = %s", stopped)
    assert row == {"status": "stopped", "released": 1}
    flag.touch()
    fleet.wait_all([job])
    assert fleet.job(job)["node"] == other.name
    assert fleet.job(job)["crashes"] == 0
    assert fleet.events(job)[:4] == ["created", "processing", "aborted:shutdown", "processing"]
    workers = fleet.rows("SELECT status FROM ostler.health WHERE node = %s", stopped)
    assert [w["status"] for w in workers] == ["stopped"]


def test_results_that_arrive_while_a_node_stops_are_written(fleet: Fleet) -> None:
    """The node's end is the last that it writes: who has stopped would be refused."""
    node = fleet.node("--pool", "work=2", "--pool", "other=0", OSTLER_NODE_LEASE=FOR_EVER, OSTLER_STOP_GRACE="30")
    jobs = fleet.enqueue_many("add", ['{"a": 1}'] * 2000)
    fleet.until(lambda: fleet.one("SELECT count(*) FROM ostler.jobs WHERE status = 'done'"), "the first to be done")
    assert node.stop() == 0
    assert fleet.one("SELECT count(*) FROM ostler.jobs WHERE status = 'processing'") == 0
    counts = fleet.rows("SELECT count(*) AS n, sum(attempt - (status = 'done')::int) AS unended FROM ostler.jobs")
    assert counts == [{"n": len(jobs), "unended": 0}], "a run that ended was not written"
    assert "could not be recorded" not in node.log()


def test_two_nodes_of_one_name_live_side_by_side(fleet: Fleet, tmp_path: Path) -> None:
    flag = tmp_path / "go"
    twins = fleet.nodes(2, "--pool", "work=1", "--pool", "other=0", name="twin")
    jobs = [twins[0].enqueue("wait_for", path=str(flag)) for _ in twins]
    fleet.wait_begun(*jobs)
    ids = [twin.id(fleet) for twin in twins]
    assert {fleet.job(job)["node_id"] for job in jobs} == set(ids)
    assert [fleet.status(node) for node in ids] == ["healthy", "healthy"]
    workers = fleet.rows("SELECT node, component, status FROM ostler.health ORDER BY node")
    assert [(w["node"], w["status"]) for w in workers] == [(node, "healthy") for node in sorted(ids)]
    twins[0].kill()
    fleet.until(lambda: fleet.status(ids[0]) == "dead", "the killed one to be declared dead")
    flag.touch()
    fleet.wait_all(jobs)
    assert fleet.status(ids[1]) == "healthy"
    assert {fleet.job(job)["node_id"] for job in jobs} == {ids[1]}


def test_rows_of_ended_nodes_are_deleted_after_a_while(fleet: Fleet) -> None:
    first, _ = fleet.nodes(2, "--pool", "work=1", "--pool", "other=0", OSTLER_EXIT_RETENTION="1")
    ended = first.id(fleet)
    first.kill()
    known = "SELECT (SELECT count(*) FROM ostler.nodes WHERE id = %s) + (SELECT count(*) FROM ostler.health WHERE node = %s)"
    fleet.until(lambda: not fleet.one(known, ended, ended), "its rows to be deleted")
    assert fleet.one("SELECT count(*) FROM ostler.nodes") == 1
