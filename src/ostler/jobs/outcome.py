"""The exceptions that a job can raise to say how its run ended. Standard library only; `verdict` decides what follows.

Returning is success. `Fail` is permanent, `Retry` asks for another run, `Snooze` for a later one that costs no attempt,
`Cancel` ends the job as cancelled; any other exception is transient.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ostler.errors import OstlerError

CANCELLED = "cancelled while it ran"  # what is told of a job that somebody else cancelled


def in_seconds(value: Any) -> Any:
    """A timedelta as seconds; anything else as it is."""
    return value.total_seconds() if isinstance(value, timedelta) else value


def is_wait(after: Any) -> bool:
    """Whether it is a number of seconds that a job can wait."""
    return isinstance(after, int | float) and not isinstance(after, bool) and 0 <= after < 1e9


class Fail(OstlerError):
    """Raise it in a job to fail for good with this code, without a retry."""

    def __init__(self, code: str, message: str = "") -> None:
        super().__init__(message or code)
        self.code = code


class Retry(OstlerError):
    """Raise it in a job to be retried, `after` seconds or a timedelta (default: the usual backoff), as long as attempts are left."""

    def __init__(self, message: str = "", *, after: float | timedelta | None = None) -> None:
        super().__init__(message or "the job asked for another run")
        after = in_seconds(after)
        if after is not None and not is_wait(after):
            raise ValueError(f"Retry(after={after!r}): it must be a number of seconds from 0 to 1e9, or a timedelta")
        self.after = after


class Snooze(OstlerError):
    """Raise it in a job to run again later, after seconds or a timedelta, without using up an attempt."""

    def __init__(self, after: float | timedelta, message: str = "") -> None:
        super().__init__(message or "the job asked to be run later")
        after = in_seconds(after)
        if not is_wait(after):
            raise ValueError(f"Snooze({after!r}): it must be a number of seconds from 0 to 1e9, or a timedelta")
        self.after = after


class Cancel(OstlerError):
    """Raise it in a job to end it as cancelled, with this message."""

    code = "CANCELLED"

    def __init__(self, message: str = "") -> None:
        super().__init__(message or "the job cancelled itself")


class Cancelled(OstlerError):
    """Raised by `job.check()` if the job has been cancelled. Do not catch it, or raise it again."""

    code = "CANCELLED"
