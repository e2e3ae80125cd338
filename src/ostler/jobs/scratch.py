"""Scratch (seed 002, R9): a private directory per run. Standard library alone.

Deleted on success (unless KEEP_SCRATCH_ON_SUCCESS=1), kept on failure for a look, swept by age and by total size.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from ostler import private

log = logging.getLogger("ostler.jobs")

_YOUNG = 600.0
_PASSES = 3  # for what appears while a folder is emptied


def place(root: Path, job: int, run: int) -> Path:
    """Where the run's directory is, made or not. The number of a run is its fence."""
    return root / str(job) / str(run)


def is_of_job(name: str) -> bool:
    """Whether a directory in the root is that of a job; a job can leave others there, with any name."""
    return name.isascii() and name.isdigit() and len(name) < 19


def make(root: Path, job: int, run: int) -> Path:
    """The run's directory, empty: after a power cut there may be an earlier one with the same number."""
    path = place(root, job, run)
    if left := delete(path):
        path.replace(path.with_name(f"{run}-{secrets.token_hex(4)}"))  # swept with the job
        log.warning("job %d: what an earlier run left in its scratch could not be deleted: %s", job, left)
    return private.make(path)


def settle(root: Path, job: int, run: int, *, success: bool) -> None:
    """After a run: delete what succeeded, keep what failed and say how large it is. Raises nothing: the run is over."""
    path = place(root, job, run)
    try:
        if success and os.environ.get("KEEP_SCRATCH_ON_SUCCESS") != "1":
            if left := delete(path.parent if run == 1 else path):
                log.warning("job %d: its scratch could not be deleted: %s", job, left)
            with contextlib.suppress(OSError):
                path.parent.rmdir()
        elif not success and path.exists():
            log.warning("job %d: a run failed, and its scratch is kept: %s (%d bytes)", job, path, size(path))
    except Exception:
        log.exception("job %d: its scratch could not be settled", job)


def size(path: Path) -> int:
    """Bytes in all files below, as far as paths can be that long."""
    total, folders = 0, [str(path)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
    return total


def delete(path: Path) -> str | None:
    """Delete a tree of any depth, also one that is still being written to; why something is left, if so.

    Folders are moved up into the first one and emptied there: no recursion, no long paths, and never more than two open files.
    """
    trouble: list[str] = []
    try:
        with _opened(str(path)) as top:
            for _ in range(_PASSES):
                trouble = _empty(top)
                if not os.listdir(top):  # noqa: PTH208
                    break
        path.rmdir()
    except FileNotFoundError:
        return None
    except OSError as error:
        return trouble[0] if trouble else str(error)
    return None


def _empty(top: int) -> list[str]:
    """Delete everything in a folder that can be; why the rest is left."""
    trouble: list[str] = []
    folders = _emptied(top, top, trouble)
    while folders:
        name = folders.pop()
        try:
            with _opened(name, top) as folder:
                folders += _emptied(folder, top, trouble)
            os.rmdir(name, dir_fd=top)
        except OSError as error:
            trouble.append(str(error))
    return trouble


def _emptied(folder: int, top: int, trouble: list[str]) -> list[str]:
    """Delete the files of a folder and move its folders to the top; their names there."""
    found = []
    for name in os.listdir(folder):
        try:
            os.unlink(name, dir_fd=folder)
        except IsADirectoryError:
            if folder == top:
                found.append(name)
            elif moved := _moved(name, folder, top, trouble):
                found.append(moved)
        except OSError as error:
            trouble.append(f"{name}: {error.strerror}")
    return found


def _moved(name: str, folder: int, top: int, trouble: list[str]) -> str | None:
    moved = secrets.token_hex(8)
    try:
        os.chmod(name, 0o700, dir_fd=folder)  # a folder that may not be written to cannot be moved
        os.rename(name, moved, src_dir_fd=folder, dst_dir_fd=top)
    except OSError as error:
        trouble.append(f"{name}: {error.strerror}")
        return None
    return moved


@contextlib.contextmanager
def _opened(name: str, inside: int | None = None) -> Iterator[int]:
    with contextlib.suppress(OSError):
        os.chmod(name, 0o700, dir_fd=inside)  # the job may have locked itself out
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=inside)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sweep(
    root: Path,
    *,
    max_age: float,
    max_bytes: int,
    live: set[int],
    now: float | None = None,
    patience: float = 60.0,
) -> tuple[int, int]:
    """Delete directories of jobs that are not live and older than `max_age` seconds, then the oldest until the rest fits.

    Returns (directories, bytes) deleted. After `patience` seconds the rest is left to the next time.
    """
    now, deadline = time.time() if now is None else now, time.monotonic() + patience
    found = []
    with contextlib.suppress(OSError):
        for folder in root.iterdir():
            if is_of_job(folder.name) and int(folder.name) not in live:
                with contextlib.suppress(OSError):
                    found.append((max(p.stat().st_mtime for p in (folder, *folder.iterdir())), folder, size(folder)))
            if time.monotonic() > deadline - patience / 2:
                break
    found.sort(key=lambda item: item[0], reverse=True)
    kept = deleted = freed = 0
    for touched, folder, used in found:
        young = now - touched < _YOUNG  # it may be a run that began after the live ones were counted
        if now - touched > max_age or (kept + used > max_bytes and not young):
            if time.monotonic() > deadline:
                break
            if left := delete(folder):
                log.warning("scratch %s could not be deleted: %s", folder, left)
            else:
                deleted, freed = deleted + 1, freed + used
        else:
            kept += used
    return deleted, freed
