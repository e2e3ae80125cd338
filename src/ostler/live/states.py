"""The state objects of seed 001, with the seed's names beside ours, and the envelope they travel in. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ostler.lifecycle import ends
from ostler.lifecycle.state import Status
from ostler.lifecycle.worker import Doing, Slot
from ostler.live import rates


def envelope(topic: str, kind: str, at: int, name: str, value: Any) -> dict[str, Any]:
    """What every event looks like: `{topic, type, timestamp, <object>}`."""
    return {"topic": topic, "type": kind, "timestamp": at, name: value}


def worker(slot: Slot, node: str, rss_mb: float | None, doing: Doing | None, *, paused: bool) -> dict[str, Any]:
    """A worker (seed 001: WorkerState). `queue_type` and `id` are the seed's names for pool and number."""
    held = slot.worker
    kind, _, number = doing.item.partition(":") if doing else ("", "", "")
    last = slot.last_exit
    return {
        "component": slot.component,
        "node": node,
        "pool": slot.pool.spec.name,
        "queue_type": slot.pool.spec.name,
        "id": slot.number,
        "status": str(slot.status),
        "pid": held.process.pid if held and held.process else None,
        "generation": slot.generation,
        "item": doing.item if doing else None,
        "current_job": int(number) if kind == "job" else None,
        "task": doing.title if doing else None,
        "paused": paused,
        "rss_mb": rss_mb,
        "started_at": held.started_ms if held else None,
        "restart_count": slot.history.lifetime,
        "restart_at": slot.due_ms if slot.status is Status.CRASHED else None,
        "last_exit": None if last is None else {"at": last.at, "reason": last.reason, "kind": last.kind, "code": last.code,
                                                "signal": last.signal, "item": last.item,
                                                "text": ends.words(last.reason, last.code, last.signal)},
    }  # fmt: skip


def queue(
    name: str,
    *,
    counts: Mapping[str, int],
    totals: Mapping[str, int],
    average: float | None,
    recent: Mapping[str, Any] | None,
    running_for: Sequence[float],
    workers: int,
    paused: bool,
    rate: float | None = None,
) -> dict[str, Any]:
    """A queue (seed 001: QueueState). `avg_time` and `eta` are seconds; `eta` counts from the event's timestamp, None: nobody can tell."""
    pending = counts.get("queued", 0)
    done = totals.get("done", 0)
    if average is None and done:
        average = totals.get("run_ms", 0) / done / 1000
    return {
        "queue": name,
        "queue_type": name,
        "pending": pending,
        "scheduled": counts.get("scheduled", 0),
        "running": counts.get("processing", 0),
        "completed": done,
        "failed": counts.get("failed", 0),
        "avg_time": None if average is None else round(average, 4),
        "eta": rates.eta(pending, running_for, average, 0 if paused else workers, rate=rate),
        "paused": paused,
        "workers": workers,
        "recent": recent,
    }


def all_queues(states: Sequence[Mapping[str, Any]], recent: Mapping[str, Any] | None) -> dict[str, Any]:
    """All queues in one (seed 001: queue_type None). The average is weighed by what was completed; the last queue decides the ETA."""
    summed = ("pending", "scheduled", "running", "completed", "failed", "workers")
    known = [s for s in states if s["avg_time"] is not None]
    weight = sum(s["completed"] for s in known)
    etas = [s["eta"] for s in states]
    return {
        "queue": None,
        "queue_type": None,
        **{key: sum(s[key] for s in states) for key in summed},
        "avg_time": round(sum(s["avg_time"] * s["completed"] for s in known) / weight, 4) if weight else None,
        "eta": None if None in etas else max(etas, default=0.0),
        "paused": bool(states) and all(s["paused"] for s in states),
        "recent": recent,
    }


def recent(counts: Mapping[str, int], width: int) -> dict[str, Any]:
    """One bucket of the counters, as it is shown: what ended in it, and how long it took and waited."""
    done = counts.get("done", 0)
    return {
        "at": counts["at"] * 1000,
        "step": width,
        **{name: counts.get(name, 0) for name in ("done", "failed", "retried", "crashed", "cancelled")},
        "avg_run": round(counts.get("run_ms", 0) / done / 1000, 4) if done else None,
        "run_p50": rates.percentile(counts, "run", 0.5),
        "run_p95": rates.percentile(counts, "run", 0.95),
        "wait_p50": rates.percentile(counts, "wait", 0.5),
        "wait_p95": rates.percentile(counts, "wait", 0.95),
    }
