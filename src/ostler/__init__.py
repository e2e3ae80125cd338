"""Ostler: a worker runtime for heavy Python work. One lifecycle, three ways to serve, one store.

These are the public names. Importing them loads no third-party module.
"""

from ostler.app import Ostler, Task, load
from ostler.errors import (
    BadArguments,
    ConfigError,
    Conflict,
    InputError,
    NotFound,
    OstlerError,
    PayloadTooLarge,
    StoreBusy,
    UnknownTask,
)
from ostler.flows import BatchId, Chain, JobId, Step
from ostler.jobs.handle import Job
from ostler.jobs.outcome import Cancel, Cancelled, Fail, Retry, Snooze
from ostler.jobs.results import LostClaim, Published

__version__ = "0.1.0"

__all__ = [
    "BadArguments",
    "BatchId",
    "Cancel",
    "Cancelled",
    "Chain",
    "ConfigError",
    "Conflict",
    "Fail",
    "InputError",
    "Job",
    "JobId",
    "LostClaim",
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
    "load",
]
