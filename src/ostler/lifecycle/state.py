"""The states of a worker and the legal moves between them. Pure; docs/states.md draws it."""

from __future__ import annotations

from enum import StrEnum

from ostler.errors import IllegalTransition


class Status(StrEnum):
    """Where a worker slot is. Paused is not a status: a paused worker is healthy and takes nothing new."""

    STOPPED = "stopped"
    STARTING = "starting"
    HEALTHY = "healthy"
    DRAINING = "draining"
    STOPPING = "stopping"
    CRASHED = "crashed"
    FAILED = "failed"


_S = Status
LEGAL: dict[Status, frozenset[Status]] = {
    _S.STOPPED: frozenset({_S.STARTING}),
    _S.STARTING: frozenset({_S.HEALTHY, _S.STOPPING, _S.STOPPED, _S.CRASHED}),
    _S.HEALTHY: frozenset({_S.DRAINING, _S.STOPPED, _S.CRASHED}),
    _S.DRAINING: frozenset({_S.STOPPING, _S.STOPPED, _S.CRASHED}),
    _S.STOPPING: frozenset({_S.STOPPED, _S.CRASHED}),
    _S.CRASHED: frozenset({_S.STARTING, _S.FAILED, _S.STOPPED}),
    _S.FAILED: frozenset({_S.STOPPED}),  # by `reset` alone
}


def move(component: str, before: Status, after: Status) -> Status:
    """The new status, when the edge exists; raises IllegalTransition otherwise."""
    if after not in LEGAL[before]:
        raise IllegalTransition(
            f"{component} cannot go from {before} to {after}; allowed: {', '.join(sorted(LEGAL[before]))}"
        )
    return after
