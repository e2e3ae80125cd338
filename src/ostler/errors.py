"""What can go wrong, as a tree. Every message says what, which id, what was found and what to do.

OstlerError
├── ConfigError          a setting, file or address is wrong: the node refuses to start (exit code 2)
│   └── NoAccess         this user may not use the data directory
├── InputError           what a caller sent cannot be taken; nothing was stored (HTTP 4xx, exit code 2)
│   ├── UnknownTask      422  no such task is declared
│   ├── BadArguments     422  arguments do not fit the task's signature, or are not JSON
│   ├── PayloadTooLarge  413  arguments over `max_payload`
│   ├── NotFound         404  no such job, worker or pool
│   └── Conflict         409  it exists, but its state does not allow this
├── StoreBusy            503  the store is locked, full or unreachable for now; nothing was stored
│   ├── StoreGone        503  the database file was deleted or replaced while it was in use
│   ├── StoreDoubt       503  the connection was lost during a commit: it may have been stored
│   └── RegistryAway     503  the registry of sessions (Redis) does not answer; open sessions go on
├── EnvError             500  an environment cannot be built, removed or used
│   └── EnvNotBuilt      503  it has to be built first; the message has the command
├── CallError            a call to a model was not answered with a result; it has the node's code, status and request id
│   ├── CallRefused      4xx  what was sent cannot be called: the same call would be refused again
│   ├── CallBusy         429, 503  nothing was run; `retry_after` says when to try again
│   ├── CallTimeout      504  it took longer than it may; also a TimeoutError
│   └── ModelFailed      500, 502, 503, 507  the model raised, died or cannot be loaded; a call that had begun may have had effects
├── JobFailed            500  `.result()` of a job that failed for good; it has the job's code, message and traceback
│   └── JobCancelled     409  … of a job that was cancelled
├── JobTimeout           504  the job has not ended in time; it goes on. Also a TimeoutError
├── Unreachable          502  another node cannot be reached from here
├── NodeLost             503  this node was declared dead by another: what it had is dropped
└── IllegalTransition    a worker was asked to move along an edge that the lifecycle does not have (a bug)
"""

from __future__ import annotations

from typing import Any


class OstlerError(Exception):
    """The root of all errors that Ostler raises on purpose."""

    code = "ERROR"
    status = 500


class ConfigError(OstlerError):
    """A setting is wrong. Raised before anything is started."""

    code = "CONFIG"


class NoAccess(ConfigError):
    """This process may not use the data directory. The message says whose it is and what to do."""

    code = "PERMISSION_DENIED"


class InputError(OstlerError):
    """What a caller sent cannot be taken. Nothing was stored."""

    code = "BAD_INPUT"
    status = 422


class UnknownTask(InputError):
    """No task of that name is declared."""

    code = "UNKNOWN_TASK"


class BadArguments(InputError):
    """The arguments do not fit the task's signature, or are not JSON."""

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
    """The thing exists, but its state does not allow what was asked."""

    code = "CONFLICT"
    status = 409


class StoreBusy(OstlerError):
    """The store could not take the write within its time; nothing was stored. Try again."""

    code = "STORE_BUSY"
    status = 503


class StoreGone(StoreBusy):
    """The database file was deleted or replaced while it was in use. Nothing that can be found again was stored."""

    code = "STORE_GONE"


class StoreDoubt(StoreBusy):
    """The connection was lost during a commit: what it had may be stored or not."""

    code = "STORE_DOUBT"


class RegistryAway(StoreBusy):
    """The registry of sessions does not answer. Open sessions go on; new ones are refused until it does."""

    code = "REGISTRY"


class EnvError(OstlerError):
    """An environment cannot be built, removed or used."""

    code = "ENV_FAILED"


class EnvNotBuilt(EnvError):
    """The environment has to be built first. The message has the command that does it."""

    code = "ENV_NOT_BUILT"
    status = 503


class CallError(OstlerError):
    """A call to a model was not answered with a result. The kinds below say what follows from it; `code` says exactly what happened."""

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
    """What was sent cannot be called, and was not run: no such task or model, a payload that the model does not take."""

    code = "CALL_REFUSED"
    status = 400


class CallBusy(CallError):
    """Nothing was run: too many calls wait, or there is no node. `retry_after` (seconds), if known, says when to try again."""

    code = "BUSY"
    status = 503


class CallTimeout(CallError, TimeoutError):
    """The call took longer than it may, and is cancelled."""

    code = "DEADLINE"
    status = 504


class ModelFailed(CallError):
    """The model raised, its process died, or it cannot be loaded. A call that had begun may have had effects, and is not repeated."""

    code = "MODEL_ERROR"


class JobFailed(OstlerError):
    """The job that somebody waited for failed for good. `code`, `message` and `traceback` are those of its last run; `job` is its id.

    `errors` has all of its runs that failed, oldest first, as `JobId.errors()` gives them.
    """

    status = 500

    def __init__(
        self,
        job: int,
        task: str,
        code: str,
        message: str,
        traceback: str | None = None,
        errors: list[dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(job, task, code, message, traceback, errors)  # all of them: an exception is pickled with these
        self.job, self.task, self.code, self.message, self.traceback = job, task, code, message, traceback
        self.errors = errors or []
        if traceback:  # printed behind the message; a note, as Python 3.11 has them
            self.__notes__ = [f"\nIn the worker:\n{traceback.rstrip()}"]

    def __str__(self) -> str:
        return f"job {self.job} ({self.task}) failed with {self.code}: {self.message}"


class JobCancelled(JobFailed):
    """The job that somebody waited for was cancelled."""

    status = 409

    def __str__(self) -> str:
        return f"job {self.job} ({self.task}) was cancelled: {self.message}"


class JobTimeout(OstlerError, TimeoutError):
    """The job has not ended in time. It goes on; `state` is the status that was found."""

    code = "TIMEOUT"
    status = 504

    def __init__(self, job: int, task: str, state: str, message: str) -> None:
        super().__init__(job, task, state, message)
        self.job, self.task, self.state, self.message = job, task, state, message

    def __str__(self) -> str:
        return self.message


class Unreachable(OstlerError):
    """Another node has what was asked for, and cannot be reached from here."""

    code = "NODE_UNREACHABLE"
    status = 502


class NodeLost(OstlerError):
    """This node was declared dead by another one: its jobs run elsewhere, and nothing that it writes is taken."""

    code = "NODE_LOST"
    status = 503


class IllegalTransition(OstlerError):
    """A worker was moved along an edge that the table of transitions does not have."""

    code = "ILLEGAL_TRANSITION"
