"""The brief turn of a node that only claims: one trip to the server, and the same in the store as after a turn that asks step by step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Iterator

import psycopg
import pytest

from ostler.errors import NodeLost, StoreDoubt
from ostler.store import Store
from ostler.store.brief import Brief
from ostler.store.frontier import Start
from ostler.store.limits import QueueLimit
from ostler.store.nodes import NodeRow
from ostler.store.postgres_words import Speaker
from ostler.store.rows import Finish, NewJob, Turn
from tests.store.counted import counted
from tests.stores import rows

NODE = "n@1"


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    with Store.open(database, Path()) as opened:
        opened.nodes.register(NodeRow(NODE, "n", 60_000, home="h"))
        yield opened


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many statements each message to the server had."""
    found: list[int] = []
    say = Speaker.say

    def heard(self: Speaker, *said):
        found.append(len(said))
        return say(self, *said)

    monkeypatch.setattr(Speaker, "say", heard)
    return found


def put(store: Store, *jobs: NewJob) -> list[int]:
    return store.jobs.enqueue(list(jobs), store.now())


def turn(store: Store, number: int, workers: int = 2, queue: str = "q", **more: Any) -> Turn:
    wants = {queue: [f"worker:{queue}:{n}" for n in range(workers)]}
    return Turn(NODE, **{"now": store.now(), "wants": wants, "number": number, **more})


def told(store: Store) -> list[Any]:
    """All that turns write."""
    return [
        rows(store, "SELECT * FROM jobs ORDER BY id"),
        rows(store, "SELECT step, at, queue, name, sum(n) FROM tallies GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4"),
        rows(store, "SELECT id, status, turn, beat_at, waits::jsonb FROM nodes ORDER BY id"),
        store.jobs.depths(),
    ]


def test_a_turn_that_only_claims_is_one_trip(store: Store, messages: list[int]) -> None:
    for number in range(1, 4):
        put(store, NewJob("t", "q", "{}"))
        now = store.now()
        messages.clear()
        assert len(store.turns.take(turn(store, number, now=now)).claims) == 1
        assert messages == [1]
    messages.clear()
    assert store.turns.take(turn(store, 4, now=now)).claims == []
    assert messages == [1]


def scenario(store: Store, draw: random.Random) -> list[Any]:
    """Jobs of several queues, priorities and ages come, run and end; what the turns told, and what is stored then."""
    at, found, held = 1_000_000, [], []
    for number in range(1, 60):
        for _ in range(draw.randrange(4)):
            more: dict[str, Any] = {
                "priority": draw.randrange(3),
                "queue": draw.choice("ab"),
                "task": draw.choice("tu"),
            }
            if not draw.randrange(8):
                more["run_at"] = at + draw.randrange(-5000, 5000)
            if not draw.randrange(8):
                more |= {"limit_key": "k", "limit_max": 1}
            store.jobs.enqueue([NewJob(**{"args": "{}", **more})], at)
        at += draw.randrange(3000)
        wants = {queue: [f"worker:{queue}:{n}" for n in range(draw.randrange(1, 4))] for queue in "ab"}
        how: dict[str, Any] = {"limits": {} if draw.randrange(5) else {"a": QueueLimit(at_once=100)}}
        how["tasks"] = None if draw.randrange(3) else frozenset("t")
        if not draw.randrange(3):
            how["finishes"] = [Finish(c.id, c.fence, "done", at, at + 5, "done") for c in held]
            held = []
        found.append(store.turns.take(Turn(NODE, at, wants=wants, number=number, **how)))
        held += found[-1].claims
    assert store.jobs.depths() == counted(store)
    return [found, told(store)]


@pytest.mark.parametrize("seed", range(3))
def test_it_stores_and_tells_what_the_longer_turn_does(
    seed: int, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief: list[bool] = []
    take = Brief.take

    def seen(self: Brief, turn: Turn):
        found = take(self, turn)
        brief.append(found is not None and bool(found.claims))
        return found

    monkeypatch.setattr(Brief, "take", seen)
    monkeypatch.setattr("ostler.store.brief._KEYED_FOR", 0)  # it is tried in vain, too
    monkeypatch.setattr("ostler.store.frontier._LONG", 1e9)  # however slow the machine is
    ends = []
    for schema, fits in (("one", Brief.fits), ("two", lambda *_: False)):
        monkeypatch.setattr(Brief, "fits", fits)
        with Store.open(f"{database}&schema={schema}", Path()) as store:
            monkeypatch.setattr(store.db, "now", lambda: 1)
            store.nodes.register(NodeRow(NODE, "n", 60_000, home="h"))
            ends.append(scenario(store, random.Random(seed)))
    assert sum(brief) >= 5
    assert False in brief
    assert ends[0] == ends[1]


def test_a_job_that_is_due_is_promoted(store: Store, messages: list[int]) -> None:
    now = store.now()
    assert store.turns.take(turn(store, 1)).claims == []
    job, other = (
        put(store, NewJob("t", "q", "{}", run_at=now - 1)),
        put(store, NewJob("t", "q", "{}", run_at=now + 9000)),
    )
    rows(store, "UPDATE jobs SET later = 1")
    taken = store.turns.take(turn(store, 2))
    assert [c.id for c in taken.claims] == job
    assert taken.next_due == now + 9000
    messages.clear()
    assert [c.id for c in store.turns.take(turn(store, 3, now=now + 9001)).claims] == other
    assert len(messages) > 4  # it was known to be due, so nothing was tried in vain


def test_jobs_with_a_limit_key_take_the_longer_turn_and_are_expected_there_for_a_while(
    store: Store, messages: list[int]
) -> None:
    keyed = put(store, *[NewJob("t", "q", "{}", limit_key="k", limit_max=1)] * 2, NewJob("t", "q", "{}"))
    now = store.now()
    assert [c.id for c in store.turns.take(turn(store, 1, now=now)).claims] == [keyed[0], keyed[2]]
    for later, trips in ((100, False), (20_000, True)):
        plain = put(store, NewJob("t", "p", "{}"), NewJob("t", "q", "{}", priority=1))
        messages.clear()
        wants = {"p": ["worker:p:0"], "q": ["worker:q:0"]}
        taken = store.turns.take(turn(store, 2 + later, now=now + later, wants=wants))
        assert [c.id for c in taken.claims] == plain
        assert (messages == [1]) is trips


def test_who_is_dead_claims_nothing_and_a_turn_that_was_committed_is_told_again(store: Store) -> None:
    put(store, NewJob("t", "q", "{}"), NewJob("t", "q", "{}"))
    first = store.turns.take(turn(store, 5, workers=1))
    again = store.turns.take(turn(store, 5, workers=1))
    assert (again.replayed, again.claims) == (True, first.claims)
    assert store.turns.take(turn(store, 6, workers=2)).again  # nobody here knows what its row said after the doubt
    store.nodes.mark(NODE, "dead")
    before = told(store)
    with pytest.raises(NodeLost):
        store.turns.take(turn(store, 7))
    assert told(store) == before


def test_a_job_that_another_one_holds_is_passed_over(store: Store, database: str) -> None:
    first, second = put(store, NewJob("t", "q", "{}"), NewJob("t", "q", "{}"))
    with psycopg.connect(database) as other:
        other.execute("SELECT 1 FROM ostler.jobs WHERE id = %s FOR UPDATE", [first])
        assert [c.id for c in store.turns.take(turn(store, 1)).claims] == [second]
    assert [c.id for c in store.turns.take(turn(store, 2)).claims] == [first]


def test_it_begins_where_the_frontier_is(store: Store) -> None:
    first, second = put(store, NewJob("t", "q", "{}"), NewJob("t", "q", "{}"))
    frontier = store.turns._frontier
    for _ in range(3):
        frontier.read("q", frontier.start("q"), [(0, second)], 1.0)
    assert frontier.start("q") == Start(0, second)
    taken = store.turns.take(turn(store, 1))
    assert [c.id for c in taken.claims] == [second]
    assert taken.next_due is not None  # there may be more before that place
    frontier.forget("q")
    assert [c.id for c in store.turns.take(turn(store, 2)).claims] == [first]


def test_a_connection_that_is_lost_during_it_leaves_a_doubt(store: Store, database: str, monkeypatch) -> None:
    (job,) = put(store, NewJob("t", "q", "{}"))
    say = Speaker.say

    def lost(self: Speaker, *said):
        say(self, *said)
        with psycopg.connect(database, autocommit=True) as other:
            other.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = 'ostler'"
            )
        monkeypatch.setattr(Speaker, "say", say)
        return say(self, ("SELECT 1", None))

    taken = turn(store, 1)
    monkeypatch.setattr(Speaker, "say", lost)
    with pytest.raises(StoreDoubt):
        store.turns.take(taken)
    again = store.turns.take(taken)
    assert again.replayed
    assert [c.id for c in again.claims] == [job]


def test_behind_a_pooler_it_is_a_transaction_with_its_settings(database: str, store: Store) -> None:
    (job,) = put(store, NewJob("t", "q", "{}"))
    with Store.open(f"{database}&pooler=1", Path()) as pooled:
        assert [c.id for c in pooled.turns.take(turn(store, 1)).claims] == [job]


def test_it_takes_a_few_and_asks_again_where_there_are_more(store: Store) -> None:
    jobs = put(store, *[NewJob("t", "q", "{}")] * 20)
    store.turns.take(turn(store, 1, queue="other"))
    first = store.turns.take(turn(store, 2, workers=40))
    assert [c.id for c in first.claims] == jobs[:16]
    assert first.again
    assert store.nodes.all()[0]["waits"] == ["q"]  # there are free places
    second = store.turns.take(turn(store, 3, workers=24))
    assert [c.id for c in second.claims] == jobs[16:]
    assert not second.again
    put(store, *[NewJob("t", "q", "{}")] * 16)
    assert not store.turns.take(turn(store, 4, workers=16)).again  # all that was asked for: the dispatcher sees that
    assert store.nodes.all()[0]["waits"] == []
