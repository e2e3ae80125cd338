"""Libraries and tracks as rows: adding, listing, counting, removing, and storing the jobs that are due."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from sqlalchemy import Connection, and_, bindparam, delete, func, insert, or_, select, update

from ostler import BadArguments, Conflict, InputError, NotFound
from ostler.apps.music.batch import AGAIN
from ostler.apps.music.rules import IGNORED, STATES, WRITE_TO, Rules
from ostler.apps.music.tables import (
    AT_ONCE,
    Tables,
    as_dict,
    changes,
    libraries,
    now_ms,
    problems,
    shown,
    tracks,
    written,
)
from ostler.apps.music.walk import inside, located

_RECENT = 120_000  # ms of tagging that the estimate is made from
_ASKED = 100  # jobs that are looked at at once
_NAME = 200
_PATTERNS = 200


class Enqueue(Protocol):
    """`Task.enqueue_many`."""

    def __call__(self, many: Iterable[dict[str, Any]], *, connection: Any = None) -> Sequence[int]: ...


class Refused(InputError):
    """A directory that cannot be a library."""

    code = "LIBRARY"


# ---- libraries


def add(tables: Tables, rules: Rules, path: str, wishes: Mapping[str, Any]) -> int:
    """Make a directory a library; its id. Raises Refused, BadArguments or Conflict; then nothing was stored."""
    try:
        root = os.fsencode(path)
    except UnicodeEncodeError:
        root = b""
    if not os.path.isabs(root) or b"\0" in root:  # noqa: PTH117  bytes
        raise Refused(f"{path!r:.200} is not an absolute path")
    root = os.path.realpath(root)
    if not os.path.isdir(root):  # noqa: PTH112  bytes
        raise Refused(f"{shown(root)} is not a directory on the node's machine")
    if not os.access(root, os.R_OK | os.X_OK):
        raise Refused(f"{shown(root)} cannot be read by the node's user")
    allowed = [os.fsencode(one) for one in rules.roots]
    if allowed and not inside(root, allowed):
        raise Refused(f"{shown(root)} is not below one of OSTLER_MUSIC_ROOTS")
    values = checked({"write_to": "database", "ignore": list(IGNORED), "watch": True, **wishes})
    values.setdefault("name", shown(os.path.basename(root)) or "/")  # noqa: PTH119  bytes
    with tables.write() as connection:
        for row in connection.execute(select(libraries.c.id, libraries.c.root, libraries.c.shown, libraries.c.name)):
            if inside(root, [row.root]) or inside(row.root, [root]):
                raise Conflict(
                    f"{shown(root)} and library {row.id} ({row.shown}) are the same, or one is inside the other"
                )
            if row.name == values["name"]:
                raise Conflict(f"library {row.id} is already named {row.name!r}; give this one another name")
        values |= {"root": root, "shown": shown(root), "added_at": now_ms(), "state": "new", "wanted": 1}
        made = connection.execute(insert(libraries).values(**values)).inserted_primary_key
    assert made is not None
    return int(made[0])


def checked(wishes: Mapping[str, Any]) -> dict[str, Any]:
    """What can be said of a library, as it is stored; raises BadArguments."""
    values = dict(wishes)
    if unknown := values.keys() - {"name", "write_to", "ignore", "watch"}:
        raise BadArguments(f"a library has no {min(unknown)!r}; it has name, write_to, ignore and watch")
    name = values.get("name", "a")
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _NAME:
        raise BadArguments(f"name must be 1 to {_NAME} printable characters, found {name!r:.100}")
    if values.get("write_to", "file") not in WRITE_TO:
        raise BadArguments(f"write_to must be one of {', '.join(WRITE_TO)}, found {values['write_to']!r:.100}")
    if not isinstance(values.get("watch", True), bool):
        raise BadArguments(f"watch must be true or false, found {values['watch']!r:.100}")
    if "ignore" in values:
        given = values["ignore"]
        if not isinstance(given, list) or not all(isinstance(p, str) and p.strip("/") for p in given):
            raise BadArguments(f'ignore must be a list of patterns, such as ["*.tmp", "drafts/"], found {given!r:.100}')
        if len(given) > _PATTERNS:
            raise BadArguments(f"a library may have {_PATTERNS} ignore patterns, found {len(given)}")
        values["ignore"] = json.dumps(given)
    return values


def change(tables: Tables, library: int, wishes: Mapping[str, Any]) -> None:
    """Change what is said of a library. Other ignore patterns are a reason to scan it."""
    values: dict[str, Any] = checked(wishes)
    with tables.write() as connection:
        taken = and_(libraries.c.name == values.get("name"), libraries.c.id != library)
        if "name" in values and connection.execute(select(libraries.c.id).where(taken)).first():
            raise Conflict(f"another library is already named {values['name']!r}")
        if (
            values
            and not connection.execute(update(libraries).where(libraries.c.id == library).values(**values)).rowcount
        ):
            raise unknown_library(library)
    if "ignore" in values:
        want_scan(tables, library)


def want_scan(tables: Tables, library: int, paths: Iterable[bytes] = (b"",)) -> None:
    """A scan that begins from now on is due: of the whole library, or of what is at these paths and below them."""
    own = libraries.c.id == library
    with tables.write() as connection:
        if not connection.execute(update(libraries).where(own).values(wanted=libraries.c.wanted + 1)).rowcount:
            raise unknown_library(library)
        wanted = connection.execute(select(libraries.c.wanted).where(own)).scalar_one()
        rows = [{"library": library, "path": path, "wanted": wanted} for path in paths]
        tables.upsert(connection, changes, rows)


def remove(tables: Tables, library: int) -> int:
    """Forget a library and all its tracks; how many. No file is touched: `undo` takes away what was written."""
    with tables.write() as connection:
        there = select(func.count()).select_from(tracks).where(tracks.c.library == library)
        count = int(connection.execute(there).scalar_one())
        if not connection.execute(delete(libraries).where(libraries.c.id == library)).rowcount:
            raise unknown_library(library)
    return count


def find(tables: Tables, named: str) -> int:
    """The id of the library with this id, name or path. Raises NotFound."""
    named = named.replace("\0", "")  # which PostgreSQL does not take
    same = [libraries.c.name == named, libraries.c.shown == named]
    if named.isascii() and named.isdigit() and len(named) < 18:
        same.append(libraries.c.id == int(named))
    with tables.read() as connection:
        found = connection.execute(select(libraries.c.id).where(or_(*same)).limit(2)).scalars().all()
    if not found:
        raise unknown_library(named)
    return int(found[0])


def unknown_library(library: object) -> NotFound:
    return NotFound(f"there is no library {library!s}; `ostler music status` lists them")


# ---- as they are shown


def listing(tables: Tables, now: int, library: int | None = None) -> list[dict[str, Any]]:
    """Libraries with the counts of their tracks, the progress of a scan and estimates."""
    some = [] if library is None else [libraries.c.id == library]
    with tables.read() as connection:
        rows = connection.execute(select(libraries).where(*some).order_by(libraries.c.id)).all()
        counts = _counts(connection)
        recent = _recent(connection, now - _RECENT)
    if library is not None and not rows:
        raise unknown_library(library)
    return [_library(row, counts.get(row.id, {}), recent.get(row.id, (0, 0)), now) for row in rows]


def _counts(connection: Connection) -> dict[int, dict[str, int]]:
    asked = select(tracks.c.library, tracks.c.state, func.count().label("n")).group_by(tracks.c.library, tracks.c.state)
    found: dict[int, dict[str, int]] = {}
    for row in connection.execute(asked):
        found.setdefault(row.library, {})[row.state] = row.n
    return found


def _recent(connection: Connection, since: int) -> dict[int, tuple[int, int]]:
    """How many tracks were tagged lately, and when the first of them was."""
    asked = select(tracks.c.library, func.count().label("n"), func.min(tracks.c.tagged_at).label("first"))
    rows = connection.execute(asked.where(tracks.c.tagged_at > since).group_by(tracks.c.library))
    return {row.library: (row.n, row.first) for row in rows}


def _library(row: Any, counts: dict[str, int], recent: tuple[int, int], now: int) -> dict[str, Any]:
    kept = ("id", "name", "write_to", "watch", "watching", "state", "reason", "added_at", "scanned_at", "took")
    found: dict[str, Any] = {name: getattr(row, name) for name in kept}
    by_state = {state: counts.get(state, 0) for state in STATES}
    total = sum(n for state, n in by_state.items() if state != "gone")
    found |= {
        "path": row.shown,
        "ignore": json.loads(row.ignore),
        "tracks": total,
        "counts": by_state,
        "due": row.wanted > row.done,
    }
    found["scan"] = _progress(row, now) if row.cursor is not None else None
    found["tagging"] = {"left": by_state["new"], "eta_seconds": _eta(by_state["new"], recent, now)}
    return found


def _progress(row: Any, now: int) -> dict[str, Any]:
    done, spent = row.progress or 0.0, max(0, now - row.started_at) / 1000
    eta = round(spent * (1 - done) / done, 1) if done > 0.01 else None
    return {"number": row.scan, "job": row.scan_job, "progress": round(done, 4), "files": row.seen, "eta_seconds": eta}


def _eta(left: int, recent: tuple[int, int], now: int) -> float | None:
    """Seconds that tagging will take at the rate of the last two minutes."""
    count, first = recent
    if not left:
        return 0.0
    return round(left * max(1, now - first) / 1000 / count, 1) if count > 1 else None


def problems_of(tables: Tables, library: int, limit: int) -> list[dict[str, Any]]:
    """What the last scan could not look at."""
    asked = select(problems.c.shown.label("path"), problems.c.reason).where(problems.c.library == library)
    with tables.read() as connection:
        return [as_dict(row) for row in connection.execute(asked.order_by(problems.c.path).limit(limit))]


# ---- jobs that are due


def queue_tags(tables: Tables, library: int, enqueue: Enqueue) -> int:
    """Store a job for each new track that has none; how many.

    On PostgreSQL jobs and rows are stored in one transaction. On SQLite they are in two files, and a run that is killed between the two
    stores nothing twice, because the jobs are unique.
    """
    due = select(tracks.c.id, tracks.c.version)
    due = due.where(tracks.c.library == library, tracks.c.state == "new", tracks.c.job.is_(None)).limit(AT_ONCE)
    queued = 0
    while True:
        with tables.write() if tables.beside_jobs else tables.read() as connection:
            rows = connection.execute(due).all()
            if not rows:
                return queued
            wanted = [{"track": row.id, "version": row.version} for row in rows]
            if tables.beside_jobs:
                _queued(connection, rows, enqueue(wanted, connection=connection))
        if not tables.beside_jobs:
            jobs = enqueue(wanted)
            with tables.write() as writing:
                _queued(writing, rows, jobs)
        queued += len(rows)


def _queued(connection: Connection, rows: Sequence[Any], jobs: Sequence[int]) -> None:
    same = and_(tracks.c.id == bindparam("key"), tracks.c.version == bindparam("seen"), tracks.c.job.is_(None))
    stored = [{"key": row.id, "seen": row.version, "job": int(job)} for row, job in zip(rows, jobs, strict=True)]
    connection.execute(update(tracks).where(same), stored)


def pages(tables: Tables, library: int) -> Iterator[list[int]]:
    """The ids of a library's tagged tracks, also of those that are gone, a page at a time."""
    own = and_(tracks.c.library == library, tracks.c.tagged_at.is_not(None))
    last = 0
    while True:
        asked = select(tracks.c.id).where(own, tracks.c.id > last).order_by(tracks.c.id).limit(AT_ONCE)
        with tables.read() as connection:
            page = [int(track) for track in connection.execute(asked).scalars()]
        if not page:
            return
        yield page
        last = page[-1]


def written_outside(tables: Tables, some: Sequence[int]) -> list[int]:
    """Those of some tracks whose tags are, or are to be, in files."""
    asked = select(tracks.c.id).join(libraries, libraries.c.id == tracks.c.library)
    asked = asked.outerjoin(written, written.c.track == tracks.c.id).order_by(tracks.c.id)
    outside = or_(libraries.c.write_to != "database", written.c.track.is_not(None))
    with tables.read() as connection:
        return list(connection.execute(asked.where(tracks.c.id.in_(some), outside)).scalars())


def retry(tables: Tables, library: int | None, states: Sequence[str], track: int | None = None) -> dict[int, int]:
    """Have tracks tagged again that failed or were toxic; how many, by library. The jobs are stored by `queue_tags`."""
    wanted: list[Any] = [tracks.c.state.in_(states)]
    if library is not None:
        wanted.append(tracks.c.library == library)
    if track is not None:
        wanted.append(tracks.c.id == track)
    with tables.write() as connection:
        counted = select(tracks.c.library, func.count().label("n")).where(*wanted).group_by(tracks.c.library)
        found = {row.library: row.n for row in connection.execute(counted)}
        connection.execute(update(tracks).where(*wanted).values(**AGAIN))
    return found


def recover(tables: Tables, library: int, is_live: Callable[[int], bool]) -> int:
    """Have tracks tagged whose jobs have ended without a word, such as cancelled ones, or those of a node with a full disk; how many.

    The oldest jobs are asked first, and no more once some of them are all live.
    """
    waiting = and_(tracks.c.library == library, tracks.c.state == "new", tracks.c.job.is_not(None))
    count = 0
    while True:
        asked = select(tracks.c.id, tracks.c.job).where(waiting).order_by(tracks.c.job).limit(_ASKED)
        with tables.read() as connection:
            rows = connection.execute(asked).all()
        lost = [row.id for row in rows if not is_live(row.job)]
        if not lost:
            return count
        with tables.write() as connection:
            connection.execute(update(tracks).where(tracks.c.id.in_(lost), waiting).values(**AGAIN))
        count += len(lost)


def not_failed(track: int, state: str) -> Conflict:
    return Conflict(f"track {track} is {state}; only one that failed or is toxic can be tried again")


# ---- files


def place(tables: Tables, track: int) -> tuple[bytes, str]:
    """Where a track's file is, and its format. Raises NotFound, also where a link leads out of OSTLER_MUSIC_ROOTS."""
    with tables.read() as connection:
        row = connection.execute(_placed().where(tracks.c.id == track)).first()
    if row is None:
        raise NotFound(f"there is no track {track}")
    try:
        return located(row.root, row.path), row.format
    except PermissionError as error:
        raise NotFound(f"the file of track {track} cannot be sent: {error.strerror}") from None


def with_places(tables: Tables, found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tracks as a search shows them, with `root` and `raw`: their paths byte by byte."""
    places: dict[int, dict[str, bytes]] = {}
    ids = [one["id"] for one in found]
    with tables.read() as connection:
        for first in range(0, len(ids), AT_ONCE):
            rows = connection.execute(_placed().where(tracks.c.id.in_(ids[first : first + AT_ONCE])))
            places |= {row.id: {"root": row.root, "raw": row.path} for row in rows}
    return [{**one, **places[one["id"]]} for one in found if one["id"] in places]


def _placed() -> Any:
    columns = (tracks.c.id, tracks.c.path, tracks.c.format, libraries.c.root)
    return select(*columns).join(libraries, libraries.c.id == tracks.c.library)
