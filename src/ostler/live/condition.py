"""Is everything well? One answer for the API, the CLI, the live state and the dashboard."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime

from ostler.jobs.backpressure import Pressure
from ostler.lifecycle import ends
from ostler.lifecycle.state import Status
from ostler.lifecycle.supervisor import Supervisor
from ostler.lifecycle.worker import Slot
from ostler.sessions.shown import Sessions
from ostler.store.fleet import Fleet
from ostler.store.lanes import Lane

_STUCK = 10.0  # seconds that a client may wait in line for a session before that is told


def condition(
    supervisor: Supervisor,
    lanes: Sequence[Lane],
    pressure: Pressure,
    stranded: Sequence[str],
    fleet: Fleet | None = None,
    sessions: Sessions | None = None,
) -> tuple[str, list[str]]:
    """(healthy | degraded | error, what is wrong, in words).

    Error: some pool of this node cannot work at all, or the store does not answer. Degraded: work is stuck or held, clients get no
    session, a worker of any node is down, or a node is.
    """
    errors: list[str] = []
    worst = "healthy"
    own = supervisor.member.id
    before = f"{fleet.label(own)}/" if fleet is not None and fleet.several else ""
    for pool in supervisor.pools.values():
        bad = [slot for slot in pool.slots if slot.status in (Status.CRASHED, Status.FAILED)]
        errors += [_complaint(slot, before) for slot in bad]
        # Slots that were opened on demand and that nobody wants now are no fault.
        meant = [slot for slot in pool.slots if slot.wanted or slot.key is None]
        idle = bool(meant) and all(slot.status is Status.STOPPED for slot in meant)
        if idle and not supervisor.stopping and not all(_is_spare(slot) for slot in meant):
            short = next((slot.waiting for slot in meant if slot.waiting), None)
            then = f": the next one {short}" if short else f"; start them with: ostler resume {pool.spec.name}"
            errors.append(f"pool {pool.spec.name} has no running worker{then}")
            worst = "degraded" if worst == "healthy" else worst
        if bad:
            all_failed = all(slot.status is Status.FAILED for slot in meant)
            worst = "error" if all_failed or worst == "error" else "degraded"
    if fleet is not None and (elsewhere := complaints(fleet, own)):
        errors += elsewhere
        worst = "degraded" if worst == "healthy" else worst
    held = [f"queue {queue} is held: {why}" for queue, why in pressure.reasons(time.monotonic()).items()]
    stuck = [*stranded, *(unserved(sessions) if sessions is not None and not supervisor.stopping else ())]
    if held or stuck:
        errors += held + stuck
        worst = "degraded" if worst == "healthy" else worst
    if supervisor.records.degraded:
        errors.append("HEARTBEAT_DEGRADED: more than three heartbeats in a row could not be written")
        worst = "error"
    if lost := {lane.name: since for lane in lanes if (since := lane.trouble_since) is not None}:
        trouble = next((lane.trouble for lane in lanes if lane.trouble), "")
        errors.append(
            f"the store has not answered ({', '.join(lost)}) for {_ago(min(lost.values()))}; retrying. {trouble}"
        )
        worst = "error"
    elif (silent := supervisor.member.unheard()) is not None:
        errors.append(
            f"the store has accepted no heartbeat for {silent:.0f} s. Running jobs continue, and their results are kept"
        )
        worst = "error"
    if supervisor.member.lost:
        errors.append("another node declared this one dead: its workers are killed, and it registers again")
        worst = "error"
    return worst, errors


def unserved(sessions: Sessions) -> list[str]:
    """Why clients get no session: nobody serves them, or their line does not move."""
    found, lines = [], sessions.lines()
    for name, state in sessions.capacity().items():
        able = any(worker["serves"] or worker["status"] == Status.STARTING for worker in state["workers"])
        pools = " or ".join(state["pools"])
        longest = max((waited for _, _, waited in lines.get(name, {"first": ()})["first"]), default=0.0)
        if state.get("paused"):
            found.append(f"sessions {name} are paused, and clients wait; to resume: ostler resume {pools}")
        elif not able:
            found.append(
                f"no worker serves sessions {name}, so nobody can connect; see 'ostler workers' for pool {pools}"
            )
        elif longest >= _STUCK:
            # Without the figures of the moment, which would be news every second.
            busy = f"all {state['slots']} slots are in use" if not state["free"] else "none of the free slots fits them"
            found.append(f"clients have waited more than {_STUCK:g} s for sessions {name}: {busy}")
    return found


def _ago(since: float) -> str:
    return f"{max(0.0, time.monotonic() - since):.0f} s"


def _is_spare(slot: Slot) -> bool:
    """Whether it has no worker for want of memory, and no work that would need one."""
    return slot.resting or (slot.ticket is not None and not slot.ticket.eager)


def unready(supervisor: Supervisor, lanes: Sequence[Lane]) -> list[str]:
    """Why the node should get no traffic; empty when it should."""
    reasons = ["the node is stopping"] if supervisor.stopping else []
    reasons += [
        f"the store has not answered lane {lane.name} for {_ago(since)}"
        for lane in lanes
        if (since := lane.trouble_since) is not None
    ]
    if (silent := supervisor.member.unheard()) is not None:
        reasons.append(f"the store has accepted no heartbeat for {silent:.0f} s")
    if supervisor.member.lost:
        reasons.append("another node declared this one dead; it registers again")
    for pool in supervisor.pools.values():
        meant = [slot for slot in pool.slots if slot.key is None and not slot.waiting and not slot.resting]
        if meant and not any(slot.status is Status.HEALTHY for slot in pool.slots):
            reasons.append(f"no worker of pool {pool.spec.name} is healthy")
    return reasons


def complaints(fleet: Fleet, own: str | None = None) -> list[str]:
    """What is wrong with other nodes than `own`: those that are silent or died, and workers that are down."""
    found = []
    for node in fleet.nodes:
        # By the clock, not by an age that would be news every second.
        label, heard = (
            node["label"],
            f"{datetime.fromtimestamp(node['last_heartbeat'] / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC",
        )
        if node["id"] == own or node["alive"] or node["status"] == "stopped":
            continue
        if node["status"] == "dead":
            then = f"start it again, or if it will not come back: ostler nodes --forget {label}"
            found.append(f"node {label} is dead: its last heartbeat was at {heard}, and its jobs were requeued; {then}")
        else:
            found.append(f"node {label} is silent: its last heartbeat was at {heard}, and its jobs will be requeued")
    down = [w for w in fleet.workers if w["node_id"] != own and w["status"] in (Status.CRASHED, Status.FAILED)]
    return found + [_words(w["name"], Status(w["status"]), ends.shown(w)["exit_text"]) for w in down]


def _complaint(slot: Slot, before: str) -> str:
    last = slot.last_exit
    how = None if last is None else f"it {ends.told(last.reason, last.code, last.signal, last.log)}"
    return _words(f"{before}{slot.component}", slot.status, how)


def _words(name: str, status: Status, how: str | None) -> str:
    if status is Status.FAILED:
        return f"{name} has failed: it crashed too often. See 'ostler logs {name}', then run: ostler restart {name}"
    return f"{name} has crashed{f': {how}' if how else ''}; it will be restarted"
