"""A reader that takes its time (a search, metrics, a dashboard) delays no claim, no enqueue and no publish."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostler.store import Store
from ostler.store.nodes import NodeRow
from ostler.store.rows import Finish, NewJob, Turn


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    return "" if request.param == "sqlite" else request.getfixturevalue("database")


def begin_reading(store: Store) -> None:
    """Leave a cursor open in the middle of a large result."""
    if store.db.dialect == "sqlite":
        store.db._connection.execute("SELECT id FROM jobs ORDER BY id").fetchone()
    else:
        connection = store.db._connection()
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT id FROM ostler.jobs ORDER BY id").fetchone()


def test_a_reader_in_the_middle_of_its_result_delays_nobody(url: str, tmp_path: Path) -> None:
    with Store.open(url, tmp_path, busy_timeout=0.5) as store:
        store.nodes.register(NodeRow("n@1", "n", 30_000, home="h"))
        store.jobs.enqueue([NewJob("t", "q", "{}") for _ in range(2000)], store.now())
        with Store.open(url, tmp_path, read_only=True) as reader:
            begin_reading(reader)
            (added,) = store.jobs.enqueue([NewJob("t", "q", "{}", priority=9)], store.now())
            (claim,) = store.turns.take(Turn("n@1", store.now(), wants={"q": ["w:0"]}, number=1)).claims
            assert claim.id == added
            assert store.jobs.hold(claim.id, claim.fence)
            done = Finish(claim.id, claim.fence, "done", 1, 2, "done")
            assert store.turns.take(Turn("n@1", store.now(), finishes=[done], number=2)).lost == []
            assert reader.jobs.depths()["q"]["queued"] in (
                2000,
                2001,
            )  # it goes on with what it began to read, or sees all
