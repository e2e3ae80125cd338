"""Artifacts (seed 002, R5): files that jobs publish under deterministic keys, whole or not at all.

A publish writes to a temporary file in `.parts`, syncs, checks that no newer claim has published, and moves into place; a small note
beside it (size, checksum, fence) makes it valid. When it returns, file, note and the folders above them survive a power cut. A run
that finds a valid artifact of an earlier run can stop there. What a killed publish leaves in `.parts` is deleted by `sweep`.
Local directories need the standard library alone; any other URL (s3://…, gs://…, memory://…) is for remote_results.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from ostler import private
from ostler.errors import BadArguments, OstlerError

_CHUNK = 1 << 20
PARTS = ".parts"  # in the root: no key begins with a dot
NOTE = ".ostler"  # the note's name is the artifact's with a dot before it and this behind
_KEY, _PART = 1000, 240  # bytes of a key, and of a name in it: file systems take 255, buckets 1024 in all


class LostClaim(OstlerError):
    """This run no longer owns its job: another one does, or it was cancelled. Nothing was published."""

    code = "LOST_CLAIM"
    status = 409


class Published(NamedTuple):
    """A published artifact."""

    key: str
    size: int
    sha256: str
    fence: int
    at: int
    origin: str = ""  # the store whose job made it: job numbers and fences mean nothing across two of them
    job: int = 0  # fences are compared for the same job alone


Holds = Callable[[], bool]  # asks the store whether the claim that publishes is still its job's


class Results(Protocol):
    """A place for artifacts."""

    def put(
        self, source: Path, key: str, fence: int, origin: str = "", job: int = 0, holds: Holds | None = None
    ) -> Published:
        """Publish a file under the key, atomically. Raises LostClaim when a newer claim of the same job has published there, unless
        `holds` says that the store knows of none: then the newer one was lost in a power cut.
        """

    def find(self, key: str) -> Published | None:
        """What is published under the key, by its note; None when nothing valid is there."""

    def open(self, key: str) -> IO[bytes]:
        """The artifact's bytes."""

    def take(self, key: str) -> tuple[Published, IO[bytes]] | None:
        """The artifact and its bytes, both of the same publish; None when nothing valid is there."""

    def fetch(self, key: str, to: Path) -> Path:
        """A local file with the artifact's bytes; `to` is written only where the artifact is not local."""

    def delete(self, key: str) -> None:
        """Remove the artifact and its note."""

    def remove(self, key: str, job: int, origin: str = "") -> bool:
        """`delete`, if what is there was published by this job; whether it was."""

    def forget(self, job: int, origin: str = "") -> None:
        """Remove what this job has published under keys that begin with its id."""

    def sweep(self, max_age: float = 86400.0, now: float | None = None) -> int:
        """Delete temporary files of killed publishes that nobody has written to for `max_age` seconds; how many."""


def connect(url: str, data: Path) -> Results:
    """The results store that a URL names; '' is the directory `results` in the data directory."""
    if url.startswith("file://"):
        return LocalResults(Path(url.removeprefix("file://")))
    if "://" not in url:
        return LocalResults(Path(url)) if url else LocalResults(data / "results", own=True)
    from ostler.jobs.remote_results import RemoteResults  # noqa: PLC0415  most have none

    return RemoteResults(url)


def check_key(key: str) -> str:
    """The key, when it names a place inside the store; raises BadArguments."""
    text = key.encode(errors="replace") if isinstance(key, str) else b""
    parts = text.split(b"/")
    if (
        b"\0" in text
        or b"\\" in text
        or any(not p or p.startswith(b".") or len(p) > _PART for p in parts)
        or len(text) > _KEY
        or text.decode() != key  # half of a surrogate pair
    ):
        raise BadArguments(
            f"{key!r:.200} is not a usable key: write something like {'{job.id}'}/clip.mp4, of at most {_KEY} bytes and {_PART} in each "
            "part, where no part is empty or begins with a dot"
        )
    return key


class LocalResults:
    """A directory. One of the user's choice keeps its rights; our `own`, in the data directory, is as private as that is."""

    def __init__(self, root: Path, *, own: bool = False) -> None:
        self.root, self._own = root, own

    def path(self, key: str) -> Path:
        return self.root / check_key(key)

    def put(
        self, source: Path, key: str, fence: int, origin: str = "", job: int = 0, holds: Holds | None = None
    ) -> Published:
        target = self.path(key)
        _make(target.parent, self.root, own=self._own)
        parts = self.root / PARTS
        _folder(parts, own=self._own)
        temporary = parts / part_name(fence)
        note = temporary.with_name(f"{temporary.name}.note")
        try:
            size, digest = _copy(source, temporary, own=self._own)
            with self._made(target.parent) as folder:
                check_fence(self.find(key), key, fence, origin, job, holds)
                published = Published(key, size, digest, fence, time.time_ns() // 1_000_000, origin, job)
                _write(note, json.dumps(published._asdict()), own=self._own)
                # The note goes first: while old and new are mixed, size and checksum do not fit and nothing counts as valid.
                note.replace(_note(target))
                temporary.replace(target)
                os.fsync(folder)
        finally:
            temporary.unlink(missing_ok=True)
            note.unlink(missing_ok=True)
        return published

    @contextlib.contextmanager
    def _made(self, folder: Path) -> Iterator[int]:
        """A folder that was made, locked. Who deletes the last file of a folder deletes that, too, until somebody else has locked it."""
        while True:
            with contextlib.ExitStack() as stack:
                is_there = False
                with contextlib.suppress(FileNotFoundError):
                    descriptor = stack.enter_context(_locked(folder))
                    is_there = os.path.samestat(os.fstat(descriptor), folder.stat())
                if is_there:
                    yield descriptor
                    return
            with contextlib.suppress(FileNotFoundError):
                _make(folder, self.root, own=self._own)

    def find(self, key: str) -> Published | None:
        target = self.path(key)
        note = _read(_note(target))
        try:
            return note if note is not None and target.stat().st_size == note.size else None
        except OSError:
            return None

    def open(self, key: str) -> IO[bytes]:
        return self.path(key).open("rb")

    def take(self, key: str) -> tuple[Published, IO[bytes]] | None:
        try:
            with _locked(self.path(key).parent, fcntl.LOCK_SH):  # a publish moves its two files under this lock
                found = self.find(key)
                return None if found is None else (found, self.open(key))
        except OSError:
            return None

    def fetch(self, key: str, to: Path) -> Path:
        return self.path(key)

    def delete(self, key: str) -> None:
        target = self.path(key)
        _note(target).unlink(missing_ok=True)
        target.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # one that is not empty ends it
            for folder in target.parents[: len(key.split("/")) - 1]:
                folder.rmdir()

    def remove(self, key: str, job: int, origin: str = "") -> bool:
        target = self.path(key)
        with contextlib.suppress(FileNotFoundError), _locked(target.parent):
            note = _read(_note(target))
            if note is not None and (note.job, note.origin) == (job, origin):
                self.delete(key)
                return True
        return False

    def forget(self, job: int, origin: str = "") -> None:
        for path in list((self.root / str(job)).rglob(f".*{NOTE}")):
            if note := _read(path):
                self.remove(note.key, job, origin)

    def sweep(self, max_age: float = 86400.0, now: float | None = None) -> int:
        deleted = 0
        oldest = (time.time() if now is None else now) - max_age
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root / PARTS) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # it was moved or deleted meanwhile
                    if entry.stat(follow_symlinks=False).st_mtime < oldest:
                        os.unlink(entry)  # noqa: PTH108
                        deleted += 1
        return deleted


def check_fence(
    found: Published | None, key: str, fence: int, origin: str, job: int, holds: Holds | None = None
) -> None:
    """Every claim is in the store before its run begins. So when the store still names this claim, a note of a newer one is from
    before a power cut that took that claim back: it may be replaced, or the job could never publish again.
    """
    newer = found is not None and (found.origin, found.job) == (origin, job) and found.fence > fence
    if found is not None and newer and not (holds is not None and holds()):
        raise LostClaim(f"{key} was published by a newer claim ({found.fence}); this one ({fence}) is too late")


def part_name(fence: int) -> str:
    """A file in `.parts` that no other publish uses."""
    return f"{fence}.{os.getpid()}.{threading.get_ident()}.{time.time_ns()}"


def valid(
    results: Results, key: str, scratch: Path, check: Callable[[Path], object] | None = None, origin: str = ""
) -> Published | None:
    """What is published under the key, if its checksum is right and the app's own check does not object (by raising)."""
    found = results.find(key)
    if found is None or found.origin != origin:
        return None
    try:
        path = results.fetch(key, scratch / "published")
        if checksum(path) != found.sha256:
            return None
        if check is not None:
            check(path)
    except Exception:  # noqa: BLE001  whatever is wrong with it, it is made again
        return None
    return found


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy(source: Path, target: Path, *, own: bool) -> tuple[int, str]:
    """Copy and sync; the size and checksum of what was written."""
    digest, size = hashlib.sha256(), 0
    with source.open("rb") as reader, private.open(target, "wb") if own else target.open("wb") as writer:
        while chunk := reader.read(_CHUNK):
            writer.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        writer.flush()
        os.fsync(writer.fileno())
    if not own:
        shutil.copymode(source, target)
    return size, digest.hexdigest()


def _read(note: Path) -> Published | None:
    try:
        return Published(**json.loads(note.read_text(encoding="ascii")))
    except (OSError, ValueError, TypeError):
        return None


def _note(target: Path) -> Path:
    return target.with_name(f".{target.name}{NOTE}")


def _write(path: Path, text: str, *, own: bool) -> None:
    with private.open(path, "w", encoding="ascii") if own else path.open("w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


_kept: set[Path] = set()  # roots whose own entry this process has synced


def _folder(path: Path, *, own: bool) -> None:
    if own:
        private.make(path)
    else:
        path.mkdir(parents=True, exist_ok=True)


def _make(folder: Path, root: Path, *, own: bool) -> None:
    """Make the folder, and sync the entries of all folders from the root down to it: also one that an earlier run has made may not
    be on disk yet.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    _folder(folder, own=own)
    below = [path for path in (folder, *folder.parents) if path != root and path.is_relative_to(root)]
    if root not in _kept or root in missing:
        below.append(root)
    for path in {p.parent for p in (*below, *missing)}:
        private.sync(path)
    _kept.add(root)


@contextlib.contextmanager
def _locked(folder: Path, how: int = fcntl.LOCK_EX) -> Iterator[int]:
    """Check and move are one step for all processes of this machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, how)
        yield descriptor
    finally:
        os.close(descriptor)
