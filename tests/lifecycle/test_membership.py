"""When a node may declare others dead: after a gap in its own beats, by whichever clock, not for one full lease."""

from __future__ import annotations

import time

import pytest

from ostler.config import Settings
from ostler.lifecycle.membership import Membership
from ostler.store.nodes import NodeRow

LEASE = 30.0


class Clocks:
    """Ours, which only goes on, and the store's, which somebody may set."""

    def __init__(self) -> None:
        self.ours, self.store = 1000.0, 1_700_000_000_000

    def go(self, seconds: float) -> None:
        self.ours += seconds
        self.store += int(seconds * 1000)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr(time, "monotonic", lambda: made.ours)
    return made


@pytest.fixture
def member(clocks: Clocks) -> Membership:
    """A node that has beaten for long enough."""
    made = Membership(Settings(name="n", node_lease=LEASE), NodeRow("n", "n", int(LEASE * 1000)))
    beats(made, clocks, LEASE + 5)
    return made


def beats(member: Membership, clocks: Clocks, seconds: float) -> None:
    for _ in range(int(seconds // 5) + 1):
        member.took_beat(clocks.store)
        clocks.go(5)


def test_a_node_whose_beats_arrive_judges_after_one_lease(clocks: Clocks) -> None:
    member = Membership(Settings(name="n", node_lease=LEASE), NodeRow("n", "n", int(LEASE * 1000)))
    assert not member.may_judge(clocks.store)
    beats(member, clocks, LEASE - 10)
    assert not member.may_judge(clocks.store)
    beats(member, clocks, 10)
    assert member.may_judge(clocks.store)


def test_after_a_gap_in_its_beats_it_waits_a_lease(member: Membership, clocks: Clocks) -> None:
    clocks.go(LEASE)
    assert not member.may_judge(clocks.store), "its own beats do not arrive"
    beats(member, clocks, LEASE - 10)
    assert not member.may_judge(clocks.store)
    beats(member, clocks, 10)
    assert member.may_judge(clocks.store)


@pytest.mark.parametrize("jump", [3_600_000, -3_600_000])
def test_after_the_stores_clock_was_set_it_waits_a_lease(member: Membership, clocks: Clocks, jump: int) -> None:
    """Else the first one that looks would find every other node's beat an hour old."""
    assert member.may_judge(clocks.store)
    clocks.store += jump
    assert not member.may_judge(clocks.store), "no beat of its own has arrived since"
    beats(member, clocks, LEASE - 10)
    assert not member.may_judge(clocks.store), "others have had no time to beat"
    beats(member, clocks, 10)
    assert member.may_judge(clocks.store)
