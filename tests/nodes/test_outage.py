"""The store is away for all, or for one node for less than its lease: nothing is lost, nobody is declared dead, nothing runs twice."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.nodes.fleet import FLOCK, Fleet, Member

LONG = {"OSTLER_HEARTBEAT_INTERVAL": "0.5", "OSTLER_NODE_LEASE": "6"}
LEASE = 6.0
ONE = ("--pool", "work=1", "--pool", "narrow=0", "--pool", "paced=0", "--pool", "keys=0")


def busy(fleet: Fleet, members: list[Member], flag: Path) -> list[int]:
    """A job that waits for the flag on each node."""
    jobs = [members[0].enqueue("hold", path=str(flag)) for _ in members]
    fleet.wait_begun(*jobs)
    assert len({fleet.job(job)["node"] for job in jobs}) == len(members)
    return jobs


def untouched(fleet: Fleet, jobs: list[int], ids: list[str]) -> None:
    """All are done by their first run, and the nodes are who they were."""
    fleet.wait_all(jobs)
    for job in jobs:
        assert fleet.events(job) == ["created", "processing", "done"]
        assert (fleet.job(job)["attempt"], fleet.job(job)["errors"]) == (1, [])
    assert fleet.dead() == []
    assert [member.id(fleet) for member in fleet.members] == ids


def test_a_node_that_is_cut_off_for_less_than_its_lease_loses_nothing(fleet: Fleet, tmp_path: Path) -> None:
    flag = tmp_path / "go"
    cut = fleet.node(*ONE, app=FLOCK, proxied=True, OSTLER_NODE_LEASE="60")
    jobs = busy(fleet, [cut], flag)
    fleet.nodes(1, *ONE, app=FLOCK, OSTLER_NODE_LEASE="60")
    ids = [member.id(fleet) for member in fleet.members]
    cut.proxy.drop()
    fleet.until(lambda: cut.get("/readyz")[0] == 503, "it to notice")
    flag.touch()  # its result has nowhere to go
    fleet.until(lambda: Path(f"{flag}.{jobs[0]}.1").exists(), "the run to end")
    assert fleet.job(jobs[0])["status"] == "processing"
    cut.proxy.heal()
    untouched(fleet, jobs, ids)
    fleet.until(lambda: cut.get("/readyz")[0] == 200, "it to be well")


@pytest.mark.parametrize("how", ["restart", "kill", "away for two leases", "hanging for two leases"])
def test_an_outage_for_all_nodes_at_once_requeues_nobody(fleet: Fleet, tmp_path: Path, how: str) -> None:
    flag = tmp_path / "go"
    nodes = fleet.nodes(3, *ONE, app=FLOCK, **LONG)
    jobs = busy(fleet, nodes, flag)
    ids = [member.id(fleet) for member in nodes]
    server = fleet.server
    match how:
        case "restart":
            server.restart()
        case "kill":
            server.kill()
            server.start()
        case "away for two leases":
            server.stop()
            try:
                away(nodes, flag)
            finally:
                server.start()
        case "hanging for two leases":
            server.pause()
            try:
                away(nodes, flag)
            finally:
                server.resume()
    flag.touch()
    more = [enqueued(fleet, nodes[n % 3]) for n in range(6)]
    untouched(fleet, jobs, ids)
    fleet.wait_all(more)
    fleet.until(lambda: all(n.get("/api/v1/health")[1]["status"] == "healthy" for n in nodes), "all to be well")
    time.sleep(1.5 * LEASE)  # whoever is to be declared dead by mistake would be by now
    untouched(fleet, jobs, ids)


def away(nodes: list[Member], flag: Path) -> None:
    """Two leases without the store; the jobs end meanwhile, and every node says that it is not well, and since when."""
    until = time.monotonic() + 2 * LEASE
    flag.touch()
    for node in nodes:
        node.until(lambda node=node: node.get("/readyz")[0] == 503)
        node.until(lambda node=node: "the store has " in str(node.get("/api/v1/health")[1]["errors"]))
    time.sleep(max(0.0, until - time.monotonic()))


def enqueued(fleet: Fleet, node: Member) -> int:
    """As a client does: refused while the store is away, it asks again."""
    return fleet.until(lambda: _posted(node), "an enqueue to be taken")


def _posted(node: Member) -> int | None:
    status, body = node.post("/api/v1/jobs", {"task": "add", "args": {"a": 1}})
    return int(body["id"]) if status == 201 else None


def test_rights_that_are_taken_from_a_node_delay_its_results_and_lose_nothing(fleet: Fleet, tmp_path: Path) -> None:
    flag, role = tmp_path / "go", f"role_{fleet.database}"
    fleet.server.create_role(role, "secret")
    fleet.server.sql(f'GRANT CREATE ON DATABASE "{fleet.database}" TO "{role}"')
    node = fleet.node(
        *ONE, app=FLOCK, OSTLER_STORE=fleet.server.url(fleet.database, user=role, password="secret", tcp=True)
    )
    jobs, ids = busy(fleet, [node], flag), [node.id(fleet)]
    fleet.server.sql(f'REVOKE ALL ON ostler.jobs FROM "{role}"', database=fleet.database)
    try:
        flag.touch()  # its result is not taken
        denied = "permission denied for table jobs"
        fleet.until(lambda: denied in str(node.get("/api/v1/health")[1]["errors"]), "health to say so")
        fleet.until(lambda: node.get("/readyz")[0] == 503, "it to be not ready")
    finally:
        fleet.server.sql(f'GRANT ALL ON ostler.jobs TO "{role}"', database=fleet.database)
    untouched(fleet, jobs, ids)
    fleet.until(lambda: node.get("/readyz")[0] == 200, "it to be well")
    node.kill()
    fleet.server.sql(f'DROP OWNED BY "{role}" CASCADE', database=fleet.database)
    fleet.server.sql(f'DROP ROLE "{role}"')


def test_a_listening_connection_that_is_lost_is_made_anew(fleet: Fleet) -> None:
    """The poll is switched off, in effect: only a ring can wake the node in time."""
    node = fleet.node("--pool", "work=1", "--pool", "other=0", OSTLER_POLL_INTERVAL="3600")
    listening = "SELECT pid FROM pg_stat_activity WHERE application_name = 'ostler listens' AND datname = %s"
    (before,) = fleet.until(lambda: fleet.rows(listening, fleet.database), "the node to listen")
    fleet.rows("SELECT pg_terminate_backend(%s)", before["pid"])
    fleet.until(lambda: fleet.rows(listening, fleet.database) not in ([], [before]), "it to listen again")
    waits = "SELECT count(*) FROM ostler.nodes WHERE waits::jsonb ? 'work'"
    fleet.until(lambda: fleet.one(waits), "its worker to be known as idle")
    for _ in range(3):
        job = fleet.enqueue("add", '{"a": 1}')
        fleet.wait_all([job])
        fleet.until(lambda: fleet.one(waits), "its worker to be known as idle")
    assert "the connection that listens was lost" in node.log()


def test_who_is_back_first_after_an_outage_gives_the_others_a_lease_to_follow(fleet: Fleet) -> None:
    """One node needs longer to reach the server again. By then its heartbeat is older than its lease, as everybody's was."""
    nodes = fleet.nodes(3, *ONE, app=FLOCK, proxied=True, OSTLER_HEARTBEAT_INTERVAL="0.5", OSTLER_NODE_LEASE="8")
    ids = [node.id(fleet) for node in nodes]
    for node in nodes:
        node.proxy.refuse()
    oldest = "SELECT min((extract(epoch FROM clock_timestamp()) * 1000)::bigint - beat_at - lease_ms) FROM ostler.nodes"
    fleet.until(lambda: fleet.one(oldest) > 0, "all leases to be over")
    for node in nodes[:2]:
        node.proxy.heal()
    well = "SELECT count(*) FROM ostler.nodes WHERE beat_at + 2000 > (extract(epoch FROM clock_timestamp()) * 1000)::bigint"
    fleet.until(lambda: fleet.one(well) == 2, "two of them to be back")
    since = fleet.one("SELECT max(beat_at) FROM ostler.nodes")
    beaten = "SELECT count(*) FROM ostler.nodes WHERE beat_at > %s"
    fleet.until(
        lambda: fleet.one(beaten, since + 2000) == 2, "heartbeats of two seconds; they look for dead nodes as often"
    )
    nodes[2].proxy.heal()
    fleet.until(lambda: fleet.one(well) == 3, "the third to be back")
    assert fleet.dead() == []
    assert [node.id(fleet) for node in nodes] == ids
    assert "this node declares no other node dead for 8 s" in nodes[0].log()
