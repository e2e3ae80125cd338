"""Beside PgQueuer on PostgreSQL, in one run, in turns: single enqueues, bulk enqueues, and a drain of no-op jobs.

    python benchmarks/peers_postgres.py [jobs] [rounds]

Needs `pip install "pgqueuer[asyncpg]"` in the same environment; without it the run says so and ends. PgQueuer runs its jobs in one
process, on its event loop; ours run in two worker processes, each result fenced and each run in a timeline. Both use one private
server (fsync on). The machine may be shared: look at the ratios, and at CPU time beside wall time.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

OURS = """
from ostler import Ostler
app = Ostler()

@app.job(queue="bench")
def noop(job): ...
"""

# Batches of 100 are ten times its default, and quicker.
THEIRS = """
import asyncio, os, sys
import asyncpg
from pgqueuer import AsyncpgPoolDriver, PgQueuer

async def main():
    pool = await asyncpg.create_pool(os.environ["PGQ"], min_size=2, max_size=8)
    pgq = PgQueuer(AsyncpgPoolDriver(pool))

    @pgq.entrypoint("noop")
    async def noop(job): ...

    await pgq.run(batch_size=100)

asyncio.run(main())
"""


class Ours:
    name = "ostler"

    def __init__(self, folder: Path, url: str) -> None:
        (folder / "ours.py").write_text(OURS)
        os.environ |= {"OSTLER_STORE": url, "OSTLER_DATA": str(folder / "data"), "OSTLER_LOG_LEVEL": "error"}
        sys.path.insert(0, str(folder))
        import ours

        self.task, self.app = ours.noop, ours.app
        argv = [sys.executable, "-m", "ostler", "up", "ours.py", "--port", "0", "--pool", "bench=2"]
        self.start = lambda: subprocess.Popen(argv, cwd=folder)
        self.stop = signal.SIGTERM

    def one(self, count: int) -> None:
        for _ in range(count):
            self.task.enqueue()

    def many(self, count: int) -> None:
        for start in range(0, count, 1000):
            self.task.enqueue_many([{}] * min(1000, count - start))

    def left(self) -> int:
        found = self.app.producer.store().jobs.depths().get("bench", {})
        return found.get("queued", 0) + found.get("processing", 0)


class Theirs:
    name = "pgqueuer"

    def __init__(self, folder: Path, url: str, address: str) -> None:
        import asyncpg
        from pgqueuer import AsyncpgDriver, Queries

        (folder / "theirs.py").write_text(THEIRS)
        self.loop = asyncio.new_event_loop()
        self.connection = self.loop.run_until_complete(asyncpg.connect(address))
        self.queries = Queries(AsyncpgDriver(self.connection))
        self.loop.run_until_complete(self.queries.install())
        env = {**os.environ, "PGQ": address}
        self.start = lambda: subprocess.Popen([sys.executable, "theirs.py"], cwd=folder, env=env)
        self.stop = signal.SIGKILL

    def one(self, count: int) -> None:
        async def put() -> None:
            for _ in range(count):
                await self.queries.enqueue("noop", None)

        self.loop.run_until_complete(put())

    def many(self, count: int) -> None:
        async def put() -> None:
            for start in range(0, count, 1000):
                n = min(1000, count - start)
                await self.queries.enqueue(["noop"] * n, [None] * n, [0] * n)

        self.loop.run_until_complete(put())

    def left(self) -> int:
        return self.loop.run_until_complete(self.connection.fetchval("SELECT count(*) FROM pgqueuer"))


def rate(work, count: int) -> float:
    began = time.perf_counter()
    work(count)
    return count / (time.perf_counter() - began)


def drain(side: Ours | Theirs, count: int) -> float:
    """Jobs a second, from the first job that is gone to the last."""
    side.many(count)
    total = side.left()
    process = side.start()
    _wait(lambda: side.left() < total)
    rest, began = side.left(), time.perf_counter()
    _wait(lambda: side.left() == 0)
    took = time.perf_counter() - began
    process.send_signal(side.stop)
    process.wait(60)
    return rest / took


def _wait(found) -> None:
    until = time.monotonic() + 300
    while not found():
        if time.monotonic() > until:
            raise SystemExit("waited in vain")
        time.sleep(0.01)


def main() -> None:
    if importlib.util.find_spec("pgqueuer") is None:
        print('pgqueuer is not installed: pip install "pgqueuer[asyncpg]", and run this again')
        return
    from tests.servers import Server

    count, rounds = (int(a) for a in sys.argv[1:3]) if len(sys.argv) > 2 else (30_000, 3)
    found: dict[str, dict[str, list[float]]] = {}
    with Server(fsync="on") as server, tempfile.TemporaryDirectory(prefix="peers-") as folder:
        mine, other = server.create_database(), server.create_database()
        sides = [Ours(Path(folder), server.url(mine)), Theirs(Path(folder), other, server.url(other, tcp=True))]
        measures = {
            "single enqueues": (lambda side: rate(side.one, 1000)),
            "bulk enqueues": (lambda side: rate(side.many, count)),
            "drain": (lambda side: drain(side, count)),
        }
        for _ in range(rounds):
            for what, measure in measures.items():
                for side in sides:
                    found.setdefault(what, {}).setdefault(side.name, []).append(measure(side))
    for what, by_side in found.items():
        rates = {name: statistics.median(runs) for name, runs in by_side.items()}
        ratio = statistics.median(ours / theirs for ours, theirs in zip(*by_side.values(), strict=True))
        print(f"{what}: " + ", ".join(f"{n} {r:,.0f}/s" for n, r in rates.items()) + f", x {ratio:.2f}")
        print("   ", json.dumps({name: [round(r) for r in runs] for name, runs in by_side.items()}))


if __name__ == "__main__":
    main()
