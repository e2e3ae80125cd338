"""Ostler: background jobs, ML models and live sessions in supervised worker processes.

These are the public names. Importing them loads no third-party module.
"""

from typing import TYPE_CHECKING, Any

from ostler import habits
from ostler.app import Ostler, load
from ostler.errors import (
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
from ostler.flows import Chain, Step
from ostler.handles import BatchId, JobId
from ostler.jobs.handle import Job
from ostler.jobs.outcome import Cancel, Cancelled, Fail, Retry, Snooze
from ostler.task import Task

if TYPE_CHECKING:
    from ostler.calls.body import Body
    from ostler.calls.current import cancelled, deadline, loading_progress
    from ostler.jobs.artifacts import Artifact, JobArtifact
    from ostler.jobs.results import LostClaim, Published
    from ostler.sessions.spec import Endpoint

__version__ = "0.1.0"

__all__ = [
    "Artifact",
    "BadArguments",
    "BatchId",
    "Body",
    "CallBusy",
    "CallError",
    "CallRefused",
    "CallTimeout",
    "Cancel",
    "Cancelled",
    "Chain",
    "ConfigError",
    "Conflict",
    "Endpoint",
    "Fail",
    "InputError",
    "Job",
    "JobArtifact",
    "JobCancelled",
    "JobFailed",
    "JobId",
    "JobTimeout",
    "LostClaim",
    "ModelFailed",
    "NotFound",
    "Ostler",
    "OstlerError",
    "PayloadTooLarge",
    "Published",
    "Retry",
    "Snooze",
    "Step",
    "StoreBusy",
    "Task",
    "UnknownTask",
    "cancelled",
    "deadline",
    "load",
    "loading_progress",
]


_LATER = {
    "Artifact": "ostler.jobs.artifacts",
    "Body": "ostler.calls.body",
    "Endpoint": "ostler.sessions.spec",
    "JobArtifact": "ostler.jobs.artifacts",
    "LostClaim": "ostler.jobs.results",
    "Published": "ostler.jobs.results",
    "cancelled": "ostler.calls.current",
    "deadline": "ostler.calls.current",
    "loading_progress": "ostler.calls.current",
}


def __getattr__(name: str) -> Any:
    """Names that few programs need are loaded on first use, so that workers start faster."""
    if name not in _LATER:
        hint = f"; use {habits.MODULE[name]}" if name in habits.MODULE else ""
        raise AttributeError(f"module 'ostler' has no attribute {name!r}{hint}")
    import importlib  # noqa: PLC0415

    return getattr(importlib.import_module(_LATER[name]), name)
