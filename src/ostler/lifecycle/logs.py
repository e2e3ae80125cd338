"""Log files of workers and jobs: one writer, one reader, and where a worker's file is. Standard library alone.

A log is two files of bounded size: `name.log`, and `name.log.1`, which it was put aside as when it was full.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import BinaryIO, cast

from ostler import private

log = logging.getLogger("ostler.lifecycle")

WORKER_BYTES = 5_000_000
_CHUNK = 65_536
_LINE = 10_000  # bytes of a line that are shown


def worker_log(data: Path, pool: str, number: int | str) -> Path:
    """Where a worker's output is."""
    return data / "logs" / f"{pool}-{number}.log"


def aside(path: Path) -> Path:
    """Where the older half of a log is."""
    return path.with_suffix(".log.1")


class Writer:
    """Appends to a log and puts it aside when it is full.

    Never raises: a full disk or too many open files cost lines. It tries again with each write, and the first that works
    begins with a line that says how many were lost.
    """

    def __init__(self, path: Path, most: int = WORKER_BYTES) -> None:
        self._path, self._most = path, most
        self._file: BinaryIO | None = None
        self._size = 0
        self._lost = 0  # lines
        self._torn = False  # the last write broke off in the middle of a line

    def write(self, data: bytes) -> None:
        """Whole lines."""
        try:
            file = self._open()
            if self._size > self._most:
                self.close()
                self._path.replace(aside(self._path))
                file = self._open()
            self._append(file, data)
        except OSError as error:
            if not self._lost:
                log.warning("cannot write %s: %s; lines are lost until it works again", self._path, error)
            self._lost += data.count(b"\n")

    def _append(self, file: BinaryIO, data: bytes) -> None:
        note = f"[ostler: {self._lost} lines could not be written here]\n".encode() if self._lost else b""
        whole = (b"\n" if self._torn else b"") + note + data
        written = file.write(whole)  # unbuffered: on a full disk it may be a part
        self._size += written
        self._torn = written < len(whole) and whole[:written][-1:] != b"\n"
        self._lost = whole[written:].count(b"\n")

    def _open(self) -> BinaryIO:
        if self._file is None:
            private.make(self._path.parent)
            self._file = cast("BinaryIO", private.open(self._path, "ab", buffering=0))
            self._size = self._file.tell()
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._size = None, 0


class Reader:
    """The lines of a log, each once, also across the change of its files."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._partial = b""
        self.lost = False  # something between two reads could not be had
        self.older = False  # there are lines before those that `start` gave

    def start(self, lines: int, place: str | None = None) -> list[str]:
        """The last lines; or, with the `place` of an earlier read, all that came after it."""
        if place and self._resume(place):
            return self.read()
        self.lost = place is not None
        found: list[bytes] = []
        self._open(self._path)
        if self._file:
            found, self.older = _last(self._file, lines)
        if before := _opened(aside(self._path)):
            with before:
                # The same file: it was put aside between the two looks.
                if self._file is None or os.fstat(before.fileno()).st_ino != os.fstat(self._file.fileno()).st_ino:
                    more, self.older = _last(before, lines - len(found))
                    found = more + found
        return [_text(line) for line in found]

    def _resume(self, place: str) -> bool:
        found = re.fullmatch(r"([0-9]{1,20})-([0-9]{1,18})", place)
        if found is None:
            return False
        inode, offset = int(found[1]), int(found[2])
        for path in (self._path, aside(self._path)):
            self._open(path)
            if self._file is None:
                continue
            known = os.fstat(self._file.fileno())
            # Behind its end: another file, which got the number of one that was deleted.
            if known.st_ino == inode and offset <= known.st_size:
                self._file.seek(offset)
                return True
        self.close()
        return False

    def read(self) -> list[str]:
        """Complete lines that were not read yet."""
        if self._file is None:
            self._open(self._path)
        lines: list[bytes] = []
        while self._file is not None:
            while data := self._file.read(_CHUNK):
                *whole, self._partial = (self._partial + data).split(b"\n")
                lines += whole
            if not self._replaced(self._file):
                break
            self._open(self._next(self._file))
        return [_text(line) for line in lines]

    @property
    def place(self) -> str:
        """Where reading would go on; for `start`."""
        if self._file is None:
            return ""
        return f"{os.fstat(self._file.fileno()).st_ino}-{self._file.tell() - len(self._partial)}"

    def _next(self, file: BinaryIO) -> Path:
        """The file after this one, which is no longer written to. Where it is not even the one put aside, some are lost."""
        try:
            number = aside(self._path).stat().st_ino
        except FileNotFoundError:
            self.lost = True
            return self._path
        if number == os.fstat(file.fileno()).st_ino:
            return self._path
        self.lost = True
        return aside(self._path)

    def _replaced(self, file: BinaryIO) -> bool:
        try:
            return self._path.stat().st_ino != os.fstat(file.fileno()).st_ino
        except FileNotFoundError:
            return False

    def _open(self, path: Path) -> None:
        self.close()
        self._file = _opened(path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def last(path: Path, lines: int) -> list[str]:
    """The last lines of a log, oldest first; none when there is no log."""
    reader = Reader(path)
    try:
        return reader.start(lines)
    finally:
        reader.close()


def _opened(path: Path) -> BinaryIO | None:
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None


def _last(file: BinaryIO, lines: int) -> tuple[list[bytes], bool]:
    """The last complete lines, and whether there are more before; the file stands behind them afterwards."""
    size = file.seek(0, os.SEEK_END)
    want, data = _CHUNK, b""
    while True:
        start = max(0, size - want)
        file.seek(start)
        data = file.read(size - start)
        if start == 0 or data.count(b"\n") > lines:
            break
        want *= 4
    whole = data[: data.rfind(b"\n") + 1]
    file.seek(start + len(whole))
    found = whole.split(b"\n")[:-1]
    found = found if start == 0 else found[1:]
    kept = found[max(0, len(found) - lines) :]
    return kept, start > 0 or len(found) > len(kept)


def _text(line: bytes) -> str:
    return line[:_LINE].decode("utf-8", "replace").rstrip("\r")
