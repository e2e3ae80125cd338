"""What a transaction says to a PostgreSQL server: in few messages, and whatever became of the connection before."""

from __future__ import annotations

from pathlib import Path
from typing import Iterator

import psycopg
import pytest

from ostler.errors import StoreBusy
from ostler.store import Store
from ostler.store.nodes import NodeRow
from ostler.store.postgres_words import Speaker
from ostler.store.rows import NewJob, Turn


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    opened = Store.open(database, Path())
    yield opened
    opened.close()


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many statements each message to the server had."""
    found: list[int] = []
    say = Speaker.say

    def counted(self: Speaker, *said):
        found.append(len(said))
        return say(self, *said)

    monkeypatch.setattr(Speaker, "say", counted)
    return found


def test_a_turn_that_claims_a_job_takes_four_trips(store: Store, messages: list[int]) -> None:
    for number in range(3):  # the first ones also prepare statements
        store.jobs.enqueue([NewJob("t", "q", "{}")], store.now())
        messages.clear()
        assert len(store.turns.take(Turn("n", store.now(), wants={"q": ["w"]})).claims) == 1, number
        assert len(messages) == 4, (
            messages
        )  # the beginning and when the next is due; what can be claimed; the claim; counters and the commit
        assert messages[0] == 2
        assert messages[-1] == 3


def test_a_transaction_that_says_nothing_costs_nothing(store: Store, messages: list[int]) -> None:
    with store.db.transaction():
        pass
    assert messages == []


def test_a_connection_that_was_lost_before_the_first_statement_is_made_anew(store: Store, database: str) -> None:
    def end_all() -> None:
        with psycopg.connect(database, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'ostler'")

    end_all()
    with store.db.transaction():
        end_all()  # nothing was said yet
        store.db.run("next_due")
    with pytest.raises(StoreBusy), store.db.transaction():
        store.db.run("next_due")
        end_all()
        store.db.run("next_due")
    assert store.db.run("next_due")[0]["due"] is None


def test_what_was_prepared_is_prepared_again_after_a_rollback(store: Store) -> None:
    """The driver has the server forget all of it."""
    for _ in range(3):
        for _ in range(3):
            store.jobs.enqueue([NewJob("t", "q", "{}"), NewJob("t", "q", "{}")], store.now())
        with pytest.raises(ZeroDivisionError), store.db.transaction():
            store.db.run("next_due")
            1 / 0  # noqa: B018
    assert store.jobs.depths()["q"]["queued"] == 18


def test_negative_numbers_keep_their_sign_in_a_message_of_several_statements(store: Store) -> None:
    with store.db.transaction():
        store.db._tell("SELECT 1", {})
        ((found,),) = store.db.ask("SELECT %(low)s::int", {"low": -(2**31)})
    assert found == -(2**31)


def test_texts_in_a_message_of_several_statements_are_only_texts(store: Store) -> None:
    name = """'; DROP TABLE ostler.jobs; --\\' "x" %s %(y)s $1 é"""
    for _ in range(3):
        with store.db.transaction():
            store.db._tell("SELECT %(name)s::text", {"name": name})
            ((found,),) = store.db.ask("SELECT %(name)s::text AS n", {"name": name})
        assert found == name
    assert store.jobs.depths() == {}


def test_what_is_told_again_does_not_wait_for_the_disk_but_orders_do(database: str) -> None:
    with Store.open(database, Path(), told_again=True) as store:
        assert store.db.ask("SHOW synchronous_commit")[0][0] == "off"
        with store.db.synced(), store.db.transaction():
            assert store.db.ask("SHOW synchronous_commit")[0][0] == "on"
        with store.db.transaction():
            assert store.db.ask("SHOW synchronous_commit")[0][0] == "off"
    with Store.open(database, Path(), durable=False) as store:
        assert store.db.ask("SHOW synchronous_commit")[0][0] == "on"


def test_no_plan_is_compiled(database: str) -> None:
    """Ways that are turned off make a plan look dear, and an older server compiles dear plans: for longer than a thousand runs take."""
    with Store.open(database, Path()) as store, Store.open(database, Path(), read_only=True) as reader:
        assert [s.db.ask("SHOW jit")[0][0] for s in (store, reader)] == ["off", "off"]
    with Store.open(f"{database}&pooler=1", Path()) as store, store.db.transaction():
        assert store.db.ask("SHOW jit")[0][0] == "off"


def test_a_turn_is_planned_once_also_when_the_server_knows_its_tables(database: str) -> None:
    with Store.open(database, Path(), durable=False, steady=True) as store:
        store.nodes.register(NodeRow("n@1", "n", 60_000, home="h"))
        store.jobs.enqueue([NewJob("t", "q", "{}")] * 2000, store.now())
        store.db.ask("ANALYZE")
        for number in range(1, 12):
            assert store.turns.take(Turn("n@1", store.now(), wants={"q": ["w"]}, number=number)).claims
        plans = store.db.ask(
            "SELECT generic_plans, custom_plans FROM pg_prepared_statements WHERE statement LIKE 'WITH mine%%'"
        )
    assert [tuple(row)[1] for row in plans] == [0]
