"""A store that moves from SQLite to PostgreSQL, by the real command and with real kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator

import psycopg
import pytest

from ostler.errors import ConfigError, Conflict
from ostler.store import Store
from ostler.store.footprints import Kind
from ostler.store.copy import LEFT, TABLES, Copy, Source, Target
from ostler.store.nodes import NodeRow
from ostler.store.artifacts import ArtifactRow
from ostler.store.rows import NewJob
from ostler.store.sessions import Admission, Ended, SessionRow
from tests import growing
from tests.harness import ROOT, Node, until
from tests.store.test_calls import call

APP = ROOT / "growing.py"
BIG = "x" * 100_000  # 150 of them make a chunk


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ostler", "migrate", *arguments]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=300, check=False)


def copied(source: Path, target: str) -> dict[str, Any]:
    done = run("--from", f"sqlite:///{source}", "--to", target, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def session(id: str) -> SessionRow:
    return SessionRow.begun("a@1", Admission(id, "worker:browsers:0", 1, "browsers", "chromium", "token"), 5)


@pytest.fixture
def grown(make_node: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A node on SQLite has worked for a while and was killed in the middle of it. Jobs in `held` wait for a file."""
    node: Node = make_node("--pool", "work=1", "--pool", "held=3", "--pool", "slow=1", app=APP)
    monkeypatch.setenv("OSTLER_STORE", "")
    monkeypatch.setenv("OSTLER_DATA", str(node.folder))
    monkeypatch.setattr(growing.app, "_producer", None)
    gate = str(tmp_path / "gate")
    ids: dict[str, Any] = {
        "done": growing.carry.enqueue(text="abc\u0000ü"),
        "failed": growing.fails.enqueue(),
        "once": growing.once.enqueue(name="a"),
        "again": growing.again.enqueue(),
        "dies": growing.dies.enqueue(),
        "running": growing.wait.enqueue(path=gate, name="running"),
        "chain": growing.wait.s(path=gate, name="chain").then(growing.add.s(y=10), into="x").enqueue(),
        "later": growing.carry.options(delay=3600).enqueue(text="later"),
        "cancelled": growing.carry.options(delay=3600).enqueue(text="never"),
        "gone": growing.carry.enqueue(text="gone"),
    }
    batch = growing.app.batch([growing.add.s(x=1), growing.wait.s(path=gate)], then=growing.report.s(), into="summary")
    for name in ("running", "chain"):
        node.wait_running(ids[name])
    node.wait_running(batch.jobs[1])
    ids["per_user"] = [growing.per_user.enqueue(user="u") for _ in range(3)]
    for name in ("done", "failed", "once", "dies", "gone"):
        node.wait_job(ids[name], "done", "failed")
    node.wait_job(batch.jobs[0], "done")
    until(lambda: node.job(ids["again"])["run_at"], "the retry to wait")
    assert node.post(f"/api/v1/jobs/{ids['cancelled']}/cancel")[0] == 200
    assert node.post("/api/v1/pools/work/pause")[0] == 200
    ids["big"] = growing.carry.enqueue_many({"text": BIG, "more": n} for n in range(400))
    node.kill()
    with Store.open("", node.folder) as store:
        store.footprints.put(Kind("embedding", "org/minilm:v2"), "cpu", 812.5, 0, 900, 1)
        store.calls.add([call(1_790_000_000_000_000)])
        store.sessions.add([session("a"), session("b").over(Ended("b", "client", None, 1000, 5, 2**40), 7)])
        with store.db.transaction():
            store.jobs.artifacts.add([ArtifactRow(ids["done"], "a/ü.txt", "home", 5, 2**40, "0" * 64)])
            assert store.jobs.retention._delete([ids["gone"]]) == [ids["gone"]]
    growing.app.producer.close()
    yield {**ids, "batch": batch, "node": node, "gate": gate, "file": node.folder / "ostler.db"}


def rows(db: Source | Target, table: str, columns: list[str]) -> list[tuple[Any, ...]]:
    schema = "ostler." if isinstance(db, Target) else ""
    sql = f"SELECT {', '.join(columns)} FROM {schema}{table}"
    found = db._query(sql, {}) if isinstance(db, Source) else db._query(sql)
    return sorted((tuple(row) for row in found), key=repr)


def test_a_store_with_everything_is_copied_although_the_copy_is_killed(
    grown: dict[str, Any], database: str, make_node: Any
) -> None:
    """Killed in its second chunk of jobs and run again. Then a node on PostgreSQL finishes everything."""
    assert run("--store", database).returncode == 0
    with psycopg.connect(database, autocommit=True) as held:
        held.execute("SELECT pg_advisory_lock(42)")
        held.execute(
            "CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_advisory_xact_lock_shared(42); RETURN NEW; END $$"
        )
        held.execute(
            f"CREATE TRIGGER stop BEFORE INSERT ON ostler.jobs FOR EACH ROW WHEN (NEW.id = {grown['big'][250]}) "
            "EXECUTE FUNCTION stop()"
        )
        process = subprocess.Popen(command("--from", f"sqlite:///{grown['file']}", "--to", database))
        waits = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = 42"
        until(lambda: held.execute(waits).fetchall(), "the copy to be in its second chunk")
        assert 100 < held.execute("SELECT count(*) FROM ostler.jobs").fetchall()[0][0] < 400
        with pytest.raises(ConfigError, match="holds a copy that is not finished; run 'ostler migrate --from"):
            Store.open(database, grown["node"].folder)
        process.kill()
        process.wait()
        held.execute("SELECT pg_advisory_unlock(42)")
        until(lambda: not held.execute(waits.replace("NOT granted AND", "")).fetchall(), "the server to notice")
        held.execute("DROP FUNCTION stop CASCADE")
    done = copied(grown["file"], database)
    assert done["resumed"] and not done["already"] and done["requeued"] == 3
    _compare(grown, database)
    again = copied(grown["file"], database)
    assert again["already"] and again["tables"]["jobs"] == done["tables"]["jobs"]
    _finish(grown, database, make_node)


def _compare(grown: dict[str, Any], database: str) -> None:
    """Row by row: only what the death of the node changes is different."""
    source, target = Source.open(grown["file"], create=False), Target(database)
    try:
        running = {row["id"] for row in source._query("SELECT id FROM jobs WHERE status = 'processing'", {})}
        assert len(running) == 3
        for table in TABLES:
            columns = source.columns(table)
            here, there = rows(source, table, columns), rows(target, table, columns)
            if table == "jobs":
                here, there = ([r for r in found if r[0] not in running] for found in (here, there))
            elif table in ("job_events", "job_errors"):
                there = [r for r in there if r[0] not in running]
                here = [r for r in here if r[0] not in running]
            elif table == "meta":
                own = ("copied", "counted", "purged")
                here, there = ([r for r in found if r[0] not in own] for found in (here, there))
            elif table in ("nodes", "health"):  # its end is written down
                assert len(here) == len(there)
                continue
            assert there == here, table
            assert here, f"{table} has no row, so nothing is shown"
        assert [row["status"] for row in target.run("nodes")] == ["dead"]
    finally:
        source.close()
        target.close()


def _finish(grown: dict[str, Any], database: str, make_node: Any) -> None:
    with psycopg.connect(database, autocommit=True) as connection:  # their time has come
        connection.execute("UPDATE ostler.jobs SET run_at = 1 WHERE later = 1")
        connection.execute("UPDATE ostler.schedules SET next_at = 1")
    Path(grown["gate"]).touch()
    flags = ("--pool", "work=2", "--pool", "held=3", "--pool", "slow=1")
    node: Node = make_node(*flags, app=APP, folder=grown["node"].folder, OSTLER_STORE=database)
    assert node.job(grown["big"][0])["status"] == "queued", "the pause did not come along"
    assert node.post("/api/v1/pools/work/resume")[0] == 200
    for name in ("running", "chain"):
        found = node.wait_job(grown[name], "done")
        assert found["result"] == found["attempt"] == 1 and found["crashes"] == 0
        assert [(error["attempt"], error["kind"]) for error in found["errors"]] == [(1, "lost")]
        names = [event["name"] for event in found["events"]]
        assert names == ["created", "processing", "begun", "requeued:stale", "processing", "begun", "done"]
    for job in [grown["again"], grown["later"], *grown["per_user"], *grown["big"], *grown["batch"].jobs]:
        node.wait_job(job, "done")
    assert node.job(grown["again"])["result"] == 2
    assert node.job(grown["failed"])["status"] == "failed" and node.job(grown["cancelled"])["status"] == "cancelled"
    with Store.open(database, node.folder) as store:
        batch = until(lambda: _called(store, grown["batch"]), "the batch to call back")
        assert node.wait_job(batch, "done")["result"] == {"batch": grown["batch"], "total": 2, "failed": 0}
        until(
            lambda: not any("queued" in d or "processing" in d for d in store.jobs.depths().values()), "all to be done"
        )
        tasks = [job["task"] for job in store.jobs.list(limit=10)[0]]
        assert "add" in tasks and "new_year" in tasks, "the chain or the schedule did not go on"
        assert store.jobs.depths() == {"work": {"failed": 1, "cancelled": 1}}
        held = store.db.run("unique_holder", key=store.jobs.find(grown["once"])["unique_key"], now=store.now())
        assert held[0]["job"] == grown["once"]
    assert node.worker("worker:work:0")["generation"] == 3, "the history of the worker did not come along"


def _called(store: Store, batch: int) -> int | None:
    found: int | None = store.jobs.flows.get_batch(batch)["callback_job"]
    return found


def test_every_table_is_copied_or_known_to_be_left(tmp_path: Path) -> None:
    Store.open("", tmp_path).close()
    source = Source.open(tmp_path / "ostler.db", create=False)
    tables = source._query("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'", {})
    source.close()
    assert {row["name"] for row in tables} == {*TABLES, *LEFT}


# ---- what is refused, and what begins anew


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A store with three jobs."""
    with Store.open("", tmp_path / "small") as store:
        store.jobs.enqueue([NewJob("t", "q", "{}") for _ in range(3)], store.now())
    return tmp_path / "small" / "ostler.db"


def test_a_copy_is_refused_while_a_node_runs_on_either_side(small: Path, database: str, make_node: Any) -> None:
    node = make_node("--pool", "work=1", folder=small.parent)
    done = run("--from", f"sqlite:///{small}", "--to", database)
    assert done.returncode == 2 and "another node (pid" in done.stderr and "is already running in" in done.stderr
    node.kill()
    with Store.open(database, small.parent) as store:
        store.nodes.register(NodeRow("n@1", "n", lease_ms=10**9))
    done = run("--from", f"sqlite:///{small}", "--to", database)
    assert done.returncode == 2 and "nodes run on schema ostler of" in done.stderr and "(n); stop them" in done.stderr


def test_a_copy_is_refused_where_jobs_are_already(small: Path, database: str) -> None:
    with Store.open(database, small.parent) as store:
        store.jobs.enqueue([NewJob("t", "q", "{}")], store.now())
    done = run("--from", f"sqlite:///{small}", "--to", database)
    assert done.returncode == 2 and "has 1 jobs already, and a copy keeps the ids of its jobs" in done.stderr
    assert copied(small, f"{database}&schema=other")["jobs"] == {"q": {"queued": 3}}


def test_a_copy_needs_a_source_and_a_target(small: Path, database: str, tmp_path: Path) -> None:
    wrong = {
        ("--from", f"sqlite:///{tmp_path}/none.db", "--to", database): "there is no store at",
        ("--from", database, "--to", database): "can only copy from SQLite to PostgreSQL",
        ("--from", f"sqlite:///{small}", "--to", f"sqlite:///{small}"): "found --from SQLite and --to SQLite",
        ("--to", database): "needs --from",
        ("--from", f"sqlite:///{small}", "--to", database, "--check"): "leave it out to copy a store",
        ("--from", f"sqlite:///{small}", "--to", "postgresql://127.0.0.1:1/none"): "cannot be used right now",
    }
    for arguments, message in wrong.items():
        done = run(*arguments)
        assert done.returncode == 2 and message in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def test_nobody_writes_to_the_source_during_a_copy_and_ids_go_on_after_it(
    small: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = Source.open(small, create=False), Target(database)
    target.migrate()
    tried: list[str] = []
    load = Target.load

    def while_it_copies(self: Target, table: str, *rest: Any) -> None:
        if table == "jobs":
            with Store.open("", small.parent, busy_timeout=0.05) as store, pytest.raises(Exception, match="try again"):
                store.jobs.enqueue([NewJob("t", "q", "{}")], store.now())
            tried.append(table)
        load(self, table, *rest)

    monkeypatch.setattr(Target, "load", while_it_copies)
    assert Copy(source, target).run().tables["jobs"] == 3
    assert tried == ["jobs"]
    with Store.open(database, small.parent) as store:
        assert store.jobs.enqueue([NewJob("t", "q", "{}")], store.now()) == [4]
        assert store.jobs.depths() == {"q": {"queued": 4}}
    source.close()
    target.close()


@pytest.mark.parametrize("at", ["settle", "open_to_others"])
def test_a_copy_that_ends_while_it_finishes_goes_on(
    small: Path, database: str, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    source, target = Source.open(small, create=False), Target(database)
    target.migrate()
    with monkeypatch.context() as patch:
        patch.setattr(Target, at, lambda _self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Copy(source, target).run()
    source.close()
    target.close()
    assert copied(small, database)["resumed"]


def test_a_copy_begins_anew_when_the_source_has_changed(
    small: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = Source.open(small, create=False), Target(database)
    target.migrate()
    with monkeypatch.context() as patch:
        patch.setattr(Copy, "_compare", lambda _self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Copy(source, target).run()
    source.close()
    with Store.open("", small.parent) as store:
        store.jobs.cancel(1, store.now())
        store.jobs.enqueue([NewJob("t", "q", "{}")], store.now())
    done = copied(small, database)
    assert not done["resumed"] and done["jobs"] == {"q": {"queued": 3, "cancelled": 1}}
    target.close()


def test_an_unfinished_copy_of_another_store_is_left_alone(small: Path, database: str, tmp_path: Path) -> None:
    with Store.open("", tmp_path / "other") as store:
        store.jobs.enqueue([NewJob("t", "q", "{}")], store.now())
    source, target = Source.open(small, create=False), Target(database)
    target.migrate()
    unfinished = Copy(source, target)
    unfinished._begin("state")
    with pytest.raises(Conflict, match="another 'ostler migrate' fills"):
        other = Copy(source, target)
        other._progress = {"after": {}, "checked": False}
        other._table("jobs")
    source.close()
    target.close()
    done = run("--from", f"sqlite:///{tmp_path}/other/ostler.db", "--to", database)
    assert done.returncode == 2 and "holds an unfinished copy of another store" in done.stderr


def test_a_bar_is_shown_to_those_who_look(small: Path, database: str) -> None:
    """And the end says what to do next."""
    env = {**os.environ, "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}
    done = subprocess.run(
        command("--from", f"sqlite:///{small}", "--to", database), capture_output=True, text=True, env=env, check=True
    )
    assert "jobs" in done.stdout and "3/3" in done.stdout
    assert "OSTLER_STORE=postgresql://" in done.stdout
