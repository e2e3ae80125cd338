"""How many jobs the workers may get now, and in which order their places are filled."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from ostler.jobs.backpressure import Pressure
from ostler.jobs.deadlines import RECALL_AFTER
from ostler.jobs.seat import Durations, Seat
from ostler.store.limits import QueueLimit
from ostler.store.rows import Claim

_FRAME_BYTES = 4_000_000  # of arguments in one frame


class Room:
    """The free places of a node's workers."""

    def __init__(self, pressure: Pressure, limits: Mapping[str, QueueLimit]) -> None:
        self._pressure, self._limits = pressure, limits
        self.durations = Durations()

    def wants(self, seats: Iterable[Seat]) -> dict[str, list[str]]:
        """For each queue the workers with room, the emptiest first, one place after another."""
        rooms: dict[str, list[tuple[int, int, str]]] = {}  # (jobs in hand, room for, component)
        now = time.monotonic()
        for seat in seats:
            if not seat.worker.accepting or seat.cancel_by is not None or seat.timed_out:
                continue
            if seat.jobs and (seat.recalled or now > seat.began + RECALL_AFTER):
                continue  # it is at a long one: nothing is put behind that
            queue, held = seat.worker.pool.spec.name, len(seat.jobs)
            if self._pressure.watermarks and self._pressure.holds(queue, now):
                continue
            # Where places or a rate are counted, none is held by a job that waits behind another.
            depth = 1 if queue in self._limits else self.durations.handover(queue)
            limit = seat.worker.pool.spec.recycle.count
            # Never more in hand than the worker may still serve; a warmed replacement comes by itself, so it serves on.
            if limit and not seat.worker.pool.spec.recycle.warm:
                depth = min(depth, limit - seat.worker.served)
            if held <= depth // 2 and held < depth:
                rooms.setdefault(queue, []).append((held, depth, seat.worker.component))
        for queue in rooms:
            self._pressure.claimed(queue)
        return {queue: in_turn(places) for queue, places in rooms.items()}


def in_turn(rooms: list[tuple[int, int, str]]) -> list[str]:
    """The components of (jobs in hand, room for, component), one for each free place, the emptiest first, one place after another."""
    rooms.sort()
    held, depth, _ = rooms[0]
    if all(room[0] == held and room[1] == depth for room in rooms):  # as on an idle node: quick
        return [component for _, _, component in rooms] * (depth - held)
    places = [(place, held, component) for held, depth, component in rooms for place in range(held, depth)]
    return [component for _, _, component in sorted(places)]


def frames(claims: list[Claim]) -> Iterator[list[Claim]]:
    """The claims in frames of bounded size."""
    part: list[Claim] = []
    size = 0
    for claim in claims:
        if part and size + len(claim.args) > _FRAME_BYTES:
            yield part
            part, size = [], 0
        part.append(claim)
        size += len(claim.args)
    yield part
