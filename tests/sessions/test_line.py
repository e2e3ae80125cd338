"""The line for slots, and a model of line, selection and slots under random steps."""

from __future__ import annotations

import random

import pytest

from ostler.sessions.line import Refusal
from ostler.sessions.selection import Worker, rank
from ostler.sessions.slots import Slots
from tests.sessions.tickets import Client, slots_of, worker


def test_priority_then_the_owner_with_the_fewest_sessions_then_who_came_first() -> None:
    slots = slots_of(p={})
    group = slots.groups["p"]
    slots.up(worker(slots=3), 0.0)
    held = [Client("a"), Client("a"), Client("b")]
    for one in held:
        assert isinstance(slots.ask(group, one, 0.0), Worker)
    first, second, third, fourth = Client("a"), Client("b"), Client("c"), Client("a", priority=1)
    for one in (first, second, third, fourth):
        assert slots.ask(group, one, 0.0) is None
    assert [*group.line.order(slots.live)] == [fourth, third, second, first]
    assert group.line.position(first, slots.live) == 4
    one = slots.workers["worker:p:0", 1]
    slots.done(one, "a", 1.0)
    assert fourth.worker is one
    slots.done(one, "b", 1.0)  # now c has none, b has none, a has two
    assert (second.worker, third.worker) == (one, None), "of equals, who came first"
    slots.done(one, "a", 1.0)
    assert third.worker is one
    assert first.worker is None


def test_a_full_line_refuses_and_a_client_that_left_is_never_given_a_slot() -> None:
    slots = slots_of(p={"line": 2})
    group = slots.groups["p"]
    one = worker()
    slots.up(one, 0.0)
    slots.ask(group, Client(), 0.0)
    gone, stays = Client(), Client()
    assert slots.ask(group, gone, 0.0) is None
    assert slots.ask(group, stays, 0.0) is None
    refusal = slots.ask(group, Client(), 0.0)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.code) == (429, "LINE_FULL")
    assert slots.leave(group, gone)
    assert not slots.leave(group, gone)
    slots.done(one, "a", 1.0)
    assert (gone.worker, stays.worker) == (None, one)


def test_who_waits_for_too_long_is_told_its_place_in_line() -> None:
    slots = slots_of(p={})
    group = slots.groups["p"]
    early, late = Client(deadline=5.0), Client(deadline=9.0)
    slots.ask(group, early, 0.0)
    slots.ask(group, late, 0.0)
    assert slots.tick(4.9) == 5.0
    assert early.why is None
    assert slots.tick(5.0) == 9.0
    assert early.why is not None
    assert (early.why.status, early.why.code, early.why.position) == (503, "NO_WORKER", 1)
    one = worker()
    slots.up(one, 9.0)
    assert late.worker is None, "its time was over"
    slots.tick(9.0)
    assert late.why is not None


def test_a_name_may_be_served_by_several_pools_and_a_pool_may_be_asked_for() -> None:
    slots = slots_of(old={"serves": "web"}, new={"serves": "web"})
    for number, pool in enumerate(("old", "new")):
        slots.up(worker(number, pool=pool), 0.0)
    group, pool = slots.group("new") or pytest.fail()
    assert (group.name, pool) == ("web", "new")
    found = slots.ask(group, Client(pool=pool), 0.0)
    assert isinstance(found, Worker)
    assert found.pool == "new"
    assert slots.ask(group, Client(pool=pool), 0.0) is None, "it waits, though the other pool has a slot"
    assert isinstance(slots.ask(group, Client(), 0.0), Worker)
    assert slots.group("strange") is None


class Model:
    """What must be true, kept apart from the code under test: who holds which slot, who waits, and who has left."""

    OWNERS, VERSIONS = ("a", "b", "c", "d"), (None, None, "1.1", "1.2")

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.slots: Slots = slots_of(p={"line": 12, "serves": "web"}, q={"line": 12, "serves": "web"})
        self.group = self.slots.groups["web"]
        self.pools = {name: dict(terms) for name, terms in self.group.pools.items()}
        self.waiting: dict[Client, None] = {}
        self.holding: dict[Client, None] = {}
        self.left: set[Client] = set()
        self.workers: dict[Worker, bool] = {}  # up: takes sessions
        self.generation = 0
        self.grants = 0

    # ---- steps

    def step(self) -> None:
        kind = self.chance.random()
        if kind < 0.34:
            self.connect()
        elif kind < 0.58 and self.holding:
            self.end(self.pick(self.holding))
        elif kind < 0.68 and self.waiting:
            self.leave(self.pick(self.waiting))
        elif kind < 0.76 and self.holding:
            self.fail(self.pick(self.holding))
        elif kind < 0.84:
            self.up()
        elif kind < 0.88 and self.workers:
            self.close(self.pick(self.workers))
        elif kind < 0.91 and self.workers:
            self.down(self.pick(self.workers))
        elif kind < 0.93:
            self.pause()
        elif kind < 0.95 and self.waiting:
            self.slots.forgive(self.group, self.pick(self.waiting), self.now)  # type: ignore[arg-type]
        else:
            self.pass_time(self.chance.random() * 3)

    def pick(self, among: dict) -> object:  # type: ignore[type-arg]
        return self.chance.choice([*among])

    def connect(self) -> None:
        chance = self.chance
        client = Client(
            chance.choice(self.OWNERS), chance.choice((0, 0, 0, 5)), chance.choice(self.VERSIONS),
            chance.choice((None, None, "p")), self.now, self.now + chance.random() * 10, tell=self.granted,
        )  # fmt: skip
        was_full = len(self.waiting) >= 12
        self.ask(client, was_full)

    def ask(self, client: Client, was_full: bool) -> None:
        is_new = not client.number
        expected = self.best(client)
        found = self.slots.ask(self.group, client, self.now)
        if isinstance(found, Worker):
            assert found is expected
            self.holding[client] = None
            client.worker = found
        elif found is None:
            assert expected is None
            assert not (was_full and is_new)
            self.waiting[client] = None
        else:
            assert was_full and is_new and expected is None

    def granted(self, client: Client) -> None:
        """The line has given a slot: to one that waits, that comes next, in the worker that it should have."""
        one = client.worker
        assert one is not None
        assert client not in self.left, "a client that left was given a slot"
        assert client in self.waiting
        assert client.deadline > self.now
        one.in_use -= 1  # as it was a moment ago
        one.served -= 1
        self.slots.live[client.owner] -= 1
        assert self.best(client) is one
        assert self.turn(client) == min(
            self.turn(other) for other in self.waiting if other.deadline > self.now and self.best(other) is not None
        )
        self.slots.live[client.owner] += 1
        one.in_use += 1
        one.served += 1
        del self.waiting[client]
        self.holding[client] = None
        self.grants += 1

    def end(self, client: Client) -> None:
        one = client.worker
        assert one is not None
        del self.holding[client]
        self.left.add(client)
        self.slots.done(one, client.owner, self.now)

    def leave(self, client: Client) -> None:
        del self.waiting[client]
        self.left.add(client)
        assert self.slots.leave(self.group, client)

    def fail(self, client: Client) -> None:
        """No connection to its worker: it asks again, and then that slot is free."""
        one = client.worker
        assert one is not None
        del self.holding[client]
        self.slots.strike(one)
        client.excluded.add(one.key)
        client.worker = None
        self.ask(client, False)
        self.slots.done(one, client.owner, self.now)
        if self.chance.random() < 0.5:
            self.slots.praise(one)

    def up(self) -> None:
        if sum(self.workers.values()) >= 6:
            return
        self.generation += 1
        chance = self.chance
        one = worker(
            chance.randrange(4), pool=chance.choice("pq"), slots=chance.randint(1, 3), generation=self.generation,
            lifetime=chance.choice((0, 6, 30)), versions=chance.choice(((), ("1.1",), ("1.1", "1.2"))),
        )  # fmt: skip
        self.workers[one] = True
        self.slots.up(one, self.now)

    def close(self, one: Worker) -> None:
        self.workers[one] = False
        self.slots.close(one.key)

    def down(self, one: Worker) -> None:
        """All its sessions end with it."""
        del self.workers[one]
        self.slots.down(one.key)
        for client in [c for c in self.holding if c.worker is one]:
            self.end(client)

    def pause(self) -> None:
        terms = self.pools[self.chance.choice("pq")]
        terms["paused"] = not terms["paused"]
        self.slots.learn(self.pools)
        self.slots.serve(self.now)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        due = {client for client in self.waiting if client.deadline <= self.now}
        following = self.slots.tick(self.now)
        assert all(client.why is not None for client in due)
        for client in due:
            del self.waiting[client]
            self.left.add(client)
        assert following == min((client.deadline for client in self.waiting), default=float("inf"))

    # ---- what must be

    def best(self, client: Client) -> Worker | None:
        fits = [
            one
            for one, is_open in self.workers.items()
            if is_open
            and not self.pools[one.pool]["paused"]
            and one.in_use < one.slots
            and (not one.lifetime or one.served < one.lifetime)
            and (client.version is None or not one.versions or client.version in one.versions)
            and client.pool in (None, one.pool)
            and one.key not in client.excluded
        ]
        return min(fits, key=rank, default=None)

    def turn(self, client: Client) -> tuple[int, int, int]:
        return -client.priority, self.slots.live.get(client.owner, 0), client.number

    def check(self) -> None:
        in_use = dict.fromkeys(self.workers, 0)
        live = dict.fromkeys(self.OWNERS, 0)
        for client in self.holding:
            assert client.worker is not None
            live[client.owner] += 1
            if client.worker in in_use:
                in_use[client.worker] += 1
        for one, number in in_use.items():
            assert one.in_use == number <= one.slots, "over-admission"
            assert not one.lifetime or one.served <= one.lifetime
        assert {owner: number for owner, number in live.items() if number} == dict(self.slots.live)
        assert len(self.group.line) == len(self.waiting) <= 12 + len(self.holding) + 8
        if any(one.in_use < one.slots for one in self.workers):
            for client in self.waiting:
                assert client.deadline <= self.now or self.best(client) is None, "it waits while a slot is free for it"

    def finish(self) -> None:
        for client in [*self.waiting]:
            self.leave(client)
        for client in [*self.holding]:
            self.end(client)
        assert not self.slots.live
        assert not len(self.group.line)
        assert all(one.in_use == 0 for one in self.workers)


@pytest.mark.parametrize("seed", range(4))
def test_nobody_gets_too_much_or_waits_in_vain_in_twenty_five_thousand_random_steps(seed: int) -> None:
    """Four times: 100,000 steps in all."""
    model = Model(seed)
    for _ in range(25_000):
        model.step()
        model.check()
    assert model.grants > 1000, "the line was hardly used"
    model.finish()
