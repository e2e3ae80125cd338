"""Storing jobs by somebody else's connection, inside their transaction: they appear when it is committed, or not at all.

Connections of psycopg, asyncpg, SQLAlchemy, Django and sqlite3 are known by the module of their type; none of these is imported here.
On PostgreSQL everything is one call of the function `put`, on SQLite the usual statements run on the connection.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ostler.errors import BadArguments, ConfigError, Conflict, NoAccess
from ostler.store import database
from ostler.store.flows import step_of

if TYPE_CHECKING:
    from ostler.config import Settings
    from ostler.store.rows import NewJob
    from ostler.store.store import Store

_AT_ONCE = 5_000  # jobs in one call
_PUT = "SELECT CAST({schema}.put(CAST(CAST({new} AS text) AS jsonb), CAST({database} AS text)) AS text)"

# The module's first part and the name of the class, or of one that it is derived from.
_LIBRARIES: dict[tuple[str, str], tuple[str, bool]] = {
    ("sqlite3", "Connection"): ("sqlite3", False),
    ("psycopg", "Connection"): ("psycopg", False),
    ("psycopg", "AsyncConnection"): ("psycopg", True),
    ("asyncpg", "Connection"): ("asyncpg", True),
    ("asyncpg", "PoolConnectionProxy"): ("asyncpg", True),
    ("sqlalchemy", "Connection"): ("sqlalchemy", False),
    ("sqlalchemy", "Session"): ("sqlalchemy", False),
    ("sqlalchemy", "scoped_session"): ("sqlalchemy", False),
    ("sqlalchemy", "AsyncConnection"): ("sqlalchemy", True),
    ("sqlalchemy", "AsyncSession"): ("sqlalchemy", True),
    ("sqlalchemy", "async_scoped_session"): ("sqlalchemy", True),
    ("django", "BaseDatabaseWrapper"): ("django", False),
    ("django", "ConnectionProxy"): ("django", False),
}


class Stored(NamedTuple):
    """What a call stored: the ids of its jobs, and the batch, where it was one."""

    jobs: list[int]
    batch: int | None = None


class _Call(NamedTuple):
    """One call of `put`: the statement with the placeholders of a library, and its values."""

    address: database.Address
    new: dict[str, Any]

    def values(self) -> tuple[str, str | None]:
        wanted = None if self.address.pooler else self.address.database or None
        return json.dumps(self.new), wanted

    def sql(self, new: str, wanted: str) -> str:
        return _PUT.format(schema=self.address.schema, new=new, database=wanted)


# ---- in one go


def enqueue(settings: Settings, connection: Any, jobs: Sequence[NewJob]) -> Stored:
    """Store all of them or none, in the connection's transaction. Raises InputError or ConfigError, or what its library raises."""
    library = _known(connection, awaited=False)
    if not database.is_postgres(settings.store):
        with_store = _guest(settings, connection, library)
        return Stored(with_store.jobs.enqueue(jobs, with_store.now()))
    _check_postgres(connection, library)
    stored: list[int] = []
    for call in _calls(settings, jobs):
        stored += _run(connection, library, call).jobs
    return Stored(stored)


def batch(settings: Settings, connection: Any, jobs: Sequence[NewJob], callback: Mapping[str, Any] | None) -> Stored:
    """`enqueue` for jobs that belong together."""
    library = _known(connection, awaited=False)
    if not database.is_postgres(settings.store):
        with_store = _guest(settings, connection, library)
        number, ids = with_store.jobs.flows.batch(jobs, None if callback is None else dict(callback), with_store.now())
        return Stored(ids, number)
    _check_postgres(connection, library)
    return _run(connection, library, _batch_call(settings, jobs, callback))


async def enqueue_async(settings: Settings, connection: Any, jobs: Sequence[NewJob]) -> Stored:
    """`enqueue` by an async connection."""
    library = _known(connection, awaited=True)
    _check_postgres(connection, library, settings)
    stored: list[int] = []
    for call in _calls(settings, jobs):
        stored += (await _run_async(connection, library, call)).jobs
    return Stored(stored)


async def batch_async(
    settings: Settings, connection: Any, jobs: Sequence[NewJob], callback: Mapping[str, Any] | None
) -> Stored:
    """`batch` by an async connection."""
    library = _known(connection, awaited=True)
    _check_postgres(connection, library, settings)
    return await _run_async(connection, library, _batch_call(settings, jobs, callback))


def _calls(settings: Settings, jobs: Sequence[NewJob]) -> list[_Call]:
    address = database.address_of(settings.store)
    parts = (jobs[start : start + _AT_ONCE] for start in range(0, len(jobs), _AT_ONCE))
    return [_Call(address, {"jobs": [step_of(job) for job in part]}) for part in parts]


def _batch_call(settings: Settings, jobs: Sequence[NewJob], callback: Mapping[str, Any] | None) -> _Call:
    new = {"jobs": [step_of(job) for job in jobs], "batch": {"callback": callback} if callback else {}}
    return _Call(database.address_of(settings.store), new)


# ---- whose connection it is


def _known(connection: Any, *, awaited: bool) -> str:
    for kind in type(connection).__mro__:
        if found := _LIBRARIES.get((kind.__module__.partition(".")[0], kind.__name__)):
            library, is_async = found
            if is_async and not awaited:
                raise BadArguments(
                    f"{_name(connection)} is an async connection; nothing was stored. Use await …_async(…), such as enqueue_async"
                )
            if awaited and not is_async:
                raise BadArguments(
                    f"{_name(connection)} is not an async connection; nothing was stored. Use the call without _async"
                )
            return library
    raise BadArguments(
        f"connection must be one of psycopg (3), asyncpg, SQLAlchemy, Django or sqlite3, found {_name(connection)}; nothing was stored"
    )


def _name(connection: Any) -> str:
    kind = type(connection)
    return f"{kind.__module__}.{kind.__qualname__}"


def _dialect(connection: Any, library: str) -> str:
    """The kind of database that the connection leads to."""
    match library:
        case "sqlite3":
            return "sqlite"
        case "sqlalchemy":
            engine = connection if hasattr(connection, "dialect") else connection.get_bind()
            return str(engine.dialect.name)
        case "django":
            return str(connection.vendor)
        case _:
            return "postgresql"


def _check_postgres(connection: Any, library: str, settings: Settings | None = None) -> None:
    found = _dialect(connection, library)
    if settings is not None and not database.is_postgres(settings.store):
        raise BadArguments(
            f"the store is a SQLite file, for which async connections are not supported, found {_name(connection)}; nothing was stored"
        )
    if found != "postgresql":
        raise BadArguments(
            f"the store is on PostgreSQL, but the connection ({_name(connection)}) is to {found}; nothing was stored"
        )


# ---- SQLite


def _guest(settings: Settings, connection: Any, library: str) -> Store:
    from ostler.store.guest import GuestDatabase  # noqa: PLC0415
    from ostler.store.store import Store  # noqa: PLC0415

    path = database.sqlite_path(settings.store, settings.data_dir)
    if (found := _dialect(connection, library)) != "sqlite":
        raise BadArguments(
            f"the store is the SQLite file {path}, but the connection ({_name(connection)}) is to {found}; nothing was stored"
        )
    guest = GuestDatabase(path, _driver_of(connection, library))
    guest.require()
    return Store(guest)


def _driver_of(connection: Any, library: str) -> Any:
    """The sqlite3 connection inside."""
    if library == "sqlalchemy":
        inner = connection if hasattr(connection, "exec_driver_sql") else connection.connection()
        return inner.connection.driver_connection
    if library == "django":
        connection.ensure_connection()
        return connection.connection
    return connection


# ---- PostgreSQL


def _run(connection: Any, library: str, call: _Call) -> Stored:
    try:
        return _stored(_SYNC[library](connection, call))
    except Exception as error:
        raise _as_ours(error, call.address) from error


async def _run_async(connection: Any, library: str, call: _Call) -> Stored:
    try:
        return _stored(await _ASYNC[library](connection, call))
    except Exception as error:
        raise _as_ours(error, call.address) from error


def _by_psycopg(connection: Any, call: _Call) -> str:
    with sys.modules["psycopg"].Cursor(connection, row_factory=_tuples) as cursor:
        return str(cursor.execute(call.sql("%s", "%s"), call.values()).fetchone()[0])


async def _by_psycopg_async(connection: Any, call: _Call) -> str:
    async with sys.modules["psycopg"].AsyncCursor(connection, row_factory=_tuples) as cursor:
        await cursor.execute(call.sql("%s", "%s"), call.values())
        return str((await cursor.fetchone())[0])


async def _by_asyncpg(connection: Any, call: _Call) -> str:
    return str(await connection.fetchval(call.sql("$1", "$2"), *call.values()))


def _by_sqlalchemy(connection: Any, call: _Call) -> str:
    return str(connection.execute(*_for_sqlalchemy(call)).scalar_one())


async def _by_sqlalchemy_async(connection: Any, call: _Call) -> str:
    return str((await connection.execute(*_for_sqlalchemy(call))).scalar_one())


def _for_sqlalchemy(call: _Call) -> tuple[Any, dict[str, Any]]:
    text = sys.modules["sqlalchemy"].text(call.sql(":new", ":wanted"))
    return text, dict(zip(("new", "wanted"), call.values(), strict=True))


def _by_django(connection: Any, call: _Call) -> str:
    with connection.cursor() as cursor:
        cursor.execute(call.sql("%s", "%s"), call.values())
        return str(cursor.fetchone()[0])


_SYNC: dict[str, Callable[[Any, _Call], str]] = {
    "psycopg": _by_psycopg,
    "sqlalchemy": _by_sqlalchemy,
    "django": _by_django,
}
_ASYNC: dict[str, Callable[[Any, _Call], Any]] = {
    "psycopg": _by_psycopg_async,
    "asyncpg": _by_asyncpg,
    "sqlalchemy": _by_sqlalchemy_async,
}


def _tuples(_cursor: Any) -> type[tuple[Any, ...]]:
    return tuple


def _stored(answer: str) -> Stored:
    found = json.loads(answer)
    if "held" in found:
        raise Conflict(
            f"job {found['held']} holds the unique key of the first step of this chain; the chain was not stored"
        )
    return Stored([int(job) for job in found["ids"]], found["batch"])


def _as_ours(error: Exception, address: database.Address) -> Exception:
    """Ours where the connection cannot lead to the store; else the error as it is, since the transaction is the caller's."""
    causes = (error, getattr(error, "orig", None), error.__cause__)
    codes = [getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) for cause in causes if cause]
    code = next((str(found) for found in codes if found), "")
    said = next(iter(str(error).strip().splitlines()), "")
    match code:
        case "3D000":
            return ConfigError(f"{said}: connect to that one, or correct OSTLER_STORE. Nothing was stored")
        case "3F000" | "42883":
            return ConfigError(
                f"the connection's database has no schema {address.schema} that jobs can be stored in ({said}), and nothing was stored. "
                f"The store is {address.shown}; connect to that one, or run 'ostler migrate'"
            )
        case "42501":
            return NoAccess(
                f"the connection's role has no permission to enqueue ({said}), and nothing was stored. Run: "
                f"GRANT USAGE ON SCHEMA {address.schema} TO …; GRANT EXECUTE ON FUNCTION {address.schema}.put TO …"
            )
        case _:
            return error
