"""The node's log, in words: what an operator who only has the log must know."""

from __future__ import annotations

import logging
import sys

from ostler.events import (
    Backpressure,
    Event,
    JobEnded,
    PoolPaused,
    SessionEnded,
    WorkerBroken,
    WorkerDrained,
    WorkerMoved,
)
from ostler.live import incidents

log = logging.getLogger("ostler")


def configure(level: str) -> None:
    """Log to stderr, one line per event."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    logging.getLogger("ostler").setLevel(level.upper())


def tell(event: Event) -> None:
    """Listens to the bus."""
    match event:
        case WorkerMoved(status="crashed"):
            _crashed(event)
        case WorkerMoved(component, _, "failed", "failed", reason=reason):
            log.error("%s is %s: it is not started. See its log, then: ostler restart %s", component, reason, component)
        case WorkerMoved(component, _, _, "failed", reason=reason):
            log.error("%s is failed: %s. Look at its log, then: ostler restart %s", component, reason, component)
        case WorkerMoved(component, generation, before, status, pid=pid, reason=reason):
            extra = f" (pid {pid})" if status == "healthy" else (f" ({reason})" if reason else "")
            log.info("%s generation %d: %s -> %s%s", component, generation, before, status, extra)
        case JobEnded(job, task, _, worker, "failed", seconds, code):
            log.warning(
                "job %d (%s) failed on %s after %.1f s: %s; see: ostler jobs %d", job, task, worker, seconds, code, job
            )
        case Backpressure(queue, reason):
            log.warning("queue %s is held: %s", queue, reason)
        case WorkerBroken():
            log.warning("%s", incidents.broken(event))
        case WorkerDrained() if event.cut:
            log.warning("%s", incidents.drain_limit(event))
        case SessionEnded(reason="killed"):
            log.info("%s", incidents.killed(event, 1))
        case PoolPaused(pool, True, still=True):
            log.warning(
                "%s still paused, as before; to go on: ostler resume%s",
                f"{pool} is" if pool else "all pools are",
                f" {pool}" if pool else "",
            )
        case PoolPaused(pool, paused):
            log.info("%s %s", pool or "all pools", "paused" if paused else "resumed")


def _crashed(event: WorkerMoved) -> None:
    follows = f"restart in {event.delay:g} s" if event.delay is not None else "no restart"
    last = f', last line: "{event.line}"' if event.line else ""
    charged = "" if event.counted else f"; charged to {event.item}"
    log.warning(
        "%s (generation %d) crashed: it %s%s; %s%s",
        event.component,
        event.generation,
        event.how,
        last,
        follows,
        charged,
    )
