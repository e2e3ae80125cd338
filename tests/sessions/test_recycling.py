"""Session workers that are replaced by count, age, memory or a slow probe: the next one is there first, and no session is cut."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.harness import Node, gone, until
from tests.sessions.test_sessions import say, session

APP = """
import asyncio, os
from websockets.asyncio.server import unix_serve
from ostler import Ostler

app = Ostler()


async def talk(connection):
    async for message in connection:
        await connection.send(str(os.getpid()))


class Worker:
    async def start(self, worker):
        self.server = await unix_serve(talk, worker.socket)
        self.memory = b"x" * self.eats
        return worker.socket

    async def probe(self):
        await asyncio.sleep(self.takes)


def pool(name, eats=0, takes=0.0, **options):
    made = type(name, (Worker,), {"eats": eats, "takes": takes})
    app.sessions(name, **{"workers": 1, "slots": 3, "lifetime": 0, "drain": 60, **options})(made)


pool("count", lifetime=6, margin=3)
pool("age", limits={"recycle_age": 1.5})
pool("memory", eats=200_000_000, limits={"recycle_rss_mb": 150})
pool("latency", takes=0.05, probe=0.02, slow_ms=20)
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("recycling")
    (folder / "app.py").write_text(APP)
    node = Node(folder / "data", folder / "app.py").start(ready=False)
    yield node
    node.stop()


@pytest.mark.parametrize("why", ["count", "age", "memory", "latency"])
def test_the_next_worker_is_there_before_the_last_one_leaves_and_no_session_is_cut(node: Node, why: str) -> None:
    node.wait_status(f"worker:{why}:0", "healthy")
    held = session(node, why)
    old = int(say(held, "who"))
    seen, refused, stop = {old}, list[str](), threading.Event()

    def keep_coming() -> None:
        """Clients that do not wait: each is refused if there is no worker for it at that moment."""
        while not stop.is_set():
            try:
                with session(node, why, "?wait=0") as client:
                    seen.add(int(say(client, "who")))
            except InvalidStatus as error:
                refused.append((error.response.body or b"").decode())
            except ConnectionClosed as error:
                refused.append(str(error))
            stop.wait(0.15)

    coming = threading.Thread(target=keep_coming)
    coming.start()
    try:
        until(lambda: len(seen) > 1, f"the worker to be replaced by {why}")
    finally:
        stop.set()
        coming.join()
    assert refused == []
    assert int(say(held, "who")) == old, "it serves on"
    assert f"recycling worker:{why}:0" in node.log()
    assert not gone(old)
    held.close()
    until(lambda: gone(old), "the old one to leave with its last session")
