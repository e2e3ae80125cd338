"""The job handle: what a running job knows of itself and can say. Standard library alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from ostler.errors import BadArguments
from ostler.jobs.outcome import Cancelled
from ostler.jobs.progress import Throttle

_EVENT_BYTES = 65_536


def _clean(text: str) -> str:
    """Text that can be stored: file names may hold bytes that are no characters."""
    return str(text).encode("utf-8", "replace").decode()[:500]


class Job:
    """The first argument of every job function."""

    def __init__(self, id: int, task: str, attempt: int, crashes: int, fence: int, say: Callable[..., None]) -> None:  # noqa: A002
        self.id = id
        self.task = task
        self.attempt = attempt
        """The number of this run, from 1."""
        self.crashes = crashes
        """How often this job has taken a worker down before."""
        self.fence = fence
        """Grows with every claim of this job: a token for conditional writes of your own."""
        self.cancelled = False
        """True once somebody asked to cancel it. Look at it between steps, or call `check()`."""
        self.stopping = False
        """True once the worker was asked to stop: finish soon, or the job goes back to the queue."""
        self._say = say
        self._throttle = Throttle()

    def progress(self, percent: float, stage: str | None = None) -> None:
        """Report how far it is (0 to 100). Cheap to call often: only real news is stored. Never goes back."""
        stage = None if stage is None else _clean(stage)
        shown = self._throttle.admit(percent, stage, time.monotonic())
        if shown is not None:
            self._say(
                "note",
                self.id,
                self.fence,
                "progress",
                shown,
                stage,
                {"pct": shown, **({"stage": stage} if stage else {})},
            )

    def event(self, name: str, data: Any = None) -> None:
        """Write a named event with JSON data into the job's timeline."""
        try:
            text = json.dumps(data, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise BadArguments(
                f"event {name!r} of job {self.id}: its data cannot be written as JSON: {error}"
            ) from error
        if len(text) > _EVENT_BYTES:
            raise BadArguments(
                f"event {name!r} of job {self.id}: its data is {len(text)} bytes as JSON, more than {_EVENT_BYTES}"
            )
        self._say("note", self.id, self.fence, _clean(name), None, None, data)

    def check(self) -> None:
        """Raise `Cancelled` when somebody asked to cancel the job."""
        if self.cancelled:
            raise Cancelled(f"job {self.id} was cancelled")

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.task} attempt {self.attempt}>"
