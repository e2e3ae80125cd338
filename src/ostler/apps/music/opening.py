"""Opening the music tagger's tables: where they are, how they are made, and how those of an earlier version become today's."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from sqlalchemy import (
    Column,
    Connection,
    Engine,
    bindparam,
    create_engine,
    event,
    func,
    insert,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy.schema import CreateIndex, CreateTable

from ostler import ConfigError
from ostler.apps.music.tables import Tables, metadata, tracks, version, words, written
from ostler.config import Settings
from ostler.store.database import address_of, is_postgres

SCHEMA = "music"  # on PostgreSQL
VERSION = 2  # 1 had no table that said so
_PATIENCE = 30.0  # seconds that a writer waits for another
_LOCK = 7_238_645  # PostgreSQL: who makes the tables


def open_tables(settings: Settings) -> Tables:
    """The tables of the node with these settings, made or brought up to date where need be. Each process opens its own."""
    store = settings.store
    made = Tables(_postgres(store) if is_postgres(store) else _sqlite(settings.data_dir / "music.db"))
    try:
        with made.read() as connection:
            is_current = _version(connection) == VERSION
        if not is_current:
            with made.write() as connection:
                _upgrade(connection)
    except BaseException:
        made.close()
        raise
    return made


def _version(connection: Connection) -> int:
    """The version of the tables that are there; 0: none are."""
    schema = None if connection.dialect.name == "sqlite" else SCHEMA
    there = inspect(connection)
    if not there.has_table("version", schema):
        return int(there.has_table("libraries", schema))
    return int(connection.execute(select(func.max(version.c.number))).scalar_one())


def _upgrade(connection: Connection) -> None:
    """Make what is missing, add what later versions have, and write down the version; all or nothing."""
    if connection.dialect.name != "sqlite":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
        connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
    found = _version(connection)
    if found > VERSION:
        raise ConfigError(
            f"the music library's tables are of version {found}, made by a later Ostler; this one knows up to {VERSION}"
        )
    for table in metadata.sorted_tables:
        connection.execute(CreateTable(table, if_not_exists=True))
    for number in range(max(1, found) + 1, VERSION + 1) if found else ():
        _STEPS[number](connection)
    for table in metadata.sorted_tables:
        for index in sorted(table.indexes, key=lambda index: str(index.name)):
            connection.execute(CreateIndex(index, if_not_exists=True))
    if found != VERSION:
        connection.execute(insert(version).values(number=VERSION))


def _to_2(connection: Connection) -> None:
    """Words to search by, and where sidecar files are."""
    _add_column(connection, tracks.c.words)
    _add_column(connection, written.c.place)
    told = (tracks.c.id, tracks.c.shown, tracks.c.title, tracks.c.artist, tracks.c.album)
    fill, last = update(tracks).where(tracks.c.id == bindparam("key")), 0
    while page := connection.execute(select(*told).where(tracks.c.id > last).order_by(tracks.c.id).limit(5_000)).all():
        connection.execute(fill, [{"key": row[0], "words": words(*row[1:])} for row in page])
        last = page[-1].id


_STEPS = {2: _to_2}  # how tables of the version before become those of a version


def _add_column(connection: Connection, column: Column[Any]) -> None:
    place = "" if connection.dialect.name == "sqlite" else f"{SCHEMA}."
    kind = column.type.compile(connection.dialect)
    connection.execute(text(f"ALTER TABLE {place}{column.table.name} ADD COLUMN {column.name} {kind}"))


def _postgres(url: str) -> Engine:
    parts = urlsplit(address_of(url).url)
    address = urlunsplit(("postgresql+psycopg", *parts[1:]))
    return create_engine(
        address, execution_options={"schema_translate_map": {None: SCHEMA}}, pool_pre_ping=True, pool_size=4
    )


def _sqlite(path: Path) -> Engine:
    path.parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": _PATIENCE})

    # The driver's own transactions begin with the first write; ours begin where `write` does.
    @event.listens_for(engine, "connect")
    def connected(connection: Any, _: object) -> None:
        connection.isolation_level = None
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        writes = connection.get_execution_options().get("writes")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


_opened: dict[tuple[int, str, str], Tables] = {}
_opening = threading.Lock()


def here() -> Tables:
    """The tables as a worker sees them: its node says where they are. Opened once in a process, again after a fork."""
    from ostler.apps.music import app  # noqa: PLC0415

    settings = app.settings()
    key = (os.getpid(), settings.store, str(settings.data_dir))
    with _opening:
        if key not in _opened:
            _opened[key] = open_tables(settings)
        return _opened[key]
