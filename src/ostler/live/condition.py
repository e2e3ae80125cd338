"""Is everything well? One answer for the API, the CLI, the live state and the dashboard."""

from __future__ import annotations

from collections.abc import Sequence

from ostler.lifecycle import ends
from ostler.lifecycle.state import Status
from ostler.lifecycle.supervisor import Supervisor
from ostler.lifecycle.worker import Slot
from ostler.store.lanes import Lane


def condition(supervisor: Supervisor, lanes: Sequence[Lane]) -> tuple[str, list[str]]:
    """(healthy | degraded | error, what is wrong, in words). Error: some pool cannot work at all, or the store does not answer."""
    errors: list[str] = []
    worst = "healthy"
    for pool in supervisor.pools.values():
        bad = [slot for slot in pool.slots if slot.status in (Status.CRASHED, Status.FAILED)]
        errors += [_complaint(slot) for slot in bad]
        idle = bool(pool.slots) and all(slot.status is Status.STOPPED for slot in pool.slots)
        if idle and not supervisor.stopping:
            errors.append(f"no worker of pool {pool.spec.name} runs; start them with: ostler resume {pool.spec.name}")
            worst = "degraded" if worst == "healthy" else worst
        if bad:
            all_failed = all(slot.status is Status.FAILED for slot in pool.slots)
            worst = "error" if all_failed or worst == "error" else "degraded"
    if supervisor.records.degraded:
        errors.append("HEARTBEAT_DEGRADED: more than three beats in a row could not be written")
        worst = "error"
    if lost := [lane.name for lane in lanes if lane.trouble_since is not None]:
        errors.append(f"the store does not answer ({', '.join(lost)}); it is tried again and again")
        worst = "error"
    return worst, errors


def unready(supervisor: Supervisor, lanes: Sequence[Lane]) -> list[str]:
    """Why the node should get no traffic; empty when it should."""
    reasons = ["the node is stopping"] if supervisor.stopping else []
    reasons += [f"the store has not answered lane {lane.name}" for lane in lanes if lane.trouble_since is not None]
    for pool in supervisor.pools.values():
        if pool.slots and not any(slot.status is Status.HEALTHY for slot in pool.slots):
            reasons.append(f"no worker of pool {pool.spec.name} is healthy")
    return reasons


def _complaint(slot: Slot) -> str:
    if slot.status is Status.FAILED:
        return f"{slot.component} is failed: it crashed too often. See 'ostler logs {slot.component}', then: ostler restart {slot.component}"
    last = slot.last_exit
    how = f": it {ends.words(last.reason, last.code, last.signal, long=True)}" if last else ""
    return f"{slot.component} is crashed{how}; it will be started again"
