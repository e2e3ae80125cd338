"""The recorder's log: how it is made, and how it is read."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

_HEADER = 16384  # as in recorder.c
_RECORD = struct.Struct("<IIQQII")
_SHARED = struct.Struct("<QQQ")


class Change(NamedTuple):
    """One change to the recorded directory, or one sync.

    `op` is C create, D mkdir, W write, T truncate, R rename, L link, U unlink or rmdir, F sync of a file or directory.
    """

    op: str
    inode: int
    at: int  # offset of a write, size of a truncate
    data: bytes  # what was written; for directory entries the name
    to: str = ""  # the new name of a rename

    @property
    def name(self) -> str:
        return os.fsdecode(self.data)


def build(folder: Path) -> Path:
    """The recorder as a shared library; skips the test where nothing can compile it."""
    library = folder / "recorder.so"
    source = Path(__file__).with_name("recorder.c")
    command = [*_compiler(), "-O2", "-Wall", "-Werror", "-fPIC", "-shared", "-pthread", "-o", str(library), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def _compiler() -> list[str]:
    if sys.platform != "linux" or sys.maxsize < 2**32:
        pytest.skip("the recorder is written for 64-bit Linux")
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    pytest.skip("no C compiler (cc, gcc, clang, or the Python package ziglang): writes cannot be recorded")


class Recorder:
    """A recording of what processes with `env` change below `root`. `root` must exist, be empty, and be named without symlinks."""

    def __init__(self, library: Path, root: Path, log: Path, capacity: int) -> None:
        self.root, self._log = root, log
        self.env = {"LD_PRELOAD": str(library), "POWERCUT_LOG": str(log)}
        prepare = ctypes.CDLL(str(library)).powercut_prepare
        prepare.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_char_p]
        if prepare(os.fsencode(log), capacity, os.fsencode(root)):
            raise AssertionError(f"the log {log} could not be made")

    def changes(self) -> list[Change]:
        """All that was recorded so far, in order."""
        with self._log.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as log:
            _, used, full = _SHARED.unpack_from(log)
            assert not full, "the log is full: give it more room or record less"
            return list(_parse(log, _HEADER, _HEADER + used))

    def delete(self) -> None:
        self._log.unlink(missing_ok=True)


def _parse(log: mmap.mmap, at: int, end: int) -> Iterator[Change]:
    while at < end:
        size, op, inode, offset, first, second = _RECORD.unpack_from(log, at)
        body = at + _RECORD.size
        data = log[body : body + first]
        yield Change(chr(op), inode, offset, data, os.fsdecode(log[body + first : body + first + second]))
        at += size
