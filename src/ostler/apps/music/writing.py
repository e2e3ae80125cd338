"""Writes our tags into audio files, so that at every moment the file is the old one or the new one.

The new file is made beside the old one, compared with it (all other tags and every packet of sound must be the same), flushed to the disk, given the
owner, mode, times and extended attributes of the old one, and renamed over it. A process that is killed on the way leaves a hidden draft, which the next
write of the same file takes over and `sweep` removes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from ostler.apps.music import formats
from ostler.apps.music.formats import Unwritable
from ostler.apps.music.memory import limited_memory

NAMESPACE = "ostler"
_DRAFT = (b".ostler-", b".part")
_TRIES = 10
# What network file systems and those of cameras answer to locks, flushes of directories and attributes that they do not have.
_UNSUPPORTED = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOLCK)

Path = str | bytes | os.PathLike[str]


class Changed(OSError):
    """Somebody else wrote, moved or locks the file at this moment. It was left alone; another try may succeed."""


@dataclass(frozen=True, slots=True)
class Written:
    """Our tags as they were and as they are. `changed` is false where they were the same and nothing was written. `facts` and `sha256` are of the file that was written, whatever is there now."""

    before: dict[str, list[str]]
    after: dict[str, list[str]]
    changed: bool
    facts: os.stat_result | None = None
    sha256: bytes = b""


@dataclass(frozen=True, slots=True)
class Described:
    """What a file says of itself; None where it does not."""

    title: str | None = None
    artist: str | None = None
    album: str | None = None
    duration: float | None = None


def write(path: Path, tags: Mapping[str, str | Sequence[str]], *, namespace: str = NAMESPACE) -> Written:
    """Make these the file's tags under `namespace:`, and remove what else is there under it; nothing else in the file changes.

    A symbolic link is followed; other names (hard links) keep the old content. Raises Unwritable (a Fail) where the file can never have tags, PermissionError where it is read-only, Changed where
    somebody else has it in hand, and other OSErrors as they come (a full disk). The file is then as it was.
    """
    prefix, wanted = f"{namespace}:", _clean(tags)
    real = os.path.realpath(os.fsencode(path))
    with _bounded(), open(real, "rb") as source:  # noqa: PTH123  bytes
        facts = os.fstat(source.fileno())
        _check_writable(real, facts)
        which = formats.kind(source)
        found = formats.load(source, which)
        before = formats.ours(found, which, prefix)
        if before == wanted:
            return Written(before, before, changed=False)
        kept = formats.others(found, which, prefix)
        with _draft(real) as (target, draft):
            try:
                formats.rewritten(source, target, which, prefix, wanted)
                target.flush()
                after = _checked(real, draft, target, which, prefix, wanted, kept)
            except Unwritable:
                _check_unchanged(real, facts)
                raise
            _like(real, facts, target.fileno())
            os.fsync(target.fileno())
            made, seen = os.fstat(target.fileno()), content(target)
            _check_unchanged(real, facts)
            os.replace(draft, real)  # noqa: PTH105
    _flush_directory(os.path.dirname(real))  # noqa: PTH120
    return Written(before, after, changed=True, facts=made, sha256=seen)


def replace(path: bytes, data: bytes) -> None:
    """Make this a file's content, whole or not at all; raises Changed where another process does the same right now."""
    with _draft(path) as (target, draft):
        target.truncate()
        target.write(data)
        target.flush()
        os.fchmod(target.fileno(), 0o644)
        os.fsync(target.fileno())
        os.replace(draft, path)  # noqa: PTH105
    _flush_directory(os.path.dirname(path))  # noqa: PTH120


def content(file: IO[bytes]) -> bytes:
    """The hash of a file's bytes."""
    file.seek(0)
    return hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]


def ours(path: Path, *, namespace: str = NAMESPACE) -> dict[str, list[str]]:
    """Our tags in the file."""
    with _bounded(), open(path, "rb") as file:  # noqa: PTH123  bytes
        which = formats.kind(file)
        return formats.ours(formats.load(file, which), which, f"{namespace}:")


def read(path: Path) -> Described:
    """Title, artist, album and duration, as far as the file tells; raises OSError where it cannot be read."""
    with open(path, "rb") as file:  # noqa: PTH123  bytes
        try:
            with _bounded():
                return Described(*formats.described(file, formats.kind(file)))
        except Unwritable:
            return Described()


def sweep(directory: Path, *, older_than: float = 60) -> int:
    """Remove drafts that killed processes left in this directory, not below it; how many. One that a process is writing now is left alone:
    it is locked, or, on a file system without locks, younger than that.
    """
    count = 0
    with os.scandir(os.fsencode(directory)) as entries:
        drafts = [e.path for e in entries if e.name.startswith(_DRAFT[0]) and e.name.endswith(_DRAFT[1])]
    for draft in drafts:
        with contextlib.suppress(OSError), _locked(draft, os.O_RDWR) as fd:
            if _has_locks(fd) or time.time() - os.fstat(fd).st_ctime >= older_than:
                os.unlink(draft)  # noqa: PTH108
                count += 1
    return count


# ---- steps of a write


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Pictures in tags are held in memory, some of them several times."""
    try:
        with limited_memory():
            yield
    except MemoryError:
        raise Unwritable("its tags are too large: pictures of hundreds of megabytes") from None


def _clean(tags: Mapping[str, str | Sequence[str]]) -> dict[str, list[str]]:
    """Names in lower case, values as lists; NUL separates values in some formats, and cannot be in one."""
    found = {}
    for name, value in tags.items():
        values = [value] if isinstance(value, str) else list(value)
        if not name or not name.isascii() or not name.isprintable() or "=" in name:
            raise ValueError(f"{name!r} cannot be the name of a tag: use ASCII letters, digits, - and _")
        if kept := [text for one in values if (text := one.replace("\0", " ").strip())]:
            found[name.lower()] = kept
    return found


def _check_writable(path: bytes, facts: os.stat_result) -> None:
    if not stat.S_ISREG(facts.st_mode):
        raise Unwritable("it is not a regular file")
    # Renaming needs no permission for the file itself; a file that was made read-only is meant to stay as it is, also for root.
    if not facts.st_mode & 0o222 or not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "the file is read-only", os.fsdecode(path))


@contextlib.contextmanager
def _draft(real: bytes) -> Iterator[tuple[IO[bytes], bytes]]:
    """A file beside the real one, locked, and removed unless it was renamed. Its name is always the same for the same file, so that a
    write after a crash takes over what the crash left.
    """
    folder, name = os.path.split(real)
    draft = os.path.join(folder, _DRAFT[0] + hashlib.sha256(name).hexdigest()[:24].encode() + _DRAFT[1])  # noqa: PTH118
    with _locked(draft, os.O_RDWR | os.O_CREAT) as fd:
        try:
            with open(fd, "r+b", closefd=False) as target:
                yield target, draft
        finally:
            with contextlib.suppress(OSError):
                if os.fstat(fd).st_ino == os.stat(draft).st_ino:  # noqa: PTH116
                    os.unlink(draft)  # noqa: PTH108


@contextlib.contextmanager
def _locked(draft: bytes, flags: int) -> Iterator[int]:
    """The draft, open and locked by this process alone; raises Changed where another one has it. The lock ends with the process."""
    for _ in range(_TRIES):
        fd = os.open(draft, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Changed(errno.EBUSY, "another process writes tags into this file", os.fsdecode(draft)) from None
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
            # The one who had the lock may have renamed or removed the file since it was opened here.
            if not _is_at(draft, fd):
                continue
            yield fd
            return
        finally:
            os.close(fd)
    raise Changed(errno.EBUSY, "other processes write tags into this file all the time", os.fsdecode(draft))


def _has_locks(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_at(path: bytes, fd: int) -> bool:
    try:
        there, here = os.lstat(path), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (there.st_ino, there.st_dev) == (here.st_ino, here.st_dev)


def _checked(
    real: bytes, draft: bytes, target: IO[bytes], which: str, prefix: str, wanted: dict[str, list[str]], kept: Any
) -> dict[str, list[str]]:
    """Our tags as the draft has them. Raises Unwritable unless all else in it is as in the real file."""
    found = formats.load(target, which)
    after = formats.ours(found, which, prefix)
    if set(after) != set(wanted):
        raise Unwritable(f"its tags could not be written: {sorted(wanted)} were to be there, {sorted(after)} are")
    if formats.others(found, which, prefix) != kept:
        raise Unwritable("its other tags could not be kept as they are")
    if packets(real) != packets(draft):
        raise Unwritable("its sound would not be the same")
    return after


def packets(path: Path) -> str:
    """A hash of the file's encoded sound, packet by packet, without what is around it."""
    import av  # noqa: PLC0415
    import av.error  # noqa: PLC0415

    from ostler.apps.music.decode import OPTIONS  # noqa: PLC0415

    seen = hashlib.sha256()
    try:
        with av.open(os.fsdecode(path), options=OPTIONS, metadata_errors="replace") as container:
            for packet in container.demux(audio=0):
                seen.update(b"%d:" % packet.size)
                if packet.size:
                    seen.update(packet)
    except (av.error.FFmpegError, IndexError) as error:
        if isinstance(error, OSError) and not isinstance(error, av.error.InvalidDataError | ValueError):
            raise
        raise Unwritable(f"its sound cannot be read ({getattr(error, 'strerror', None) or error})") from None
    return seen.hexdigest()


def _check_unchanged(real: bytes, facts: os.stat_result) -> None:
    there = os.stat(real)  # noqa: PTH116
    same = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
    if any(getattr(there, name) != getattr(facts, name) for name in same):
        raise Changed(errno.EBUSY, "the file was changed while its tags were written", os.fsdecode(real))


def _like(real: bytes, facts: os.stat_result, fd: int) -> None:
    """Give the draft all that belongs to the file and is not its content. What cannot be given is an error: better no tags than another owner."""
    here = os.fstat(fd)
    if (here.st_uid, here.st_gid) != (facts.st_uid, facts.st_gid):
        os.fchown(fd, facts.st_uid, facts.st_gid)
    if os.fstat(fd).st_mode != facts.st_mode:
        os.fchmod(fd, stat.S_IMODE(facts.st_mode))
    _copy_attributes(real, fd)
    os.utime(fd, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def _copy_attributes(real: bytes, fd: int) -> None:
    """Extended attributes, access lists among them. Those of security modules are set by the system itself where we may not."""
    try:
        names = os.listxattr(real)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return
        raise
    for name in names:
        try:
            os.setxattr(fd, name, os.getxattr(real, name))
        except PermissionError:
            if not name.startswith(("security.", "trusted.")):
                raise


def _flush_directory(folder: bytes) -> None:
    """So that the new name survives a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(fd)
