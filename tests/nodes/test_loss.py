"""Nodes that die, are cut off or stand still: their jobs run elsewhere, and nothing that they say afterwards is taken."""

from __future__ import annotations

import signal
from pathlib import Path

import psycopg

from ostler.store.rows import NewJob
from tests.harness import family_of
from tests.nodes.fleet import LEASE, Fleet, Member


def hold_a_job(fleet: Fleet, member: Member, flag: Path) -> int:
    """A job that this node runs until the flag is there: the others have no worker for it yet."""
    job = member.enqueue("wait_for", path=str(flag))
    fleet.wait_begun(job)
    assert fleet.job(job)["node"] == member.name
    return job


def ran_elsewhere(fleet: Fleet, job: int, other: Member) -> None:
    """It was requeued once, without blame, and is done by the other node."""
    fleet.wait_all([job])
    found = fleet.job(job)
    assert (found["crashes"], found["attempt"], found["node"]) == (0, 1, other.name)
    assert [(error["attempt"], error["kind"], error["code"]) for error in found["errors"]] == [(1, "lost", "LOST")]
    assert fleet.events(job) == ["created", "processing", "requeued:stale", "processing", "done"]


def came_back(fleet: Fleet, member: Member, before: str, flag: Path) -> None:
    """The node is there again under another id, its old workers are gone, and it works."""
    fleet.until(lambda: member.id(fleet) != before and member.get("/readyz")[0] == 200, "the node to come back")
    assert fleet.status(before) == "dead"
    assert fleet.status(member.id(fleet)) == "healthy"
    workers = fleet.rows("SELECT node, status FROM ostler.health WHERE node = %s", member.id(fleet))
    assert [w["status"] for w in workers] == ["healthy"]
    flag.unlink(missing_ok=True)


def test_the_jobs_of_a_killed_node_run_elsewhere_without_blame(fleet: Fleet, tmp_path: Path) -> None:
    flag = tmp_path / "go"
    first = fleet.node("--pool", "work=1", "--pool", "other=0")
    job = hold_a_job(fleet, first, flag)
    (other,) = fleet.nodes(1, "--pool", "work=1", "--pool", "other=0")
    dead = first.id(fleet)
    first.kill()
    fleet.until(lambda: fleet.status(dead) == "dead", "it to be declared dead", patience=LEASE + 30)
    flag.touch()
    ran_elsewhere(fleet, job, other)
    silent = "SELECT e.at - n.beat_at FROM ostler.nodes n, ostler.timeline e WHERE n.id = %s AND e.job = %s AND e.name = 'requeued:stale'"
    assert LEASE * 1000 < fleet.one(silent, dead, job) < LEASE * 1000 + 5000, "it was not released within lease + 5 s"
    workers = fleet.rows("SELECT status, pid FROM ostler.health WHERE node = %s", dead)
    assert workers == [{"status": "stopped", "pid": None}]
    log = other.log()
    assert f"node {dead} is dead" in log and "1 jobs of node" in log


def test_a_node_that_starts_again_on_its_data_directory_recovers_at_once(fleet: Fleet, tmp_path: Path) -> None:
    """No lease is waited for: it is longer than the test."""
    flag = tmp_path / "go"
    node = fleet.node("--pool", "work=1", "--pool", "other=0", OSTLER_NODE_LEASE="600")
    job = hold_a_job(fleet, node, flag)
    before = node.id(fleet)
    node.kill()
    flag.touch()
    node.start()
    ran_elsewhere(fleet, job, node)
    assert fleet.status(before) == "dead"
    workers = fleet.rows("SELECT node FROM ostler.health")
    assert {w["node"] for w in workers} == {node.id(fleet)}, "the history was not taken over"


def test_a_node_that_is_cut_off_past_its_lease_loses_its_jobs_and_comes_back(fleet: Fleet, tmp_path: Path) -> None:
    flag = tmp_path / "go"
    cut = fleet.node("--pool", "work=1", "--pool", "other=0", proxied=True)
    job = hold_a_job(fleet, cut, flag)
    (other,) = fleet.nodes(1, "--pool", "work=1", "--pool", "other=0")
    before, workers = cut.id(fleet), family_of(cut.folder)
    assert workers
    cut.proxy.drop()
    fleet.until(lambda: fleet.status(before) == "dead", "it to be declared dead")
    fleet.until(lambda: cut.get("/readyz")[0] == 503, "it to say that the store is away")
    assert any("the store has accepted no heartbeat for" in e for e in cut.get("/api/v1/health")[1]["errors"])
    flag.touch()  # both runs end now; only one of them counts
    ran_elsewhere(fleet, job, other)
    cut.proxy.heal()
    came_back(fleet, cut, before, flag)
    assert fleet.events(job)[-1] == "done", "a late result was taken"
    assert fleet.job(job)["node"] == other.name
    assert not workers & family_of(cut.folder), "workers of its former life still run"
    other.stop()
    again = cut.enqueue("wait_for", path=str(flag))
    fleet.wait_begun(again)
    flag.touch()
    fleet.wait_all([again])
    assert fleet.job(again)["attempt"] == 1


def test_a_node_that_was_stopped_past_its_lease_loses_its_jobs_and_comes_back(fleet: Fleet, tmp_path: Path) -> None:
    flag = tmp_path / "go"
    stopped = fleet.node("--pool", "work=1", "--pool", "other=0")
    job = hold_a_job(fleet, stopped, flag)
    (other,) = fleet.nodes(1, "--pool", "work=1", "--pool", "other=0")
    before = stopped.id(fleet)
    stopped.signal(signal.SIGSTOP)
    fleet.until(lambda: fleet.status(before) == "dead", "it to be declared dead")
    flag.touch()
    ran_elsewhere(fleet, job, other)
    stopped.signal(signal.SIGCONT)
    came_back(fleet, stopped, before, flag)
    assert fleet.events(job)[-1] == "done"
    assert f"another node declared node {before} dead" in stopped.log()


def test_a_node_that_was_stopped_in_a_transaction_does_not_keep_its_locks(fleet: Fleet, tmp_path: Path) -> None:
    """It holds its own row, as every turn does: the server ends the transaction, and then it can be declared dead."""
    first = fleet.node("--pool", "work=1", "--pool", "other=0")
    fleet.nodes(1, "--pool", "work=0", "--pool", "other=0")
    before = first.id(fleet)
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%SET turn%'"
    idle = "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction' AND query LIKE '%run_at%'"
    with psycopg.connect(fleet.url) as blocker, fleet.store() as store:
        # Its turn begins, and waits for its own row; it is stopped there, and the row is let go.
        blocker.execute("SELECT 1 FROM ostler.nodes WHERE id = %s FOR UPDATE", [before])
        # A job that is due takes a turn of several trips; one that only claims is never open while nobody hears its node.
        now = store.now()
        job = store.jobs.enqueue([NewJob("add", "work", '{"a": 1}', run_at=now)], now - 1)[0]

        def stopped_there() -> bool:
            fleet.until(lambda: fleet.one(waiting), "a turn to wait for the lock")
            first.signal(signal.SIGSTOP)
            if not fleet.one(waiting):  # it had just given up
                first.signal(signal.SIGCONT)
                return False
            return True

        fleet.until(stopped_there, "the node to be stopped in a turn")
        blocker.rollback()
    fleet.until(lambda: fleet.one(idle) or fleet.status(before) == "dead", "the transaction to stay open")
    fleet.until(lambda: fleet.status(before) == "dead", "it to be declared dead")
    assert fleet.events(job) == ["created"], "an open transaction was taken"
    first.signal(signal.SIGCONT)
    fleet.wait_all([job])
    assert first.id(fleet) != before
    assert fleet.events(job) == ["created", "processing", "done"]
