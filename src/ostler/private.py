"""Who may use the data directory: its modes, its token, and what somebody without the right is told. Standard library alone.

The directory itself records the rule: 0700 for its owner alone, 2770 where the node was started with `group`. Everything that is
made in it takes after its parent directory, so processes with another umask, or without the node's settings, do the same.
"""

from __future__ import annotations

import builtins
import contextlib
import grp
import logging
import os
import pwd
import stat
from pathlib import Path
from typing import IO, Any

from ostler.errors import ConfigError, NoAccess

log = logging.getLogger("ostler")

_OWN, _SHARED = 0o700, 0o2770
TOKEN = "token"  # noqa: S105  the file's name


def prepare(data: Path, group: str = "") -> None:
    """Make the data directory, or take the rights of others from one that is there. Only a node changes an existing one.

    A file system without modes (drvfs, some volumes) costs one warning.
    """
    gid = _gid(group) if group else None
    try:
        missing = [folder for folder in (data, *data.parents) if not folder.exists()]
        data.mkdir(_OWN, parents=True, exist_ok=True)
        for folder in missing:
            sync(folder.parent)
        found = data.stat()
    except OSError as error:
        raise ConfigError(
            f"the data directory {data} cannot be created: {error.strerror}; name another with --data"
        ) from error
    wanted = _OWN if gid is None else _SHARED
    if stat.S_IMODE(found.st_mode) == wanted and gid in (None, found.st_gid):
        return
    if found.st_mode & stat.S_ISVTX:  # /tmp and its like: not ours to close
        log.warning("%s is shared by many users and was left unchanged; give the node its own directory (--data)", data)
        return
    if gid is not None and gid != found.st_gid:
        _give(data, gid, group)
    with contextlib.suppress(OSError):
        data.chmod(wanted)
    if (left := stat.S_IMODE(data.stat().st_mode)) != wanted:
        log.warning("%s cannot be made private: its mode is %04o and should be %04o", data, left, wanted)
    elif not missing:
        _tighten(data, gid)
        log.warning("%s had mode %04o; it and its contents now have %04o", data, found.st_mode & 0o7777, wanted)


def make(path: Path) -> Path:
    """A directory in the data directory, with the rights of the one that it is in."""
    try:
        path.mkdir(_OWN)
    except FileExistsError:
        return path
    except FileNotFoundError:
        make(path.parent)
        return make(path)
    with contextlib.suppress(OSError):  # `prepare` has warned
        path.chmod(_SHARED if _is_shared(path.parent) else _OWN)
    return path


def anchor(folder: Path) -> None:
    """Have the directory and what is in it on disk by name, whoever made it: what is acknowledged there must be found again."""
    for path in (folder, folder.parent):
        with contextlib.suppress(PermissionError):  # a member of the group may not read what is above
            sync(path)


def sync(folder: Path) -> None:
    """Have the directory's entries on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open(path: Path, mode: str, **more: Any) -> IO[Any]:  # noqa: A001
    """As the builtin; a file that this creates is 0600, or 0660 in a shared directory, whatever the umask."""
    return builtins.open(path, mode, opener=_open, **more)


def _open(path: str, flags: int) -> int:
    mode = file_mode(Path(path).parent)
    descriptor = os.open(path, flags, mode)
    if flags & os.O_CREAT and stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:
        with contextlib.suppress(OSError):  # somebody else's, or a file system without modes
            os.fchmod(descriptor, mode)
    return descriptor


def create(path: Path) -> None:
    """Make an empty file, private from its first moment, and sync its entry; one that is there stays as it is."""
    with contextlib.suppress(FileExistsError):
        with open(path, "xb"):
            pass
        sync(path.parent)


def file_mode(folder: Path) -> int:
    """The mode of files and sockets in a directory."""
    return 0o660 if _is_shared(folder) else 0o600


def _is_shared(folder: Path) -> bool:
    return folder.stat().st_mode & 0o2020 == 0o2020


def _gid(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(f"group {group!r} does not exist on this machine; create it, or remove the setting") from None


def _give(data: Path, gid: int, group: str) -> None:
    try:
        os.chown(data, -1, gid)
    except OSError as error:
        raise ConfigError(
            f"{data} cannot be given to group {group!r} ({error.strerror}): the node's user, {_user(os.geteuid())}, must be a member"
        ) from error


def _tighten(data: Path, gid: int | None) -> None:
    """Bring all that is in the directory in line. No link is followed: who could write here may have left some."""
    for _, folders, files, at in os.fwalk(data):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):  # a socket, a link, or gone
                descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
                try:
                    _tighten_one(descriptor, gid)
                finally:
                    os.close(descriptor)


def _tighten_one(descriptor: int, gid: int | None) -> None:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode):
        wanted = _OWN if gid is None else _SHARED
    elif stat.S_ISREG(mode):
        own = 0o600 | mode & 0o100  # a program that a job left stays one
        wanted = own if gid is None else own | own >> 3
    else:
        return
    if gid is not None:
        os.fchown(descriptor, -1, gid)
    os.fchmod(descriptor, wanted)


# ---- the token


def token(data: Path) -> str:
    """The node's own token, made at its first start; the group may read it."""
    import secrets  # noqa: PLC0415  workers need none

    found = read_token(data) if _is_ours(data / TOKEN) else ""
    if not found:
        found = secrets.token_urlsafe(32)
        fresh = data / f"{TOKEN}.new"
        try:
            fresh.unlink(missing_ok=True)
            with open(fresh, "x", encoding="ascii") as file:
                file.write(found + "\n")
            fresh.replace(data / TOKEN)
        except OSError as error:
            raise ConfigError(
                f"{data / TOKEN} cannot be written: {error.strerror}; delete it, or name another with --data"
            ) from error
    with contextlib.suppress(OSError):  # `prepare` has warned
        (data / TOKEN).chmod(file_mode(data) & 0o640)
    return found


def _is_ours(path: Path) -> bool:
    """Whether the file can be believed: in a directory that others can write to, one of them may have put it there."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid in (0, os.geteuid())


def read_token(data: Path) -> str:
    """The node's own token, or '' when there is none, or none that this process may read."""
    try:
        return (data / TOKEN).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


# ---- who has no right


def check(path: Path, *, write: bool) -> None:
    """Raise NoAccess when this process may not use the database file."""
    if (said := refusal(path, write=write)) is not None:
        raise said


def refusal(path: Path, *, write: bool) -> NoAccess | None:
    """Why this process may not use a file of the data directory, in words; None when it may."""
    for folder in (*reversed(path.parents), path.parent):
        needs = os.X_OK | (os.W_OK if write and folder == path.parent else 0)
        if (said := _denied(folder, needs)) is not None:
            return said
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        if (said := _denied(path.with_name(name), os.R_OK | (os.W_OK if write else 0))) is not None:
            return said
    return None


def _denied(path: Path, needs: int) -> NoAccess | None:
    try:
        found = path.stat()
        if os.access(path, needs, effective_ids=True):
            return None
    except PermissionError:
        return None  # the directory above says more
    except OSError:
        return None  # it is not there
    return NoAccess(
        f"permission denied: {path} belongs to {_user(found.st_uid)}:{_group(found.st_gid)} with mode "
        f"{stat.S_IMODE(found.st_mode):04o}, and this process runs as {_user(os.geteuid())}. Run it as {_user(found.st_uid)}; or set "
        f'`group = "…"` for the node and put {_user(os.geteuid())} into that group; or use the HTTP API with the token '
        "(`ostler token` prints it)"
    )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
