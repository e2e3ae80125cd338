"""The doctor on a PostgreSQL store, and what it says of each thing that can be wrong there."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from ostler.store import Store, doctor, postgres_doctor, sqlite
from ostler.store.nodes import NodeRow
from ostler.store.postgres_doctor import Limits
from ostler.store.rows import NewJob, Turn
from tests.cli.test_cli import ostler
from tests.harness import Node, until
from tests.servers import Server

STRICT = Limits(pinned=0.1, waiting=0.1, dead=50)


@pytest.fixture
def opened(database: str, tmp_path: Path) -> Iterator[Store]:
    with Store.open(database, tmp_path) as store:
        yield store


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """A server that allows few connections, and prepared transactions."""
    settings = {"max_connections": "20", "max_prepared_transactions": "5", "autovacuum": "off"}
    try:
        server = Server(**settings)
    except LookupError as missing:
        pytest.skip(str(missing))
    with server:
        yield server


def findings(store: Store, what: str, limits: Limits = STRICT, level: str = "warning") -> list[str]:
    return [f.text for f in postgres_doctor.examine(store, limits) if (f.what, f.level) == (what, level)]


def bad(store: Store) -> set[str]:
    found = [*postgres_doctor.examine(store), *doctor.orphans(store)]
    return {f.what for f in found if f.level != "ok"} - {"durability"}  # the tests' server does not sync


def test_a_fresh_store_is_well(opened: Store) -> None:
    assert bad(opened) == set()


def test_a_server_that_does_not_sync_is_told(opened: Store, postgres: Server) -> None:
    assert findings(opened, "durability") if postgres.ours else True


@pytest.mark.parametrize("idle", [False, True])
def test_a_transaction_that_holds_a_snapshot_is_named(opened: Store, database: str, idle: bool) -> None:
    with psycopg.connect(opened.db.place.address, application_name="report") as holder:
        holder.execute(f"SET TRANSACTION ISOLATION LEVEL {'READ COMMITTED' if idle else 'REPEATABLE READ'}")
        holder.execute("SELECT count(*) FROM ostler.jobs")
        found = until(lambda: findings(opened, "snapshots"), "the snapshot to be old")
        assert f"pid {holder.info.backend_pid}" in found[0] and "report" in found[0]
        assert "pg_terminate_backend" in found[0]
        assert not findings(opened, "snapshots", Limits())  # not yet for a minute
        holder.rollback()
    assert not findings(opened, "snapshots")


def test_a_forgotten_prepared_transaction_and_a_slot_without_client_are_named(small: Server, tmp_path: Path) -> None:
    url = small.url(small.create_database())
    with Store.open(url, tmp_path) as store:
        with psycopg.connect(store.db.place.address, autocommit=True) as other:
            other.execute("BEGIN")
            other.execute("CREATE TABLE t (x int)")
            other.execute("PREPARE TRANSACTION 'forgotten'")
            other.execute("SELECT pg_create_physical_replication_slot('old_replica', true)")
        try:
            found = until(lambda: len(f := findings(store, "snapshots")) >= 2 and f, "both to be found")
            assert any("'forgotten'" in text and "ROLLBACK PREPARED" in text for text in found)
            assert any("old_replica" in text and "drop it" in text for text in found)
        finally:
            with psycopg.connect(store.db.place.address, autocommit=True) as other:
                other.execute("ROLLBACK PREPARED 'forgotten'")
                other.execute("SELECT pg_drop_replication_slot('old_replica')")
        assert not findings(store, "snapshots")


def test_dead_rows_and_a_vacuum_that_is_off_are_named(small: Server, tmp_path: Path) -> None:
    with Store.open(small.url(small.create_database()), tmp_path) as store:
        assert any("autovacuum is off on this server" in text for text in findings(store, "vacuum"))
        store.db.ask("INSERT INTO ostler.meta SELECT 'k', '0'")
        for n in range(100):
            store.meta.set("k", str(n))
        store.db.ask("SELECT pg_stat_force_next_flush()" if small.major >= 15 else "SELECT 1")
        found = until(lambda: [t for t in findings(store, "vacuum") if t.startswith("meta has")], "the dead rows")
        assert "VACUUM ostler.meta" in found[0]
        store.db.ask("VACUUM ostler.meta")
        store.db.ask("ALTER TABLE ostler.jobs SET (autovacuum_enabled = false)")
        assert any("RESET (autovacuum_enabled)" in text for text in findings(store, "vacuum"))


def test_missing_and_invalid_indexes_are_errors_with_their_remedy(opened: Store) -> None:
    opened.db.ask("DROP INDEX ostler.jobs_ready")
    (found,) = findings(opened, "indexes", level="error")
    remedy = found.partition("Make it again: ")[2]
    assert remedy.startswith("CREATE INDEX jobs_ready ON ostler.jobs")
    opened.db.ask(remedy)
    assert not findings(opened, "indexes", level="error")
    opened.db.ask("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'ostler.jobs_later'::regclass")
    (found,) = findings(opened, "indexes", level="error")
    assert "REINDEX INDEX CONCURRENTLY ostler.jobs_later" in found


def test_an_index_of_another_schema_is_named_there(database: str, tmp_path: Path) -> None:
    with Store.open(f"{database}&schema=clips", tmp_path) as store:
        store.db.ask("DROP INDEX clips.jobs_ready")
        (found,) = findings(store, "indexes", level="error")
        assert "ON clips.jobs" in found


def test_a_server_that_runs_out_of_connections_is_told(small: Server, tmp_path: Path) -> None:
    with Store.open(small.url(small.create_database()), tmp_path) as store, contextlib.ExitStack() as many:
        assert not findings(store, "connections")
        for _ in range(14):
            many.enter_context(psycopg.connect(store.db.place.address))
        (found,) = findings(store, "connections")
        assert "of 17 in use" in found and "max_connections" in found


def test_who_waits_for_a_lock_is_told_with_who_holds_it(opened: Store) -> None:
    address = opened.db.place.address
    with psycopg.connect(address) as holder, psycopg.connect(address, autocommit=True) as waiter:
        holder.execute("LOCK TABLE ostler.rates IN ACCESS EXCLUSIVE MODE")
        thread = threading.Thread(target=waiter.execute, args=("SELECT count(*) FROM ostler.rates",))
        thread.start()
        found = until(lambda: findings(opened, "locks"), "the wait to be seen")
        assert f"pid {waiter.info.backend_pid}" in found[0] and f"pid {holder.info.backend_pid} holds" in found[0]
        holder.rollback()
        thread.join()
    assert not findings(opened, "locks")


def test_a_clock_that_is_wrong_here_is_told(opened: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = postgres_doctor.time.time
    monkeypatch.setattr(postgres_doctor.time, "time", lambda: real() + 5)
    (found,) = findings(opened, "clock")
    assert "5.0" in found and "ahead of" in found and "NTP" in found


def test_a_far_server_is_told(opened: Store) -> None:
    assert "closer to the server" in findings(opened, "round trip", Limits(round_trip=0.0))[0]


def test_jobs_that_a_node_left_behind_are_orphans(store: Store) -> None:
    store.nodes.register(NodeRow("n@1", "n", 30_000))
    store.jobs.enqueue([NewJob("t", "q", "{}")], 1000)
    assert store.turns.take(Turn("n@1", 2000, wants={"q": ["worker:q:0"]})).claims
    assert [f.level for f in doctor.orphans(store)] == ["ok"]
    store.db.run("node_end", id="n@1", now=store.now())  # it died before it gave back what it had
    found = [f.text for f in doctor.orphans(store) if f.level == "warning"]
    assert any("1 of n@1" in text for text in found) and any("n@1 (stopped)" in text for text in found)
    store.nodes.release(store.nodes.unreleased()[0])
    assert [f.level for f in doctor.orphans(store)] == ["ok"]


def test_a_write_ahead_log_that_cannot_shrink_is_told(tmp_path: Path) -> None:
    with Store.open("", tmp_path) as store:
        path = tmp_path / "ostler.db"
        reader = sqlite.sqlite3.connect(path)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM jobs").fetchall()
        for n in range(200):
            store.meta.set("k", f"{n}" * 5000)
        found = doctor.wal(path, most=1_000_000)
        assert found.level == "warning" and "transaction open" in found.text
        reader.close()
        assert doctor.wal(path, most=100_000_000).level == "ok"


# ---- with a node


def test_the_command_looks_at_a_node_on_postgres_and_finds_a_listener_that_was_lost(make_node, database: str) -> None:
    node: Node = make_node("--pool", "work=1", "--pool", "other=1", OSTLER_STORE=database)

    def said() -> dict[str, list[dict[str, str]]]:
        done = ostler("doctor", "--json", "--data", str(node.folder), OSTLER_STORE=database)
        found: dict[str, list[dict[str, str]]] = {}
        for finding in json.loads(done.stdout)["findings"]:
            found.setdefault(finding["what"], []).append(finding)
        return found

    found = said()
    assert found.keys() >= {
        "database", "round trip", "clock", "connections", "snapshots", "vacuum", "indexes", "listeners", "locks", "orphans", "node"
    }  # fmt: skip
    assert found["listeners"][0] == {"level": "ok", "what": "listeners", "text": "1 for 1 node"}
    assert "sqlite" not in found and "PostgreSQL" in found["database"][0]["text"]
    with Store.open(database, node.folder) as store:
        store.nodes.register(NodeRow("deaf@1", "deaf", 600_000, home="another"))  # it lives, and listens to nobody
        (lost,) = until(lambda: findings(store, "listeners"), "the node that does not listen to be told")
        assert "1 for 2 nodes" in lost and "poll" in lost


def test_a_server_that_cannot_be_reached_is_one_error(tmp_path: Path) -> None:
    done = ostler("doctor", "--json", "--data", str(tmp_path), OSTLER_STORE="postgresql://u:sesame@127.0.0.1:1/x")
    (found,) = [f for f in json.loads(done.stdout)["findings"] if f["what"] == "database"]
    assert done.returncode == 1 and found["level"] == "error" and "sesame" not in done.stdout + done.stderr
