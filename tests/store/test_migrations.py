"""The schema: brought up to date once however many try, the same whichever way it came about, and several in one database."""

from __future__ import annotations

import re
import sqlite3
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ostler.errors import ConfigError, StoreBusy
from ostler.store import Store, queries
from ostler.store.rows import NewJob, Turn
from tests.servers import Server
from tests.store.test_upgrade import restored
from tests.stores import rows, value


def name_of(url: str) -> str:
    """The database of a URL."""
    return urlsplit(url).path.lstrip("/")


# ---- at once


def test_many_who_migrate_at_once_all_succeed_and_each_migration_is_applied_once(database: str, tmp_path: Path) -> None:
    applied: list[list[str]] = []
    errors: list[Exception] = []
    start = threading.Barrier(6)

    def migrate() -> None:
        try:
            with Store(connect(database, tmp_path)) as store:
                start.wait()
                applied.append(store.db.migrate())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=migrate) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    known = [name for _, name, _ in queries.migrations("postgres")]
    assert sorted(applied) == [[]] * 5 + [known]


def test_who_finds_another_one_migrating_waits_for_it_however_long_it_takes(database: str, tmp_path: Path) -> None:
    first, second = connect(database, tmp_path), connect(database, tmp_path, busy_timeout=0.1)
    applied: list[list[str]] = []
    with Store(first), Store(second):
        with first.transaction():
            first.lock(["migrations"])
            waiter = threading.Thread(target=lambda: applied.append(second.migrate()))
            waiter.start()
            waiter.join(1.0)  # ten times as long as it waits for anything else
            assert waiter.is_alive()
        waiter.join(30)
        assert len(applied[0]) == len(queries.migrations("postgres"))
        assert first.migrate() == []


def connect(url: str, folder: Path, **how: Any):
    from ostler.store.database import connect

    return connect(url, folder, **how)


# ---- older and newer


def set_version(store: Store, version: int) -> None:
    if store.db.dialect == "sqlite":
        rows(store, f"PRAGMA user_version = {version}")
    else:
        rows(store, "DELETE FROM migrations WHERE number > :version", version=version)
        rows(
            store,
            "INSERT INTO migrations (number, name) VALUES (:version, 'other') ON CONFLICT DO NOTHING",
            version=version,
        )


def test_a_schema_one_release_newer_is_used_with_a_warning_and_two_are_refused(
    store_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Store.open(store_url, tmp_path) as store:
        known = store.db.schema()
        set_version(store, known + 1)
    with Store.open(store_url, tmp_path) as store:
        store.jobs.enqueue([NewJob("t", "q", "{}")], 1)
        assert [c.id for c in store.turns.take(Turn("n", 2, wants={"q": ["w"]})).claims] == [1]
        set_version(store, known + 2)
    assert re.search(rf"has (schema|version) {known + 1}, this ostler knows {known}", caplog.text)
    with pytest.raises(ConfigError, match=rf"has (schema|version) {known + 2}, .* used by a newer ostler\. Upgrade"):
        Store.open(store_url, tmp_path)


def test_who_uses_a_store_while_a_newer_node_adds_columns_goes_on(store_url: str, tmp_path: Path) -> None:
    """As in a rolling deploy. PostgreSQL has prepared what was said a few times, and refuses it when its result has changed."""
    with Store.open(store_url, tmp_path) as reads, Store.open(store_url, tmp_path) as writes:
        job = reads.jobs.enqueue([NewJob("t", "q", "{}")], reads.now())[0]

        def written() -> list[Any]:
            with writes.db.transaction():
                return writes.db.run("node", id="nobody")

        for _ in range(4):
            assert (reads.nodes.all(), reads.jobs.get(job)["id"], written()) == ([], job, [])
        with Store.open(store_url, tmp_path) as newer:
            for table in ("jobs", "nodes"):
                rows(newer, f"ALTER TABLE {table} ADD COLUMN new_{table} INTEGER")
        assert (reads.nodes.all(), reads.jobs.get(job)["id"], reads.nodes.unreleased()) == ([], job, [])
        if writes.db.dialect == "postgres":
            with pytest.raises(StoreBusy):  # nothing was stored: a lane tries it again
                written()
        assert written() == []


def test_a_reader_of_an_older_schema_says_what_to_do(store_url: str, tmp_path: Path) -> None:
    with Store.open(store_url, tmp_path) as store:
        set_version(store, store.db.schema() - 1)
        if store.db.dialect == "postgres":
            rows(store, "DELETE FROM migrations")
    with pytest.raises(ConfigError, match="this ostler reads|is not there yet") as told:
        Store.open(store_url, tmp_path, read_only=True)
    assert "'ostler up'" in str(told.value)


def test_a_migration_that_fails_leaves_nothing_behind(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = queries.migrations("postgres")
    broken = [*good, (good[-1][0] + 1, "broken", "CREATE TABLE ostler.half (id int); SELECT 1 / 0;")]
    with monkeypatch.context() as patch:
        patch.setattr(queries, "migrations", lambda dialect: broken)
        with pytest.raises(Exception, match="division by zero"):
            Store.open(database, tmp_path)
    db = connect(database, tmp_path)
    with Store(db) as store:
        assert db.schema() == 0
        assert rows(store, "SELECT 1 FROM pg_namespace WHERE nspname = 'ostler'") == []
        assert db.migrate() == [name for _, name, _ in good]


# ---- the same schema, whichever way


def sqlite_schema(path: Path) -> dict[str, Any]:
    """Tables by their columns, and the SQL of all else, without regard to order and white space."""
    connection = sqlite3.connect(path)
    found: dict[str, Any] = {}
    for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master"):
        if kind == "table":
            columns = connection.execute(f"PRAGMA table_xinfo({name})").fetchall()
            checks = sorted(re.findall(r"CHECK \((?:[^()]|\([^()]*\))*\)", sql))
            found[name] = sorted(column[1:] for column in columns), checks, "AUTOINCREMENT" in sql, "WITHOUT" in sql
        elif sql:
            found[name] = re.sub(r"\s+", " ", re.sub(r"--[^\n]*", "", sql)).strip()
    connection.close()
    return found


def test_a_migrated_sqlite_store_has_the_schema_of_a_fresh_one(tmp_path: Path) -> None:
    Store.open("", tmp_path / "fresh").close()
    Store.open("", restored(tmp_path / "old")).close()
    assert sqlite_schema(tmp_path / "old" / "ostler.db") == sqlite_schema(tmp_path / "fresh" / "ostler.db")


CATALOG = """
SELECT 'column', table_name::text, column_name::text, data_type::text, column_default::text, is_nullable::text, is_identity::text
  FROM information_schema.columns WHERE table_schema = :schema
 UNION ALL
SELECT 'index', tablename, indexname, indexdef, NULL, NULL, NULL FROM pg_indexes WHERE schemaname = :schema
 UNION ALL
SELECT 'constraint', r.relname, c.conname, pg_get_constraintdef(c.oid), NULL, NULL, NULL
  FROM pg_constraint c JOIN pg_class r ON r.oid = c.conrelid JOIN pg_namespace n ON n.oid = r.relnamespace
 WHERE n.nspname = :schema
 UNION ALL
SELECT 'view', viewname, definition, NULL, NULL, NULL, NULL FROM pg_views WHERE schemaname = :schema
 UNION ALL
SELECT 'function', p.proname, pg_get_functiondef(p.oid), NULL, NULL, NULL, NULL
  FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = :schema
 UNION ALL
SELECT 'trigger', r.relname, t.tgname, pg_get_triggerdef(t.oid), NULL, NULL, NULL
  FROM pg_trigger t JOIN pg_class r ON r.oid = t.tgrelid JOIN pg_namespace n ON n.oid = r.relnamespace
 WHERE n.nspname = :schema AND NOT t.tgisinternal
 UNION ALL
SELECT 'options', r.relname, array_to_string(r.reloptions, ','), NULL, NULL, NULL, NULL
  FROM pg_class r JOIN pg_namespace n ON n.oid = r.relnamespace WHERE n.nspname = :schema
"""


def catalog(store: Store, schema: str) -> list[tuple[Any, ...]]:
    found = rows(store, CATALOG, schema=schema)
    assert found
    return sorted(tuple(str(v).replace(f"{schema}.", "") for v in row) for row in found)


def test_a_postgres_store_migrated_step_by_step_has_the_schema_of_a_fresh_one(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = queries.migrations("postgres")
    for count in range(1, len(known) + 1):
        with monkeypatch.context() as patch:
            patch.setattr(queries, "migrations", lambda dialect, count=count: known[:count])
            Store.open(f"{database}&schema=stepped", tmp_path).close()
    Store.open(f"{database}&schema=fresh", tmp_path).close()
    with Store.open(f"{database}&schema=stepped", tmp_path) as store:
        assert catalog(store, "stepped") == catalog(store, "fresh")


def columns(store: Store) -> dict[str, set[str]]:
    """The columns of each table, on either database."""
    found: dict[str, set[str]] = {}
    if store.db.dialect == "sqlite":
        tables = [name for (name,) in rows(store, "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")]
        for table in tables:
            found[table] = {row[1] for row in rows(store, f"PRAGMA table_xinfo({table})")}
    else:
        sql = "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'ostler'"
        for table, column in rows(store, sql):
            found.setdefault(table, set()).add(column)
    return found


def test_both_databases_have_the_same_tables_with_the_same_columns(database: str, tmp_path: Path) -> None:
    with Store.open("", tmp_path) as one, Store.open(database, tmp_path) as other:
        here, there = columns(one), columns(other)
    assert there.pop("migrations")  # SQLite keeps its number in the header of the file
    here = {name: found for name, found in here.items() if not name.startswith("sqlite_")}
    there["tallies"].remove("part")
    there["depths"].remove("rings")  # for jobs that are stored in a guest's transaction
    assert here == there


# ---- several apps in one database


def test_apps_with_schemas_of_their_own_do_not_see_each_other(database: str, tmp_path: Path) -> None:
    def opened(schema: str, **how: Any) -> Store:
        return Store.open(f"{database}&schema={schema}", tmp_path, **how)

    with opened("one") as one, opened("two", busy_timeout=0.2) as two, opened("one", busy_timeout=0.2) as same:
        assert one.jobs.put([NewJob("t", "q", "{}", unique_key="k")], 1) == [(1, True)]
        assert two.jobs.put([NewJob("t", "q", "{}", unique_key="k")], 1) == [(1, True)]
        two.jobs.cancel(1, 2)
        assert one.jobs.get(1)["status"] == "queued"
        assert (one.jobs.depths(), two.jobs.depths()) == ({"q": {"queued": 1}}, {"q": {"cancelled": 1}})
        with one.db.transaction():
            one.db.lock(["unique:x"])
            assert two.jobs.put([NewJob("t", "q", "{}", unique_key="x")], 1) == [(2, True)]  # not its lock
            with pytest.raises(StoreBusy):
                same.jobs.put([NewJob("t", "q", "{}", unique_key="x")], 1)


def test_a_ring_is_heard_in_its_own_schema_alone(database: str, tmp_path: Path) -> None:
    with Store.open(f"{database}&schema=one", tmp_path) as one, Store.open(f"{database}&schema=two", tmp_path) as two:
        listening = two.db.place.connect()
        listening.execute(f"LISTEN {two.db.place.channel}")
        one.db.ring_all()
        assert list(listening.notifies(timeout=0.3)) == []
        two.db.ring_all()
        assert len(list(listening.notifies(timeout=10, stop_after=1))) == 1
        listening.close()


@pytest.mark.parametrize("schema", ["Ostler", "1st", "a-b", "a.b", "x" * 64, 'a"; DROP SCHEMA public; --'])
def test_a_schema_that_would_have_to_be_quoted_is_refused(postgres: Server, schema: str) -> None:
    from urllib.parse import quote

    with pytest.raises(ConfigError, match="must be of small letters"):
        Store.open(f"{postgres.url()}&schema={quote(schema)}", Path())


def test_a_search_path_and_other_settings_of_the_role_change_nothing(
    postgres: Server, database: str, tmp_path: Path
) -> None:
    name = name_of(database)
    for setting in (
        "search_path = nowhere",
        "timezone = 'Asia/Tokyo'",
        "datestyle = 'German, DMY'",
        "lc_messages = 'C'",
    ):
        postgres.sql(f'ALTER DATABASE "{name}" SET {setting}')
    postgres.sql(f"ALTER DATABASE \"{name}\" SET default_transaction_isolation = 'serializable'")
    with Store.open(database, tmp_path) as store:
        store.jobs.enqueue([NewJob("t", "q", "{}")], 1)
        assert len(store.turns.take(Turn("n", 2, wants={"q": ["w"]})).claims) == 1
        assert value(store, "SELECT count(*) FROM jobs WHERE status = 'processing'") == 1
        with store.db.transaction():
            assert store.db._query("SHOW transaction_isolation") == [("read committed",)]
