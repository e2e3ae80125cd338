"""`ostler doctor`: are this machine, this Python, this data directory and the store fit for a node? Looks, changes nothing."""

from __future__ import annotations

import os
import platform
import pwd
import resource
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import click

import ostler
from ostler import config, private
from ostler.calls.address import node_url
from ostler.cli import client, show
from ostler.cli.options import as_json, where
from ostler.config import Settings
from ostler.errors import OstlerError
from ostler.store import Store
from ostler.store.database import is_postgres, sqlite_path
from ostler.store.doctor import Finding, examine

_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "lustre", "afs", "drvfs", "fuse.sshfs")
_LITTLE = 500_000_000  # bytes of free space
_FILES = 1024
# https://www.sqlite.org/wal.html#walresetbug
_WAL_RESET = (3, 7, 0), (3, 51, 3)
_COLOURS = {"ok": "green", "warning": "yellow", "error": "bold red"}


@click.command()
@click.option(
    "--deep", is_flag=True, help="Also check the integrity of the database (PRAGMA quick_check), which reads all of it."
)
@where
@as_json
def doctor(known: Settings, deep: bool, json_: bool) -> None:
    """Check Python, the data directory, limits, the node and the store. Exits with 1 if there is an error."""
    found = [finding for look in (_program, _sqlite, _directory, _limits, _variables, _node) for finding in look(known)]
    found += _database(known, deep)
    if json_:
        show.as_json({"findings": [finding._asdict() for finding in found]})
    else:
        rows = [(show.styled(f.level, _COLOURS[f.level]), f.what, f.text) for f in found]
        show.table(("", "what", "found"), rows, "")
    raise SystemExit(1 if any(finding.level == "error" for finding in found) else 0)


def _program(_: Settings) -> Iterator[Finding]:
    yield Finding("ok", "ostler", f"{ostler.__version__} on Python {platform.python_version()}, {platform.platform()}")


def _sqlite(known: Settings) -> Iterator[Finding]:
    if not is_postgres(known.store):
        yield sqlite_version(sqlite3.sqlite_version_info)


def sqlite_version(version: tuple[int, int, int]) -> Finding:
    """Whether the version has the bug at the reset of a WAL, which can (very rarely) corrupt a database."""
    shown, (first, fixed) = ".".join(map(str, version)), _WAL_RESET
    if first <= version < fixed:
        return Finding(
            "warning",
            "sqlite",
            f"{shown} has a rare bug that can corrupt a database when two connections checkpoint at once (fixed in 3.51.3; "
            "your distribution may have the fix in an older number). SQLite comes with your Python or your system (libsqlite3): upgrade that, or run "
            "Ostler with a Python that has a newer one. Keep backups",
        )
    return Finding("ok", "sqlite", shown)


def _directory(known: Settings) -> Iterator[Finding]:
    path = known.data_dir
    if not path.exists():
        above = next(p for p in path.parents if p.exists())
        able = os.access(above, os.W_OK)
        words = "a node will create it" if able else f"and {above} may not be written by this user"
        yield Finding("ok" if able else "error", "data", f"{path} does not exist yet; {words}")
        path = above
    else:
        yield _access(path)
    kind = filesystem(path, _mounts())
    if kind in _NETWORK and not is_postgres(known.store):
        yield Finding(
            "warning",
            "filesystem",
            f"{path} is on {kind}: SQLite's locks do not hold on network filesystems; use a local disk",
        )
    else:
        yield Finding("ok", "filesystem", kind or "unknown")
    free = shutil.disk_usage(path).free
    yield Finding("ok" if free > _LITTLE else "warning", "free space", f"{free / 1e9:.1f} GB")


def _access(path: Path) -> Finding:
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    try:
        owner = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        owner = str(found.st_uid)
    text = f"{path}, owner {owner}, mode {mode:04o}"
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return Finding("error", "data", f"{text}: this user cannot write there")
    if mode & stat.S_IRWXO:
        return Finding("warning", "data", f"{text}: every user of this machine can read it; run chmod o-rwx")
    return Finding("ok", "data", text)


def _mounts() -> list[tuple[str, str]]:
    """(mount point, kind of filesystem), as Linux tells; none elsewhere."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    parts = [line.split(" ") for line in lines]
    return [(p[4].replace("\\040", " "), p[p.index("-") + 1]) for p in parts if "-" in p]


def filesystem(path: Path, mounts: list[tuple[str, str]]) -> str | None:
    """The kind of filesystem that a path is on: of the deepest mount above it, the last one."""
    real = path.resolve()
    over = [
        (len(Path(point).parts), order, kind)
        for order, (point, kind) in enumerate(mounts)
        if real.is_relative_to(point)
    ]
    return max(over)[2] if over else None


def _limits(_: Settings) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < _FILES:
        yield Finding("error", "open files", f"at most {hard}; a node needs {_FILES} or more (ulimit -n, LimitNOFILE=)")
    else:
        shown = "unlimited" if hard < 0 else str(hard)
        yield Finding("ok", "open files", f"{soft}, can be raised to {shown}")


def _variables(_: Settings) -> Iterator[Finding]:
    for warning in config.strangers():
        yield Finding("warning", "environment", warning)


def _node(known: Settings) -> Iterator[Finding]:
    url = node_url(known)
    if url is None:
        yield Finding("ok", "node", "none is running in this data directory")
        return
    try:
        health = client.request(known, "GET", "/api/v1/health")
    except OstlerError as error:
        yield Finding("error", "node", f"runs at {url}, but: {error}")
        return
    words = "; ".join([health["status"], *health["errors"]])
    yield Finding("ok" if health["status"] == "healthy" else "warning", "node", f"runs at {url}, {words}")


def _database(known: Settings, deep: bool) -> Iterator[Finding]:
    try:
        if not is_postgres(known.store):
            path = sqlite_path(known.store, known.data_dir)
            private.check(path, write=False)
            if not path.exists():
                yield Finding("ok", "database", f"there is none at {path} yet")
                return
        with Store.open(known.store, known.data_dir, read_only=True) as opened:
            yield from examine(opened, deep=deep)
    except OstlerError as error:
        yield Finding("error", "database", str(error))
