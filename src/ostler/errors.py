"""All exceptions, as a tree. Every message says what happened, to which id, what was found and what to do.

OstlerError
├── ConfigError          a setting, file or address is wrong; the node does not start (exit code 2)
│   └── NoAccess         this user has no access to the data directory
├── InputError           the input is invalid; nothing was stored (HTTP 4xx, exit code 2)
│   ├── UnknownTask      422  no such task is declared
│   ├── BadArguments     422  the arguments do not match the task's signature, or are not JSON
│   ├── PayloadTooLarge  413  the arguments are larger than `max_payload`
│   ├── NotFound         404  no such job, worker or pool
│   └── Conflict         409  it exists, but its state does not allow this
├── StoreBusy            503  the store is locked, full or unreachable for now; nothing was stored
│   ├── StoreGone        503  the database file was deleted or replaced while it was in use
│   ├── StoreDoubt       503  the connection was lost during a commit; it may have been stored
│   └── RegistryAway     503  the registry of sessions (Redis) does not answer; open sessions go on
├── EnvError             500  an environment cannot be built, removed or used
│   └── EnvNotBuilt      503  it must be built first; the message has the command
├── CallError            a call to a model returned no result; has the node's code, status and request id
│   ├── CallRefused      4xx  the call is invalid; sending it again would not help
│   ├── CallBusy         429, 503  nothing was run; `retry_after` says when to try again
│   ├── CallTimeout      504  it took too long; also a TimeoutError
│   └── ModelFailed      500, 502, 503, 507  the model raised, died or cannot be loaded; the call may have had side effects
├── JobFailed            502  raised by `.result()` of a failed job; has its code, message and traceback
│   └── JobCancelled     409  raised by `.result()` of a cancelled job
├── JobTimeout           504  the job has not ended in time, and continues. Also a TimeoutError
├── Unreachable          502  another node cannot be reached from here
├── NodeLost             503  another node declared this one dead; its results are dropped
└── IllegalTransition    a worker was asked for a change of state that does not exist (a bug)
"""

from __future__ import annotations

from typing import Any


class OstlerError(Exception):
    """The base class of all exceptions that Ostler raises."""

    code = "ERROR"
    status = 500


class ConfigError(OstlerError):
    """A declaration or setting is wrong. Raised before anything starts."""

    code = "CONFIG"


class NoAccess(ConfigError):
    """This process has no access to the data directory. The message says who owns it and what to do."""

    code = "PERMISSION_DENIED"


class InputError(OstlerError):
    """The input is invalid. Nothing was stored."""

    code = "BAD_INPUT"
    status = 422


class UnknownTask(InputError):
    """No task of that name is declared."""

    code = "UNKNOWN_TASK"


class BadArguments(InputError):
    """The arguments do not match the task's signature, or are not JSON."""

    code = "BAD_ARGUMENTS"


class PayloadTooLarge(InputError):
    """The arguments are larger than `max_payload`."""

    code = "PAYLOAD_TOO_LARGE"
    status = 413


class NotFound(InputError):
    """No such job, worker or pool."""

    code = "NOT_FOUND"
    status = 404


class Conflict(InputError):
    """It exists, but its state does not allow this."""

    code = "CONFLICT"
    status = 409


class StoreBusy(OstlerError):
    """The store was locked, full or unreachable for `store_patience`; nothing was stored. Try again."""

    code = "STORE_BUSY"
    status = 503


class StoreGone(StoreBusy):
    """The database file was deleted or replaced while in use. Nothing was stored."""

    code = "STORE_GONE"


class StoreDoubt(StoreBusy):
    """The connection was lost during a commit: the data may or may not have been stored."""

    code = "STORE_DOUBT"


class RegistryAway(StoreBusy):
    """The registry of sessions does not answer. Open sessions continue; new ones are refused until it does."""

    code = "REGISTRY"


class EnvError(OstlerError):
    """An environment cannot be built, removed or used."""

    code = "ENV_FAILED"


class EnvNotBuilt(EnvError):
    """The environment must be built first. The message has the command."""

    code = "ENV_NOT_BUILT"
    status = 503


class CallError(OstlerError):
    """A call to a model returned no result. The subclass says what to do about it; `code` says exactly what happened."""

    code = "CALL_FAILED"

    def __init__(
        self,
        message: str,
        code: str = "",
        status: int = 0,
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.status = code or self.code, status or self.status
        self.request_id, self.retry_after = request_id, retry_after


class CallRefused(CallError):
    """The call is invalid and was not run: unknown task or model, or a payload that the model rejects."""

    code = "CALL_REFUSED"
    status = 400


class CallBusy(CallError):
    """Nothing was run: too many calls are waiting, or there is no node. `retry_after` is when to try again (seconds), if known."""

    code = "BUSY"
    status = 503


class CallTimeout(CallError, TimeoutError):
    """The call took too long and was cancelled."""

    code = "DEADLINE"
    status = 504


class ModelFailed(CallError):
    """The model raised, its process died, or it cannot be loaded. The call is not repeated, because it may have had side effects."""

    code = "MODEL_ERROR"


class JobFailed(OstlerError):
    """A job that was waited for has failed for good. `code`, `message` and `traceback` are from its last run; `job` is its id.

    `errors` lists all failed runs, oldest first, like `JobId.errors()`.
    """

    status = 502

    def __init__(
        self,
        job: int,
        task: str,
        code: str,
        message: str,
        traceback: str | None = None,
        errors: list[dict[str, Any]] | None = None,
    ) -> None:
        # All of them, so that the exception can be pickled.
        super().__init__(job, task, code, message, traceback, errors)
        self.job, self.task, self.code, self.message, self.traceback = job, task, code, message, traceback
        self.errors = errors or []
        if traceback:  # printed after the message, as a note (PEP 678)
            self.__notes__ = [f"\nIn the worker:\n{traceback.rstrip()}"]

    def __str__(self) -> str:
        return f"job {self.job} ({self.task}) failed with {self.code}: {self.message}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class JobCancelled(JobFailed):
    """A job that was waited for was cancelled."""

    status = 409

    def __str__(self) -> str:
        return f"job {self.job} ({self.task}) was cancelled: {self.message}"


class JobTimeout(OstlerError, TimeoutError):
    """The job has not ended in time, and continues. `state` is its current status."""

    code = "TIMEOUT"
    status = 504

    def __init__(self, job: int, task: str, state: str, message: str) -> None:
        super().__init__(job, task, state, message)
        self.job, self.task, self.state, self.message = job, task, state, message

    def __str__(self) -> str:
        return self.message


class Unreachable(OstlerError):
    """The node that has what was asked for cannot be reached from here."""

    code = "NODE_UNREACHABLE"
    status = 502


class NodeLost(OstlerError):
    """Another node declared this one dead: its jobs run elsewhere, and its writes are refused."""

    code = "NODE_LOST"
    status = 503


class IllegalTransition(OstlerError):
    """A worker was asked for a change of state that the table of transitions does not have."""

    code = "ILLEGAL_TRANSITION"
