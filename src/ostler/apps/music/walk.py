"""A library's files in the byte order of their paths, one directory in memory at a time. Standard library alone.

The order is that of the rows in the database, so that a scan can compare the two as streams, and can go on after any path.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ostler.apps.music.rules import FORMATS, Rules

_SUFFIXES = {b"." + name.encode(): name for name in FORMATS}
LEADS_OUT = "it is a link that leads out of OSTLER_MUSIC_ROOTS"
_GONE = (errno.ENOENT, errno.ENOTDIR)


class File(NamedTuple):
    """A music file as its directory shows it. `path` is relative to the root."""

    path: bytes
    format: str
    size: int
    mtime_ns: int
    inode: int


class Problem(NamedTuple):
    """Something that cannot be looked at. Of a directory (`path` ends with "/") nothing is known, not even that it is empty."""

    path: bytes
    reason: str


Ignore = Callable[[bytes, bool], bool]


def ignoring(patterns: Sequence[str]) -> Ignore:
    """Whether a path (and whether it is a directory) is to be left out.

    A pattern without a slash is compared with the name, one with a slash with the path from the library's root; a slash at its
    end means directories alone. `*` is any text, `?` one character, `[ab]` one of these. Case counts.
    """
    compiled = [
        (re.compile(fnmatch.translate(p.strip("/"))), "/" in p.rstrip("/"), p.endswith("/")) for p in patterns if p
    ]

    def ignored(path: bytes, folder: bool) -> bool:
        whole = os.fsdecode(path)
        name = whole.rpartition("/")[2]
        return any(
            (folder or not only_folders) and pattern.match(whole if by_path else name)
            for pattern, by_path, only_folders in compiled
        )

    return ignored


def signed(number: int) -> int:
    """A number as databases take it, 64 bits with a sign: inodes use all 64, and a file may be of the year 300,000."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def file_facts(facts: os.stat_result) -> dict[str, int]:
    """What a row says of a file, by which a scan sees whether it has changed."""
    return {"size": facts.st_size, "mtime_ns": signed(facts.st_mtime_ns), "inode": signed(facts.st_ino)}


def inside(path: bytes, folders: Sequence[bytes]) -> bool:
    """Whether a path is one of the directories, or below one of them."""
    return any(path == one or path.startswith(one.rstrip(b"/") + b"/") for one in folders)


def located(root: bytes, path: bytes) -> bytes:
    """Where a track's file really is. Raises PermissionError where a link leads out of OSTLER_MUSIC_ROOTS."""
    real = os.path.realpath(os.path.join(root, path))  # noqa: PTH118  bytes
    roots = [os.fsencode(one) for one in Rules.from_environment().roots]
    if roots and not inside(real, roots):
        raise PermissionError(errno.EACCES, LEADS_OUT, os.fsdecode(path))
    return real


class _Folder:
    """A directory that is being walked: its entries in order, and how far it is."""

    def __init__(self, path: bytes, entries: list[tuple[bytes, os.DirEntry[bytes], bool]], share: float) -> None:
        self.path, self.entries, self.next = path, entries, 0
        self.share = share / len(entries) if entries else 0.0  # of the whole walk that each entry stands for


class Walk:
    """The files under `root`. `done` (0 to 1) says how far it is, from the shape of the tree alone.

    A symlink to something inside the library, or to another library, is left out, because that has a path of its own; one to a directory
    outside is followed, and no such directory is entered twice: so a loop of links ends. Where there are `roots`, a link that leads out of
    them is a problem.
    """

    def __init__(
        self, root: bytes, ignore: Ignore, *, roots: Sequence[bytes] = (), others: Sequence[bytes] = ()
    ) -> None:
        """`others` are the roots of other libraries."""
        self.root, self._ignore, self._roots, self._others = root, ignore, roots, others
        self._real = os.path.realpath(root)
        self._entered: set[tuple[int, int]] = set()  # directories outside, which links lead to
        self.done = 0.0
        self.drafts: set[bytes] = set()  # directories in which a write that was killed has left something

    def __iter__(self) -> Iterator[File | Problem]:
        """Raises OSError when the root itself cannot be listed."""
        return self._files([_Folder(b"", self._list(b""), 1.0)])

    def below(self, path: bytes) -> Iterator[File | Problem]:
        """What is at this path, file or directory, and below it; nothing where it is not there, or is left out. Raises OSError."""
        parent = path.rpartition(b"/")[0]
        parts = parent.split(b"/") if parent else []
        if any(self._ignore(b"/".join(parts[: n + 1]), True) for n in range(len(parts))):
            return iter(())
        try:
            entries = [one for one in self._list(parent) if one[0] == path]
        except (FileNotFoundError, NotADirectoryError):
            return iter(())
        return self._files([_Folder(parent, entries, 0.0)])

    def _files(self, stack: list[_Folder]) -> Iterator[File | Problem]:
        while stack:
            folder = stack[-1]
            if folder.next == len(folder.entries):
                stack.pop()
                continue
            path, entry, is_folder = folder.entries[folder.next]
            folder.next += 1
            if not is_folder:
                self.done += folder.share
                if found := self._file(path, entry):
                    yield found
                continue
            if self._leads_out_of_roots(entry):
                self.done += folder.share
                yield Problem(path + b"/", LEADS_OUT)
                continue
            try:
                entries = self._list(path)
            except OSError as error:
                self.done += folder.share
                if error.errno not in _GONE:
                    yield Problem(path + b"/", said(error))
                continue
            if not entries:
                self.done += folder.share
            stack.append(_Folder(path, entries, folder.share))

    def _list(self, path: bytes) -> list[tuple[bytes, os.DirEntry[bytes], bool]]:
        """What is to be looked at in a directory, in the order in which the paths below it come."""
        found: list[tuple[bytes, bytes, os.DirEntry[bytes], bool]] = []
        prefix = path + b"/" if path else b""
        with os.scandir(os.path.join(self.root, path)) as entries:  # noqa: PTH118  bytes
            for entry in entries:
                own = prefix + entry.name
                if entry.name.startswith(b".ostler-"):
                    self.drafts.add(path)
                is_folder = self._is_folder(entry)
                if not is_folder and os.path.splitext(entry.name)[1].lower() not in _SUFFIXES:  # noqa: PTH122  bytes
                    continue
                if not self._ignore(own, is_folder):
                    found.append((entry.name + b"/" if is_folder else entry.name, own, entry, is_folder))
        # Before links are looked at: of two to one directory it is always the same that counts.
        found.sort(key=lambda one: one[0])
        return [
            (own, entry, is_folder)
            for _, own, entry, is_folder in found
            if not entry.is_symlink() or self._leads_out(entry, is_folder)
        ]

    @staticmethod
    def _is_folder(entry: os.DirEntry[bytes]) -> bool:
        try:
            return entry.is_dir()
        except OSError:  # a link that leads nowhere, or to itself
            return False

    def _leads_out(self, entry: os.DirEntry[bytes], is_folder: bool) -> bool:
        """Whether a link leads out of the library, to a directory where no other link led before."""
        target = os.path.realpath(entry.path)
        if inside(target, [self._real, *self._others]) or any(inside(one, [target]) for one in self._others):
            return False
        if not is_folder:
            return True
        try:
            facts = entry.stat()
        except OSError:
            return False
        known = (facts.st_dev, facts.st_ino) in self._entered
        self._entered.add((facts.st_dev, facts.st_ino))
        return not known and not inside(self._real, [target])

    def _leads_out_of_roots(self, entry: os.DirEntry[bytes]) -> bool:
        return bool(self._roots) and entry.is_symlink() and not inside(os.path.realpath(entry.path), self._roots)

    def _file(self, path: bytes, entry: os.DirEntry[bytes]) -> File | Problem | None:
        if self._leads_out_of_roots(entry):
            return Problem(path, LEADS_OUT)
        try:
            facts = entry.stat()
        except OSError as error:
            if error.errno == errno.ENOENT and not entry.is_symlink():
                return None  # deleted just now
            return Problem(path, said(error))
        if not stat.S_ISREG(facts.st_mode):
            return Problem(path, "it is not a regular file")
        kind = _SUFFIXES[os.path.splitext(path)[1].lower()]  # noqa: PTH122  bytes
        return File(path, kind, **file_facts(facts))


def said(error: OSError) -> str:
    """The reason in words, without the path: that is shown beside it."""
    return (error.strerror or str(error)).lower()


def plain(text: str, most: int = 1_000) -> str:
    """A text from a file as any database and terminal takes it: no control characters, and not too long."""
    return " ".join("".join(one if one.isprintable() else " " for one in text[:most]).split())
