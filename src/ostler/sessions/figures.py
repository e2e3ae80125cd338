"""A node's session pools in figures, for the web, metrics and the live state. shown.py has the promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ostler.lifecycle.worker import Slot, Worker
from ostler.sessions.spec import SessionSpec

if TYPE_CHECKING:
    from ostler.sessions.pools import SessionPools

_LINES = 20  # of each line that are shown


def capacity(pools: SessionPools) -> dict[str, dict[str, Any]]:
    """By public name: slots, and the workers that have them."""
    found: dict[str, dict[str, Any]] = {}
    for name, spec in pools.specs.items():
        entry = found.setdefault(spec.serves, {"pools": [], "slots": 0, "in_use": 0, "free": 0, "workers": []})
        entry["pools"].append(name)
        entry["waiting"] = pools.waiting.get(spec.serves, 0)
        entry["paused"] = entry.get("paused", True) and pools.supervisor.pauses.holds(name)
        for slot in pools.supervisor.pools[name].slots:
            workers: list[Worker | None] = [*slot.all()]
            entry["workers"] += [_shown(pools, spec, slot, worker, entry) for worker in workers or [None]]
    return found


def _shown(
    pools: SessionPools, spec: SessionSpec, slot: Slot, worker: Worker | None, entry: dict[str, Any]
) -> dict[str, Any]:
    serving = pools.of(worker) if worker is not None else None
    in_use = len(serving.live) if serving else 0
    serves = serving is not None and serving.takes and not pools.supervisor.pauses.holds(spec.name)
    entry["in_use"] += in_use
    if serves:
        entry["slots"] += spec.options.slots
        entry["free"] += max(0, spec.options.slots - in_use)
    return {
        "component": slot.component,
        "pool": spec.name,
        "generation": worker.generation if worker else slot.generation,
        "status": str(worker.status if worker else slot.rest),
        "serves": serves,
        "slots": spec.options.slots,
        "in_use": in_use,
        "served": worker.served if worker else 0,
        "lifetime": spec.options.lifetime,
        "probe_ms": serving.probe_ms if serving else None,
        "mb": (serving.mb if serving else None) or (worker.rss_mb if worker else None),
        "versions": list(serving.info.get("versions") or spec.options.versions) if serving else [],
        "started_at": worker.started_ms if worker else None,
    }


def live(pools: SessionPools) -> list[dict[str, Any]]:
    """The live sessions of this node, oldest first."""
    names = ("owner", "client", "agent", "priority", "waited_ms", "key", "via")
    return [
        {
            "id": live.id,
            "pool": live.serving.spec.name,
            "serves": live.serving.spec.serves,
            "component": live.serving.worker.component,
            "generation": live.serving.worker.generation,
            **{name: live.about.get(name) for name in names},
            "started_at": live.started_at,
            "bytes_in": live.bytes_in,
            "bytes_out": live.bytes_out,
            "idle": live.idle,
            "state": live.state,
            "views": bool(live.serving.info.get("views")),
        }
        for live in pools.held.values()
    ]


def lines(pools: SessionPools) -> dict[str, dict[str, Any]]:
    """Who waits, by public name."""
    return {
        spec.serves: {
            "total": pools.waiting.get(spec.serves, 0),
            "first": pools.first_in_line.get(spec.serves, [])[:_LINES],
        }
        for spec in pools.specs.values()
    }


def counts(pools: SessionPools) -> dict[str, dict[str, int]]:
    """What was counted, by public name."""
    known = {spec.serves: pools.counters(spec.serves) for spec in pools.specs.values()}
    return {name: {**(found.before + found.plane), "strikes": found.strikes} for name, found in known.items()}
