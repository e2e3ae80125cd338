"""The music tagger's own tables: `music.db` in the data directory, or the schema `music` of the store's PostgreSQL database.

They are the app's, not Ostler's: SQLAlchemy Core, made when they are first opened (opening.py). Jobs are in Ostler's store.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Engine,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    and_,
    or_,
    true,
)
from sqlalchemy.exc import OperationalError

from ostler import StoreBusy

AT_ONCE = 500  # values in one IN (…), rows in one transaction

metadata = MetaData()
_Id = BigInteger().with_variant(Integer, "sqlite")


def _track() -> Column[Any]:
    return Column("track", _Id, ForeignKey("tracks.id", ondelete="CASCADE"), primary_key=True)


def _library(*, primary_key: bool = False) -> Column[Any]:
    return Column(
        "library", _Id, ForeignKey("libraries.id", ondelete="CASCADE"), primary_key=primary_key, nullable=False
    )


libraries = Table(
    "libraries",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("root", LargeBinary, nullable=False, unique=True),  # bytes: a name need not be UTF-8
    Column("shown", Text, nullable=False),
    Column("name", Text, nullable=False, unique=True),
    Column("write_to", Text, nullable=False),
    Column("ignore", Text, nullable=False),  # a JSON list of patterns
    Column("watch", Boolean, nullable=False),
    Column("added_at", BigInteger, nullable=False),
    # A scan is due while `wanted` is larger than `done`: what changes during a scan is found by the next one.
    Column("wanted", BigInteger, nullable=False, default=0),
    Column("done", BigInteger, nullable=False, default=0),
    Column("state", Text, nullable=False),  # new, scanning, ready, away
    Column("reason", Text),
    Column("watching", Text),  # why it cannot be watched
    # The scan that runs, or the last one.
    Column("scan", BigInteger, nullable=False, default=0),  # its number
    Column("scan_job", BigInteger),  # whose it is: only that job may go on with it
    Column("scan_wanted", BigInteger, nullable=False, default=0),  # `wanted` when it began
    Column("cursor", LargeBinary),  # up to here it is in the rows; None: it has ended
    Column("started_at", BigInteger),
    Column("scanned_at", BigInteger),
    Column("progress", Double),
    Column("seen", BigInteger, nullable=False, default=0),
    Column("files", BigInteger, nullable=False, default=0),  # how many the last whole scan found
    Column("took", Double),  # seconds
    sqlite_autoincrement=True,  # an id is never given twice: jobs name it
)

tracks = Table(
    "tracks",
    metadata,
    Column("id", _Id, primary_key=True),
    _library(),
    Column("path", LargeBinary, nullable=False),  # relative to the library's root
    Column("shown", Text, nullable=False),
    Column("format", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("mtime_ns", BigInteger, nullable=False),
    Column("inode", BigInteger, nullable=False),
    Column("sha256", LargeBinary),
    Column("state", Text, nullable=False),
    Column("before", Text),  # the state that a track had before it was gone
    Column("reason", Text),
    Column("job", BigInteger),  # the last job that was stored to tag it
    Column("version", BigInteger, nullable=False, default=0),  # grows when it is to be tagged again
    Column("added_at", BigInteger, nullable=False),
    Column("tagged_at", BigInteger),
    Column("model", Text),
    Column("title", Text),
    Column("artist", Text),
    Column("album", Text),
    Column("duration", Double),
    Column("words", Text),  # path, title, artist and album as a search compares them
    UniqueConstraint("library", "path"),
    Index("tracks_by_state", "library", "state", "job"),
    Index("tracks_by_inode", "library", "inode"),
    Index("tracks_by_size", "library", "size"),
    Index("tracks_by_content", "sha256"),
    Index("tracks_by_time", "library", "tagged_at"),
    sqlite_autoincrement=True,
)

# Where something has changed since the last scan; an empty path is the whole library. `wanted` is the library's when it was seen.
changes = Table(
    "changes",
    metadata,
    _library(primary_key=True),
    Column("path", LargeBinary, primary_key=True),
    Column("wanted", BigInteger, nullable=False),
)

problems = Table(
    "problems",
    metadata,
    _library(primary_key=True),
    Column("path", LargeBinary, primary_key=True),
    Column("shown", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("scan", BigInteger, nullable=False),
)

models = Table(
    "models",
    metadata,
    Column("model", Text, primary_key=True),
    Column("tags", Text, nullable=False),  # a JSON list: the names of the scores, in their order
    Column("used_at", BigInteger, nullable=False),
)

scores = Table(
    "scores",
    metadata,
    _track(),
    Column("model", Text, primary_key=True),
    Column("at", BigInteger, nullable=False),
    Column("scores", LargeBinary, nullable=False),  # float32
    Index("scores_by_time", "model", "at"),
)

embeddings = Table(
    "embeddings",
    metadata,
    _track(),
    Column("model", Text, primary_key=True),
    Column("at", BigInteger, nullable=False),
    Column("vec", LargeBinary, nullable=False),  # float32
    Index("embeddings_by_time", "model", "at"),
)

calibrations = Table(
    "calibrations",
    metadata,
    Column("id", _Id, primary_key=True),
    _library(),
    Column("model", Text, nullable=False),
    Column("at", BigInteger, nullable=False),
    Column("files", BigInteger, nullable=False),
    Column("job", BigInteger, unique=True),
    Column("undone", BigInteger),  # when
    sqlite_autoincrement=True,
)

thresholds = Table(
    "thresholds",
    metadata,
    Column("calibration", _Id, ForeignKey("calibrations.id", ondelete="CASCADE"), primary_key=True),
    Column("tag", Text, primary_key=True),
    Column("value", Double, nullable=False),
    Column("method", Text, nullable=False),
)

written = Table(
    "written",
    metadata,
    _track(),
    Column("at", BigInteger, nullable=False),
    Column("target", Text, nullable=False),  # file or sidecar
    Column("tags", Text, nullable=False),  # JSON: what is there now
    Column("before", Text),  # JSON: what was there of ours before the first write
    Column("place", LargeBinary),  # where the sidecar file is
)

version = Table("version", metadata, Column("number", Integer, primary_key=True))


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def shown(path: bytes) -> str:
    """A path that any database and terminal takes: bytes that are no UTF-8, and control characters, become escapes."""
    text = path.decode("utf-8", "backslashreplace")
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


_CONTROL = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029]")


def below(column: Column[Any], path: bytes) -> Any:
    """The rows at a path and below it; all of them for an empty one."""
    return true() if not path else or_(column == path, and_(column > path + b"/", column < path + b"0"))


def words(*texts: str | None) -> str:
    """Texts as a search compares them: without case, and with accents written in one way, on any database."""
    return unicodedata.normalize("NFC", "\n".join(text for text in texts if text).casefold())


class Tables:
    """The tables in one database. For any thread; a transaction is one thread's."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.dialect = engine.dialect.name
        self.beside_jobs = self.dialect != "sqlite"
        """Whether Ostler's store is in the same database, so that a transaction can have both."""

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """One consistent look."""
        consistent = {"isolation_level": "REPEATABLE READ"} if self.beside_jobs else {}  # as on SQLite
        with _ours(), self.engine.connect().execution_options(**consistent) as connection:
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        """All or nothing. On SQLite it holds the write lock from the beginning, so that what it read is still so."""
        with _ours(), self.engine.connect().execution_options(writes=True) as connection, connection.begin():
            yield connection

    def upsert(self, connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
        """Insert rows, or replace those with the same primary key."""
        if not rows:
            return
        from sqlalchemy.dialects import postgresql, sqlite  # noqa: PLC0415

        insert: Any = (sqlite if self.dialect == "sqlite" else postgresql).insert(table)
        keys = [column.name for column in table.primary_key]
        changed = {name: insert.excluded[name] for name in rows[0] if name not in keys}
        connection.execute(insert.on_conflict_do_update(index_elements=keys, set_=changed), list(rows))

    def close(self) -> None:
        self.engine.dispose()


@contextlib.contextmanager
def _ours() -> Iterator[None]:
    try:
        yield
    except OperationalError as error:
        raise StoreBusy(f"the music library's database cannot be used right now: {error.orig}; try again") from error


def as_dict(row: Any) -> dict[str, Any]:
    return dict(row._mapping)  # noqa: SLF001


def from_json(value: str | None) -> Any:
    return None if value is None else json.loads(value)
