"""Ostler: a worker runtime for heavy Python work. One lifecycle, three ways to serve, one store.

These are the public names. Importing them loads no third-party module.
"""

from ostler.app import JobId, Ostler, Task, load
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
from ostler.jobs.handle import Job
from ostler.jobs.outcome import Cancelled, Fail, Retry

__version__ = "0.1.0"

__all__ = [
    "BadArguments",
    "Cancelled",
    "ConfigError",
    "Conflict",
    "Fail",
    "InputError",
    "Job",
    "JobId",
    "NotFound",
    "Ostler",
    "OstlerError",
    "PayloadTooLarge",
    "Retry",
    "StoreBusy",
    "Task",
    "UnknownTask",
    "load",
]
