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
│   └── StoreDoubt       503  the connection was lost during a commit: it may have been stored
├── EnvError             500  an environment cannot be built, removed or used
│   └── EnvNotBuilt      503  it has to be built first; the message has the command
├── Unreachable          502  another node cannot be reached from here
├── NodeLost             503  this node was declared dead by another: what it had is dropped
└── IllegalTransition    a worker was asked to move along an edge that the lifecycle does not have (a bug)
"""

from __future__ import annotations


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


class EnvError(OstlerError):
    """An environment cannot be built, removed or used."""

    code = "ENV_FAILED"


class EnvNotBuilt(EnvError):
    """The environment has to be built first. The message has the command that does it."""

    code = "ENV_NOT_BUILT"
    status = 503


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
