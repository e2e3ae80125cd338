"""SQL for tests, in words that both databases understand: tables by their bare names, values as `:name`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator

from ostler.store import Store


def rows(store: Store, sql: str, **values: Any) -> list[tuple[Any, ...]]:
    """What the SQL gives, as plain tuples; nothing for a statement that gives none."""
    if store.db.dialect == "sqlite":
        return [tuple(row) for row in store.db._connection.execute(sql, values)]
    from ostler.store.postgres import _translated

    connection = store.db._connection()
    with connection.transaction():
        connection.execute(f"SET LOCAL search_path = {store.db.place.schema}")
        cursor = connection.execute(_translated(sql), values)
        return [tuple(row) for row in cursor] if cursor.description else []


def value(store: Store, sql: str, **values: Any) -> Any:
    """The one value that the SQL gives."""
    ((found,),) = rows(store, sql, **values)
    return found


@contextmanager
def locked(store: Store) -> Iterator[None]:
    """Nobody else can write jobs meanwhile."""
    execute = store.db._connection.execute if store.db.dialect == "sqlite" else store.db._connection().execute
    if store.db.dialect == "sqlite":
        execute("BEGIN IMMEDIATE")
    else:
        execute("BEGIN")
        execute(f"LOCK TABLE {store.db.place.schema}.jobs IN EXCLUSIVE MODE")
    try:
        yield
    finally:
        execute("ROLLBACK")


@contextmanager
def no_events(store: Store) -> Iterator[None]:
    """Whoever stores an event finds that it cannot."""
    name = "no_events"
    if store.db.dialect == "sqlite":
        made = [f"CREATE TRIGGER {name} BEFORE INSERT ON job_events BEGIN SELECT RAISE(ABORT, 'no room'); END"]
        gone = [f"DROP TRIGGER {name}"]
    else:
        made = [
            f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no room'; END $$",
            f"CREATE TRIGGER {name} BEFORE INSERT ON job_events FOR EACH ROW EXECUTE FUNCTION {name}()",
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
