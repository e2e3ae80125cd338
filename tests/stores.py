"""Stores for tests on both databases, and SQL that both understand: tables by their bare names, values as `:name`."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Iterator

import pytest

import psycopg

from ostler.store import Store
from tests.servers import Server


@contextmanager
def store_of(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of an empty store, for a fixture whose parameter is `sqlite` or `postgres`."""
    if request.param == "sqlite":
        yield "sqlite"
    else:
        server = request.getfixturevalue("postgres")
        with new_database(server, template=_template(server)) as url:
            yield url


@cache
def _template(server: Server) -> str:
    """A database with the schema in it: to copy it takes half the time of making it anew."""
    name = server.start().create_database()
    Store.open(server.url(name), Path()).close()
    return name


@contextmanager
def new_database(server: Server, template: str = "template0") -> Iterator[str]:
    """The URL of an empty database. Who stopped the server meanwhile need not start it again."""
    server.start()
    name = server.create_database(template)
    yield server.url(name)
    server.start()
    server.drop_database(name)


def rows(store: Store, sql: str, **values: Any) -> list[tuple[Any, ...]]:
    """What the SQL gives, as plain tuples; nothing for a statement that gives none."""
    if store.db.dialect == "sqlite":
        return [tuple(row) for row in store.db._connection.execute(sql, values)]
    from ostler.store.postgres_words import translated

    connection = store.db._connection()
    with connection.transaction():
        connection.execute(f"SET LOCAL search_path = {store.db.place.schema}")
        cursor = connection.execute(translated(sql), values)
        return [tuple(row) for row in cursor] if cursor.description else []


def value(store: Store, sql: str, **values: Any) -> Any:
    """The one value that the SQL gives."""
    ((found,),) = rows(store, sql, **values)
    return found


@contextmanager
def locked(store: Store) -> Iterator[None]:
    """Nobody else can write meanwhile; reading goes on."""
    if store.db.dialect == "sqlite":
        execute = store.db._connection.execute
        execute("BEGIN IMMEDIATE")
    else:
        execute = store.db._connection().execute
        tables = execute("SELECT schemaname || '.' || tablename FROM pg_tables WHERE schemaname = 'ostler'")
        names = ", ".join(sorted(name for (name,) in tables))
        for left in range(20, -1, -1):
            execute("BEGIN")
            execute("SET LOCAL idle_in_transaction_session_timeout = 0")  # it is held for as long as a test wants
            try:
                execute(f"LOCK TABLE {names} IN EXCLUSIVE MODE")
                break
            except psycopg.errors.DeadlockDetected:  # a node that writes takes them in another order
                execute("ROLLBACK")
                if not left:
                    raise
    try:
        yield
    finally:
        execute("ROLLBACK")


@contextmanager
def no_events(store: Store) -> Iterator[None]:
    """Whoever stores an event finds that it cannot: on SQLite at once, on PostgreSQL at the commit."""
    name = "no_events"
    if store.db.dialect == "sqlite":
        made = [f"CREATE TRIGGER {name} BEFORE INSERT ON job_events BEGIN SELECT RAISE(ABORT, 'no room'); END"]
        gone = [f"DROP TRIGGER {name}"]
    else:
        made = [
            f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no room'; END $$",
            f"CREATE CONSTRAINT TRIGGER {name} AFTER INSERT ON job_events DEFERRABLE INITIALLY DEFERRED"
            f" FOR EACH ROW EXECUTE FUNCTION {name}()",
        ]
        gone = [f"DROP TRIGGER {name} ON job_events", f"DROP FUNCTION {name}"]
    for sql in made:
        rows(store, sql)
    try:
        yield
    finally:
        for sql in gone:
            rows(store, sql)


@contextmanager
def statements(store: Store) -> Iterator[list[str]]:
    """The statements that the store's connection sends meanwhile."""
    seen: list[str] = []
    if store.db.dialect == "sqlite":
        store.db._connection.set_trace_callback(seen.append)
        yield seen
        store.db._connection.set_trace_callback(None)
    else:
        connection = store.db._connection()
        send = connection.execute
        connection.execute = lambda sql, *args: (seen.append(str(sql)), send(sql, *args))[1]
        yield seen
        del connection.execute
