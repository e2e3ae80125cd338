from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import pytest

from ostler.store import Store
from ostler.store.frontier import Frontier
from tests.harness import APP, Node
from tests.servers import Server, open_server
from tests.stores import new_database, store_of


# Where nothing may be cached, each of the hundreds of processes that the tests start would compile Ostler anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell that starts the tests in the background has SIGINT ignored, and what the tests start would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Files that take long come first, so that the last minutes of a run are not those of one file alone.
LONG = (
    "nodes/",
    "faults/",
    "test_deploy",
    "powercut/",
    "live/test_load",
    "test_types",
    "test_envs",
    "calls/test_calls",
    "apps/",
    "web/",
    "cli/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent

    def rank(item: pytest.Item) -> int:
        name = item.path.relative_to(here).as_posix() if item.path.is_relative_to(here) else ""
        return next((at for at, start in enumerate(LONG) if name.startswith(start)), len(LONG))

    items.sort(key=rank)  # stable: within a file nothing moves


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Where a store is, once on each database: what a test says of it holds for both. Nodes and programs that the test starts
    find it in OSTLER_STORE.
    """
    with store_of(request) as url:
        monkeypatch.setenv("OSTLER_STORE", url)
        yield url


@pytest.fixture
def store(store_url: str, tmp_path: Path):
    """An empty store, once on each database. However slow the machine is, its claims read a queue from the beginning."""
    with Store.open(store_url, tmp_path, durable=False) as opened:
        opened.turns._frontier = Frontier(whole=True)
        yield opened


@pytest.fixture
def sqlite_store(tmp_path: Path):
    """An empty store on SQLite, for what is true there alone."""
    with Store.open("", tmp_path, durable=False) as opened:
        yield opened


@pytest.fixture
def make_node(tmp_path: Path):
    """Start nodes; each is killed at the end of its test (how nodes stop in order has tests of its own)."""
    nodes: list[Node] = []
    numbers = itertools.count()

    def make(
        *flags: str, app=None, folder: Path | None = None, start: bool = True, ready: bool = True, **env: str
    ) -> Node:
        where = folder or tmp_path / f"node{next(numbers)}"
        node = Node(where, app or APP, *flags, **env)
        nodes.append(node)
        return node.start(ready=ready) if start else node

    yield make
    for node in nodes:
        if node.process is not None and node.process.poll() is None:
            node.kill()


@pytest.fixture
def node(make_node) -> Node:
    return make_node("--pool", "work=2", "--pool", "other=1")


@pytest.fixture(scope="session")
def postgres():
    """One PostgreSQL server per test process, so that a test may stop or pause it without harm to another process."""
    try:
        server = open_server()
    except LookupError as missing:
        pytest.skip(str(missing))
    yield server
    server.close()


@pytest.fixture
def database(postgres: Server):
    """The URL of an empty database of the test's own. A test that stopped the server need not start it again."""
    with new_database(postgres) as url:
        yield url
