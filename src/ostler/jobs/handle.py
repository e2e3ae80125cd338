"""The job handle, which a running job uses to report and to publish. Standard library only."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostler import habits
from ostler.errors import BadArguments
from ostler.jobs.outcome import Cancelled
from ostler.jobs.progress import Throttle
from ostler.jobs.signature import check_depth

if TYPE_CHECKING:
    from ostler.jobs.artifacts import JobArtifact
    from ostler.jobs.results import Published, Results

_EVENTS = 10_000  # named events of one run; what a job prints is for more
_EVENT_BYTES = 65_536


def _clean(text: str) -> str:
    """Text that can be stored: file names may hold bytes that are no characters."""
    return str(text).encode("utf-8", "replace").decode()[:500]


running: Job | None = None  # the job that this process runs now; also for threads of that job
_making = threading.Lock()  # threads of a job that ask for its scratch at once


class Job(habits.Hinting):
    """The job handle: the first argument of every job function."""

    _hints = habits.HANDLE

    def __init__(self, id: int, task: str, attempt: int, crashes: int, fence: int, say: Callable[..., None]) -> None:  # noqa: A002
        self.id = id
        self.task = task
        self.attempt = attempt
        """The number of this attempt, from 1. A run that did not count, for example because of a shutdown, is repeated with the same number."""
        self.crashes = crashes
        """How often this job has crashed its worker so far."""
        self.fence = fence
        """A number that grows with every run of this job, to guard your own conditional writes."""
        self.cancelled = False
        """True when the job has been cancelled. Check it between steps, or call `check()`."""
        self.stopping = False
        """True when the worker is being stopped: finish soon, or the job is requeued."""
        self._claim = (id, fence)  # what is reported names the claim, whatever the job does to its handle
        self._say = say
        self._throttle = Throttle()
        self._events = 0
        self._scratch: Path | None = None
        self._holds: Callable[[str | None], bool] = lambda _: True

    def progress(self, percent: float, stage: str | None = None) -> None:
        """Report progress (0 to 100), and optionally what the job is doing. Cheap to call often: only real changes are stored. Never goes back."""
        stage = None if stage is None else _clean(stage)
        shown = self._throttle.admit(percent, stage, time.monotonic())
        if shown is not None:
            self._say(
                "note",
                *self._claim,
                "progress",
                shown,
                stage,
                {"pct": shown, **({"stage": stage} if stage else {})},
            )

    def event(self, name: str, data: Any = None) -> None:
        """Add a named event with JSON data to the job's timeline. The first 10,000 of a run are kept."""
        self._tell(name, data)

    def _tell(self, name: str, data: Any, published: Published | None = None) -> None:
        try:
            text = json.dumps(data, allow_nan=False)
            check_depth(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadArguments(
                f"event {name!r} of job {self.id}: its data cannot be written as JSON: {error}"
            ) from error
        if len(text) > _EVENT_BYTES:
            raise BadArguments(
                f"event {name!r} of job {self.id}: its data is {len(text)} bytes as JSON, more than {_EVENT_BYTES}"
            )
        self._events += 1
        if self._events > _EVENTS and published is None:  # a loop that tells everything; that it was cut is told once
            if self._events > _EVENTS + 1:
                return
            name, data = "events:limit", {"kept": _EVENTS}
        more = [] if published is None else [[published.key, published.at, published.size, published.sha256]]
        self._say("note", *self._claim, _clean(name), None, None, data, *more)

    @property
    def scratch(self) -> Path:
        """A private, empty directory for this run. Deleted on success, kept on failure so that you can look into it."""
        with _making:
            if self._scratch is None:
                from ostler.jobs import scratch  # noqa: PLC0415

                self._scratch = scratch.make(_data() / "scratch", *self._claim)
            return self._scratch

    @property
    def results(self) -> Results:
        """Where artifacts are published."""
        from ostler.jobs import results  # noqa: PLC0415

        return results.connect(os.environ.get("OSTLER_RESULTS", ""), _data())

    def publish(self, path: str | os.PathLike[str], key: str) -> Published:
        """Publish a file as an artifact under a key such as f"{job.id}/clip.mp4". Readers see the whole file or nothing.

        Raises LostClaim if this run no longer owns the job, because another run does or the job was cancelled. Adds the event `uploaded`.
        """
        from ostler.jobs.results import LostClaim, check_key  # noqa: PLC0415

        if not self._holds(check_key(key)):
            raise LostClaim(f"job {self.id} is now run by another worker, or was cancelled; {key} was not published")
        origin = os.environ.get("OSTLER_ORIGIN", "")
        published = self.results.put(Path(path), key, self.fence, origin, self.id, lambda: self._holds(None))
        self._tell("uploaded", {"key": key, "size": published.size, "sha256": published.sha256}, published)
        return published

    def published(self, key: str, check: Callable[[Path], object] | None = None) -> Published | None:
        """The artifact that an earlier run published under the key, or None. It is valid: its checksum matches, and `check(path)` did not raise.

        A run that finds one can return at once instead of doing the work again.
        """
        from ostler.jobs import results  # noqa: PLC0415

        return results.valid(self.results, key, self.scratch, check, os.environ.get("OSTLER_ORIGIN", ""))

    def artifact(self, key: str) -> JobArtifact:
        """The artifact that any job has published under the key, to read it or get a local file (`.path()`). Raises NotFound."""
        from ostler import config  # noqa: PLC0415
        from ostler.jobs.artifacts import JobArtifact, Reader, by_store  # noqa: PLC0415

        settings = config.load()
        reader = Reader(settings, by_store(settings))
        found = reader.artifact(key)
        return JobArtifact(key, found.size, found.sha256, found.type, found.at, reader, lambda: self.scratch)

    def check(self) -> None:
        """Raise `Cancelled` if the job has been cancelled."""
        if self.cancelled:
            raise Cancelled(f"job {self.id} was cancelled")

    def _settle(self, *, success: bool) -> None:
        """After the run: delete or keep its scratch."""
        if self._scratch is not None:
            from ostler.jobs import scratch  # noqa: PLC0415

            scratch.settle(_data() / "scratch", *self._claim, success=success)

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.task} attempt {self.attempt}>"


def _data() -> Path:
    return Path(os.environ.get("OSTLER_DATA") or ".ostler")
