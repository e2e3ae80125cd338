"""Directories of session workers: outside of the data directory, because what a worker starts may run as another user."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

log = logging.getLogger("ostler.sessions")


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
        shutil.rmtree(self._home, ignore_errors=True)
        for folder in (self._home, self.root):
            folder.mkdir(0o711, exist_ok=True)
            folder.chmod(0o711)

    def _is_ours(self) -> bool:
        try:
            found = self._home.lstat()
        except FileNotFoundError:
            return True
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()

    def of(self, pool: str, number: int, generation: int) -> Path:
        """A worker's own; it makes it itself."""
        return self.root / f"{pool[:24]}.{number}.{generation}"

    def remove(self, pool: str, number: int, generation: int) -> None:
        """The worker and its family are gone."""
        shutil.rmtree(self.of(pool, number, generation), ignore_errors=True)

    async def stop(self) -> None:
        """All workers are gone."""
        shutil.rmtree(self._home, ignore_errors=True)
