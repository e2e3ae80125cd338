"""The job handle: what a running job knows of itself and can say. Standard library alone."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


class Job:
    """The first argument of every job function."""

    def __init__(self, id: int, task: str, attempt: int, crashes: int, fence: int, say: Callable[..., None]) -> None:  # noqa: A002
        self.id = id
        self.task = task
        self.attempt = attempt
        """Which of the attempts this run is, from 1. A run that did not count, as after a shutdown, has the same number again."""
        self.crashes = crashes
        """How often this job has taken a worker down before."""
        self.fence = fence
        """Grows with every claim of this job: a token for conditional writes of your own."""
        self.cancelled = False
        """True once somebody asked to cancel it. Look at it between steps, or call `check()`."""
        self.stopping = False
        """True once the worker was asked to stop: finish soon, or the job goes back to the queue."""
        self._claim = (id, fence)  # what is reported names the claim, whatever the job does to its handle
        self._say = say
        self._throttle = Throttle()
        self._events = 0
        self._scratch: Path | None = None
        self._holds: Callable[[str | None], bool] = lambda _: True

    def progress(self, percent: float, stage: str | None = None) -> None:
        """Report how far it is (0 to 100). Cheap to call often: only real news is stored. Never goes back."""
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
        """Write a named event with JSON data into the job's timeline. Of a run's own events the first 10,000 are kept."""
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
        """A private directory for this run, empty at first. Deleted on success, kept on failure for a look."""
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
        """Publish a file under a key such as f"{job.id}/clip.mp4": whole or not at all, and only while this run owns its job.

        Raises LostClaim when another run owns it by now. Writes the event `uploaded`.
        """
        from ostler.jobs.results import LostClaim, check_key  # noqa: PLC0415

        if not self._holds(check_key(key)):
            raise LostClaim(f"job {self.id} has another owner by now, or was cancelled; {key} was not published")
        origin = os.environ.get("OSTLER_ORIGIN", "")
        published = self.results.put(Path(path), key, self.fence, origin, self.id, lambda: self._holds(None))
        self._tell("uploaded", {"key": key, "size": published.size, "sha256": published.sha256}, published)
        return published

    def published(self, key: str, check: Callable[[Path], object] | None = None) -> Published | None:
        """What an earlier run has published under the key, if it is valid: right checksum, and `check(path)` does not raise.

        A run that finds one can return at once instead of doing the work again.
        """
        from ostler.jobs import results  # noqa: PLC0415

        return results.valid(self.results, key, self.scratch, check, os.environ.get("OSTLER_ORIGIN", ""))

    def artifact(self, key: str) -> JobArtifact:
        """What any job has published under the key: to read, or as a local file (`.path()`). Raises NotFound."""
        from ostler import config  # noqa: PLC0415
        from ostler.jobs.artifacts import JobArtifact, Reader, by_store  # noqa: PLC0415

        settings = config.load()
        reader = Reader(settings, by_store(settings))
        found = reader.artifact(key)
        return JobArtifact(key, found.size, found.sha256, found.type, found.at, reader, lambda: self.scratch)

    def check(self) -> None:
        """Raise `Cancelled` when somebody asked to cancel the job."""
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
