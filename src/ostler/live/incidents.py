"""Incidents: what an operator wants to have been told, in words. They are kept in the store, so last night's are there too.

`words` of things are pure. An incident may be rewritten while it goes on: a crash when its worker is back, failing jobs of one
task when more of them fail.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ostler.events import (
    Backpressure,
    Bus,
    JobEnded,
    PoolPaused,
    Recovered,
    SessionEnded,
    StoreAnswers,
    WorkerBroken,
    WorkerDrained,
    WorkerMoved,
)
from ostler.store import now_ms
from ostler.store.lanes import Lane
from ostler.store.store import Store

log = logging.getLogger("ostler.live")

KEPT = 50  # in memory; the store has more
_SAME = 60_000  # ms: failures of one task with one code within this are one incident
_WRITE_EVERY = 0.5


@dataclass(frozen=True, slots=True)
class Incident:
    """One of them. `id` is its beginning in ms, unique on its node; `at` its last change."""

    node: str
    id: int
    level: str
    subject: str
    text: str
    at: int
    count: int = 1
    job: int | None = None
    detail: str | None = None

    def view(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def crash(event: WorkerMoved, ended: JobEnded | None, back_after: float | None = None) -> str:
    """How a worker ended, and what follows."""
    if back_after is not None:
        then = f"restarted after {_span(back_after)}"
    elif event.delay is None:
        then = "it is not restarted"
    else:
        then = f"restarts in {_span(event.delay)}"
    return f"{event.component} {event.how}; {then}{_job(_job_of(event), ended)}"


def _job_of(event: WorkerMoved) -> int | None:
    kind, _, number = (event.item or "").partition(":")
    return int(number) if kind == "job" else None


def _job(job: int | None, ended: JobEnded | None) -> str:
    if job is None:
        return ""
    if ended is None or ended.job != job or ended.event.startswith("requeued"):
        return f", job {job} requeued"
    return f", job {job} failed as {ended.code}" if ended.event == "failed" else f", job {job} {ended.event}"


def failures(event: JobEnded, count: int) -> str:
    """Jobs that failed for good."""
    if count == 1:
        return f"job {event.job} ({event.task}) failed: {event.code}"
    return f"{count} jobs of task {event.task} failed with {event.code}, the last is job {event.job}"


def failing(rows: Iterable[Mapping[str, Any]], since: int) -> list[dict[str, Any]]:
    """Jobs that failed for good since then, by task and code, the most first, as the incidents tell. The dashboard counts the same way."""
    found: Counter[tuple[str, str]] = Counter()
    for row in rows:
        kind, _, rest = row["subject"].partition(":")
        if (row["level"], kind) == ("error", "task") and row["at"] >= since:
            task, _, code = rest.rpartition(":")
            found[task, code] += row["count"]
    return [{"task": task, "code": code, "count": count} for (task, code), count in found.most_common()]


def broken(event: WorkerBroken) -> str:
    """A session worker that hangs, or has lost what it serves."""
    ended = f", and {_sessions(event.sessions)} ended with it" if event.sessions else ""
    return f"{event.worker} {'hung' if event.what == 'hung' else 'was lost'}: {event.text}; it is replaced{ended}"


def drain_limit(event: WorkerDrained) -> str:
    """A drain that was cut short."""
    return f"{event.worker} reached its drain limit after {_span(event.seconds)}: {_sessions(event.cut)} ended"


def killed(event: SessionEnded, count: int) -> str:
    """Sessions that an operator ended."""
    by = f" by {event.by}" if event.by else ""
    if count == 1:
        return f"session {event.session} of {event.pool} ({event.owner}) was ended{by}"
    return f"{count} sessions of {event.pool} were ended by operators, the last one, session {event.session},{by}"


def _sessions(number: int) -> str:
    return f"{number} {'session' if number == 1 else 'sessions'}"


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s".replace(".0 s", " s")


def failed_lately(store: Store) -> list[dict[str, Any]]:
    """What failed in the last hour; nothing where no job is failed any more."""
    if not any(states.get("failed") for states in store.jobs.depths().values()):
        return []
    return failing(store.live.incidents(KEPT), now_ms() - 3_600_000)


class Incidents:
    """Listens to the bus, words what matters, and has the store keep it."""

    def __init__(self, node: str, bus: Bus, lane: Lane, changed: Callable[[], None] = lambda: None) -> None:
        self._node, self._lane = node, lane
        self.changed = changed
        self.last: deque[Incident] = deque(maxlen=KEPT)  # oldest first
        self._ends: dict[str, JobEnded] = {}  # worker -> how the last job that it did not finish ended
        self._crashes: dict[str, tuple[Incident, WorkerMoved, float]] = {}
        self._repeats: dict[tuple[str, str | None], Incident] = {}
        self._unwritten: dict[int, Incident] = {}
        self._writing: asyncio.TimerHandle | None = None
        bus.listen(self._heard)

    async def start(self) -> None:
        """Load what the store has of earlier."""
        rows = await self._lane.call(lambda store: store.live.incidents(KEPT))
        known = {(i.node, i.id) for i in self.last}
        earlier = [Incident(**row) for row in reversed(rows)]
        self.last = deque([*(i for i in earlier if (i.node, i.id) not in known), *self.last], maxlen=KEPT)

    def merge(self, rows: list[dict[str, Any]]) -> bool:
        """Take in what other nodes told, newest first; whether there was any news."""
        known = {(i.node, i.id): i for i in self.last}
        fresh = [Incident(**row) for row in reversed(rows) if row["node"] != self._node]
        news = [i for i in fresh if known.get((i.node, i.id)) != i]
        if news:
            merged = {**known, **{(i.node, i.id): i for i in news}}
            self.last = deque(sorted(merged.values(), key=lambda i: i.id)[-KEPT:], maxlen=KEPT)
        return bool(news)

    async def stop(self) -> None:
        """Hand what was not written yet to the lane."""
        if self._writing is not None:
            self._writing.cancel()
        self._write()

    def tell(self, level: str, subject: str, text: str, **more: Any) -> Incident:
        """Note an incident."""
        at = now_ms()
        newest = max((i.id for i in self.last if i.node == self._node), default=0)
        incident = Incident(self._node, max(at, newest + 1), level, subject, text, at, **more)
        self.last.append(incident)
        self._keep(incident)
        return incident

    def _rewrite(self, incident: Incident, **changes: Any) -> Incident:
        changed = replace(incident, at=now_ms(), **changes)
        for place, known in enumerate(self.last):
            if (known.node, known.id) == (incident.node, incident.id):
                self.last[place] = changed
        self._keep(changed)
        return changed

    def _keep(self, incident: Incident) -> None:
        self._unwritten[incident.id] = incident
        if self._writing is None:
            self._writing = asyncio.get_running_loop().call_later(_WRITE_EVERY, self._write)
        self.changed()

    def _write(self) -> None:
        self._writing = None
        rows, self._unwritten = [i.view() for i in self._unwritten.values()], {}

        def write(store: Store) -> None:
            for row in rows:
                store.live.put_incident(row)

        if rows:
            self._lane.post(write)

    # ---- what happened

    def _heard(self, event: Any) -> None:
        match event:
            case JobEnded():
                self._ends[event.worker] = event
                if event.event == "failed":
                    self._repeated(("error", f"task:{event.task}:{event.code}"), event)
            case WorkerMoved(status="crashed"):
                ended = self._ends.get(event.component)
                incident = self.tell(
                    "warning", event.component, crash(event, ended), job=_job_of(event), detail=event.line
                )
                self._crashes[event.component] = (incident, event, time.monotonic())
            case WorkerMoved(status="stopped", reason="killed"):
                self.tell("info", event.component, f"{event.component} {event.how}{_job(_job_of(event), None)}")
            case WorkerMoved(status="healthy"):
                if found := self._crashes.pop(event.component, None):
                    incident, crashed, at = found
                    text = crash(crashed, self._ends.get(event.component), time.monotonic() - at)
                    self._rewrite(incident, text=text)
            case WorkerMoved(status="failed"):
                self._crashes.pop(event.component, None)
                hint = f"check its log, then run: ostler restart {event.component}"
                self.tell("error", event.component, f"{event.component} has failed: {event.reason}", detail=hint)
            case PoolPaused(pool, paused, still=False):
                what = f"pool {pool}" if pool else "all pools"
                self.tell("info", f"pool:{pool or '*'}", f"{what} {'paused' if paused else 'resumed'}")
            case Recovered(jobs, _):
                self.tell("warning", "node", f"{jobs} {'job' if jobs == 1 else 'jobs'} of a node that died requeued")
            case Backpressure(queue, reason):
                self._repeated(("warning", f"queue:{queue}"), None, f"queue {queue} held: {reason}")
            case WorkerBroken():
                self.tell("warning", event.worker, broken(event))
            case WorkerDrained() if event.cut:
                self.tell("warning", event.worker, drain_limit(event))
            case SessionEnded(reason="killed"):
                self._killed(event)
            case StoreAnswers(lane, answers):
                if answers:
                    self.tell("info", f"store:{lane}", f"the store accepts writes of lane {lane} again")
                else:
                    self.tell("error", f"store:{lane}", f"the store does not answer lane {lane}; retrying")

    def _killed(self, event: SessionEnded) -> None:
        """Sessions that an operator ends one after another are one incident."""
        key = "info", f"session:{event.pool}"
        known = self._repeats.get(key)
        count = known.count + 1 if known is not None and now_ms() - known.at < _SAME else 1
        self._repeated(key, None, killed(event, count))

    def _repeated(self, key: tuple[str, str], event: JobEnded | None, text: str = "") -> None:
        """One incident for many of the same kind, as long as they follow each other."""
        level, subject = key
        known = self._repeats.get(key)
        if known is not None and now_ms() - known.at < _SAME:
            count = known.count + 1
            words = failures(event, count) if event else text
            self._repeats[key] = self._rewrite(known, text=words, count=count, job=event.job if event else None)
            return
        words = failures(event, 1) if event else text
        self._repeats[key] = self.tell(level, subject, words, job=event.job if event else None)
        if len(self._repeats) > 200:  # tasks and codes are few; this is for whoever makes codes up
            self._repeats.pop(next(iter(self._repeats)))
