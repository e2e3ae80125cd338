"""Several processes that use an empty database at the same moment."""

from __future__ import annotations

import threading
from pathlib import Path

from ostler.store import Store


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
