"""Decisions about memory: single ones by hand, and a hundred thousand of a random world."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from ostler.lifecycle.admission import (
    HOST,
    PATIENCE,
    Evict,
    Grant,
    Memory,
    Need,
    Refuse,
    Resident,
    Wait,
    Waiter,
    decide,
    footprint,
    raised,
)

ROOMY = Memory(HOST, 64_000, 64_000)


def gpu(free: float, total: float = 80_000, name: str = "GPU-0", **more: float) -> Memory:
    return Memory(name, total, free, **more)


def ask(mb: float, owner: str = "new", waited: float = 0.0, host: float = 0.0) -> Waiter:
    return Waiter(owner, Need(host, mb), waited)


def held(owner: str, mb: float, device: str = "GPU-0", **more) -> Resident:
    return Resident(owner, device, gpu_mb=mb, **more)


# ---- what is counted


def test_reservations_that_are_not_seen_yet_and_the_headroom_are_not_room() -> None:
    tight = gpu(40_000, reserved_mb=20_000, headroom_mb=1000)
    assert decide(ROOMY, [tight], [], [ask(19_000)]) == [Grant("new", "GPU-0")]
    assert isinstance(decide(ROOMY, [tight], [], [ask(19_001)])[0], Wait)


def test_two_that_fit_alone_and_not_together_are_not_both_granted() -> None:
    first, second = decide(ROOMY, [gpu(80_000)], [], [ask(50_000, "a"), ask(50_000, "b")])
    assert first == Grant("a", "GPU-0")
    assert isinstance(second, Wait)


def test_the_measured_peak_comes_before_what_was_declared_and_that_before_a_guess() -> None:
    declared, guess = Need(500, 9000), Need(700, 1300)
    assert footprint(Need(600, 8000), declared, guess) == Need(600, 8000)
    assert footprint(Need(600, 0), declared, guess) == Need(600, 9000)  # nobody could measure the device
    assert footprint(None, Need(0, 9000), guess) == Need(700, 9000)


def test_a_footprint_that_was_too_small_is_raised_but_not_above_what_there_is() -> None:
    assert raised(8000, 80_000) == 10_000
    assert raised(70_000, 80_000) == 80_000
    assert raised(80_000, 79_000) == 80_000


# ---- where


def test_the_device_where_least_is_left_over_is_taken() -> None:
    two = [gpu(60_000, name="GPU-a"), gpu(30_000, name="GPU-b")]
    assert decide(ROOMY, two, [], [ask(20_000)]) == [Grant("new", "GPU-b")]
    assert decide(ROOMY, two, [], [ask(40_000)]) == [Grant("new", "GPU-a")]


def test_one_worker_never_gets_its_memory_from_two_devices() -> None:
    two = [gpu(40_000, name="GPU-a"), gpu(40_000, name="GPU-b")]
    assert isinstance(decide(ROOMY, two, [], [ask(60_000)])[0], Wait)


def test_what_can_never_fit_is_refused_with_the_figures() -> None:
    (refused,) = decide(ROOMY, [gpu(80_000, headroom_mb=500)], [], [ask(79_501)])
    assert refused == Refuse("new", "it needs 79,501 MB of GPU memory, and no GPU can ever give it more than 79,500 MB")
    (refused,) = decide(ROOMY, [gpu(10_000)], [held("main", 60_000, pinned=True)], [ask(30_000)])
    assert "no GPU can ever give it more than 20,000 MB" in refused.why
    (refused,) = decide(ROOMY, [], [], [Waiter("new", Need(64_001, 0))])
    assert "the host can never give it more than 64,000 MB" in refused.why
    (refused,) = decide(ROOMY, [], [], [ask(1)])
    assert "there is no GPU" in refused.why


# ---- who must go


def test_the_cheapest_idle_ones_go_and_no_more_than_needed() -> None:
    residents = [
        held("dear", 20_000, reload_s=60, use=5),
        held("cheap", 20_000, reload_s=2),
        held("middle", 20_000, reload_s=10),
    ]
    evict, wait = decide(ROOMY, [gpu(10_000)], residents, [ask(25_000)])
    assert evict == Evict(("cheap",), "new", "GPU-0")
    assert isinstance(wait, Wait)
    evict, _ = decide(ROOMY, [gpu(10_000)], residents, [ask(45_000)])
    assert evict.residents == ("cheap", "middle")


def test_one_large_one_goes_alone_where_the_small_ones_before_it_would_not_do() -> None:
    residents = [held("a", 2000), held("b", 1000), held("large", 40_000, reload_s=100)]
    evict, _ = decide(ROOMY, [gpu(0)], residents, [ask(40_000)])
    assert evict.residents == ("large",)


def test_busy_and_pinned_ones_stay_and_nobody_goes_in_vain() -> None:
    residents = [held("idle", 10_000), held("busy", 30_000, busy=True), held("pinned", 30_000, pinned=True)]
    assert [type(d) for d in decide(ROOMY, [gpu(10_000)], residents, [ask(30_000)])] == [Wait]
    evict, _ = decide(ROOMY, [gpu(10_000)], residents, [ask(20_000)])
    assert evict.residents == ("idle",)


def test_while_memory_comes_back_nobody_else_is_evicted_and_nobody_behind_takes_it() -> None:
    residents = [held("going", 40_000, leaving=True), held("idle", 30_000)]
    head, evict, behind = decide(ROOMY, [gpu(10_000)], residents, [ask(50_000, "head"), ask(5000, "small")])
    assert head == Wait("head", "it needs 50,000 MB of GPU memory, and waits for memory to be freed", soon=True)
    assert evict == Evict(("idle",), "small", "GPU-0")
    assert isinstance(behind, Wait)


def test_a_parked_one_holds_host_memory_and_none_of_the_device() -> None:
    parked = held("parked", 40_000, parked=True, host_mb=40_000)
    assert [type(d) for d in decide(ROOMY, [gpu(10_000)], [parked], [ask(20_000)])] == [Wait]
    short = Memory(HOST, 64_000, 10_000)
    evict, _ = decide(short, [], [parked], [Waiter("new", Need(20_000))])
    assert evict == Evict(("parked",), "new", HOST)


def test_where_host_and_device_are_short_both_are_made_free_or_neither() -> None:
    short = Memory(HOST, 64_000, 1000)
    residents = [held("g", 30_000, host_mb=2000), Resident("h", None, host_mb=8000)]
    evict, _ = decide(short, [gpu(0)], residents, [ask(20_000, host=10_000)])
    assert set(evict.residents) == {"g", "h"}
    assert [type(d) for d in decide(short, [gpu(0)], residents, [ask(20_000, host=12_000)])] == [Wait]


# ---- the line


def test_smaller_ones_overtake_the_head_of_the_line_until_its_patience_is_over() -> None:
    residents = [held("busy", 60_000, busy=True)]
    line = [ask(50_000, "head", waited=29.9), ask(10_000, "small")]
    assert decide(ROOMY, [gpu(20_000)], residents, line)[1] == Grant("small", "GPU-0")
    line[0] = replace(line[0], waited=30.0)
    assert [type(d) for d in decide(ROOMY, [gpu(20_000)], residents, line)] == [Wait, Wait]


def test_the_head_holds_nobody_up_where_that_cannot_help_it() -> None:
    line = [ask(50_000, "head", waited=99), ask(10_000, "small")]
    assert decide(ROOMY, [gpu(20_000)], [], line)[1] == Grant("small", "GPU-0")  # other programs hold the rest
    two = [gpu(20_000, name="GPU-0"), gpu(20_000, name="GPU-1", total=40_000)]
    line = [ask(50_000, "head", waited=99), ask(10_000, "small")]
    assert decide(ROOMY, two, [held("busy", 60_000, busy=True)], line)[1] == Grant("small", "GPU-1")


def test_who_needs_no_gpu_never_waits_for_one() -> None:
    line = [ask(50_000, "head", waited=99, host=1000), Waiter("cpu", Need(2000))]
    decisions = decide(Memory(HOST, 8000, 2500), [gpu(20_000)], [held("busy", 60_000, busy=True)], line)
    assert decisions[1] == Grant("cpu", None)


def test_busy_ones_that_can_yield_are_asked_to_only_for_the_sake_of_one_who_has_waited_long() -> None:
    residents = [held("jobs", 60_000, busy=True, yields=True), held("model", 10_000, busy=True)]
    assert [type(d) for d in decide(ROOMY, [gpu(10_000)], residents, [ask(50_000, waited=29)])] == [Wait]
    evict, _ = decide(ROOMY, [gpu(10_000)], residents, [ask(50_000, waited=30)])
    assert evict.residents == ("jobs",)
    assert [type(d) for d in decide(ROOMY, [gpu(10_000)], residents, [ask(75_000, waited=30)])] == [Wait]


def test_workers_of_one_pool_do_not_make_each_other_leave_nor_hold_up_others() -> None:
    residents = [held("a0", 60_000, group="a"), held("b0", 15_000, busy=True, group="b")]
    line = [replace(ask(50_000, "a1", waited=99), group="a"), ask(5000, "c")]
    assert [type(d) for d in decide(ROOMY, [gpu(5000)], residents, line)] == [Wait, Grant]


def test_a_modest_one_takes_what_is_free_and_nobody_leaves_or_waits_for_it() -> None:
    line = [replace(ask(50_000, "modest", waited=99), modest=True), ask(5000, "c")]
    assert [type(d) for d in decide(ROOMY, [gpu(20_000)], [held("a", 60_000)], line)] == [Wait, Grant]
    assert decide(ROOMY, [gpu(60_000)], [], line[:1]) == [Grant("modest", "GPU-0")]


def test_who_can_use_one_device_only_gets_that_one_or_waits() -> None:
    two = [gpu(60_000, name="GPU-a"), gpu(30_000, name="GPU-b")]
    waiter = replace(ask(20_000), only="GPU-a")
    assert decide(ROOMY, two, [], [waiter]) == [Grant("new", "GPU-a")]
    assert isinstance(decide(ROOMY, two, [], [replace(waiter, need=Need(0, 70_000))])[0], Wait)
    assert isinstance(decide(ROOMY, two, [], [replace(waiter, only="GPU-gone")])[0], Refuse)


def test_in_exclusive_mode_one_loads_at_a_time_and_cpu_workers_do_not_care() -> None:
    line = [ask(1000, "load"), ask(1000, "other"), Waiter("cpu", Need(100))]
    load, call, cpu = decide(ROOMY, [gpu(80_000)], [], line, exclusive=True)
    assert load == Grant("load", "GPU-0") and cpu == Grant("cpu", None)
    assert isinstance(call, Wait) and "gpu_exclusive" in call.why
    decisions = decide(ROOMY, [gpu(80_000)], [], line, exclusive=True, operating=True)
    assert [type(d) for d in decisions] == [Wait, Wait, Grant]
    assert [type(d) for d in decide(ROOMY, [gpu(80_000)], [], line)] == [Grant] * 3


# ---- a random world


@dataclass
class Held:
    """A worker of the random world: what it may use, and what the devices show of it."""

    need: Need
    device: str | None
    seen: Need = Need()
    busy: bool = True
    pinned: bool = False
    leaving: bool = False
    yields: bool = False
    gone: int = 0  # steps until its memory is back, once it has gone
    reload_s: float = 1.0
    group: str = ""


class World:
    """Memory, workers that come and go, other programs, and a line. `step` makes something happen, `look` decides."""

    HEADROOM = 2

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.totals = {HOST: 200.0} | {f"GPU-{n}": self.random.choice((40.0, 80.0)) for n in range(seed % 4)}
        self.foreign = dict.fromkeys(self.totals, 0.0)
        self.held: dict[str, Held] = {}
        self.line: dict[str, Waiter] = {}
        self.number = 0
        self.granted = self.evicted = self.refused = 0

    def share(self, held: Held, need: Need, name: str) -> float:
        return need.host_mb if name == HOST else need.gpu_mb if held.device == name else 0.0

    def memories(self) -> list[Memory]:
        found = []
        for name, total in self.totals.items():
            seen = sum(self.share(h, h.seen, name) for h in self.held.values())
            unseen = sum(
                max(0.0, self.share(h, h.need, name) - self.share(h, h.seen, name))
                for h in self.held.values()
                if not h.gone
            )
            found.append(Memory(name, total, total - self.foreign[name] - seen, unseen, self.HEADROOM))
        return found

    def residents(self) -> list[Resident]:
        found = []
        for owner, h in self.held.items():
            most = h.seen if h.gone else h.need.largest(h.seen)
            gpu_mb = most.gpu_mb if h.device else 0.0
            flags = {"busy": h.busy, "pinned": h.pinned, "leaving": h.leaving or h.gone > 0, "yields": h.yields}
            more = {"reload_s": h.reload_s, "group": h.group}
            found.append(Resident(owner, h.device, most.host_mb, gpu_mb, **flags, **more))
        return found

    def step(self, *, calm: bool = False) -> None:
        r = self.random
        self.line = {o: replace(w, waited=w.waited + (1.0 if calm else r.random() * 3)) for o, w in self.line.items()}
        for owner, h in [*self.held.items()]:
            if h.gone:
                h.gone -= 1
                if not h.gone:
                    del self.held[owner]
            elif h.leaving and not (h.busy and r.random() < 0.5):
                h.gone, h.busy = 1 + r.randrange(3), False
        if calm:
            self.foreign = dict.fromkeys(self.totals, 0.0)
            self.line = {o: replace(w, modest=False, group="") for o, w in self.line.items()}
            for h in self.held.values():
                h.busy, h.seen, h.pinned = False, h.need, False
            return
        event = r.random()
        if event < 0.35 and len(self.line) < 8:
            self.number += 1
            need = Need(r.choice((0.0, 5.0, 20.0, 60.0)), r.choice((0.0, 0.0, 5.0, 15.0, 30.0, 60.0, 79.0)))
            more = {"group": r.choice(("", "a", "b")), "modest": r.random() < 0.1}
            self.line[f"w{self.number}"] = Waiter(f"w{self.number}", need, **more)
        elif event < 0.38 and self.line:
            del self.line[r.choice([*self.line])]
        elif event < 0.42:
            name = r.choice([*self.totals])
            self.foreign[name] = r.random() * self.totals[name] * r.choice((0.1, 0.9))
        elif self.held:
            self.change(self.held[r.choice([*self.held])], event)

    def change(self, h: Held, event: float) -> None:
        if h.gone:
            return
        if event < 0.6:
            h.seen, h.busy = h.need, False  # it has loaded
        elif event < 0.7 and not h.leaving:
            h.busy = True  # a call: only where it is not claimed
        elif event < 0.85:
            h.busy = False
        elif event < 0.95:
            h.leaving = True  # its idle time is over
        else:
            h.gone, h.busy = 1 + self.random.randrange(3), False  # it crashed

    def look(self) -> None:
        memories, residents, waiters = self.memories(), self.residents(), [*self.line.values()]
        decisions = decide(memories[0], memories[1:], residents, waiters)
        self.check(memories, residents, waiters, decisions)
        for decision in decisions:
            self.apply(decision)

    def apply(self, decision) -> None:
        r = self.random
        if isinstance(decision, Grant):
            waiter = self.line.pop(decision.owner)
            more = {"pinned": r.random() < 0.03, "yields": r.random() < 0.3, "reload_s": 1 + r.random() * 9}
            self.held[decision.owner] = Held(waiter.need, decision.device, group=waiter.group, **more)
            self.granted += 1
        elif isinstance(decision, Evict):
            for owner in decision.residents:
                self.held[owner].leaving = True
                self.evicted += 1
        elif isinstance(decision, Refuse):
            del self.line[decision.owner]
            self.refused += 1

    # ---- what must always hold

    def check(self, memories, residents, waiters, decisions) -> None:
        of = {w.owner: w for w in waiters}
        by = {r.owner: r for r in residents}
        final = [d for d in decisions if not isinstance(d, Evict)]
        assert [d.owner for d in final] == [w.owner for w in waiters], "one decision for each, in order"
        assert all(d.why for d in final if not isinstance(d, Grant))
        room = {m.name: m.room_mb for m in memories}
        for d in final:
            if isinstance(d, Grant):
                need = of[d.owner].need
                assert (d.device is not None) == (need.gpu_mb > 0)
                for name, mb in ((HOST, need.host_mb), (d.device, need.gpu_mb)):
                    if mb:
                        room[name] -= mb
                        assert room[name] >= -1e-6, "never more than fits"
        evicted = [(by[o], of[d.waiter], d) for d in decisions if isinstance(d, Evict) for o in d.residents]
        assert len({r.owner for r, _, _ in evicted}) == len(evicted), "nobody is claimed twice"
        for resident, waiter, _ in evicted:
            assert not resident.pinned and not resident.leaving and not waiter.modest
            assert not resident.group or resident.group != waiter.group
            assert not resident.busy or (resident.yields and waiter.waited >= PATIENCE)
        self.check_order(memories, residents, waiters, final)

    def check_order(self, memories, residents, waiters, final) -> None:
        """The head is not overtaken for longer than its patience, and what needs no GPU waits for the host alone."""
        room = {m.name: m.room_mb for m in memories}
        short_of_host = False
        kept: set[str] = set()
        for waiter, d in zip(waiters, final, strict=True):
            need = waiter.need
            if isinstance(d, Grant):
                assert d.device not in kept, "overtaken for longer than its patience"
                room[HOST] -= need.host_mb
                if d.device:
                    room[d.device] -= need.gpu_mb
            elif isinstance(d, Wait):
                if need.host_mb > room[HOST]:
                    short_of_host = True
                elif not need.gpu_mb:
                    assert short_of_host, "it waits although the host has room and nobody before it lacks that"
                if waiter.waited >= PATIENCE and not d.soon and not waiter.modest and need.gpu_mb:
                    kept |= {m.name for m in memories[1:] if self.hope(m, residents, waiter) >= need.gpu_mb}

    def hope(self, memory, residents, waiter) -> float:
        """The room on a device when all have gone that go for the waiter or by themselves."""
        here = [r for r in residents if r.device == memory.name]
        return memory.room_mb + sum(
            r.gpu_mb for r in here if r.leaving or not (r.pinned or (r.group and r.group == waiter.group))
        )


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2, 3))])
def test_what_must_hold_holds_in_twenty_five_thousand_random_steps(seed: int) -> None:
    world = World(seed)
    for n in range(25_000):
        world.step()
        world.look()
        if n % 1000 == 999:
            for _ in range(100):
                world.step(calm=True)
                world.look()
            assert not world.line, f"nothing runs, and they still wait: {world.line}"
    assert world.granted > 1000 and world.refused > 10
    assert world.evicted > 100


def test_a_decision_takes_time_in_proportion_to_who_waits_and_who_holds_memory() -> None:
    def compared(count: int) -> int:
        looked = 0

        class Counted(Resident):
            __slots__ = ()

            def frees(self, name: str) -> float:
                nonlocal looked
                looked += 1
                return Resident.frees(self, name)

        residents = [Counted(f"r{n}", "GPU-0", gpu_mb=10, busy=n % 2 == 0) for n in range(count)]
        waiters = [ask(10_000 if n % 2 else 10, f"w{n}", waited=40) for n in range(count)]
        decide(ROOMY, [gpu(0)], residents, waiters)
        return looked

    assert compared(800) < 3 * compared(400)
