"""Jobs that are stored in a transaction of the caller's: they appear with its commit, or not at all."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import threading
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Iterator

import asyncpg
import django
import psycopg
import pytest
import sqlalchemy
from django.conf import settings as django_settings
from django.db import connections
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from ostler import BadArguments, ConfigError, Conflict
from ostler.errors import StoreBusy
from ostler.jobs.options import OPTIONS
from ostler.jobs.producer import prepare
from ostler.store import Store, queries
from ostler.store.nodes import NodeRow
from tests import featured
from tests.harness import ROOT, until
from tests.servers import Server

APP = ROOT / "featured.py"


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch, database: str, tmp_path: Path) -> Iterator[ModuleType]:
    """An app whose store is an empty database."""
    yield from _app(monkeypatch, database, tmp_path)


@pytest.fixture
def small_shop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """The same app on SQLite."""
    yield from _app(monkeypatch, "", tmp_path)


def _app(monkeypatch: pytest.MonkeyPatch, url: str, data: Path) -> Iterator[ModuleType]:
    monkeypatch.setenv("OSTLER_STORE", url)
    monkeypatch.setenv("OSTLER_DATA", str(data))
    monkeypatch.setattr(featured.app, "_producer", None)
    Store.open(url, data).close()
    yield featured
    if featured.app._producer is not None:
        featured.app._producer.close()


@contextmanager
def opened(app: ModuleType) -> Iterator[Store]:
    settings = app.app.settings()
    with Store.open(settings.store, settings.data_dir) as store:
        yield store


def jobs_of(app: ModuleType) -> list[dict[str, Any]]:
    with opened(app) as store:
        return store.jobs.list(limit=1000)[0][::-1]


# ---- every library, both ends of a transaction


class _OfDjango:
    """Two aliases of Django's connections, made for one database."""

    def __init__(self, url: str) -> None:
        if not django_settings.configured:
            django_settings.configure(DATABASES={}, USE_TZ=True)
            django.setup()
        parts = psycopg.conninfo.conninfo_to_dict(url)
        self.settings = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": parts["dbname"],
            "USER": parts["user"],
            "HOST": parts["host"],
            "PORT": parts["port"],
        }

    @contextmanager
    def connection(self) -> Iterator[Any]:
        connections.databases["shop"] = connections.configure_settings(
            {"default": self.settings, "shop": self.settings}
        )["shop"]
        try:
            yield connections["shop"]
        finally:
            connections["shop"].close()
            del connections["shop"], connections.databases["shop"]


def _sync_ways(url: str) -> dict[str, Any]:
    """For each library: open a connection, and end its transaction."""

    @contextmanager
    def by_psycopg(commit: bool) -> Iterator[Any]:
        with psycopg.connect(url, row_factory=dict_row) as connection:
            yield connection
            connection.commit() if commit else connection.rollback()

    @contextmanager
    def by_raw_cursors(commit: bool) -> Iterator[Any]:
        with psycopg.connect(url, cursor_factory=psycopg.RawCursor) as connection:
            yield connection
            connection.commit() if commit else connection.rollback()

    def engine() -> Any:
        return sqlalchemy.create_engine(
            "postgresql+psycopg://", creator=lambda: psycopg.connect(url), poolclass=NullPool
        )

    @contextmanager
    def by_sqlalchemy(commit: bool) -> Iterator[Any]:
        with engine().connect() as connection:
            yield connection
            connection.commit() if commit else connection.rollback()

    @contextmanager
    def by_session(commit: bool) -> Iterator[Any]:
        with Session(engine()) as session:
            yield session
            session.commit() if commit else session.rollback()

    @contextmanager
    def by_scoped_session(commit: bool) -> Iterator[Any]:
        session = scoped_session(sessionmaker(engine()))
        yield session
        session.commit() if commit else session.rollback()
        session.remove()

    @contextmanager
    def by_django(commit: bool) -> Iterator[Any]:
        from django.db import transaction

        with _OfDjango(url).connection() as connection:
            connection.set_autocommit(False)
            yield connection
            transaction.commit(using="shop") if commit else transaction.rollback(using="shop")

    return {
        "psycopg": by_psycopg,
        "raw_cursors": by_raw_cursors,
        "sqlalchemy": by_sqlalchemy,
        "session": by_session,
        "scoped_session": by_scoped_session,
        "django": by_django,
    }


SYNC = ["psycopg", "raw_cursors", "sqlalchemy", "session", "scoped_session", "django"]


@pytest.mark.parametrize("library", SYNC)
def test_a_job_appears_with_the_commit_and_not_before(shop: ModuleType, database: str, library: str) -> None:
    with _sync_ways(database)[library](True) as connection:
        first = shop.double.enqueue(x=1, connection=connection)
        second = shop.double.options(connection=connection, priority=3).enqueue(2)
        many = shop.double.enqueue_many([{"x": 3}, {"x": 4}], connection=connection)
        chain = shop.double.s(x=5).then(shop.double.s(), into="x").enqueue(connection=connection)
        batch = shop.app.batch([shop.double.s(x=6)], then=shop.report.s(), into="summary", connection=connection)
        assert jobs_of(shop) == []
    ids = [first, second, *many, chain, *batch.jobs]
    assert [job["id"] for job in jobs_of(shop)] == ids == sorted(set(ids))
    with opened(shop) as store:
        assert store.jobs.depths() == {"work": {"queued": 6}}
        assert store.jobs.find(second)["priority"] == 3
        assert store.jobs.flows.get_batch(batch)["pending"] == 1
        assert [e["name"] for e in store.jobs.events(first)] == ["created"]


@pytest.mark.parametrize("library", SYNC)
def test_a_transaction_that_is_rolled_back_leaves_nothing(shop: ModuleType, database: str, library: str) -> None:
    with _sync_ways(database)[library](False) as connection:
        shop.once.enqueue(name="a", connection=connection)
        shop.per_user.enqueue(user="u", folder="f", connection=connection)
        shop.app.batch([shop.double.s(x=1)], connection=connection)
    with opened(shop) as store:
        assert store.jobs.list()[0] == [] and store.jobs.depths() == {}
    assert isinstance(shop.once.enqueue(name="a"), int)


def _async_ways(url: str, commit: bool) -> dict[str, Any]:
    async def by_psycopg(work: Any) -> Any:
        async with await psycopg.AsyncConnection.connect(url) as connection:
            found = await work(connection)
            await (connection.commit() if commit else connection.rollback())
            return found

    async def by_asyncpg(work: Any) -> Any:
        connection = await asyncpg.connect(url)
        await connection.set_type_codec("jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
        transaction = connection.transaction()
        await transaction.start()
        found = await work(connection)
        await (transaction.commit() if commit else transaction.rollback())
        await connection.close()
        return found

    async def by_pool(work: Any) -> Any:
        async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool, pool.acquire() as connection:
            transaction = connection.transaction()
            await transaction.start()
            found = await work(connection)
            await (transaction.commit() if commit else transaction.rollback())
            return found

    def engine() -> Any:
        return create_async_engine("postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(url))

    async def by_session(work: Any) -> Any:
        made = engine()
        async with AsyncSession(made) as session:
            found = await work(session)
            await (session.commit() if commit else session.rollback())
        await made.dispose()
        return found

    async def by_sqlalchemy(work: Any) -> Any:
        made = engine()
        async with made.connect() as connection:
            found = await work(connection)
            await (connection.commit() if commit else connection.rollback())
        await made.dispose()
        return found

    return {
        "psycopg": by_psycopg,
        "asyncpg": by_asyncpg,
        "pool": by_pool,
        "session": by_session,
        "sqlalchemy": by_sqlalchemy,
    }


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("library", ["psycopg", "asyncpg", "pool", "session", "sqlalchemy"])
def test_async_code_awaits_the_same(shop: ModuleType, database: str, library: str, commit: bool) -> None:
    async def work(connection: Any) -> list[int]:
        first = await shop.double.enqueue_async(x=1, connection=connection)
        many = await shop.double.enqueue_many_async([{"x": 2}, {"x": 3}], connection=connection)
        chain = await shop.double.s(x=5).then(shop.double.s(), into="x").enqueue_async(connection)
        batch = await shop.app.batch_async([shop.double.s(x=6)], connection=connection)
        assert jobs_of(shop) == []
        return [first, *many, chain, *batch.jobs]

    with asyncio.Runner() as runner:
        ids = runner.run(_async_ways(database, commit)[library](work))
    assert [job["id"] for job in jobs_of(shop)] == (ids if commit else [])


def test_async_calls_without_a_connection_work_as_before(small_shop: ModuleType) -> None:
    async def work() -> list[int]:
        batch = await small_shop.app.batch_async([small_shop.double.s(x=1)])
        many = await small_shop.double.enqueue_many_async([{"x": 2}])
        return [*batch.jobs, *many, await small_shop.double.enqueue_async(x=3)]

    assert asyncio.run(work()) == [job["id"] for job in jobs_of(small_shop)]


# ---- what the job is


def test_a_job_of_the_callers_transaction_equals_one_of_ours(shop: ModuleType, database: str) -> None:
    """Of every kind of option and policy; only numbers and times differ, and that a limited job is due now."""
    declared = featured.app.job(queue="work", name="rich", attempts=7, timeout=5, priority=2, backoff=(1, 9), unique=["x"],
                                unique_for=60, at_once=3, per="x")  # fmt: skip
    try:
        task = declared(lambda job, x, y=1: None)
        ways = [
            lambda t, **more: t.enqueue(x="a\u0000ü", **more),
            lambda t, **more: t.options(attempts=1, timeout=2, priority=-1, delay=3600).enqueue(x=[1], **more),
            lambda t, **more: t.options(unique_key="k", unique_for=5, limit_key="l", limit_max=9).enqueue(x={"b": 1, "a": 2}, **more),
        ]  # fmt: skip
        with opened(shop) as store, psycopg.connect(database) as connection:
            for way in ways:
                plain = way(task)
                ours = dict(store.db.run("job", id=plain)[0])
                held = store.db.run("unique_holder", key=ours["unique_key"], now=store.now())
                store.db.run("unique_set", key=ours["unique_key"], job=0, until=1)
                theirs = dict(store.db.run("job", id=_committed(way, task, connection))[0])
                assert held[0]["job"] == plain
                for name in ("id", "created_at", "run_at", "later", "behind"):
                    del ours[name], theirs[name]
                assert theirs == ours
    finally:
        del featured.app.tasks["rich"]


def _committed(way: Any, task: Any, connection: Any) -> int:
    job = way(task, connection=connection)
    connection.commit()
    return int(job)


def test_a_task_with_a_parameter_named_connection_takes_the_options_one(shop: ModuleType, database: str) -> None:
    task = featured.app.job(queue="work", name="joins")(lambda job, connection: None)
    try:
        with psycopg.connect(database) as connection:
            job = task.options(connection=connection).enqueue(connection="text")
            assert jobs_of(shop) == []
            connection.commit()
        with opened(shop) as store:
            assert store.jobs.find(job)["args"] == {"connection": "text"}
    finally:
        del featured.app.tasks["joins"]


def test_five_thousand_and_more_go_into_one_transaction(shop: ModuleType, database: str) -> None:
    with psycopg.connect(database) as connection:
        ids = shop.double.enqueue_many(({"x": n} for n in range(7000)), connection=connection)
        assert len(set(ids)) == 7000 and ids == sorted(ids)
        connection.rollback()
    assert jobs_of(shop) == []


def test_steps_inside_a_chain_or_batch_have_no_connection_of_their_own(shop: ModuleType, database: str) -> None:
    with psycopg.connect(database) as connection:
        own = shop.double.options(connection=connection).s(x=1)
        for wrong in (
            lambda: shop.double.s(x=1).then(own, into="x").enqueue(),
            lambda: shop.app.batch([own]),
            lambda: shop.app.batch([own.then(shop.double.s(), into="x")]),
            lambda: shop.app.batch([], then=own),
        ):
            with pytest.raises(
                BadArguments, match="a step of a chain, batch or schedule cannot have its own connection"
            ):
                wrong()
        own.then(shop.double.s(), into="x").enqueue()  # the first one's is the chain's
        assert jobs_of(shop) == []
        connection.commit()
    assert len(jobs_of(shop)) == 1


def test_a_batch_of_jobs_that_are_there_already_calls_back_at_once(shop: ModuleType, database: str) -> None:
    there = shop.once.enqueue(name="a")
    with psycopg.connect(database) as connection:
        then = shop.report.options(delay=100).s()
        full = shop.app.batch(
            [shop.once.s(name="a"), shop.once.s(name="a")], then=then, into="summary", connection=connection
        )
        empty = shop.app.batch([], then=shop.report.s(), into="summary", connection=connection)
        half = shop.app.batch(
            [shop.once.s(name="a"), shop.double.s(x=1)], then=then, into="summary", connection=connection
        )
        connection.commit()
    assert full.jobs == [there, there] and empty.jobs == []
    with opened(shop) as store:
        found = [store.jobs.flows.get_batch(batch) for batch in (full, empty, half)]
        assert [row["pending"] for row in found] == [0, 0, 1]
        called = [store.jobs.find(row["callback_job"]) for row in found[:2]]
        assert [job["args"] for job in called] == [
            {"summary": {"batch": full, "total": 2, "failed": 0}},
            {"summary": {"batch": empty, "total": 0, "failed": 0}},
        ]
        assert called[0]["run_at"] > store.now() + 90_000 and called[1]["run_at"] is None
        assert found[2]["callback_job"] is None


# ---- others at the same time


def test_a_unique_job_waits_for_the_open_transaction_that_has_its_key(shop: ModuleType, database: str) -> None:
    """And gets that one's id when it is committed; when it is rolled back, the job is its own."""
    for commit in (True, False):
        found: list[int] = []
        with psycopg.connect(database) as connection:
            theirs = shop.once.enqueue(name=f"{commit}", connection=connection)
            other = threading.Thread(target=_enqueue_once, args=(shop, f"{commit}", found))
            other.start()
            until(lambda: _waiting(database), "the other producer to wait")
            assert found == []
            connection.commit() if commit else connection.rollback()
            other.join()
        assert (found == [theirs]) is commit
    assert len(jobs_of(shop)) == 2


def _enqueue_once(app: ModuleType, name: str, found: list[int]) -> None:
    found.append(app.once.enqueue(name=name))
    app.app.producer.close()


def _waiting(database: str) -> bool:
    with psycopg.connect(database) as connection:
        return bool(connection.execute("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted").fetchall())


def test_two_transactions_get_the_same_unique_job(shop: ModuleType, database: str) -> None:
    with psycopg.connect(database) as one, psycopg.connect(database) as two:
        first = shop.once.enqueue(name="a", connection=one)
        one.commit()
        assert shop.once.enqueue(name="a", connection=two) == first
        assert shop.once.options(unique_key="other").enqueue(name="a", connection=two) != first
        with pytest.raises(Conflict, match=f"job {first} holds the unique key of the first step of this chain"):
            shop.once.s(name="a").then(shop.double.s(x=1)).enqueue(connection=two)
        two.commit()  # a refused chain does not spoil the transaction
    assert len(jobs_of(shop)) == 2


def test_a_transaction_with_an_old_snapshot_stores_no_second_unique_job(shop: ModuleType, database: str) -> None:
    with psycopg.connect(database) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT 1 FROM ostler.jobs")
        first = shop.once.enqueue(name="a")
        with pytest.raises(psycopg.errors.SerializationFailure):
            shop.once.enqueue(name="a", connection=connection)
        connection.rollback()
        assert shop.once.enqueue(name="a", connection=connection) == first


def test_upkeep_does_not_wait_for_an_open_transaction_that_takes_an_old_key(shop: ModuleType, database: str) -> None:
    old = [shop.once.enqueue(name=name) for name in ("a", "b")]
    with psycopg.connect(database) as connection, opened(shop) as store:
        for job in old:
            store.jobs.cancel(job, store.now())
        shop.once.enqueue(name="a", connection=connection)
        store.jobs.retention.purge_keys(store.now())
        connection.commit()
        assert len(connection.execute("SELECT key FROM ostler.uniques").fetchall()) == 1


def test_an_open_transaction_with_a_limited_job_blocks_nobody(shop: ModuleType, database: str, make_node: Any) -> None:
    """Others with the same key go on, and its own job runs after the commit."""
    node = make_node("--pool", "keys=2", app=APP, OSTLER_STORE=database, OSTLER_POLL_INTERVAL="600")
    folder = str(node.folder)
    with psycopg.connect(database) as connection:
        waits = shop.per_user.enqueue(user="u", folder=folder, connection=connection)
        for _ in range(3):
            node.wait_job(shop.per_user.enqueue(user="u", folder=folder), "done")
        assert node.get(f"/api/v1/jobs/{waits}")[0] == 404
        connection.commit()
    assert node.wait_job(waits, "done")["result"] == 1


def test_many_limited_jobs_keep_to_their_limit(shop: ModuleType, database: str, make_node: Any) -> None:
    node = make_node("--pool", "keys=4", app=APP, OSTLER_STORE=database, OSTLER_POLL_INTERVAL="600")
    folder = node.folder / "running"
    folder.mkdir()
    ids: list[int] = []
    with psycopg.connect(database) as connection:
        for n in range(24):
            ids.append(shop.per_user.enqueue(user=f"u{n % 3}", folder=str(folder), connection=connection))
            if n % 4 == 3:
                connection.commit()
    assert {node.wait_job(job, "done")["result"] for job in ids} == {1}
    with opened(shop) as store:
        until(lambda: store.jobs.depths() == {}, "the counts to agree")


def test_claims_pass_over_no_pile_of_jobs_whose_key_is_full(shop: ModuleType, database: str) -> None:
    """However many were stored in transactions of others: one of them stands in the ready index, the rest behind it."""
    with psycopg.connect(database) as connection, opened(shop) as store:
        many = [{"user": "u", "folder": "f"} for _ in range(500)]
        shop.per_user.enqueue_many(many, connection=connection)
        connection.commit()
        from ostler.store.rows import Turn

        store.nodes.register(NodeRow("n", "n", 10**9))
        taken = store.turns.take(Turn("n", store.now() + 5, wants={"keys": ["a", "b"]}))
        assert len(taken.claims) == 1
        ready = "SELECT count(*) FROM ostler.jobs WHERE status = 'queued' AND later = 0 AND behind = 0"
        assert connection.execute(ready).fetchall() == [(1,)]
        assert store.jobs.depths() == {"keys": {"queued": 499, "processing": 1}}


# ---- a node


def test_a_node_runs_the_job_right_after_the_commit(shop: ModuleType, database: str, make_node: Any) -> None:
    """By NOTIFY: its poll comes once in ten minutes."""
    node = make_node("--pool", "work=1", app=APP, OSTLER_STORE=database, OSTLER_POLL_INTERVAL="600")
    with psycopg.connect(database) as connection:
        for x in range(3):
            until(lambda: _idle(shop), "the node to wait for jobs")
            job = shop.double.enqueue(x=x, connection=connection)
            connection.commit()
            assert node.wait_job(job, "done")["result"] == 2 * x
    until(lambda: _idle(shop), "the node to wait for jobs")  # the same by plain SQL
    with psycopg.connect(database) as connection:
        job = connection.execute("""SELECT ostler.enqueue('double', '{"x": 21}')""").fetchall()[0][0]
    assert node.wait_job(job, "done")["result"] == 42


def test_who_waits_at_the_commit_is_woken_whatever_was_at_the_call(shop: ModuleType, database: str) -> None:
    """And nobody else: a NOTIFY costs all commits a common lock."""
    with (
        psycopg.connect(database) as connection,
        psycopg.connect(database, autocommit=True) as listener,
        opened(shop) as store,
    ):
        store.nodes.register(NodeRow("n", "n", 10**9))
        listener.execute("LISTEN ostler_ostler")
        for before, after, rings in (("[]", '["work"]', True), ('["work"]', '["other"]', False)):
            store.db.run("node_waits", id="n", waits=before)
            shop.double.enqueue_many([{"x": 1}, {"x": 2}], connection=connection)
            shop.double.enqueue(x=1, connection=connection)
            store.db.run("node_waits", id="n", waits=after)
            connection.commit()
            listener.execute("NOTIFY ostler_ostler, 'end'")
            heard = [note.payload for note in listener.notifies(timeout=10, stop_after=1 + rings)]
            assert heard == [""] * rings + ["end"]


def _idle(app: ModuleType) -> bool:
    with opened(app) as store:
        return any("work" in node["waits"] for node in store.nodes.alive())


# ---- what is refused


def test_a_wrong_connection_is_refused_with_what_was_found(
    shop: ModuleType, database: str, postgres: Server, tmp_path: Path
) -> None:
    def refused(what: type[Exception], match: str, connection: Any) -> None:
        with pytest.raises(what, match=match):
            shop.double.enqueue(x=1, connection=connection)

    refused(BadArguments, "must be one of psycopg .* found builtins.str; nothing was stored", "postgresql://…")
    with closing(sqlite3.connect(":memory:")) as connection:
        refused(BadArguments, r"on PostgreSQL, but the connection \(sqlite3.Connection\) is to sqlite", connection)
    lite = sqlalchemy.create_engine("sqlite://", poolclass=NullPool)
    with lite.connect() as connection, Session(lite) as session:
        refused(BadArguments, "is to sqlite; nothing was stored", connection)
        refused(BadArguments, "is to sqlite; nothing was stored", session)
    stranger = postgres.create_database()
    with psycopg.connect(postgres.url(stranger)) as connection:
        refused(ConfigError, "database has no schema ostler .* run 'ostler migrate'", connection)
    Store.open(postgres.url(stranger), tmp_path).close()
    with psycopg.connect(postgres.url(stranger)) as connection:
        refused(ConfigError, f"the connection is to database {stranger}, but the store is in database", connection)
    with pytest.raises(
        BadArguments, match="is not an async connection; nothing was stored. Use the call without _async"
    ):
        with psycopg.connect(database) as connection:
            asyncio.run(shop.double.enqueue_async(x=1, connection=connection))

    async def unawaited() -> None:
        async with await psycopg.AsyncConnection.connect(database) as connection:
            shop.double.enqueue(x=1, connection=connection)

    with pytest.raises(BadArguments, match="is an async connection; nothing was stored. Use await"):
        asyncio.run(unawaited())
    assert jobs_of(shop) == []
    postgres.drop_database(stranger)


def test_arguments_are_checked_before_the_connection_is_used(shop: ModuleType) -> None:
    with pytest.raises(BadArguments, match="'x' must be int"):
        shop.double.enqueue(x="1", connection=object())
    with pytest.raises(BadArguments, match="'nope' is not an option"):
        shop.double.options(nope=1, connection=object())


def test_errors_of_the_callers_transaction_stay_its_librarys(shop: ModuleType, database: str) -> None:
    with psycopg.connect(database) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("SELECT 1 / 0")
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            shop.double.enqueue(x=1, connection=connection)
        connection.rollback()
        shop.double.enqueue(x=1, connection=connection)
    assert len(jobs_of(shop)) == 1


def test_a_role_that_only_enqueues_needs_one_function(shop: ModuleType, database: str, postgres: Server) -> None:
    role = f"web_{random.getrandbits(32):x}"
    name = psycopg.conninfo.conninfo_to_dict(database)["dbname"]
    postgres.create_role(role)
    _declare(shop)
    mine = postgres.url(str(name), user=role)
    try:
        with psycopg.connect(mine) as connection:
            with pytest.raises(ConfigError, match=r"has no permission to enqueue .* GRANT USAGE ON SCHEMA ostler"):
                shop.double.enqueue(x=1, connection=connection)
        postgres.sql(f"GRANT USAGE ON SCHEMA ostler TO {role}", database=str(name))
        with psycopg.connect(mine) as connection:
            with pytest.raises(ConfigError, match="GRANT EXECUTE ON FUNCTION ostler.put"):
                shop.double.enqueue(x=1, connection=connection)
        grant = f"GRANT EXECUTE ON FUNCTION ostler.put, ostler.enqueue(text, text, jsonb) TO {role}"
        postgres.sql(grant, database=str(name))
        with psycopg.connect(mine) as connection:
            shop.double.enqueue(x=1, connection=connection)
            connection.execute("SELECT ostler.enqueue('double', jsonb_build_object('x', 2))")
            connection.commit()
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute("SELECT * FROM ostler.jobs")
        assert len(jobs_of(shop)) == 2
    finally:
        postgres.sql(f"DROP OWNED BY {role}", database=str(name))
        postgres.sql(f"DROP ROLE {role}")


# ---- plain SQL


def _declare(app: ModuleType) -> None:
    """As a node of the app would."""
    with opened(app) as store:
        store.nodes.register(NodeRow("n", "n", 10**9))
        rows = [
            {**t.row, "parameters": json.dumps(t.parameters), "policy": json.dumps(t.row["policy"])}
            for t in app.app.tasks.values()
        ]
        store.nodes.declare("n", rows, [])


def test_sql_checks_the_task_the_names_and_the_options(shop: ModuleType, database: str) -> None:
    _declare(shop)
    wrong = {
        "'nope'": "there is no task 'nope'; declared are: begin, digs, double",
        "'double'": r"the arguments do not fit task 'double': 'x' is missing. It takes \(x\)",
        """'once', '{"n": 1}'""": r"'name' is missing; 'n' is not a parameter. It takes \(name, other = …\)",
        "'double', '[1]'": "must be an object of names and values, found array",
        "'double', NULL::text": "must be an object of names and values, found NULL",
        "'double', '{'": "invalid input syntax for type json",
        """'double', '{"x": 1}', '{"prio": 1}'""": "'prio' is not an option; known are: attempts, delay",
        """'double', '{"x": 1}', '{"priority": 1.5}'""": "priority must be a whole number from -1000000 to 1000000, found 1.5",
        """'double', '{"x": 1}', '{"run_at": 1700000000}'""": "this looks like seconds: multiply by 1000",
        """'double', '{"x": 1}', '{"unique_for": 5}'""": "unique_for goes with a unique key, found none",
        """'double', '{"x": 1}', '{"limit_key": "k"}'""": "limit_key goes with a limit_max",
        """'double', '{"x": 1}', '[]'""": "options of task 'double' must be an object",
        """'once', '{"name": 1.5}'""": "1.5 is not a whole number",
    }
    for call, message in wrong.items():
        with psycopg.connect(database) as connection, pytest.raises(psycopg.Error, match=message):
            connection.execute(f"SELECT ostler.enqueue({call})")
    assert jobs_of(shop) == []


def test_sql_takes_arguments_as_text_json_and_jsonb(shop: ModuleType, database: str) -> None:
    _declare(shop)
    with psycopg.connect(database) as connection:
        for args in (
            """'{"x": 1}'""",
            """'{"x": 1}'::text""",
            "json_build_object('x', 1)",
            "jsonb_build_object('x', 1)",
        ):
            connection.execute(f"SELECT ostler.enqueue('double', {args})")
        connection.execute("SELECT ostler.enqueue('begin')")
        connection.execute("""SELECT ostler.enqueue('begin', options => '{"delay": 100}')""")
        connection.execute("""SELECT ostler.enqueue('talks', '{"text": "\\u0000 \\ud83d\\ude00"}')""")
    with opened(shop) as store:
        found = [store.jobs.find(job["id"]) for job in jobs_of(shop)]
    assert [job["args"] for job in found[:4]] == [{"x": 1}] * 4
    assert found[6]["args"] == {"text": "\x00 \U0001f600"}
    assert found[5]["run_at"] - found[5]["created_at"] in range(99_990, 100_010)


def test_sql_makes_the_same_keys_as_python(shop: ModuleType, database: str) -> None:
    """Of all JSON but numbers that are not whole."""
    task = featured.app.job(queue="work", name="keyed", unique=True, at_once=2, per="v")(
        lambda job, v, w=(1, "ü"): None
    )
    try:
        _declare(shop)
        dice = random.Random(8)
        with psycopg.connect(database) as connection:
            for _ in range(300):
                args = {"v": _value(dice, 3)} | ({"w": _value(dice, 2)} if dice.random() < 0.5 else {})
                ours = prepare({"keyed": task.row}, "keyed", args, 10**6)
                text = json.dumps(args, ensure_ascii=dice.random() < 0.5, indent=dice.choice([None, 2]))
                made = connection.execute("SELECT ostler.enqueue('keyed', %s)", [text]).fetchall()[0][0]
                query = "SELECT unique_key, limit_key, limit_max, args FROM ostler.jobs WHERE id = %s"
                key, limit_key, most, stored = connection.execute(query, [made]).fetchall()[0]
                assert (key, limit_key, most) == (ours.unique_key, ours.limit_key, ours.limit_max), text
                assert json.loads(stored) == args
    finally:
        del featured.app.tasks["keyed"]


def _value(dice: random.Random, depth: int) -> Any:
    def text() -> str:
        return "".join(dice.choice('ab"\\/\n\t\x01\x7fäß€\U0001f600 ') for _ in range(dice.randrange(8)))

    kind = dice.randrange(7 if depth else 5)
    if kind == 5:
        return [_value(dice, depth - 1) for _ in range(dice.randrange(4))]
    if kind == 6:
        return {text(): _value(dice, depth - 1) for _ in range(dice.randrange(4))}
    return [text() * 60, text(), dice.randrange(-(10**20), 10**20), None, dice.random() < 0.5][kind]


def test_sql_knows_the_options_that_python_knows() -> None:
    script = queries.migrations("postgres")[0][2]
    for name, option in OPTIONS.items():
        assert f"('{name}', '{option.kind.__name__}', " in script and f"'{option.wanted}')" in script
    assert f"known are: {', '.join(sorted(OPTIONS))}" in script


def test_another_schema_has_functions_of_its_own(
    monkeypatch: pytest.MonkeyPatch, database: str, tmp_path: Path
) -> None:
    url = f"{database}&schema=other"
    Store.open(url, tmp_path).close()
    for app in _app(monkeypatch, url, tmp_path):
        _declare(app)
        with psycopg.connect(database) as connection:
            app.once.enqueue(name="a", connection=connection)
            connection.execute("""SELECT other.enqueue('once', '{"name": "b"}')""")
            connection.commit()
        assert len(jobs_of(app)) == 2


# ---- SQLite


def _file(app: ModuleType) -> Path:
    found: Path = app.app.settings().data_dir / "ostler.db"
    return found


@pytest.mark.parametrize("how", [{}, {"isolation_level": "IMMEDIATE"}, {"isolation_level": None}])
def test_on_sqlite_the_connection_is_one_on_the_same_file(small_shop: ModuleType, how: dict[str, Any]) -> None:
    connection = sqlite3.connect(_file(small_shop), **how)
    connection.row_factory = lambda cursor, row: "whatever"
    connection.execute("CREATE TABLE orders (id INTEGER)")
    for commit in (False, True):
        if how == {"isolation_level": None}:
            connection.execute("BEGIN")
        connection.execute("INSERT INTO orders VALUES (1)")
        small_shop.once.enqueue(name="a", connection=connection)
        small_shop.per_user.enqueue(user="u", folder="f", connection=connection)
        small_shop.double.enqueue_many([{"x": 1}, {"x": 2}], connection=connection)
        small_shop.double.s(x=3).then(small_shop.double.s(), into="x").enqueue(connection)
        small_shop.app.batch(
            [small_shop.double.s(x=4)], then=small_shop.report.s(), into="summary", connection=connection
        )
        assert jobs_of(small_shop) == []
        connection.commit() if commit else connection.rollback()
    assert len(jobs_of(small_shop)) == 6
    with opened(small_shop) as store:
        assert store.jobs.depths() == {"work": {"queued": 5}, "keys": {"queued": 1}}
    connection.close()


def test_on_sqlite_a_refused_call_leaves_the_callers_transaction_as_it_was(small_shop: ModuleType) -> None:
    small_shop.once.enqueue(name="a")
    connection = sqlite3.connect(_file(small_shop))
    connection.execute("CREATE TABLE orders (id INTEGER)")
    connection.execute("INSERT INTO orders VALUES (1)")
    with pytest.raises(Conflict, match="holds the unique key"):
        small_shop.app.batch(
            [small_shop.double.s(x=1), small_shop.once.s(name="a").then(small_shop.double.s(x=1))],
            connection=connection,
        )
    connection.commit()
    assert connection.execute("SELECT count(*) FROM orders").fetchone() == (1,)
    assert len(jobs_of(small_shop)) == 1
    connection.close()


def test_on_sqlite_a_connection_in_autocommit_mode_commits_each_call(small_shop: ModuleType) -> None:
    connection = sqlite3.connect(_file(small_shop), isolation_level=None)
    small_shop.once.enqueue(name="a", connection=connection)
    assert len(jobs_of(small_shop)) == 1 and not connection.in_transaction
    connection.close()


def test_on_sqlite_sqlalchemy_and_django_work_by_the_connection_inside(small_shop: ModuleType) -> None:
    engine = sqlalchemy.create_engine(f"sqlite:///{_file(small_shop)}", poolclass=NullPool)
    with Session(engine) as session:
        small_shop.double.enqueue(x=1, connection=session)
        assert jobs_of(small_shop) == []
        session.commit()
    with engine.connect() as connection:
        small_shop.double.enqueue(x=2, connection=connection)
        connection.rollback()
    assert len(jobs_of(small_shop)) == 1


def test_on_sqlite_another_file_or_database_is_refused(small_shop: ModuleType, database: str, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    for connection in (sqlite3.connect(":memory:"), sqlite3.connect(other)):
        with pytest.raises(
            BadArguments, match=r"the connection is to .*, but the store is .*ostler.db; nothing was stored"
        ):
            small_shop.double.enqueue(x=1, connection=connection)
        connection.close()
    with psycopg.connect(database) as postgres_connection:
        with pytest.raises(BadArguments, match=r"the store is the SQLite file .* is to postgresql; nothing was stored"):
            small_shop.double.enqueue(x=1, connection=postgres_connection)

    async def awaited() -> None:
        async with await psycopg.AsyncConnection.connect(database) as connection:
            await small_shop.double.enqueue_async(x=1, connection=connection)

    with pytest.raises(BadArguments, match="the store is a SQLite file, for which async connections are not supported"):
        asyncio.run(awaited())
    link = tmp_path / "link.db"
    link.symlink_to(_file(small_shop))
    connection = sqlite3.connect(link)  # the same file by another name
    small_shop.double.enqueue(x=1, connection=connection)
    connection.commit()
    connection.close()
    assert len(jobs_of(small_shop)) == 1


def test_on_sqlite_an_open_write_of_another_makes_it_busy(small_shop: ModuleType) -> None:
    holder = sqlite3.connect(_file(small_shop), isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    connection = sqlite3.connect(_file(small_shop), timeout=0.05)
    with pytest.raises(StoreBusy, match="nothing was stored, try again"):
        small_shop.double.enqueue(x=1, connection=connection)
    holder.execute("ROLLBACK")
    small_shop.double.enqueue(x=1, connection=connection)
    connection.commit()
    holder.close()
    connection.close()
    assert len(jobs_of(small_shop)) == 1


def test_on_sqlite_wake_lets_the_node_look_at_once(make_node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    node = make_node("--pool", "work=1", app=APP, OSTLER_POLL_INTERVAL="600")
    for app in _app(monkeypatch, "", node.folder):
        for x in range(3):
            connection = sqlite3.connect(node.folder / "ostler.db", timeout=30)
            job = app.double.enqueue(x=x, connection=connection)
            connection.commit()
            connection.close()
            app.app.wake()
            assert node.wait_job(job, "done")["result"] == 2 * x
