from __future__ import annotations

from pathlib import Path

import pytest

from tests.nodes.fleet import Fleet
from tests.servers import Server


@pytest.fixture
def fleet(postgres: Server, tmp_path: Path):
    """Nodes on a database of the test's own; all are killed at its end."""
    postgres.start()
    name = postgres.create_database()
    made = Fleet(postgres, name, tmp_path)
    yield made
    made.close()
    postgres.start()
    postgres.drop_database(name)
