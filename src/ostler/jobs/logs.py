"""What each job printed: a log per job that printed anything. The newest lines are never lost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from ostler.lifecycle.logs import Writer, aside

_BYTES = 1_000_000


class JobLogs:
    """`logs/jobs/{thousands}/{id}.log`, and `.log.1` before it once it is full."""

    def __init__(self, data: Path) -> None:
        self._root = data / "logs" / "jobs"

    def path(self, job: int) -> Path:
        return self._root / str(job // 1000) / f"{job}.log"

    def append(self, job: int, lines: list[bytes]) -> None:
        """Add lines. A full disk costs lines, never a worker."""
        writer = Writer(self.path(job), _BYTES)
        writer.write(b"\n".join(lines) + b"\n")
        writer.close()

    def delete(self, jobs: Iterable[int]) -> None:
        """Remove the logs of jobs that are no more."""
        for job in jobs:
            for path in (self.path(job), aside(self.path(job))):
                with contextlib.suppress(OSError):
                    path.unlink()
