"""A thousand clients on one node: all are served, all leave, and nothing of them stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.harness import Node, until
from tests.live.test_stream import elsewhere
from tests.sse import Stream

CLIENTS = 1000
PATIENCE = 40.0


@contextlib.contextmanager
def soft_limit(files: int):
    """What is started meanwhile inherits this limit of open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, before[1]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Crowd:
    """Many clients of one topic, in this process, on raw sockets."""

    def __init__(self, node: Node, count: int) -> None:
        self.node, self.count = node, count
        self.writers: list[asyncio.StreamWriter] = []
        self.readers: list[asyncio.StreamReader] = []

    async def come(self) -> None:
        """All of them; each has its snapshot when this returns."""
        await asyncio.gather(*(self._one() for _ in range(self.count)))

    async def _one(self) -> None:
        where = urlsplit(self.node.url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        self.readers.append(reader)
        self.writers.append(writer)
        writer.write(f"GET /api/v1/events?topics=queue:jobs HTTP/1.1\r\nHost: {where.netloc}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head.partition(b"\r\n")[0], head
        await reader.readuntil(b'"type":"live"')

    async def see(self, text: bytes) -> None:
        """All of them read until they have seen this."""
        await asyncio.gather(*(reader.readuntil(text) for reader in self.readers))

    async def go(self) -> None:
        for writer in self.writers:
            writer.close()
        await asyncio.gather(*(w.wait_closed() for w in self.writers), return_exceptions=True)


def sockets(node: Node) -> int:
    """Open sockets of the node's process."""
    found = 0
    for entry in Path(f"/proc/{node.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.readlink(entry).startswith("socket:")
    return found


def rss_mb(node: Node) -> float:
    pages = int(Path(f"/proc/{node.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.timeout(240)
def test_a_thousand_clients_come_see_and_go_and_nothing_of_them_stays(make_node) -> None:
    with soft_limit(1024):  # what most systems give
        node = make_node("--pool", "work=1", "--pool", "other=0")
    at_rest, memory = sockets(node), []

    async def a_round() -> None:
        crowd = Crowd(node, CLIENTS)
        try:
            await crowd.come()
            assert sockets(node) >= CLIENTS
            job = await asyncio.to_thread(node.enqueue, "add", a=1)
            await crowd.see(f'"job":{{"id":{job},"task":"add","queue":"work","status":"done"'.encode())
        finally:
            await crowd.go()

    with soft_limit(CLIENTS + 1000):
        for _ in range(3):
            asyncio.run(asyncio.wait_for(a_round(), PATIENCE))
            until(lambda: sockets(node) <= at_rest + 3, "the node to have let all of them go")
            memory.append(rss_mb(node))
    assert memory[2] < memory[0] + 15, memory  # a leak of one client's state would be tens of kB a head
    assert node.get("/readyz")[0] == 200
    assert "Traceback" not in node.log()


def test_workers_get_the_limit_of_open_files_that_the_node_was_started_with(make_node) -> None:
    with soft_limit(1024):
        node = make_node("--pool", "work=1", "--pool", "other=0")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    (pid,) = [w["pid"] for w in node.workers() if w["pid"]]
    assert resource.prlimit(node.pid, resource.RLIMIT_NOFILE) == (min(hard, 65_536), hard)
    assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (1024, hard)


def test_clients_that_do_not_read_cost_little_memory(make_node) -> None:
    """One that reads decides when enough was said to fill whatever lies between the node and those that do not."""
    node = make_node("--pool", "work=1", "--pool", "other=1")
    with soft_limit(2000), Stream(node.url).live() as reading, contextlib.ExitStack() as opened:
        before = rss_mb(node)
        for _ in range(300):
            opened.enter_context(Stream(node.url, buffer=4096))
        for n in range(1, 9):
            elsewhere(node, "other", 300, say="x" * 190)
            reading.wait(lambda n=n: reading.of("queue:other:status")["completed"] == 300 * n, "the jobs")
        assert rss_mb(node) < before + 95  # with whole copies for each of them it was 136 and more
        assert len(reading.events) > 1000
