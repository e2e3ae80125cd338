"""Who gets memory, who must go for it, who waits, and who can never have it. Pure: plain data in, decisions out, no clock.

Room is the live free memory, less what is reserved and not yet seen in it, less the headroom. Waiters are taken in order. One
that fits is granted, on the device where the least is left over. For one that does not fit, idle residents are evicted, those
first that cost least (reload seconds x recent use / MB), as many as it takes and no more; what they free is set aside for it.
Where that is not enough it waits, and smaller ones behind it may overtake. When it has waited for `patience` seconds they may
not: memory that it could have is kept for it, and busy residents that can yield are asked to leave when they have finished.

Whoever needs no GPU never waits for one: a waiter that lacks GPU memory alone holds up nobody who does not ask for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

HOST = "host"
"""The host's memory among the names of devices."""
PATIENCE = 30.0
"""Seconds after which nobody in the line is overtaken."""
_RAISE = 1.25  # by how much a footprint grows that was too small


@dataclass(frozen=True, slots=True)
class Need:
    """Memory in MB (a million bytes)."""

    host_mb: float = 0.0
    gpu_mb: float = 0.0

    def largest(self, other: Need) -> Need:
        return Need(max(self.host_mb, other.host_mb), max(self.gpu_mb, other.gpu_mb))

    def __str__(self) -> str:
        parts = [
            f"{mb:,.0f} MB of {what} memory" for mb, what in ((self.gpu_mb, "GPU"), (self.host_mb, "host")) if mb > 0
        ]
        return " and ".join(parts) or "no memory"


NONE = Need()


@dataclass(frozen=True, slots=True)
class Memory:
    """One memory as it is now: the host's, or a device's. `reserved_mb` is granted and not yet seen in `free_mb`."""

    name: str
    total_mb: float
    free_mb: float
    reserved_mb: float = 0.0
    headroom_mb: float = 0.0

    @property
    def room_mb(self) -> float:
        return self.free_mb - self.reserved_mb - self.headroom_mb


@dataclass(frozen=True, slots=True)
class Resident:
    """A worker that holds memory. `gpu_mb` and `host_mb`: how much more room there is when it has gone."""

    owner: str
    device: str | None
    host_mb: float = 0.0
    gpu_mb: float = 0.0
    busy: bool = False
    pinned: bool = False
    parked: bool = False  # its device memory is on the host
    leaving: bool = False  # claimed, or gone and not yet seen to be gone
    yields: bool = False  # busy, but can be asked to leave when it has finished what it has
    reload_s: float = 1.0
    use: float = 1.0
    group: str = ""

    @property
    def cost(self) -> float:
        """What its loss costs: seconds of loading, weighed with how much it is used."""
        return self.reload_s * self.use

    def frees(self, name: str) -> float:
        """MB that come back in that memory when it goes."""
        if name == HOST:
            return self.host_mb
        return self.gpu_mb if self.device == name and not self.parked else 0.0


@dataclass(frozen=True, slots=True)
class Waiter:
    """Someone in the line. Nobody is made to leave for one of the same `group`, such as another worker of its pool.

    `modest`: it takes what is free, and nobody leaves or is held up for it. `only`: the one device that it can use.
    """

    owner: str
    need: Need
    waited: float = 0.0
    group: str = ""
    modest: bool = False
    only: str | None = None

    @property
    def wants_gpu(self) -> bool:
        return self.need.gpu_mb > 0


@dataclass(frozen=True, slots=True)
class Grant:
    """The waiter has its memory, on that device."""

    owner: str
    device: str | None


@dataclass(frozen=True, slots=True)
class Evict:
    """These go, for the sake of a waiter; they are claimed from now on. `short_of` is HOST or a device."""

    residents: tuple[str, ...]
    waiter: str
    short_of: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now, because. `soon`: its memory is on its way and set aside."""

    owner: str
    why: str
    soon: bool = False


@dataclass(frozen=True, slots=True)
class Refuse:
    """Never, because."""

    owner: str
    why: str


Decision = Grant | Evict | Wait | Refuse


def footprint(known: Need | None, declared: Need, guess: Need) -> Need:
    """What to reserve: the measured peak of earlier runs, else what was declared, else a guess; for host and device apart."""
    known = known or Need()
    return Need(
        known.host_mb or declared.host_mb or guess.host_mb,
        known.gpu_mb or declared.gpu_mb or guess.gpu_mb,
    )


def raised(mb: float, most: float) -> float:
    """The footprint of a worker that ran out of memory with this one; no more than there is, so that it can be tried alone."""
    return max(mb, min(mb * _RAISE, most))


def decide(
    host: Memory,
    devices: Sequence[Memory],
    residents: Iterable[Resident],
    waiters: Iterable[Waiter],
    *,
    patience: float = PATIENCE,
    exclusive: bool = False,
    operating: bool = False,
) -> list[Decision]:
    """One decision for each waiter, in order, and who is evicted for them.

    `exclusive`: of all that use a GPU, one loads at a time; `operating`: one does.
    """
    line = _Line(host, devices, residents, patience, exclusive=exclusive, operating=operating)
    decisions: list[Decision] = []
    for waiter in waiters:
        decisions += line.place(waiter)
    return decisions


@dataclass(slots=True)
class _Plan:
    """How a waiter can get its memory: on that device, when these have gone."""

    device: str | None
    victims: list[Resident] = field(default_factory=list)

    @property
    def price(self) -> tuple[int, float]:
        return sum(r.busy for r in self.victims), sum(r.cost for r in self.victims)


class _Line:
    """The memory while one pass goes through the line: what is granted or set aside is gone for those behind."""

    def __init__(
        self,
        host: Memory,
        devices: Sequence[Memory],
        residents: Iterable[Resident],
        patience: float,
        *,
        exclusive: bool,
        operating: bool,
    ) -> None:
        memories = [host, *devices]
        self._patience, self._exclusive, self._operating = patience, exclusive, operating
        self._devices = [d.name for d in devices]
        self._room = {m.name: m.room_mb for m in memories}
        self._coming = dict.fromkeys(self._room, 0.0)
        self._most = {m.name: m.total_mb - m.headroom_mb for m in memories}  # what a worker could ever have
        self._hope = dict(self._room)  # what it could have when all go that are not pinned
        self._own: dict[tuple[str, str], float] = {}  # … and how much of that each group holds
        self._idle: dict[str, list[Resident]] = {name: [] for name in self._room}
        self._loose = dict.fromkeys(self._room, 0.0)  # what the idle ones hold
        self._yielding: dict[str, list[Resident]] = {name: [] for name in self._room}
        self._patient = dict.fromkeys(self._room, 0.0)  # what those hold that can yield
        self._claimed: set[str] = set()
        self._kept: set[str] = set()  # memories in which nobody may overtake any more
        for resident in residents:
            for name in (HOST, resident.device):
                if name in self._room and (mb := resident.frees(str(name))) > 0:
                    self._count(str(name), resident, mb)
        for name, idle in self._idle.items():
            idle.sort(key=lambda r: (r.cost / r.frees(name), r.owner))

    def _count(self, name: str, resident: Resident, mb: float) -> None:
        if resident.pinned and not resident.leaving:
            self._most[name] -= mb
            return
        self._hope[name] += mb
        if resident.group and not resident.leaving:
            self._own[name, resident.group] = self._own.get((name, resident.group), 0.0) + mb
        if resident.leaving:
            self._coming[name] += mb
        elif not resident.busy:
            self._idle[name].append(resident)
            self._loose[name] += mb
        elif resident.yields:
            self._yielding[name].append(resident)
            self._patient[name] += mb

    # ---- one waiter

    def place(self, waiter: Waiter) -> list[Decision]:
        """What happens to the next one in the line."""
        usable = [waiter.only] if waiter.only in self._devices else [] if waiter.only else self._devices
        if why := self._never(waiter.need, usable):
            return [Refuse(waiter.owner, why)]
        if self._exclusive and waiter.wants_gpu and self._operating:
            return [Wait(waiter.owner, "another worker is loading, and only one may at a time (gpu_exclusive)")]
        device = self._best_fit(waiter.need.gpu_mb, usable)
        if self._host_fits(waiter.need.host_mb) and (device or not waiter.need.gpu_mb):
            self._take(waiter.need, device)
            self._operating |= waiter.wants_gpu
            return [Grant(waiter.owner, device)]
        aged = waiter.waited >= self._patience and not waiter.modest
        if not waiter.modest and (plan := self._plan(waiter, device, usable, yielding=aged)):
            return self._carry_out(waiter, plan)
        if aged:
            self._keep(waiter, usable)
        return [Wait(waiter.owner, self._lacks(waiter, usable))]

    def _never(self, need: Need, usable: Sequence[str]) -> str | None:
        if need.gpu_mb > 0 and not usable:
            return f"it needs {need}, and there is no GPU for it"
        if need.gpu_mb > 0 and need.gpu_mb > (most := max(self._most[d] for d in usable)):
            return f"it needs {need}, and no GPU can ever give it more than {max(0.0, most):,.0f} MB"
        if need.host_mb > 0 and need.host_mb > self._most[HOST]:
            return f"it needs {need}, and the host can never give it more than {max(0.0, self._most[HOST]):,.0f} MB"
        return None

    def _host_fits(self, mb: float) -> bool:
        return not mb or (HOST not in self._kept and mb <= self._room[HOST])

    def _best_fit(self, mb: float, usable: Sequence[str]) -> str | None:
        fitting = [d for d in usable if d not in self._kept and 0 < mb <= self._room[d]]
        return min(fitting, key=lambda d: (self._room[d], d), default=None)

    def _take(self, need: Need, device: str | None) -> None:
        self._room[HOST] -= need.host_mb
        if device:
            self._room[device] -= need.gpu_mb

    # ---- one that does not fit

    def _plan(self, waiter: Waiter, fits: str | None, usable: Sequence[str], *, yielding: bool) -> _Plan | None:
        """The cheapest way to make room; None when there is none now. It evicts nobody in vain."""
        need, group = waiter.need, waiter.group
        if not need.gpu_mb or fits:
            plan: _Plan | None = _Plan(fits)
        else:
            plans = [self._clear(d, need.gpu_mb, group, yielding) for d in usable if d not in self._kept]
            plan = min((p for p in plans if p), key=lambda p: (p.price, p.device), default=None)
        if plan is None or not need.host_mb:
            return plan
        if HOST in self._kept:
            return None
        short = need.host_mb - self._room[HOST] - self._coming[HOST] - sum(r.frees(HOST) for r in plan.victims)
        if short <= 0:
            return plan
        more = self._cheapest(HOST, short, group, yielding, besides=plan.victims)
        if more is None:
            return None
        plan.victims += more
        return plan

    def _clear(self, device: str, mb: float, group: str, yielding: bool) -> _Plan | None:
        short = mb - self._room[device] - self._coming[device]
        victims = [] if short <= 0 else self._cheapest(device, short, group, yielding)
        return None if victims is None else _Plan(device, victims)

    def _cheapest(
        self, name: str, short: float, group: str, yielding: bool, besides: Sequence[Resident] = ()
    ) -> list[Resident] | None:
        """Residents that free so much there: the cheapest first, and none that is not needed. None when they are too few."""
        if short > self._loose[name] + (self._patient[name] if yielding else 0.0):
            return None
        passed = self._claimed.union(r.owner for r in besides)
        chosen: list[Resident] = []
        got = 0.0
        for resident in [*self._idle[name], *(self._yielding[name] if yielding else ())]:
            if got >= short:
                break
            if resident.owner not in passed and not (group and resident.group == group):
                chosen.append(resident)
                got += resident.frees(name)
        if got < short:
            return None
        for resident in chosen[-2::-1]:  # the last one was needed
            if got - resident.frees(name) >= short:
                chosen.remove(resident)
                got -= resident.frees(name)
        return chosen

    def _carry_out(self, waiter: Waiter, plan: _Plan) -> list[Decision]:
        """Claim the plan's residents, and set aside for the waiter what it lacks now and they free."""
        need, short_of = waiter.need, HOST
        if plan.device and self._room[plan.device] < need.gpu_mb:
            short_of = plan.device
        for resident in plan.victims:
            self._claimed.add(resident.owner)
            for name in {HOST, resident.device} & self._room.keys():
                mb = resident.frees(str(name))
                self._coming[str(name)] += mb
                (self._patient if resident.busy else self._loose)[str(name)] -= mb
        if plan.device:
            self._room[plan.device] -= need.gpu_mb
        if self._room[HOST] < need.host_mb:  # else those who need no GPU could wait for one
            self._room[HOST] -= need.host_mb
        owners = tuple(r.owner for r in plan.victims)
        then = f"unloads {', '.join(owners)}" if owners else "waits for memory to be freed"
        wait = Wait(waiter.owner, f"it needs {need}, and {then}", soon=True)
        return [Evict(owners, waiter.owner, short_of), wait] if owners else [wait]

    def _keep(self, waiter: Waiter, usable: Sequence[str]) -> None:
        """Nobody overtakes any more, where that can help: memory that other programs hold does not come back by that."""
        need = waiter.need
        hope = {name: self._hope[name] - self._own.get((name, waiter.group), 0.0) for name in (HOST, *usable)}
        if need.gpu_mb:
            self._kept |= {d for d in usable if hope[d] >= need.gpu_mb}
        if self._room[HOST] < need.host_mb <= hope[HOST]:
            self._kept.add(HOST)

    def _lacks(self, waiter: Waiter, usable: Sequence[str]) -> str:
        free = []
        if waiter.need.gpu_mb:
            free.append(f"{max(0.0, *(self._room[d] for d in usable)):,.0f} MB of a GPU")
        if waiter.need.host_mb:
            free.append(f"{max(0.0, self._room[HOST]):,.0f} MB of the host")
        return f"it needs {waiter.need}; {' and '.join(free)} is available now, and nothing idle can make room"
