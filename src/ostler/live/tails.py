"""Following what workers and jobs print. Who follows is woken when something was printed, and reads the file from where it was."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any, BinaryIO

from ostler.events import Bus, Printed

_CHUNK = 65_536


class Tails:
    """Who follows what."""

    def __init__(self, bus: Bus) -> None:
        self._followers: dict[str, set[asyncio.Event]] = {}
        self.closed = False
        bus.listen(self._heard)

    def _heard(self, event: Any) -> None:
        if isinstance(event, Printed):
            for follower in self._followers.get(event.subject, ()):
                follower.set()

    def follow(self, subject: str) -> asyncio.Event:
        """An event that is set whenever the subject has printed."""
        wake = asyncio.Event()
        self._followers.setdefault(subject, set()).add(wake)
        return wake

    def leave(self, subject: str, wake: asyncio.Event) -> None:
        followers = self._followers.get(subject, set())
        followers.discard(wake)
        if not followers:
            self._followers.pop(subject, None)

    async def start(self) -> None:
        """Nothing to begin: followers come by themselves."""

    async def stop(self) -> None:
        """End all of them: the node stops."""
        self.closed = True
        for followers in self._followers.values():
            for wake in followers:
                wake.set()


class LogFile:
    """A growing file that is put aside (`.log.1`) when it is full: its lines, each once, across the change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._partial = b""
        self.lost = False  # something between two reads could not be had

    def start(self, lines: int, place: str | None = None) -> list[str]:
        """The last lines; or, with the `place` of an earlier read, all that came after it."""
        if place and self._resume(place):
            return self.read()
        self.lost = place is not None
        found: list[bytes] = []
        aside = self._path.with_suffix(".log.1")
        self._open(self._path)
        if self._file:
            found = _last(self._file, lines)
        if len(found) < lines and aside.exists():
            with aside.open("rb") as older:
                found = _last(older, lines - len(found)) + found
        return [_text(line) for line in found]

    def _resume(self, place: str) -> bool:
        found = re.fullmatch(r"([0-9]{1,20})-([0-9]{1,18})", place)
        if found is None:
            return False
        inode, offset = int(found[1]), int(found[2])
        for path in (self._path, self._path.with_suffix(".log.1")):
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
        aside = self._path.with_suffix(".log.1")
        try:
            number = aside.stat().st_ino
        except FileNotFoundError:
            self.lost = True
            return self._path
        if number == os.fstat(file.fileno()).st_ino:
            return self._path
        self.lost = True
        return aside

    def _replaced(self, file: BinaryIO) -> bool:
        try:
            return self._path.stat().st_ino != os.fstat(file.fileno()).st_ino
        except FileNotFoundError:
            return False

    def _open(self, path: Path) -> None:
        self.close()
        try:
            self._file = path.open("rb")
        except FileNotFoundError:
            self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _last(file: BinaryIO, lines: int) -> list[bytes]:
    """The last complete lines; the file stands behind them afterwards."""
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
    return found[max(0, len(found) - lines) :]


def _text(line: bytes) -> str:
    return line[:10_000].decode("utf-8", "replace").rstrip("\r")
