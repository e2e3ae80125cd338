"""Directories of session workers: outside of the data directory, because what a worker starts may run as another user."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import stat
import tempfile
from pathlib import Path

from ostler.errors import ConfigError
from ostler.lifecycle import family

log = logging.getLogger("ostler.sessions")

_NAME = 24  # characters of a pool's name in a path


class Scratch:
    """One node's. The path is short, for the path of a socket may have 107 bytes. What a killed node left is found by the next one on
    the same data directory, where its guard has not removed it.
    """

    def __init__(self, data: Path) -> None:
        mark = hashlib.sha256(os.fsencode(data.resolve())).hexdigest()[:10]
        self._home = Path(tempfile.gettempdir()) / f"ostler-{os.geteuid()}-{mark}"
        if not self._is_ours():
            self._home = Path(tempfile.mkdtemp(prefix=f"ostler-{os.geteuid()}-"))
            log.warning("session workers use %s: the usual place is not this user's", self._home)
        self.root = self._home / secrets.token_hex(4)

    async def start(self) -> None:
        """The node holds its data directory's lock, so nobody uses what is there."""
        await asyncio.to_thread(family.remove, self._home)
        try:
            self._make()
        except FileNotFoundError:  # the guard of the node before this one has removed the first, which was still empty
            self._make()

    def _make(self) -> None:
        try:
            for folder in (self._home, self.root):
                folder.mkdir(0o711)  # never one that is there: somebody else may have put it there, or a link
                folder.chmod(0o711)
        except FileExistsError:
            raise ConfigError(
                f"{folder} was made by somebody else a moment ago: remove it, or set TMPDIR to a directory where only this user writes"
            ) from None

    def _is_ours(self) -> bool:
        try:
            found = self._home.lstat()
        except FileNotFoundError:
            return True
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()

    def of(self, pool: str, number: int, generation: int) -> Path:
        """A worker's own; it makes it itself."""
        name = pool if len(pool) <= _NAME else f"{pool[: _NAME - 9]}-{hashlib.sha256(pool.encode()).hexdigest()[:8]}"
        return self.root / f"{name}.{number}.{generation}"

    def remove(self, pool: str, number: int, generation: int) -> None:
        """The worker and its family are gone. Beside the loop: it may have left a lot."""
        asyncio.get_running_loop().run_in_executor(None, family.remove, self.of(pool, number, generation))

    async def stop(self) -> None:
        """All workers are gone."""
        await asyncio.to_thread(family.remove, self._home)
