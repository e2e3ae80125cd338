"""What `ostler doctor` finds in a store, whichever database is under it. Looks, changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ostler.store import queries
from ostler.store.sqlite import SqliteDatabase
from ostler.store.store import Store

_WAL = 200_000_000  # bytes


class Finding(NamedTuple):
    """One look. A warning is worth reading; an error keeps a node from working. `text` says what to do."""

    level: str
    what: str
    text: str


def examine(store: Store, *, deep: bool = False) -> Iterator[Finding]:
    """Everything that can be found out in a moment; `deep` also reads all of a SQLite file."""
    if isinstance(store.db, SqliteDatabase):
        yield from _sqlite(store.db, deep=deep)
    else:
        from ostler.store import postgres_doctor  # noqa: PLC0415  its driver is an extra

        yield from postgres_doctor.examine(store)
    yield from orphans(store)


def version(found: int, newest: int, text: str) -> Finding:
    """Whether the schema is the one that this code knows."""
    if found > newest:
        return Finding("warning", "database", f"{text}: written by a newer ostler (this one knows {newest})")
    if found < newest:
        return Finding("ok", "database", f"{text}; the next start upgrades it to {newest}")
    return Finding("ok", "database", text)


def orphans(store: Store) -> Iterator[Finding]:
    """Jobs and workers of nodes that have ended, which nobody has given back yet."""
    lost = [f"{row['n']} of {row['node'] or 'no node'}" for row in store.db.run("orphans")]
    nodes = [f"{node['id']} ({node['status']})" for node in store.nodes.unreleased()]
    if not lost and not nodes:
        yield Finding("ok", "orphans", "no job is held by a node that has ended")
        return
    then = "any running node requeues them within seconds: look at its log, or start one with 'ostler up'"
    if lost:
        yield Finding("warning", "orphans", f"running jobs of nodes that have ended: {', '.join(lost)}; {then}")
    if nodes:
        yield Finding("warning", "orphans", f"nodes that have ended and hold their jobs: {', '.join(nodes)}; {then}")


# ---- SQLite


def _sqlite(db: SqliteDatabase, *, deep: bool) -> Iterator[Finding]:
    path, found = db.path, db.schema()
    text = f"{path}, {path.stat().st_size / 1e6:.1f} MB, schema {found}"
    yield version(found, queries.newest(db.dialect), text)
    yield wal(path)
    if deep:
        yield _integrity(db.integrity())


def wal(path: Path, most: int = _WAL) -> Finding:
    """A write-ahead log that only grows: somebody holds a snapshot, so that it cannot be put into the file."""
    log = path.with_name(f"{path.name}-wal")
    size = log.stat().st_size if log.exists() else 0
    if size > most:
        then = "a program that holds a transaction open keeps it from shrinking: end it (`fuser` names those that use the file)"
        return Finding("warning", "wal", f"{log} has {size / 1e6:.0f} MB; {then}")
    return Finding("ok", "wal", f"{size / 1e6:.1f} MB")


def _integrity(said: list[str]) -> Finding:
    if said == ["ok"]:
        return Finding("ok", "integrity", "quick_check found nothing wrong")
    return Finding("error", "integrity", f"{'; '.join(said[:5])}: stop the node and restore a backup")
