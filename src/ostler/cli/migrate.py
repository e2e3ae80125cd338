"""`ostler migrate`: the schema of a store up to date, or a store on SQLite copied to PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ostler import folder, private
from ostler.cli import show
from ostler.cli.options import as_json, where
from ostler.config import Settings
from ostler.errors import ConfigError
from ostler.store import database, queries

if TYPE_CHECKING:
    from ostler.store.copy import Summary, Target

_PATIENCE = 30.0  # seconds for a lock that somebody else holds


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 if there is something to do.")
@click.option("--from", "source", metavar="URL", help="The store to copy: sqlite:///path/to/ostler.db.")
@click.option(
    "--to",
    "target",
    metavar="URL",
    help="Where to copy it: postgresql://user@host/database (default: the configured store).",
)
@where
@as_json
def migrate(known: Settings, check: bool, source: str | None, target: str | None, json_: bool) -> None:
    """Update the store's schema, or copy a SQLite store to PostgreSQL.

    A copy keeps job ids, timelines, schedules and history. If it is interrupted, run it again to continue.
    """
    if source is None and target is not None:
        raise ConfigError("--to needs --from sqlite:///path/to/ostler.db")
    if source is not None:
        if check:
            raise ConfigError("--check only checks the schema; leave it out to copy a store")
        _copy(known, source, target or known.store, json_)
    else:
        _upgrade(known, check, json_)


def _upgrade(known: Settings, check: bool, json_: bool) -> None:
    url, data = known.store, known.data_dir
    missing = not database.exists(url, data)
    if missing and not check:
        place = database.home(url, data)
        private.check(place / "ostler.db", write=True)
        if not place.exists():
            private.prepare(place, known.group)
    db = None if missing and check else database.connect(url, data, busy_timeout=_PATIENCE, read_only=check)
    try:
        version = 0 if db is None else db.schema()
        dialect = "postgres" if database.is_postgres(url) else "sqlite"
        pending = [name for number, name, _ in queries.migrations(dialect) if number > version]
        applied = [] if db is None or check else db.migrate()
        newest = version if db is None or check else db.schema()
    finally:
        if db is not None:
            db.close()
    shown = database.address_of(url) if dialect == "postgres" else None
    store = f"schema {shown.schema} of {shown.shown}" if shown else str(database.sqlite_path(url, data))
    if json_:
        show.as_json({"store": store, "version": newest, "applied": applied, "pending": pending if check else []})
    elif check and pending:
        print(f"{store} has version {version}; pending: {', '.join(pending)}")
    else:
        print(f"{store}: applied {', '.join(applied)}" if applied else f"{store} is up to date (version {newest})")
    if check and pending:
        raise SystemExit(1)


# ---- copying


def _copy(known: Settings, source: str, target: str, json_: bool) -> None:
    if database.is_postgres(source) or not database.is_postgres(target):
        raise ConfigError(
            f"can only copy from SQLite to PostgreSQL, found --from {_kind(source)} and --to {_kind(target)}; "
            "write --from sqlite:///path/to/ostler.db --to postgresql://user@host/database"
        )
    from ostler.store.copy import Copy, Source, Target  # noqa: PLC0415  the driver is an extra

    path = database.sqlite_path(source, known.data_dir)
    began = time.monotonic()
    opened = Source.open(path, durable=False, busy_timeout=_PATIENCE, create=False)
    try:
        with folder.lock(path.parent, known.group):  # no node runs there, and none starts meanwhile
            opened.migrate()
            to = Target(target, busy_timeout=_PATIENCE)
            try:
                _make_schema(to)
                with _shown(json_) as report:
                    done = Copy(opened, to, report).run()
                where = f"schema {to.place.schema} of {to.place.shown}"
            finally:
                to.close()
    finally:
        opened.close()
    _tell(str(path), where, done, time.monotonic() - began, json_)


def _kind(url: str) -> str:
    return "PostgreSQL" if database.is_postgres(url) else "SQLite"


def _make_schema(to: Target) -> None:
    from ostler.store.postgres import FILLING  # noqa: PLC0415

    if to.schema() != FILLING:
        to.migrate()


@contextmanager
def _shown(json_: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each table, where somebody looks."""
    console = show.console()
    if json_ or not console.is_terminal:
        yield lambda *_: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        lines: dict[str, Any] = {}

        def report(table: str, copied: int, total: int) -> None:
            if table not in lines:
                lines[table] = bar.add_task(table, total=total)
            bar.update(lines[table], completed=copied, total=total)

        yield report


def _tell(source: str, target: str, done: Summary, seconds: float, json_: bool) -> None:
    rows = sum(done.tables.values())
    if json_:
        show.as_json({"from": source, "to": target, **done._asdict(), "rows": rows, "seconds": round(seconds, 3)})
        return
    if done.already:
        print(f"{source} was already copied to {target}; nothing to do")
        return
    statuses = ("queued", "processing", "done", "failed", "cancelled")
    lines = [(queue, *(counts.get(status, 0) for status in statuses)) for queue, counts in sorted(done.jobs.items())]
    show.table(("queue", *(f">{status}" for status in statuses)), lines, "no jobs")
    print(f"{rows} rows copied from {source} to {target} in {show.span(seconds)}; row and job counts match")
    if done.requeued:
        print(f"{done.requeued} jobs that were processing are queued again, without using up an attempt")
    print(
        "now set OSTLER_STORE=postgresql://… for all nodes and producers; jobs that are enqueued in the old store from now on are not copied"
    )
