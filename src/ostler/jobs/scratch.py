"""Scratch (seed 002, R9): a private directory per attempt. Standard library alone.

Deleted on success (unless KEEP_SCRATCH_ON_SUCCESS=1), kept on failure for a look, swept by age and by total size.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from pathlib import Path

log = logging.getLogger("ostler.jobs")

_YOUNG = 600.0


def place(root: Path, job: int, attempt: int) -> Path:
    """Where the attempt's directory is, made or not."""
    return root / str(job) / str(attempt)


def make(root: Path, job: int, attempt: int) -> Path:
    """The attempt's directory, empty: an aborted run with the same number may have left something."""
    path = place(root, job, attempt)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True, mode=0o700)
    return path


def settle(root: Path, job: int, attempt: int, *, success: bool) -> None:
    """After a run: delete what succeeded, keep what failed and say how large it is."""
    path = place(root, job, attempt)
    if not path.exists():
        return
    if success and os.environ.get("KEEP_SCRATCH_ON_SUCCESS") != "1":
        shutil.rmtree(path.parent if attempt == 1 else path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()
        return
    if not success:
        log.warning("job %d, attempt %d failed; its scratch is kept: %s (%d bytes)", job, attempt, path, size(path))


def size(path: Path) -> int:
    """Bytes in all files below."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(folder) / name).lstat().st_size
    return total


def sweep(root: Path, *, max_age: float, max_bytes: int, live: set[int], now: float | None = None) -> tuple[int, int]:
    """Delete directories of jobs that are not live and older than `max_age` seconds, then the oldest until the rest fits.

    Returns (directories, bytes) deleted.
    """
    now = time.time() if now is None else now
    found = []
    with contextlib.suppress(OSError):
        for folder in root.iterdir():
            if folder.name.isdigit() and int(folder.name) not in live:
                with contextlib.suppress(OSError):
                    found.append((max(p.stat().st_mtime for p in (folder, *folder.iterdir())), folder, size(folder)))
    found.sort(key=lambda item: item[0], reverse=True)
    kept = deleted = freed = 0
    for touched, folder, used in found:
        young = now - touched < _YOUNG  # it may be a run that began after the live ones were counted
        if now - touched > max_age or (kept + used > max_bytes and not young):
            shutil.rmtree(folder, ignore_errors=True)
            deleted, freed = deleted + 1, freed + used
        else:
            kept += used
    return deleted, freed
