"""The data directory of a running node: its lock, its address, and what the node needs of the system to use it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ostler import private
from ostler.config import Settings
from ostler.errors import ConfigError
from ostler.lifecycle import family
from ostler.plane.entry import RESERVE

_PER_WORKER = 6  # files: channel, output, log and pidfd, and what a start needs for a moment
_CLIENTS = 32  # connections, at the least


@contextlib.contextmanager
def lock(folder: Path, group: str) -> Iterator[IO[str]]:
    """Only one node per data directory: two would each think the other's workers dead."""
    try:
        if not folder.exists():
            private.prepare(folder, group)
        file = private.open(folder / "node.lock", "a+", encoding="ascii")
    except OSError as error:
        raise ConfigError(
            f"the data directory {folder} cannot be used: {error.strerror}; name another with --data"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise ConfigError(
                f"another node (pid {file.read().strip() or 'unknown'}) is already running in {folder}; stop it, or name another directory with --data"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield file


def prepare(settings: Settings) -> None:
    """Make the directory, as private as it is meant to be, and see that it can be written to."""
    try:
        private.prepare(settings.data_dir, settings.group)
        private.make(settings.data_dir / "logs")
        probe = settings.data_dir / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"the data directory {settings.data_dir} cannot be used: {error.strerror}; name another with --data"
        ) from error


def identity(folder: Path) -> str:
    """What this data directory is called in the store. Whoever holds its lock knows that no other node of it lives."""
    path = folder / "home"
    with contextlib.suppress(OSError):
        if found := path.read_text(encoding="ascii").strip():
            return found
    made = secrets.token_hex(8)
    with private.open(path, "w", encoding="ascii") as file:
        file.write(f"{made}\n")
    return made


@contextlib.contextmanager
def address(folder: Path, url: str, *, own_token: bool) -> Iterator[None]:
    """`node.json` tells the CLI where the node listens; a reader finds it whole or not at all."""
    path = folder / "node.json"
    fresh = path.with_suffix(".json.new")
    with private.open(fresh, "w", encoding="ascii") as file:
        known = {"url": url, "pid": os.getpid(), "started": family.start_time(os.getpid()), "own_token": own_token}
        json.dump(known, file)
    fresh.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def check_files(workers: int) -> None:
    """Refuse to start where clients would find a node that runs and takes no connection."""
    needed = RESERVE + _PER_WORKER * workers + _CLIENTS
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise ConfigError(
            f"this process may have {allowed} files open, and {needed} are needed (workers: {workers}); "
            f"raise the limit: `ulimit -n {max(needed, 1024)}`, or LimitNOFILE= in a systemd unit"
        )
