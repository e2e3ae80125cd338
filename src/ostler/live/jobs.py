"""The jobs that clients follow: which must be read again, which are new, and which the broker may forget.

Between two looks it collects the ids that changed. `begin` takes them for one look, `read` reads them, and `tell` publishes what was
found. If the store did not answer, `put_back` keeps them for the next look.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from ostler.live.broker import Broker
from ostler.store.store import Store

TOPIC = "queue:jobs"
FOLLOWED = 300  # jobs that are followed at once
_CHANGES = 100  # … that are told in one look; of more that change at once, the newest, and a `resync`
_LOOK_BACK = 10.0  # seconds; ids are given in order, and on a store with many writers they are committed in any
_OVERLAP = 1000  # ids that are looked at once more for that
_NEWEST = 100  # jobs that a snapshot shows beside the running ones
_ENDED, _WAITING, _RUNNING = range(3)  # jobs are forgotten in this order


class Look(NamedTuple):
    """What one look reads of the jobs."""

    wanted: bool  # somebody follows jobs
    first: bool  # … and nobody did at the last look
    everything: bool
    overflow: bool
    named: list[int]
    stale: list[int]  # jobs that are shown and may have changed
    after: int  # the id above which jobs may be new


class Found(NamedTuple):
    """What the store said."""

    jobs: list[dict[str, Any]]
    new: list[int]
    last_id: int


class Fresh:
    """Which jobs are new. "Above the last id" is not enough where several write: a lower id may be committed later."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int]] = deque()  # when we looked, and the highest id then
        self._known: set[int] = set()  # of those that are looked at again

    def after(self, now: float, last: int) -> int:
        """The id above which to look: the highest one of some seconds ago."""
        while len(self._looks) > 1 and self._looks[1][0] <= now - _LOOK_BACK:
            self._looks.popleft()
        return min(self._looks[0][1], last) if self._looks else last

    def unseen(self, ids: Sequence[int]) -> list[int]:
        return [job for job in ids if job not in self._known]

    def seen(self, now: float, last: int, ids: Sequence[int], *, first: bool) -> None:
        """These were read, the highest first, and `last` is the highest that there is. The first look begins anew."""
        if first:
            self._looks, self._known = deque([(now, ids[-1] - 1 if ids else last)]), set()
        self._looks.append((now, last))
        self._known.update(ids)
        if len(self._known) > 2 * _OVERLAP:
            self._known = {job for job in self._known if job > self._looks[0][1]}


class Jobs:
    """The followed jobs. `read` runs on the lane of the store, everything else on the node's loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._named: dict[int, None] = {}  # changed since the last look, in the order in which they were named
        self._overflow = False  # more changed than is followed
        self.recheck = False  # any job that has not ended may have changed, too
        self.everything = False  # … and any that has: somebody may have put it back, or deleted it
        self.looked = False  # the last look read jobs
        self.flooded = False  # … and could not tell all of them
        self._last_id = 0
        self._fresh = Fresh()
        self._followed: dict[int, int] = {}  # job -> how soon it may be forgotten, in the order of their last change

    def name(self, jobs: Sequence[int]) -> None:
        """These have changed; of too many, the newest are looked at."""
        for job in jobs[-_CHANGES:]:
            self._named.pop(job, None)
            self._named[job] = None
        self._overflow |= len(jobs) > _CHANGES
        while len(self._named) > FOLLOWED:
            del self._named[next(iter(self._named))]
            self._overflow = True

    def begin(self) -> Look:
        """Take what has been noted so far: one look reads it."""
        wanted, overflow, first = self._broker.wanted(TOPIC), self._overflow, not self.looked
        everything = self.everything or (first and wanted)
        # Of too many changes only the newest were noted: what we show as unfinished may be over by now.
        stale = [
            job for job, rank in self._followed.items() if everything or (rank != _ENDED and (overflow or self.recheck))
        ]
        after = self._fresh.after(time.monotonic(), self._last_id)
        look = Look(wanted, first, everything, overflow, list(self._named), stale, after)
        self._named, self._overflow, self.recheck, self.everything = {}, False, False, False
        return look

    def put_back(self, look: Look) -> None:
        """The store did not answer: the next look reads this, too."""
        self.recheck = True
        self._overflow |= look.overflow
        self.everything |= look.everything
        self._named = {**dict.fromkeys(look.named), **self._named}

    def read(self, store: Store, look: Look) -> Found:
        if not look.wanted:
            return Found([], [], 0)
        live, first = store.live, look.first
        new = live.newest_ids(0 if first else look.after, _NEWEST if first else _OVERLAP)
        told = new if first else self._fresh.unseen(new)[:_CHANGES]
        ids = {*(live.processing_ids(FOLLOWED) if first else ()), *told, *look.named, *look.stale}
        return Found(store.jobs.short(list(ids)), new, max(new[0] if new else 0, self._last_id))

    def tell(self, look: Look, found: Found) -> None:
        """Publish what was found."""
        self.looked = look.wanted  # if False, whoever wants them next begins anew
        if not look.wanted:
            return
        # What came and went while nobody looked, or faster than we look, cannot be told one by one.
        last = self._last_id
        overflow = look.overflow or found.last_id - last > _CHANGES or (look.first and last > 0)
        self._last_id = found.last_id
        self._fresh.seen(time.monotonic(), found.last_id, found.new, first=look.first)
        for job in {*look.stale} - {job["id"] for job in found.jobs}:  # deleted
            self._followed.pop(job, None)
            self._broker.forget(TOPIC, str(job))
        self._publish(found.jobs)
        self.flooded = overflow
        if overflow:
            self._broker.missed(TOPIC, "more jobs changed than are told here; list them again")

    def _publish(self, jobs: list[dict[str, Any]]) -> None:
        for job in sorted(jobs, key=lambda j: j["id"]):
            self._broker.publish(TOPIC, "job_update", "job", job, key=str(job["id"]))
            self._followed.pop(job["id"], None)
            open_rank = _RUNNING if job["status"] == "processing" else _WAITING
            self._followed[job["id"]] = open_rank if job["finished_at"] is None else _ENDED
        spare = len(self._followed) - FOLLOWED
        if spare > 0:
            # What was published just now last of all: nobody has been sent it yet. Else the oldest change before the newer.
            now = {job["id"] for job in jobs}
            first = sorted(
                self._followed, key=lambda job: (self._followed[job] == _RUNNING, job in now, self._followed[job])
            )
            for old in first[:spare]:
                del self._followed[old]
                self._broker.forget(TOPIC, str(old))
