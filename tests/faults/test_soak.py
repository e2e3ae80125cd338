"""A long run: floods, kills of workers and of the node, clients that come and go. `OSTLER_SOAK=3600 make soak` runs for an hour."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.faults.test_chaos import PRODUCER, each_done_once
from tests.harness import Node, family_of, gone, until
from tests.live.test_load import rss_mb, sockets
from tests.sse import Stream

SECONDS = float(os.environ.get("OSTLER_SOAK", "600"))
SINGLE, BULK, CLIENTS = 50, 4000, 20  # in a round
WARM = 5  # rounds


def _round(node: Node, dice: random.Random, *, kill_node: bool) -> None:
    """A flood, watched, with workers (or the whole node) killed in the middle of it; back when all of it has ended."""
    producer = subprocess.Popen([sys.executable, "-c", PRODUCER, str(SINGLE), str(BULK)], env=node.producer_env)
    streams = [Stream(node.url, dice.choice(["*", "queue:jobs", "queue:status"])) for _ in range(CLIENTS)]
    kills = 0

    def step() -> bool:
        nonlocal kills
        for stream in streams[::2]:  # the others do not read
            with contextlib.suppress(OSError):  # its node was killed
                stream.pump(0)
        alive = [w["pid"] for w in node.workers() if w["pid"] and w["status"] == "healthy"]
        if alive and kills < 3:
            with contextlib.suppress(ProcessLookupError):
                os.kill(dice.choice(alive), signal.SIGKILL)
            kills += 1
        depth = node.get("/api/v1/info")[1]["queues"]["work"]
        return producer.poll() is not None and not any(depth[s] for s in ("queued", "processing", "scheduled"))

    try:
        if kill_node:
            left = family_of(node.folder) - {producer.pid}
            node.kill()
            until(lambda: all(gone(pid) for pid in left), "all of the killed node to be gone")
            node.start()
        until(step, "the round to end", patience=300)
        assert producer.wait() == 0
    finally:
        for stream in streams:
            stream.close()


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_long_run_loses_nothing_and_grows_nothing(make_node) -> None:
    generous = {
        "OSTLER_CRASH_LIMIT": "1000000",
        "OSTLER_RESTART_LIMIT": "1000000",
        "OSTLER_RESTART_LIFETIME": "1000000",
    }
    node = make_node("--pool", "work=3", "--pool", "other=0", OSTLER_LOG_LEVEL="warning", **generous)
    dice, rounds, memory = random.Random(7), 0, list[float]()
    began = time.monotonic()
    while (elapsed := time.monotonic() - began) < SECONDS or len(memory) < 2 * WARM:
        kill_node = elapsed < SECONDS / 3 and rounds % 3 == 2  # afterwards one node has the rest of the time to grow
        memory = [] if kill_node else memory
        _round(node, dice, kill_node=kill_node)
        rounds += 1
        memory.append(rss_mb(node))
    until(lambda: sockets(node) <= 20, "all clients' connections to be closed")
    jobs = rounds * (SINGLE + BULK)
    with Stream(node.url, "queue:status,queue:jobs") as stream:
        stream.live()
        assert stream.of("queue:status")["completed"] == jobs
        assert set(stream.jobs().values()) == {"done"}
    print(f"{rounds} rounds, {jobs} jobs, MB after each of the last node: {[round(m) for m in memory]}")
    # The node's connections may still fill their page caches (16 MB, and five of 4 MB); more than that would be growth.
    assert max(memory[-WARM:]) < max(memory[:WARM]) + 48, memory
    assert "Traceback" not in node.log()
    node.stop()
    with node.open_store() as store:
        each_done_once(store, jobs)
