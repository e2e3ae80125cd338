"""Files that were moved: new ones that are known under a path where no file is any more."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from typing import Any

from sqlalchemy import case, select

from ostler.apps.music.tables import AT_ONCE, Tables, tracks
from ostler.apps.music.walk import File

CANDIDATES = 50  # rows with the same value that a new file is compared with
COMPARED = tuple(tracks.c[name] for name in ("id", "path", "size", "mtime_ns", "inode", "state", "before"))


class Moves:
    """The moves within one library."""

    def __init__(self, tables: Tables, library: int, root: bytes) -> None:
        self._tables, self._id, self._root = tables, library, root

    def of(self, new: list[File]) -> dict[bytes, int]:
        """Which of these files were moved: the ids of their rows.

        The same inode, size and time, or else the same content, which is read only where a missing file had the same size.
        """
        found: dict[bytes, int] = {}
        taken: set[int] = set()
        for file, row in self._same(new, tracks.c.inode, "inode"):
            if file.path in found or row.id in taken or (row.size, row.mtime_ns) != (file.size, file.mtime_ns):
                continue
            if self._is_missing(row):
                found[file.path] = row.id
                taken.add(row.id)
        rest, hashes = [file for file in new if file.path not in found], dict[bytes, bytes | None]()
        for file, row in self._same(rest, tracks.c.size, "size"):
            if file.path in found or row.id in taken or row.sha256 is None or not self._is_missing(row):
                continue
            if file.path not in hashes:
                hashes[file.path] = self._content(file.path)
            if hashes[file.path] == row.sha256:
                found[file.path] = row.id
                taken.add(row.id)
        return found

    def _same(self, files: list[File], column: Any, name: str) -> Iterator[tuple[File, Any]]:
        """Files with the rows that have the same value, those that are gone first; a few for each."""
        wanted = {getattr(file, name) for file in files}
        if not wanted:
            return
        gone = case((tracks.c.state == "gone", 0), else_=1)
        asked = select(*COMPARED, tracks.c.sha256).where(tracks.c.library == self._id, column.in_(wanted))
        by_value: dict[int, list[Any]] = {}
        with self._tables.read() as connection:
            for row in connection.execute(asked.order_by(gone).limit(CANDIDATES * AT_ONCE)):
                by_value.setdefault(getattr(row, name), []).append(row)
        for file in files:
            for row in by_value.get(getattr(file, name), ())[:CANDIDATES]:
                yield file, row

    def _is_missing(self, row: Any) -> bool:
        if row.state == "gone":
            return True
        try:
            os.lstat(os.path.join(self._root, row.path))  # noqa: PTH118  bytes
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            pass
        return False

    def _content(self, path: bytes) -> bytes | None:
        try:
            return content(os.path.join(self._root, path))  # noqa: PTH118  bytes
        except OSError:
            return None


def content(path: bytes) -> bytes:
    """The hash of a file's bytes."""
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123  bytes
        return hashlib.file_digest(file, "sha256").digest()
