"""Who may call which worker, and when: lines of waiting calls, places in workers, and the idle clock.

Nothing here knows a clock, a socket or a process: the time comes with each verb, what is to be said to the node goes through
`say`, and a call is anything with `granted` and `refused`. A call holds a place from `ask` (or `granted`) to `done`. A worker that is
told to go is closed first, so no call can get a place in it: there is no moment between "still here" and "just left".
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

Key = tuple[str, str]  # task and model id
NEVER = -1.0


class Refusal(NamedTuple):
    """Why a call gets no place."""

    status: int
    code: str
    message: str
    retry: float | None = None  # seconds


class Call(Protocol):
    """One call, as the leases see it."""

    priority: int  # the highest goes first
    deadline: float  # it does not wait beyond this moment
    keep: float | None  # how long the worker stays after it; None: as the model has it

    def granted(self, place: Place) -> None:
        """It waited, and has a place now."""

    def refused(self, why: Refusal) -> None:
        """It waited in vain."""


@dataclass(slots=True)
class Terms:
    """What a model allows."""

    room: int = 1  # calls at once in one worker
    workers: int = 1
    queue: int = 100  # calls that may wait
    idle: float = 60.0
    pinned: bool = False
    gpu: bool = False  # it uses a GPU


@dataclass(slots=True, eq=False)
class Place:
    """A worker that serves: calls hold leases in it."""

    line: Line
    replica: int
    generation: int
    upstream: Any
    room: int
    held: int = 0
    guests: int = 0  # connections that are lent to it (lending.py)
    freeing: bool = False  # it was to be evicted when only resting guests were in it
    idle_since: float = 0.0
    keep: float = 60.0
    used: int = 0


@dataclass(slots=True, eq=False)
class Line:
    """One model: its places, and the calls that wait for one."""

    key: Key
    terms: Terms
    places: dict[int, Place] = field(default_factory=dict)
    wanted: set[int] = field(default_factory=set)  # replicas that were asked for and are not up
    closing: dict[int, int] = field(default_factory=dict)  # replica -> generation that was told to go
    waiting: list[tuple[int, int, Call]] = field(default_factory=list)  # a heap
    left: set[int] = field(default_factory=set)  # numbers of those who left the line
    broken: Refusal | None = None  # why it cannot be had
    broken_until: float = math.inf
    seconds: float = 0.0  # that a call takes, measured
    used_at: float = 0.0
    alone: float = 0.0  # … that it takes in its worker, where nobody is before it
    apart_until: float = 0.0  # no connection is lent to its workers before: others wanted them
    apart: float = 0.0  # for how long it was that time

    def waits(self) -> int:
        return len(self.waiting) - len(self.left)

    def held(self) -> int:
        return sum(place.held for place in self.places.values())

    def in_flight(self) -> int:
        return self.held() + sum(place.guests for place in self.places.values())

    def idle(self) -> bool:
        return not self.places and not self.wanted and not self.waits() and not self.closing


class Leases:
    """All models of this node."""

    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say
        self.lines: dict[Key, Line] = {}
        self._numbers = itertools.count()
        self._number_of: dict[Call, tuple[Line, int]] = {}

    def line(self, key: Key, terms: Terms) -> Line:
        """The line of a model."""
        found = self.lines.get(key)
        if found is None:
            found = self.lines[key] = Line(key, terms)
        return found

    def change(self, line: Line, terms: Terms) -> None:
        """The model's terms are others from now on, for its workers that are up, too."""
        for place in line.places.values():
            place.room = terms.room
            if place.keep == line.terms.idle:
                place.keep = terms.idle
        line.terms = terms

    # ---- calls

    def ask(self, key: Key, terms: Terms, call: Call, now: float) -> Place | Refusal | None:
        """A place, or why there is none, or None: it waits, and hears of it later."""
        line = self.line(key, terms)
        line.used_at = now
        if line.broken is not None:
            if now < line.broken_until:
                retry = None if line.broken_until == math.inf else line.broken_until - now
                return line.broken._replace(retry=retry)
            line.broken = None
        if not line.waits() and (place := _free(line)) is not None:
            return self._hold(place, call)
        if line.waits() >= line.terms.queue and (line.terms.queue or not self._could_start(line)):
            return Refusal(
                429,
                "BUSY",
                f"{key[0]} {key[1]!r} is busy: {line.waits()} calls wait, and {line.terms.queue} may",
                self._patience(line),
            )
        number = next(self._numbers)
        heapq.heappush(line.waiting, (-call.priority, number, call))
        self._number_of[call] = (line, number)
        self._want(line)
        return None

    def reserve(self, key: Key, now: float) -> Place | None:
        """A place that is free at once, for a call that is on its way from another node; `done` ends it. Nobody in line is passed."""
        line = self.lines.get(key)
        if line is None or line.waits() or (place := _free(line)) is None:
            return None
        line.used_at = now
        self.hold(place)
        return place

    def hold(self, place: Place) -> None:
        """Hold this place, which is free, until `done`."""
        place.held += 1
        place.used += 1

    def could_wait(self, key: Key) -> bool:
        """Whether a call would be let into the line."""
        line = self.lines.get(key)
        return line is None or (line.broken is None and line.waits() < max(1, line.terms.queue))

    def is_free(self, key: Key) -> bool:
        """Whether a call would have a place at once."""
        line = self.lines.get(key)
        return line is not None and not line.waits() and _free(line) is not None

    def done(self, place: Place, now: float, seconds: float | None = None) -> None:
        """The call that held a place is over, however it ended; `seconds` where it was answered."""
        line = place.line
        place.held -= 1
        if seconds is not None:
            line.seconds = seconds if not line.seconds else 0.8 * line.seconds + 0.2 * seconds
        if not place.held:
            place.idle_since = now
        self._serve(line, now)

    def leave(self, call: Call) -> bool:
        """It does not wait any more; False when it was not in line."""
        found = self._number_of.pop(call, None)
        if found is None:
            return False
        line, number = found
        line.left.add(number)
        if len(line.left) > 64 and len(line.left) * 2 > len(line.waiting):
            line.waiting = [w for w in line.waiting if w[1] not in line.left]
            heapq.heapify(line.waiting)
            line.left.clear()
        return True

    # ---- workers

    def up(self, key: Key, replica: int, generation: int, upstream: Any, now: float) -> None:
        """The node says: it serves."""
        line = self.line(key, Terms())
        line.wanted.discard(replica)
        line.broken = None
        line.places[replica] = Place(
            line, replica, generation, upstream, line.terms.room, idle_since=now, keep=line.terms.idle
        )
        self._serve(line, now)

    def down(self, key: Key, replica: int, generation: int, now: float) -> Place | None:
        """The node says: it is gone. The place, if it had one; who holds it learns it from his connection."""
        line = self.lines.get(key)
        if line is None:
            return None
        place = line.places.get(replica)
        if place is not None and place.generation == generation:
            del line.places[replica]
        else:
            place = None
        if line.closing.get(replica) == generation:
            del line.closing[replica]  # one that was asked for meanwhile is on its way
        else:
            line.wanted.discard(replica)
        self._want(line)
        return place

    def fail(self, key: Key, why: Refusal, now: float, until: float = math.inf) -> None:
        """The model cannot be had until then: all that wait for it are told, and so are those that come."""
        line = self.lines.get(key)
        if line is None or line.places:
            return  # another worker of it serves
        line.broken, line.broken_until = why, until
        line.wanted.clear()
        for _, _, call in self._take_all(line):
            call.refused(why._replace(retry=None if until == math.inf else until - now))

    def close(self, key: Key, replica: int, generation: int) -> bool:
        """Let no new call in. Whether nobody is in it."""
        line = self.lines.get(key)
        place = line.places.get(replica) if line else None
        if line is None or place is None or place.generation != generation:
            return True
        line.closing[replica] = generation
        del line.places[replica]
        return not place.held and not place.guests

    def lose(self, place: Place) -> bool:
        """A connection to it broke: nobody gets a place in it until the node has said what became of it. Whether that is news."""
        if place.line.places.get(place.replica) is not place:
            return False
        self.close(place.line.key, place.replica, place.generation)
        return True

    def evict(self, key: Key, replica: int, generation: int) -> bool:
        """Close it if it is idle; whether it may go."""
        line = self.lines.get(key)
        place = line.places.get(replica) if line else None
        if line is None or place is None or place.generation != generation:
            return True
        if place.held or place.guests or line.terms.pinned:
            return False
        return self.close(key, replica, generation)

    # ---- the clock

    def tick(self, now: float) -> float:
        """Close who was idle for long enough, refuse who waited too long; when to look again."""
        following = now + 3600.0
        for line in [*self.lines.values()]:
            for place in [*line.places.values()]:
                keep = NEVER if line.terms.pinned else place.keep
                if place.held or place.guests or keep < 0:
                    continue
                if now >= place.idle_since + keep:
                    self.close(line.key, place.replica, place.generation)
                    self._say("idle", *line.key, place.replica, place.generation)
                else:
                    following = min(following, place.idle_since + keep)
            for _, number, call in [*line.waiting]:
                if number in line.left:
                    continue
                if now >= call.deadline:
                    self.leave(call)
                    call.refused(
                        Refusal(
                            504, "DEADLINE", f"{line.key[0]} {line.key[1]!r} had no place in time; it waited in line"
                        )
                    )
                else:
                    following = min(following, call.deadline)
        return following

    # ---- inside

    def _hold(self, place: Place, call: Call) -> Place:
        self.hold(place)
        place.keep = place.line.terms.idle if call.keep is None else call.keep
        return place

    def _serve(self, line: Line, now: float) -> None:
        """Give places that are free to those who wait."""
        while line.waits() and (place := _free(line)) is not None:
            _, number, call = heapq.heappop(line.waiting)
            if number in line.left:
                line.left.discard(number)
                continue
            del self._number_of[call]
            if now >= call.deadline:
                call.refused(Refusal(504, "DEADLINE", f"{line.key[0]} {line.key[1]!r} had no place in time"))
                continue
            call.granted(self._hold(place, call))
        self._want(line)

    def _take_all(self, line: Line) -> list[tuple[int, int, Call]]:
        taken = [w for w in line.waiting if w[1] not in line.left]
        line.waiting, line.left = [], set()
        for _, _, call in taken:
            del self._number_of[call]
        return taken

    def _want(self, line: Line) -> None:
        """Ask the node for as many workers as the line needs, and no more than the model may have."""
        waits = line.waits()
        if not waits or line.broken is not None:
            return
        needed = min(line.terms.workers, math.ceil((waits + line.held()) / line.terms.room))
        for replica in range(line.terms.workers):
            if len(line.places) + len(line.wanted) >= max(1, needed):
                return
            if replica not in line.places and replica not in line.wanted:
                line.wanted.add(replica)
                self._say("want", *line.key, replica)

    def _could_start(self, line: Line) -> bool:
        return not line.places and not line.waits()

    def _patience(self, line: Line) -> float:
        room = max(1, sum(place.room for place in line.places.values()))
        return max(1.0, math.ceil((line.waits() + 1) * (line.seconds or 1.0) / room))

    def facts(self, now: float) -> dict[str, Any]:
        """For health."""
        found = {}
        for (task, model), line in self.lines.items():
            idle = [now - p.idle_since for p in line.places.values() if not p.held and not p.guests]
            found[f"{task}\n{model}"] = {
                "in_flight": line.in_flight(),
                "waiting": line.waits(),
                "idle_seconds": round(min(idle), 1) if idle and not line.in_flight() else None,
            }
        return found


def _free(line: Line) -> Place | None:
    """A place with room: the fullest that has some, so that the others become idle."""
    best: Place | None = None
    for place in line.places.values():
        if place.held < place.room and (best is None or place.held > best.held):
            best = place
    return best
