"""What a scan has found and not written yet: files that are new, changed, moved, back or gone, written in one transaction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, and_, bindparam, case, func, insert, select, update

from ostler.apps.music.tables import Tables, now_ms, problems, shown, tracks, words
from ostler.apps.music.walk import File, Problem

# A track that is to be tagged (again): another version, so that a job for the one before does not stand for it.
AGAIN = {"state": "new", "reason": None, "before": None, "job": None, "version": tracks.c.version + 1}
GONE = "it is not in the library any more: deleted, moved away or ignored"


@dataclass
class Batch:
    """What is to be written next."""

    new: list[File] = field(default_factory=list)
    changed: list[dict[str, Any]] = field(default_factory=list)
    back: list[dict[str, Any]] = field(default_factory=list)
    gone: list[dict[str, Any]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.new) + len(self.changed) + len(self.back) + len(self.gone) + len(self.problems)

    def write(self, connection: Connection, tables: Tables, library: int, scan: int, moves: dict[bytes, int]) -> int:
        """Write it, in the caller's transaction; how many tracks are gone now. `moves`: which new files are tracks that were elsewhere."""
        now, own = now_ms(), tracks.c.id == bindparam("key")
        moved = [{"key": moves[f.path], **facts(f), **_place(f)} for f in self.new if f.path in moves]
        first = {"library": library, "state": "new", "added_at": now}
        new = [
            {**first, **facts(f), **_place(f), "words": words(shown(f.path))} for f in self.new if f.path not in moves
        ]
        gone = 0
        # Those that are gone first: a file of the same name may have come by a move.
        if self.gone:
            there = and_(own, tracks.c.path == bindparam("path_was"), tracks.c.state != "gone")
            leave = update(tracks).where(there).values(before=tracks.c.state, state="gone", reason=GONE)
            gone = connection.execute(leave, self.gone).rowcount
        if moved:
            told = select(tracks.c.id, tracks.c.title, tracks.c.artist, tracks.c.album)
            found = {row.id: row[1:] for row in connection.execute(told.where(tracks.c.id.in_(moves.values())))}
            moved = [{**row, "words": words(row["shown"], *found.get(row["key"], ()))} for row in moved]
            revived = case((tracks.c.state == "gone", func.coalesce(tracks.c.before, "new")), else_=tracks.c.state)
            reason = case((tracks.c.state == "gone", None), else_=tracks.c.reason)
            connection.execute(update(tracks).where(own).values(state=revived, reason=reason, before=None), moved)
        if new:
            connection.execute(insert(tracks), new)
        if self.changed:
            connection.execute(update(tracks).where(own).values(**AGAIN), self.changed)
        if self.back:
            connection.execute(update(tracks).where(own).values(before=None, reason=None), self.back)
        told_problems = [
            {"library": library, "path": p.path, "shown": shown(p.path), "reason": p.reason, "scan": scan}
            for p in self.problems
        ]
        tables.upsert(connection, problems, told_problems)
        return gone


def facts(file: File) -> dict[str, Any]:
    """What tells whether a file has changed."""
    return {"size": file.size, "mtime_ns": file.mtime_ns, "inode": file.inode}


def _place(file: File) -> dict[str, Any]:
    return {"path": file.path, "shown": shown(file.path), "format": file.format}
