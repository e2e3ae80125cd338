"""The first moments: an empty database that several use at once, and a server that is not there yet."""

from __future__ import annotations

import threading
from pathlib import Path

from ostler.store import Store
from tests.harness import until
from tests.nodes.fleet import Fleet


def test_all_that_open_an_empty_database_at_once_find_it_ready(database: str, tmp_path: Path) -> None:
    """One of them makes the schema; the others, who saw none, wait for it and then see it."""
    together, failed = threading.Barrier(8), list[BaseException]()

    def use() -> None:
        together.wait()
        try:
            with Store.open(database, tmp_path) as store:
                assert store.jobs.depths() == {}
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_a_node_waits_for_a_server_that_is_away_and_says_so(fleet: Fleet) -> None:
    fleet.server.stop()
    node = fleet.node("--pool", "work=1", "--pool", "other=0", start=False)
    node.start_process()
    until(lambda: "waiting for the store" in node.log(), "it to say so")
    assert node.process.poll() is None
    fleet.server.start()
    fleet.await_up(node)
    fleet.wait_all([node.enqueue("add", a=1)])


def test_a_node_that_waits_for_its_store_stops_when_asked(fleet: Fleet) -> None:
    fleet.server.stop()
    node = fleet.node("--pool", "work=1", "--pool", "other=0", start=False)
    node.start_process()
    until(lambda: "waiting for the store" in node.log(), "it to wait")
    assert node.stop() == 0
