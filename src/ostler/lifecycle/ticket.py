"""A claim to memory: what a worker asks for, and what its holder and the ledger tell each other while it holds it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ostler.lifecycle.admission import NONE, Need
from ostler.store.footprints import Kind

if TYPE_CHECKING:
    from ostler.lifecycle.ledger import Ledger


class Standing(NamedTuple):
    """What a holder says of itself when somebody needs its memory. `yields`: busy, but it can leave when it has finished."""

    busy: bool
    pinned: bool = False
    yields: bool = False
    reload_s: float = 1.0
    use: float = 1.0


def always_busy() -> Standing:
    """Of a holder that never goes for others."""
    return Standing(busy=True)


def nothing(*_: object) -> None:
    """Of a holder that does not want to be told."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a worker asks for. With a `kind`, its peaks are recorded and the next of that kind reserves those; unless it is
    `declared_only`: then its peaks change nothing, but running out of memory does.
    """

    declared: Need
    guess: Need = NONE
    kind: Kind | None = None
    declared_only: bool = False
    group: str = ""
    eager: bool = True  # others may have to leave for it


@dataclass(slots=True, eq=False)
class Ticket:
    """One owner's claim to memory: `waiting`, `granted` (its worker loads), `settled`, `parked`, `gone`."""

    owner: str
    key: str  # its name in the ledger; the owner's, unless that one has several
    demand: Demand
    ledger: Ledger
    on_granted: Callable[[Ticket], None]
    on_refused: Callable[[Ticket, str], None]
    on_waiting: Callable[[Ticket, str], None]
    standing: Callable[[], Standing]
    on_evict: Callable[[str], None]
    status: str = "waiting"
    since: float = field(default_factory=time.monotonic)
    eager: bool = True
    why: str = ""  # why it waits
    need: Need = NONE
    device: str | None = None
    session: int | None = None
    claimed: bool = False  # told to go
    waking: bool = False  # parked, and in the line for its device
    seen: Need = NONE
    reported: Need = NONE
    peak: Need = NONE
    load_ms: int | None = None
    ran_short: bool = False

    @property
    def granted(self) -> bool:
        return self.status in ("granted", "settled")

    def running(self, pid: int) -> None:
        """Its worker is this process, the leader of a session: what the session uses is this ticket's."""
        self.session = pid
        self.ledger.look()

    def settled(self, measured: Need | None = None, load_ms: int | None = None) -> None:
        """The worker is up. What it measured of itself counts where the devices do not tell."""
        if self.status == "granted":
            self.status, self.load_ms = "settled", load_ms
            if measured is not None and not self._declared:
                self.need = measured  # it was a guess
        if measured is not None:
            self.measured(measured)
        self.ledger.look()

    @property
    def _declared(self) -> bool:
        return self.demand.declared != NONE or self.ledger.known(self.demand.kind) is not None

    def measured(self, mb: Need) -> None:
        """What the worker says that it uses now, for example with a heartbeat."""
        self.reported = mb
        self.peak = self.peak.largest(mb)

    def ran_out(self, of: str) -> None:
        """Its worker ran out of memory, of HOST or of its device: the next one of its kind reserves more."""
        self.ran_short = True
        self.ledger.raise_footprint(self, of)

    def insist(self) -> None:
        """Others may have to leave for it from now on; its waiting time begins now."""
        if self.status == "waiting" and not self.eager:
            self.eager, self.since = True, time.monotonic()
            self.ledger.look()

    def kept(self) -> None:
        """It was told to go and is needed: it stays."""
        self.claimed = False
        self.ledger.look()

    def parked(self) -> None:
        """Its device memory is on the host now."""
        self.ledger.park(self)

    def wake(self, granted: Callable[[Ticket], None], refused: Callable[[Ticket, str], None]) -> None:
        """It wants its device memory back, on the same device."""
        self.on_granted, self.on_refused = granted, refused
        self.ledger.wake(self)

    def release(self) -> None:
        """It holds and wants nothing any more: its worker's family is gone, or it leaves the line. A second time does nothing."""
        self.ledger.release(self)
