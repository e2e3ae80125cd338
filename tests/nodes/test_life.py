"""The ordinary life of nodes: they stop, share a name, and are forgotten."""

from __future__ import annotations

import shutil
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


def test_two_nodes_on_copies_of_one_data_directory_live_side_by_side(fleet: Fleet, tmp_path: Path) -> None:
    """As when a machine is cloned. The second one takes the first for its predecessor once, when it starts, and never again."""
    first = fleet.node("--pool", "work=1", "--pool", "other=0", OSTLER_NODE_LEASE=FOR_EVER)
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(first.folder / "home", copy)
    second = fleet.node("--pool", "work=1", "--pool", "other=0", folder=copy, OSTLER_NODE_LEASE=FOR_EVER)
    living = "SELECT id FROM ostler.nodes WHERE status = 'healthy' ORDER BY id"
    fleet.until(lambda: len(fleet.dead()) == 1 and len(fleet.rows(living)) == 2, "the first to be back")
    before, flag = fleet.rows(living), tmp_path / "go"
    jobs = [second.enqueue("wait_for", path=str(flag)) for _ in range(2)]
    fleet.wait_begun(*jobs)
    beats = "SELECT count(*) FROM ostler.nodes WHERE status = 'healthy' AND beat_at > %s"
    since = fleet.one("SELECT max(beat_at) FROM ostler.nodes")
    fleet.until(
        lambda: fleet.one(beats, since + 2000) == 2, "heartbeats of two seconds; they look for dead nodes as often"
    )
    flag.touch()
    fleet.wait_all(jobs)
    assert fleet.rows(living) == before
    assert [fleet.events(job) for job in jobs] == [["created", "processing", "done"]] * 2


def test_a_node_holds_seven_connections_however_many_workers_it_has(fleet: Fleet) -> None:
    """As docs/operations.md says: one for each lane, and one that listens."""
    node = fleet.node("--pool", "work=6", "--pool", "other=2")
    held = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'ostler%%' AND datname = %s"
    jobs, most = fleet.enqueue_many("add", ['{"a": 1}'] * 500), 0
    done = "SELECT count(*) FROM ostler.jobs WHERE status = 'done'"
    while fleet.one(done) < len(jobs):
        assert node.get("/api/v1/jobs?search=add")[0] == 200
        most = max(most, fleet.one(held, fleet.database))
    assert most <= 7
    fleet.until(lambda: fleet.one(held, fleet.database) == 7, "all of them to be in use")


def test_rows_of_ended_nodes_are_deleted_after_a_while(fleet: Fleet) -> None:
    first, _ = fleet.nodes(2, "--pool", "work=1", "--pool", "other=0", OSTLER_EXIT_RETENTION="1")
    ended = first.id(fleet)
    first.kill()
    known = "SELECT (SELECT count(*) FROM ostler.nodes WHERE id = %s) + (SELECT count(*) FROM ostler.health WHERE node = %s)"
    fleet.until(lambda: not fleet.one(known, ended, ended), "its rows to be deleted")
    assert fleet.one("SELECT count(*) FROM ostler.nodes") == 1
