"""Directories of session workers: outside of the data directory, because what a worker starts may run as another user."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

log = logging.getLogger("ostler.sessions")


class Scratch:
    """One node's. Its path is short (the path of a socket may have 107 bytes) and the same at each start, so that what a killed node
    left is found and removed.
    """

    def __init__(self, data: Path) -> None:
        mark = hashlib.sha256(os.fsencode(data.resolve())).hexdigest()[:10]
        self.root = Path(tempfile.gettempdir()) / f"ostler-{os.geteuid()}-{mark}"

    async def start(self) -> None:
        """Empty, and nobody else's. The node holds its data directory's lock, so nobody uses what is there."""
        if not self._is_ours():
            self.root = Path(tempfile.mkdtemp(prefix=f"ostler-{os.geteuid()}-"))
            log.warning("session workers use %s: the usual place is not this user's", self.root)
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(0o711, exist_ok=True)
        self.root.chmod(0o711)

    def _is_ours(self) -> bool:
        try:
            found = self.root.lstat()
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
        """The node stops, and all workers are gone."""
        shutil.rmtree(self.root, ignore_errors=True)
