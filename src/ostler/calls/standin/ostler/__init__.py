"""A stand-in for `ostler` in the environment of a model, where Ostler is not installed. Standard library, Python 3.9.

It is first on the path there, so a file that declares jobs and models can be imported: models are kept, everything else is accepted
and forgotten. Modules that a model's process uses come from the real package, which stands behind this one on `__path__`.
"""

from __future__ import annotations

import os
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
__path__.append(os.path.dirname(os.path.dirname(os.path.dirname(_HERE))))  # noqa: PTH120

from ostler.calls.body import Body  # noqa: E402
from ostler.calls.current import cancelled, deadline, loading_progress  # noqa: E402
from ostler.errors import (  # noqa: E402
    BadArguments,
    CallBusy,
    CallError,
    CallRefused,
    CallTimeout,
    ConfigError,
    Conflict,
    InputError,
    JobCancelled,
    JobFailed,
    JobTimeout,
    ModelFailed,
    NotFound,
    OstlerError,
    PayloadTooLarge,
    StoreBusy,
    UnknownTask,
)
from ostler.jobs.outcome import Cancel, Cancelled, Fail, Retry, Snooze  # noqa: E402

from .app import Nothing, Ostler, Task  # noqa: E402

__all__ = [
    "BadArguments",
    "Body",
    "CallBusy",
    "CallError",
    "CallRefused",
    "CallTimeout",
    "Cancel",
    "Cancelled",
    "ConfigError",
    "Conflict",
    "Fail",
    "InputError",
    "JobCancelled",
    "JobFailed",
    "JobTimeout",
    "ModelFailed",
    "NotFound",
    "Ostler",
    "OstlerError",
    "PayloadTooLarge",
    "Retry",
    "Snooze",
    "StoreBusy",
    "Task",
    "UnknownTask",
    "cancelled",
    "deadline",
    "loading_progress",
]


_UNUSED = (
    "Artifact",
    "BatchId",
    "Chain",
    "Endpoint",
    "Job",
    "JobArtifact",
    "JobId",
    "LostClaim",
    "Published",
    "Step",
    "load",
)


def __getattr__(name: str) -> Any:
    """Public names that stand for something which no model uses."""
    if name not in _UNUSED:
        raise AttributeError(f"module 'ostler' has no attribute {name!r} in the environment of a model")
    return type(name, (Nothing,), {})
