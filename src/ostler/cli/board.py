"""What `ostler top` knows: the newest state of everything, as the stream tells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ostler.cli.words import State
from ostler.store.identity import name_of

SPANS = {"10m": 600, "1h": 3600, "24h": 86_400, "7d": 604_800}  # seconds
_KEPT = 100  # incidents; the stream does not tell which ones are over


class Board:
    """Events go in one by one; the picture is made of what is here. Times are milliseconds."""

    def __init__(self, span: str) -> None:
        self.span, self.lost = span, False
        self.step, self.points = 10, dict[int, State]()  # counters are the store's, which outlives a node
        self.whole: State | None = None  # all of them in one
        self._clear()

    def _clear(self) -> None:
        self.is_live = False
        self.counters_due = True  # what ended while nobody followed is in no event
        self.jobs_missed = False
        self.node: State = {}
        self.health: State = {"status": "starting", "errors": []}
        self.total: State | None = None
        self.queues: dict[str, State] = {}
        self.workers: dict[str, State] = {}
        self.sessions: dict[str, State] = {}  # pools, by the name that clients connect to
        self.nodes: dict[str, State] = {}  # none while there is only the one
        self.jobs: dict[int, State] = {}  # the running ones
        self.incidents: dict[tuple[str, int], State] = {}
        self._heard: list[State] | None = None  # jobs that were told while they are listed anew

    def apply(self, body: Mapping[str, Any]) -> None:
        match body:
            case {"topic": "stream", "type": "resync"}:
                self._clear()
            case {"type": "resync"}:
                self.jobs_missed = True
            case {"type": "live", "stream": state}:
                self.is_live, self.node = True, state
            case {"health": state}:
                self.health = state
            case {"worker": state}:
                _put(self.workers, f"{state['node_id']}/{state['component']}", state)
            case {"session": state}:
                self.sessions[state["pool"]] = state
            case {"topic": "system:nodes", "node": state}:
                _put(self.nodes, state["id"], state)
            case {"job": state}:
                self._job(state)
                if self._heard is not None:
                    self._heard.append(state)
            case {"incident": state}:
                self.incidents[state["node"], state["id"]] = state
                if len(self.incidents) > _KEPT:
                    del self.incidents[next(iter(self.incidents))]
            case {"queue": {"queue": None, "recent": recent} as state, "timestamp": at}:
                self.total = {**state, "told_at": at}
                if recent and recent["step"] == self.step:
                    self.points[recent["at"]] = recent
            case {"queue": state, "timestamp": at}:
                self.queues[state["queue"]] = {**state, "told_at": at}

    @property
    def several(self) -> bool:
        """Whether it must be said which node a worker or job is of."""
        return len(self.nodes) > 1

    def label(self, node: str | None) -> str:
        """What a node is called."""
        return str(self.nodes.get(node or "", {}).get("label") or name_of(node) or "")

    def _job(self, state: State) -> None:
        if state["status"] == "processing":
            self.jobs[state["id"]] = state
        else:
            self.jobs.pop(state["id"], None)

    def counters(self, found: Mapping[str, Any]) -> None:
        """The counters of the span, read anew."""
        self.counters_due, self.step = False, found["step"]
        self.points = {point["at"]: point for point in found["points"]}
        self.whole = found["whole"]

    def relist(self) -> None:
        """The running jobs are about to be asked for."""
        self.jobs_missed, self._heard = False, []

    def listed(self, jobs: list[State]) -> None:
        """The running jobs; what was told since they were asked for may be newer."""
        self.jobs = {job["id"]: job for job in jobs}
        heard, self._heard = self._heard or [], None
        for job in heard:
            self._job(job)

    def rate(self, now: int) -> float:
        """Jobs done per second, over about the last minute, or one step where that is longer."""
        step = self.step * 1000
        first = now - now % step - max(0, 60_000 - step)
        done: int = sum(p["done"] for at, p in self.points.items() if at >= first)
        return done * 1000 / max(1000, now - first)

    def series(self, now: int, name: str, width: int) -> list[float]:
        """At most so many figures over the span, oldest first: counts are added up, of durations the longest."""
        slots = SPANS[self.span] // self.step
        each = -(-slots // width)
        found = [0.0] * -(-slots // each)
        for at, point in self.points.items():
            place = -1 - (now // 1000 // self.step - at // 1000 // self.step) // each
            if -len(found) <= place < 0 and (value := point[name]):
                found[place] = found[place] + value if name == "done" else max(found[place], value)
        return found


def _put(known: dict[str, State], key: str, state: State) -> None:
    """What has left for good says so in its last state."""
    if state.get("gone"):
        known.pop(key, None)
    else:
        known[key] = state
