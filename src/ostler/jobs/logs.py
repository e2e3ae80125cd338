"""What each job printed: a file per job that printed anything, bounded, in two parts. The newest lines are never lost."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path

from ostler import private

log = logging.getLogger("ostler.jobs")

_BYTES = 1_000_000


class JobLogs:
    """`logs/jobs/{thousands}/{id}.log`, and `.log.1` before it once it is full."""

    def __init__(self, data: Path) -> None:
        self._root = data / "logs" / "jobs"

    def path(self, job: int) -> Path:
        return self._root / str(job // 1000) / f"{job}.log"

    def append(self, job: int, lines: list[bytes]) -> None:
        """Add lines. A full disk costs lines, never a worker."""
        path = self.path(job)
        try:
            private.make(path.parent)
            with private.open(path, "ab") as file:
                file.write(b"\n".join(lines) + b"\n")
                full = file.tell() > _BYTES
            if full:
                path.replace(path.with_suffix(".log.1"))
        except OSError as error:
            log.warning("job %d: what it printed could not be kept: %s", job, error)

    def read(self, job: int, lines: int = 1000) -> list[str]:
        """The last lines, oldest first."""
        found: list[str] = []
        for path in (self.path(job).with_suffix(".log.1"), self.path(job)):
            with contextlib.suppress(OSError):
                found += path.read_text(encoding="utf-8", errors="replace").splitlines()
        return found[-lines:]

    def delete(self, jobs: Iterable[int]) -> None:
        """Remove the logs of jobs that are no more."""
        for job in jobs:
            for path in (self.path(job), self.path(job).with_suffix(".log.1")):
                with contextlib.suppress(OSError):
                    path.unlink()
