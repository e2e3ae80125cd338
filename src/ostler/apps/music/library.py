"""A library's rows and how a scan brings them up to date: two streams in one order, files and rows, are compared side by side.

Nothing is written for a file that is as its row says. What is new, changed, moved or gone is written in small transactions, each with
the path that the scan has reached: a scan that is killed goes on there.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, delete, func, or_, select, update

from ostler import Cancelled
from ostler.apps.music import outputs
from ostler.apps.music.batch import Batch, facts
from ostler.apps.music.moves import CANDIDATES, COMPARED, Moves
from ostler.apps.music.rules import Rules
from ostler.apps.music.tables import (
    AT_ONCE,
    Tables,
    below,
    changes,
    libraries,
    now_ms,
    problems,
    shown,
    tracks,
    written,
)
from ostler.apps.music.walk import File, Problem, Walk, ignoring, said

_PAGE = 5_000  # rows read at once
_EVERY = 10_000  # files after which the position is written, also when nothing has changed
_SECONDS = 1.0  # … and so long
_PATHS = 2_000  # that have changed: if more have, all is looked at


class Away(Exception):
    """The library cannot be looked at: not mounted, deleted, or empty where it had music. Its rows are left as they are."""


@dataclass
class Found:
    """What a scan found, in numbers."""

    seen: int = 0
    new: int = 0
    changed: int = 0
    moved: int = 0
    gone: int = 0
    back: int = 0
    problems: int = 0
    resumed: bool = False
    partial: bool = False  # only what was seen to change was looked at

    def result(self) -> dict[str, Any]:
        return dict(self.__dict__)


Tick = Callable[[float, Found], None]


class Scan:
    """One look at a library, by one job. `run` may be repeated by that job after a kill: it goes on where the last transaction ended.

    Where it is known what has changed, only that is looked at, unless links or missing files leave a doubt.
    `tick(done, found)` is called now and then with the share that is done; what it raises ends the scan. `queue()` is called after
    each transaction that made tracks to be tagged, `rewrite(tracks)` for those whose tags may be written at another place, or not at all.
    """

    def __init__(
        self,
        tables: Tables,
        library: int,
        job: int,
        tick: Tick,
        queue: Callable[[], object],
        rewrite: Callable[[list[int]], object] = lambda _: None,
    ) -> None:
        self._tables, self._id, self._job, self._tick = tables, library, job, tick
        self._queue, self._rewrite = queue, rewrite
        self._own = and_(libraries.c.id == library, libraries.c.scan_job == job)  # no other job has begun a scan since
        self._position = b""  # the last path that was compared
        self._scope: list[bytes] = []  # the paths that are to be looked at; none: all
        self._found, self._batch = Found(), Batch()
        self._left: set[int] = set()  # tracks that this scan found gone: a move may bring them back
        self._began = self._written = time.monotonic()
        self._written_at = 0  # how many files had been seen then

    def run(self) -> Found:
        """Raises Away, and LookupError when the library was removed."""
        row = self._begin()
        self._root, self._known = row.root, self._count()
        walk = self._walk(row)
        try:
            self._identity = _identity(row.root)
            if not (self._scope and self._looked_at_changes(walk)):
                self._expected = row.files
                self._compare(walk, self._rows(), self._position)
                self._flush(1.0)
        except OSError as error:
            reason = f"{row.shown} cannot be read: {said(error)}; is it mounted?"
            self._give_up("away", reason)
            raise Away(reason) from error
        except Away as away:
            self._give_up("away", str(away))
            raise
        except Cancelled:
            self._give_up("ready", "the last scan was cancelled")
            raise
        self._sweep(walk.drafts)
        self._finish()
        self._found.partial = bool(self._scope)
        return self._found

    def _walk(self, row: Any) -> Walk:
        with self._tables.read() as connection:
            others = connection.execute(select(libraries.c.root).where(libraries.c.id != self._id)).scalars().all()
        roots = [os.fsencode(one) for one in Rules.from_environment().roots]
        return Walk(row.root, ignoring(json.loads(row.ignore)), roots=roots, others=others)

    def _looked_at_changes(self, walk: Walk) -> bool:
        """Look only at what has changed; False where that leaves a doubt, and all is to be looked at."""
        self._position, self._found.seen, self._expected = b"", 0, 0
        with contextlib.suppress(OSError):
            if self._is_sure(walk):
                self._flush(1.0)
                return True
        self._position, self._found.seen, self._batch, self._scope = b"", 0, Batch(), []
        return False

    def _is_sure(self, walk: Walk) -> bool:
        real = os.path.realpath(self._root)
        for done, path in enumerate(self._scope):
            place = os.path.join(real, path)  # noqa: PTH118  bytes
            if os.path.islink(place) or os.path.realpath(place) != place:  # noqa: PTH114  bytes
                return False  # what links lead to depends on all others
            self._position = b""
            self._compare(walk.below(path), self._rows(path), b"")
            self._advance(done / len(self._scope))
        # Where all that is left has vanished it may be unplugged.
        return not self._batch.gone or bool(self._found.seen) or self._has_others()

    def _has_others(self) -> bool:
        """Whether files are there that are not to be looked at."""
        some = select(tracks.c.path).where(tracks.c.library == self._id, tracks.c.state != "gone").limit(CANDIDATES)
        gone = {row["path_was"] for row in self._batch.gone}
        with self._tables.read() as connection:
            places = [path for path in connection.execute(some).scalars() if path not in gone]
        return any(os.path.exists(os.path.join(self._root, path)) for path in places)  # noqa: PTH110, PTH118  bytes

    def _sweep(self, folders: set[bytes]) -> None:
        """Remove what killed writes left behind."""
        for folder in folders:
            from ostler.apps.music import writing  # noqa: PLC0415

            with contextlib.suppress(OSError):
                writing.sweep(os.path.join(self._root, folder))  # noqa: PTH118  bytes

    # ---- beginning and end

    def _begin(self) -> Any:
        own = libraries.c.id == self._id
        with self._tables.write() as connection:
            row = connection.execute(select(libraries).where(own)).first()
            if row is None:
                raise LookupError(f"there is no library {self._id}")
            self._number, self._wanted = row.scan, row.scan_wanted
            begun: dict[str, Any] = {"state": "scanning", "reason": None}
            if row.cursor is not None and row.scan_job == self._job:
                self._position, self._found.seen = row.cursor, row.seen
                self._found.resumed = True
            else:
                self._number, self._wanted = row.scan + 1, row.wanted
                begun |= {"scan": self._number, "scan_job": self._job, "scan_wanted": row.wanted, "cursor": b""}
                begun |= {"started_at": now_ms(), "progress": 0.0, "seen": 0}
            connection.execute(update(libraries).where(own).values(**begun))
            seen = and_(changes.c.library == self._id, changes.c.wanted <= self._wanted)
            self._scope = list(
                connection.execute(select(changes.c.path).where(seen).order_by(changes.c.path)).scalars()
            )
        if b"" in self._scope or len(self._scope) > _PATHS or row.scanned_at is None or row.state == "away":
            self._scope = []
        return row

    def _finish(self) -> None:
        took = round(time.monotonic() - self._began, 3)
        values = {"cursor": None, "state": "ready", "reason": None, "progress": 1.0, "took": took, "done": self._wanted}
        if not self._scope:
            values |= {"seen": self._found.seen, "files": self._found.seen, "scanned_at": now_ms()}
        with self._tables.write() as connection:
            connection.execute(update(libraries).where(self._own).values(**values))
            # What this scan did not find is no problem any more.
            old = and_(problems.c.library == self._id, problems.c.scan < self._number)
            for path in self._scope or [b""]:
                connection.execute(delete(problems).where(old, below(problems.c.path, path)))
            self._settle(connection)
            left = list(connection.execute(self._unwritten()).scalars())
        self._rewrite(left)

    def _unwritten(self) -> Any:
        """The tracks whose tags are not where they are to be: they were away when these were taken out, or a disk was full."""
        late = or_(written.c.target != libraries.c.write_to, tracks.c.reason.startswith(outputs.UNWRITTEN))
        found = select(tracks.c.id).join(libraries, libraries.c.id == tracks.c.library)
        found = found.outerjoin(written, written.c.track == tracks.c.id)
        return found.where(tracks.c.library == self._id, tracks.c.state == "tagged", late)

    def _settle(self, connection: Connection) -> None:
        """What was to be looked at was looked at."""
        seen = and_(changes.c.library == self._id, changes.c.wanted <= self._wanted)
        connection.execute(delete(changes).where(seen))

    def _give_up(self, state: str, reason: str) -> None:
        """The scan is over, and is not due any more."""
        values = {"state": state, "reason": reason, "cursor": None, "done": self._wanted}
        with self._tables.write() as connection:
            connection.execute(update(libraries).where(self._own).values(**values))
            self._settle(connection)

    def _count(self) -> int:
        """How many tracks there are, as far as the rows say."""
        there = and_(tracks.c.library == self._id, tracks.c.state != "gone")
        with self._tables.read() as connection:
            return int(connection.execute(select(func.count()).select_from(tracks).where(there)).scalar_one())

    # ---- the two streams

    def _compare(self, walk: Iterable[File | Problem], rows: Iterator[Any], after: bytes) -> None:
        """Files and rows behind a path, side by side."""
        row = next(rows, None)
        for item in walk:
            if item.path <= after and isinstance(item, File):
                continue  # it was compared before the scan was killed; a directory that cannot be read has rows behind its path
            while row is not None and row.path < item.path:
                self._missing(row)
                row = next(rows, None)
            if isinstance(item, Problem):
                row = self._unknown(item, row, rows)
            else:
                self._found.seen += 1
                if row is not None and row.path == item.path:
                    self._compared(item, row)
                    row = next(rows, None)
                else:
                    self._batch.new.append(item)
            self._position = max(self._position, item.path)
            self._advance(getattr(walk, "done", 0.0))
        if self._known and not self._found.seen and not self._scope:
            raise Away(
                f"{shown(self._root)} has no music in it, but {self._known} tracks are known; is it mounted? "
                "If they are deleted for good: ostler music remove"
            )
        while row is not None:
            self._missing(row)
            self._position = row.path
            self._advance(getattr(walk, "done", 0.0))
            row = next(rows, None)

    def _rows(self, path: bytes = b"") -> Iterator[Any]:
        """The rows at a path and below it, behind the position, a page at a time. A page begins behind what was compared: a row that a move has put there
        meanwhile is not looked at again.
        """
        last = self._position
        while True:
            last = max(last, self._position)
            asked = select(*COMPARED).where(
                tracks.c.library == self._id, tracks.c.path > last, below(tracks.c.path, path)
            )
            with self._tables.read() as connection:
                page = connection.execute(asked.order_by(tracks.c.path).limit(_PAGE)).all()
            yield from page
            if len(page) < _PAGE:
                return
            last = page[-1].path

    def _unknown(self, item: Problem, row: Any | None, rows: Iterator[Any]) -> Any | None:
        """Nothing can be said of what is there: its rows stay as they are. The first row behind it."""
        self._batch.problems.append(item)
        self._found.problems += 1
        whole = item.path.endswith(b"/")
        while row is not None and (row.path.startswith(item.path) if whole else row.path == item.path):
            row = next(rows, None)
        return row

    def _compared(self, item: File, row: Any) -> None:
        if (item.size, item.mtime_ns) != (row.size, row.mtime_ns):
            self._batch.changed.append({"key": row.id, **facts(item)})
            self._found.changed += 1
        elif row.state == "gone":
            self._batch.back.append({"key": row.id, "inode": item.inode, "state": row.before or "new"})
            self._found.back += 1

    def _missing(self, row: Any) -> None:
        if row.state != "gone":
            self._batch.gone.append({"key": row.id, "path_was": row.path})

    # ---- writing

    def _advance(self, done: float) -> None:
        if self._known and not self._found.seen:
            return  # it may be unplugged: nothing is written before a file was seen
        idle = self._found.seen - self._written_at < _EVERY and time.monotonic() - self._written < _SECONDS
        if len(self._batch) >= AT_ONCE or not idle:
            self._flush(done)

    def _flush(self, done: float) -> None:
        """Write what was found, and how far the scan is, in one transaction."""
        batch, self._batch = self._batch, Batch()
        if self._expected:
            done = min(1.0, self._found.seen / self._expected)
        moves = Moves(self._tables, self._id, self._root).of(batch.new) if self._known and batch.new else {}
        if batch.gone and _identity(self._root) != self._identity:
            raise Away(f"{shown(self._root)} was unmounted or replaced during the scan")
        values = {"cursor": b"" if self._scope else self._position, "progress": done, "seen": self._found.seen}
        with self._tables.write() as connection:
            if not connection.execute(update(libraries).where(self._own).values(**values)).rowcount:
                raise LookupError(f"library {self._id} was removed during the scan, or another job scans it")
            gone = batch.write(connection, self._tables, self._id, self._number, moves)
        self._left.update(row["key"] for row in batch.gone)
        self._found.new += len(batch.new) - len(moves)
        self._found.moved += len(moves)
        self._found.gone += gone - len(self._left.intersection(moves.values()))
        self._written, self._written_at = time.monotonic(), self._found.seen
        if batch.new or batch.changed or batch.back:
            self._queue()
        self._rewrite([*moves.values(), *(row["key"] for row in batch.back)])
        self._tick(done, self._found)


def _identity(root: bytes) -> tuple[int, int]:
    """What is mounted there. Raises OSError when nothing is."""
    facts = os.stat(root)  # noqa: PTH116  bytes
    return facts.st_dev, facts.st_ino
