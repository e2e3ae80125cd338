"""The one memory budget of a node: who holds memory, who waits for it, and what is really free.

All state is on the node's loop. Readings are taken in threads, one for the host and one for the GPUs, so that whoever needs no GPU
does not wait for a slow driver. Each reading is followed by decisions (admission.py); events such as a release only ask for the
next reading. Between two readings nothing is lost: what a worker may still take is reserved until a reading shows it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ostler.lifecycle import holdings
from ostler.lifecycle.admission import (
    HOST,
    NONE,
    PATIENCE,
    Decision,
    Evict,
    Grant,
    Memory,
    Need,
    Refuse,
    Resident,
    Wait,
    Waiter,
    decide,
    raised,
)
from ostler.lifecycle.devices import Devices, Reading
from ostler.lifecycle.footprints import CPU, Peaks
from ostler.lifecycle.readings import GpuReadings, HostReading, Reader, read_gpus, read_host
from ostler.lifecycle.returning import Left
from ostler.lifecycle.ticket import Demand, Standing, Ticket, always_busy, nothing
from ostler.store.footprints import Kind
from ostler.store.lanes import Lane

log = logging.getLogger("ostler.lifecycle")

_QUICK, _WAITING, _HOLDING, _NOTHING = 0.1, 1.0, 5.0, 60.0  # seconds between looks
_SOME = Need(gpu_mb=1.0)
_FRESH = 0.2  # how much older than a waiter a reading may be that it is decided by
_OLD = 3.0  # a reading of the GPUs that is older is no ground for a decision


class Ledger:
    """Grants memory, device by device and on the host, to all that a node runs. A part of the node."""

    def __init__(
        self,
        devices: Devices | None = None,
        *,
        headroom: Need | None = None,
        exclusive: bool = False,
        patience: float = PATIENCE,
        lane: Lane | None = None,
    ) -> None:
        self._devices, self._peaks = devices or Devices(), Peaks(lane)
        self._headroom = headroom or Need(512.0, 512.0)
        self.exclusive, self._patience = exclusive, patience
        self._line: list[Ticket] = []
        self._held: dict[str, Ticket] = {}
        self._left: list[Left] = []
        self._host: HostReading | None = None
        self._gpus: GpuReadings | None = None
        self._unreadable: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers: list[Reader[Any]] = []
        self._clock: asyncio.TimerHandle | None = None
        self._sessions: frozenset[int] = frozenset()  # whose memory the host's readings tell
        self._numbers = itertools.count(1)

    # ---- start and stop

    async def start(self) -> None:
        """Load what earlier runs needed, and begin to read."""
        self._loop = asyncio.get_running_loop()
        await self._peaks.load()
        self._readers = [
            Reader("host", lambda: read_host(self._devices, self._sessions), self._told_host, self._loop),
            Reader("gpus", partial(read_gpus, self._devices), self._told_gpus, self._loop),
        ]
        for reader in self._readers:
            reader.start()
        self.look()

    async def stop(self) -> None:
        if self._clock:
            self._clock.cancel()
        for reader in self._readers:
            reader.stop()
        self._readers, self._loop = [], None

    # ---- what holders ask

    def reserve(
        self,
        owner: str,
        demand: Demand,
        *,
        granted: Callable[[Ticket], None],
        refused: Callable[[Ticket, str], None],
        waiting: Callable[[Ticket, str], None] = nothing,
        standing: Callable[[], Standing] = always_busy,
        evict: Callable[[str], None] = nothing,
    ) -> Ticket:
        """Ask for memory, at the end of the line. Later `granted(ticket)` or `refused(ticket, why)` is called; meanwhile `waiting`
        with each new reason. Once the worker has settled, `standing()` tells whether it could go, and `evict(short_of)` that it must:
        it is claimed by then, and either releases its ticket or says that it is `kept`.
        """
        is_known = any(owner == t.key for t in (*self._line, *self._held.values()))
        key = f"{owner}#{next(self._numbers)}" if is_known else owner
        ticket = Ticket(owner, key, demand, self, granted, refused, waiting, standing, evict, eager=demand.eager)
        self._line.append(ticket)
        self.look()
        return ticket

    def known(self, kind: Kind | None) -> Need | None:
        """The largest peaks of earlier runs of that kind on the devices that this node has."""
        return self._peaks.known(kind, self._names())

    def reload_seconds(self, kind: Kind) -> float | None:
        """How long the last load of that kind took."""
        return self._peaks.reload_seconds(kind, self._names())

    def _names(self) -> set[str]:
        readings = self._gpus.readings.values() if self._gpus else ()
        return {r.device.name for r in readings} or {CPU}

    def _asks(self, ticket: Ticket) -> Need | None:
        """What it is in the line for; None while the GPUs are not known yet."""
        if ticket.waking:
            return Need(0.0, ticket.need.gpu_mb)
        found = self._peaks.need(ticket.demand, self._names())
        if not found.gpu_mb:
            return found
        if self._gpus is None:
            return None
        return found if self._gpus.readings else self._peaks.on_host(ticket.demand)

    # ---- what tickets say

    def release(self, ticket: Ticket) -> None:
        """See Ticket.release."""
        if ticket.status == "gone":
            return
        if ticket in self._line:
            self._line.remove(ticket)
        if self._held.get(ticket.key) is ticket:
            del self._held[ticket.key]
            self._gives_back(ticket)
            if ticket.status != "granted" and not ticket.ran_short:
                self._learn(ticket)
        ticket.status = "gone"
        self.look()

    def _learn(self, ticket: Ticket) -> None:
        """A run has ended well. Where what is declared counts, what was raised comes down to that again, step by step."""
        demand, device = ticket.demand, self._device_name(ticket)
        if not demand.declared_only:
            self._peaks.record(demand.kind, device, ticket.peak, ticket.load_ms)
        elif self._peaks.known(demand.kind, [device]):
            self._peaks.record(demand.kind, device, demand.declared)

    def park(self, ticket: Ticket) -> None:
        """See Ticket.parked."""
        if self._held.get(ticket.key) is ticket and ticket.status == "settled":
            self._gives_back(ticket)
            ticket.status, ticket.claimed = "parked", False
            self.look()

    def wake(self, ticket: Ticket) -> None:
        """See Ticket.wake."""
        if ticket.status == "parked" and not ticket.waking:
            ticket.waking, ticket.eager, ticket.since = True, True, time.monotonic()
            self._line.append(ticket)
            self.look()

    def _gives_back(self, ticket: Ticket) -> None:
        """Its device memory will be free, but is not counted as such before a reading shows it."""
        if ticket.device and ticket.seen.gpu_mb > 0 and ticket.status != "parked" and self._gpus:
            reading = self._reading(ticket)
            free = reading.free_mb if reading else 0.0
            left = Left(ticket.owner, ticket.device, ticket.seen.gpu_mb, free, ticket.session, time.monotonic())
            self._left.append(left)
        ticket.seen = Need(ticket.seen.host_mb, 0.0)

    def raise_footprint(self, ticket: Ticket, of: str) -> None:
        """See Ticket.ran_out."""
        most = self._most(ticket, of)
        had = ticket.need.largest(ticket.peak)
        now = Need(raised(had.host_mb, most), had.gpu_mb) if of == HOST else Need(had.host_mb, raised(had.gpu_mb, most))
        log.warning("%s ran out of memory with %s; the next one reserves %s", ticket.owner, had, now)
        self._peaks.record(ticket.demand.kind, self._device_name(ticket), now)

    def _most(self, ticket: Ticket, of: str) -> float:
        if of == HOST:
            return self._host.reading.device.total_mb - self._headroom.host_mb if self._host else 0.0
        reading = self._reading(ticket)
        return reading.device.total_mb - self._headroom.gpu_mb if reading else 0.0

    def _device_name(self, ticket: Ticket) -> str:
        reading = self._reading(ticket)
        return reading.device.name if reading else min(self._names())

    def _reading(self, ticket: Ticket) -> Reading | None:
        """The last one of its device."""
        return self._gpus.readings.get(ticket.device or "") if self._gpus else None

    # ---- looking

    def look(self) -> None:
        """Have the memory read now; decisions follow."""
        self._sessions = frozenset(t.session for t in self._held.values() if t.session)
        tickets = [*self._line, *self._held.values()]
        # The GPUs only where somebody uses them, or nothing else is going on: nvidia-smi is no light program.
        gpus = self._left or not tickets or any(t.device or (self._asks(t) or _SOME).gpu_mb for t in tickets)
        for reader in self._readers if gpus else self._readers[:1]:
            reader.ask()
        self._set_clock()

    def _set_clock(self) -> None:
        if self._clock:
            self._clock.cancel()
        if self._loop is None:
            return
        coming = self._left or any(t.claimed for t in self._held.values())
        pause = (_QUICK if coming else _WAITING) if self._line else _HOLDING if self._held else _NOTHING
        self._clock = self._loop.call_later(pause, self.look)

    def _told_host(self, found: HostReading | Exception) -> None:
        if isinstance(found, Exception):
            log.warning("the host's memory cannot be read: %s", found)
            return
        self._host = found
        for ticket in self._held.values():
            rss = found.rss.get(ticket.session or -1)
            self._saw(ticket, Need(ticket.reported.host_mb if rss is None else rss, ticket.seen.gpu_mb))
        self._decide()

    def _told_gpus(self, found: GpuReadings | Exception) -> None:
        if isinstance(found, Exception):
            if self._unreadable is None:
                log.warning("the GPUs cannot be read, so workers that need one wait: %s", found)
            self._unreadable = str(found)
        else:
            if self._unreadable is not None:
                log.info("the GPUs can be read again")
            self._gpus, self._unreadable = found, None
            for ticket in self._held.values():
                self._saw(ticket, Need(ticket.seen.host_mb, holdings.on_device(ticket, found)))
            self._left = [left for left in self._left if not left.is_back(found)]
        self._decide()

    def _saw(self, ticket: Ticket, seen: Need) -> None:
        ticket.seen = seen
        ticket.peak = ticket.peak.largest(seen)

    # ---- deciding

    def _decide(self) -> None:
        if self._loop is None or self._host is None:
            return
        now = time.monotonic()
        waiters = self._waiters(now)
        if waiters:
            memories = self._memories(self._host)
            decisions = decide(
                memories[0],
                memories[1:],
                self._residents(),
                waiters,
                patience=self._patience,
                exclusive=self.exclusive,
                operating=self.operating() is not None,
            )
            line = {ticket.key: ticket for ticket in self._line}
            held = dict(self._held)
            for decision in decisions:
                self._apply(decision, line, held)
        self._set_clock()

    def _waiters(self, now: float) -> list[Waiter]:
        found = []
        read_at = self._gpus.at if self._gpus and not self._unreadable and now - self._gpus.at < _OLD else None
        for ticket in self._line:
            need = self._asks(ticket)
            if need is None or (need.gpu_mb and (read_at is None or read_at < ticket.since - _FRESH)):
                if self._unreadable is not None:
                    self._tell_waiting(ticket, f"the GPUs cannot be read: {self._unreadable}")
                continue
            found.append(
                Waiter(
                    ticket.key,
                    need,
                    now - ticket.since,
                    group=ticket.demand.group,
                    modest=not ticket.eager,
                    only=ticket.device if ticket.waking else None,
                )
            )
        return found

    def _memories(self, host: HostReading) -> list[Memory]:
        return holdings.memories(host, self._gpus, self._held.values(), self._headroom)

    def _residents(self) -> list[Resident]:
        return [left.resident() for left in self._left] + [
            holdings.resident(ticket, self._standing(ticket)) for ticket in self._held.values()
        ]

    def _standing(self, ticket: Ticket) -> Standing:
        if ticket.status == "granted" or ticket.waking:
            return always_busy()
        try:
            return ticket.standing()
        except Exception:
            log.exception("%s does not say whether it is idle; it is left loaded", ticket.owner)
            return always_busy()

    def _apply(self, decision: Decision, line: dict[str, Ticket], held: dict[str, Ticket]) -> None:
        match decision:
            case Grant(owner, device) if (ticket := line[owner]) in self._line:
                self._grant(ticket, device)
            case Refuse(owner, why) if (ticket := line[owner]) in self._line:
                self._line.remove(ticket)
                ticket.waking, ticket.status = False, ticket.status if ticket.waking else "gone"
                _call(ticket.owner, ticket.on_refused, ticket, why)
            case Evict(residents, waiter, short_of):
                for owner in residents:
                    log.info("unloading %s, because %s needs memory (%s)", owner, waiter, short_of)
                    held[owner].claimed = True
                    _call(owner, held[owner].on_evict, short_of)
            case Wait(owner, why):
                self._tell_waiting(line[owner], why)

    def _grant(self, ticket: Ticket, device: str | None) -> None:
        self._line.remove(ticket)
        if ticket.waking:
            ticket.waking, ticket.status = False, "settled"
        else:
            ticket.need, ticket.device, ticket.status = self._asks(ticket) or NONE, device, "granted"
            self._held[ticket.key] = ticket
        ticket.why = ""
        _call(ticket.owner, ticket.on_granted, ticket)

    def _tell_waiting(self, ticket: Ticket, why: str) -> None:
        if ticket.why != why:
            ticket.why = why
            _call(ticket.owner, ticket.on_waiting, ticket, why)

    # ---- what others see

    def operating(self) -> str | None:
        """In exclusive mode, who loads onto a GPU now: the others wait."""
        loading = [t for t in self._held.values() if t.status == "granted" and t.need.gpu_mb] if self.exclusive else []
        return loading[0].owner if loading else None

    def snapshot(self) -> dict[str, Any]:
        """All memories with who holds how much of them, and who waits, for health, metrics and dashboard. From memory."""
        memories = self._memories(self._host) if self._host else []
        shown = [holdings.shown(memory, self._gpus, self._held.values()) for memory in memories]
        now = time.monotonic()
        return {
            "host": shown[0] if shown else None,
            "devices": shown[1:],
            "unreadable": self._unreadable,
            "exclusive": self.exclusive,
            "operating": self.operating(),
            "waiting": [holdings.waiting(t, self._asks(t) or t.demand.declared, now) for t in self._line],
        }


def _call(owner: str, told: Callable[..., None], *values: object) -> None:
    """Tell a holder; one that fails must not stop the others."""
    try:
        told(*values)
    except Exception:
        log.exception("%s failed on news of its memory", owner)
