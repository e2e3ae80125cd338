"""The node's log, in words: what an operator who only has the log must know."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import logging
import sys
from collections import Counter

from ostler.events import (
    Backpressure,
    Event,
    JobEnded,
    JobTook,
    PoolPaused,
    RunsDone,
    SessionEnded,
    WorkerBroken,
    WorkerDrained,
    WorkerMoved,
)
from ostler.live import incidents

log = logging.getLogger("ostler")


FORMATS = ("text", "json")
_WINDOW = 5.0  # seconds of which a flood of jobs is told in one line
_LINES = 10  # about jobs in one window, before the rest is only counted
_FLOOD = 100  # jobs done in one window that are told of, though nothing is wrong with them
_SHOWN = 200  # characters of an error


class _Json(logging.Formatter):
    """One object per line, for programs that gather logs."""

    def format(self, record: logging.LogRecord) -> str:
        at = dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(timespec="milliseconds")
        line = {"time": at, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(level: str, form: str = "text") -> None:
    """Log to stderr, one line per event."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
    handler.setFormatter(_Json() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("ostler").setLevel(level.upper())


class JobLines:
    """A line for each job that fails or takes long; in a flood of them, a line every few seconds for all."""

    def __init__(self) -> None:
        self._lines = 0
        self._left_out = 0
        self._done = 0
        self._failed: Counter[str] = Counter()
        self._window: asyncio.TimerHandle | None = None

    def tell(self, event: Event) -> None:
        """Listens to the bus."""
        match event:
            case RunsDone(runs):
                self._done += len(runs)
                self._open()
            case JobTook(job, task, worker, seconds):
                self._line(logging.INFO, f"job {job} ({task}) took {seconds:.1f} s on {worker}")
            case JobEnded(job, task, _, worker, "failed", seconds, code, message):
                self._failed[code or "?"] += 1
                why = f"{code}: {_short(message)}" if message else code
                text = f"job {job} ({task}) failed on {worker} after {seconds:.1f} s: {why}; see: ostler jobs {job}"
                self._line(logging.WARNING, text)
            case JobEnded(job, task, _, worker, "requeued:retry", seconds, _, message, attempt, attempts):
                which = f"attempt {attempt} of {attempts}"
                text = f"job {job} ({task}) failed in {which} on {worker} after {seconds:.1f} s and is retried: {_short(message)}"
                self._line(logging.INFO, text)

    def _line(self, level: int, text: str) -> None:
        self._open()
        self._lines += 1
        if self._lines <= _LINES:
            log.log(level, "%s", text)
        else:
            self._left_out += 1

    def _open(self) -> None:
        if self._window is None:
            self._window = asyncio.get_running_loop().call_later(_WINDOW, self._sum)

    def _sum(self) -> None:
        """The end of a window: what it came to, where that was a flood."""
        self._window = None
        if self._left_out or self._done >= _FLOOD:
            codes = ", ".join(f"{n} {code}" for code, n in self._failed.most_common(3))
            failed = f", {sum(self._failed.values()):,} failed ({codes})" if self._failed else ""
            rest = f"; {self._left_out:,} lines about single jobs were left out" if self._left_out else ""
            log.info("in the last %g s: %s jobs done%s%s", _WINDOW, f"{self._done:,}", failed, rest)
        self._lines = self._left_out = self._done = 0
        self._failed.clear()


def _short(message: str | None) -> str:
    """One line of an error, without what a terminal would take for a command."""
    lines = (message or "").strip().splitlines() or ["an error"]
    text = "".join(c if c.isprintable() else " " for c in lines[0])
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def tell(event: Event) -> None:
    """Listens to the bus."""
    match event:
        case WorkerMoved(status="crashed"):
            _crashed(event)
        case WorkerMoved(component, _, "failed", "failed", reason=reason):
            log.error(
                "%s is %s and is not started. Check its log, then run: ostler restart %s", component, reason, component
            )
        case WorkerMoved(component, _, _, "failed", reason=reason):
            log.error("%s has failed: %s. Check its log, then run: ostler restart %s", component, reason, component)
        case WorkerMoved(component, generation, before, status, pid=pid, reason=reason):
            extra = f" (pid {pid})" if status == "healthy" else (f" ({reason})" if reason else "")
            log.info("%s generation %d: %s -> %s%s", component, generation, before, status, extra)
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
                "%s still paused; to resume: ostler resume%s",
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
