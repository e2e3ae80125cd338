"""The state objects of seed 001, with the seed's names beside ours, and the envelope they travel in. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ostler.lifecycle import ends
from ostler.lifecycle.state import Status
from ostler.lifecycle.worker import Doing, Slot
from ostler.live import rates
from ostler.store import fleet

_ALWAYS_NEW = frozenset({"last_heartbeat", "heartbeat_age", "skew_ms", "running"})


class Naming(NamedTuple):
    """What this node and its workers are called."""

    id: str
    label: str
    several: bool  # whether other nodes live

    def of(self, component: str) -> dict[str, str]:
        """The names of one of its workers."""
        name = f"{self.label}/{component}" if self.several else component
        return {"name": name, "component": component, "node": self.label, "node_id": self.id}


def envelope(topic: str, kind: str, at: int, name: str, value: Any) -> dict[str, Any]:
    """What every event looks like: `{topic, type, timestamp, <object>}`."""
    return {"topic": topic, "type": kind, "timestamp": at, name: value}


def worker(slot: Slot, node: Naming, rss_mb: float | None, doing: Doing | None, *, paused: bool) -> dict[str, Any]:
    """A worker of this node (seed 001: WorkerState). `queue_type` and `id` are the seed's names for pool and number."""
    held = slot.worker
    kind, _, number = doing.item.partition(":") if doing else ("", "", "")
    last = slot.last_exit
    return {
        **node.of(slot.component),
        "pool": slot.pool.spec.name,
        "queue_type": slot.pool.spec.name,
        "id": slot.number,
        "status": str(slot.status),
        "idle": fleet.is_idle(slot.status, slot.key),
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
        "waiting_for": slot.waiting if slot.status is Status.STOPPED else None,
        "last_exit": None if last is None else {"at": last.at, "reason": last.reason, "kind": last.kind, "code": last.code,
                                                "signal": last.signal, "item": last.item,
                                                "text": ends.words(last.reason, last.code, last.signal)},
    }  # fmt: skip


def far_worker(row: Mapping[str, Any], *, paused: bool) -> dict[str, Any]:
    """A worker of another node, from the store."""
    ended = row["metadata"] if row["exit_reason"] and row["metadata"] else {}
    text = ends.shown(row)["exit_text"]
    return {
        **{name: row[name] for name in ("name", "component", "node", "node_id", "pool")},
        "queue_type": row["pool"],
        "id": int(row["component"].rpartition(":")[2]),
        **{name: row[name] for name in ("status", "pid", "generation")},
        "idle": fleet.is_idle(row["status"], row.get("key")),
        "item": f"job:{row['current_job']}" if row["current_job"] else None,
        "current_job": row["current_job"],
        "task": row["current_task"],
        "paused": paused,
        **{name: row[name] for name in ("rss_mb", "started_at", "restart_count")},
        "restart_at": None,
        "waiting_for": (row["metadata"] or {}).get("waiting_for") if row["status"] == Status.STOPPED else None,
        "last_exit": None if text is None else {"at": ended.get("at"), "reason": row["exit_reason"], "kind": None,
                                                "code": row["exit_code"], "signal": ended.get("signal"), "item": ended.get("item"),
                                                "text": text},
    }  # fmt: skip


def model(node_id: str, task: str, name: str, found: Mapping[str, Any], rss_mb: float | None) -> dict[str, Any]:
    """A model of this node, without what changes by itself, such as how long it has been idle."""
    kept = ("state", "reason", "in_flight", "waiting", "worker")
    return {"task": task, "model": name, "node_id": node_id, **{k: found[k] for k in kept}, "memory_mb": rss_mb}


def session_pool(node_id: str, name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """A session pool of this node, without what changes by itself, such as memory and what a probe takes."""
    kept = ("pools", "slots", "in_use", "free", "waiting")
    of_worker = ("component", "generation", "status", "serves", "slots", "in_use", "served", "lifetime", "started_at")
    workers = [{k: worker[k] for k in of_worker} for worker in found["workers"]]
    paused = bool(found.get("paused"))
    return {"pool": name, "node_id": node_id, **{k: found[k] for k in kept}, "paused": paused, "workers": workers}


def node(row: Mapping[str, Any]) -> dict[str, Any]:
    """A node. Its heartbeat is left out: that it lives is told, and that it does no more."""
    return {name: value for name, value in fleet.shown(row).items() if name not in _ALWAYS_NEW}


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
    stuck: int = 0,
) -> dict[str, Any]:
    """A queue (seed 001: QueueState). `avg_time` and `eta` are seconds; `eta` counts from the event's timestamp, None: nobody can tell.

    `stuck`: how many of the pending jobs no running node can run, because none declares their task.
    """
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
        "eta": rates.eta(pending, running_for, average, 0 if paused or stuck else workers, rate=rate),
        "paused": paused,
        "workers": workers,
        "stuck": stuck,
        "recent": recent,
    }


def all_queues(states: Sequence[Mapping[str, Any]], recent: Mapping[str, Any] | None) -> dict[str, Any]:
    """All queues in one (seed 001: queue_type None). The average is weighed by what was completed; the last queue decides the ETA."""
    summed = ("pending", "scheduled", "running", "completed", "failed", "workers", "stuck")
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
