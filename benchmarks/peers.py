"""Beside Huey on SQLite, in one run, in turns: single durable enqueues, and a drain of no-op jobs by two worker processes.

    python benchmarks/peers.py [jobs] [rounds]

Needs `pip install huey` in the same environment; without it the run says so and ends. Both sync every commit of an enqueue to
the disk. The machine may be shared: look at the ratios, and at CPU time beside wall time.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

OURS = """
from ostler import Ostler
app = Ostler()

@app.job(queue="bench")
def noop(job): ...
"""

THEIRS = """
from huey import SqliteHuey
huey = SqliteHuey(filename={path!r}, fsync=True, results=False)

@huey.task()
def noop(): ...
"""


class Ours:
    name = "ostler"

    def __init__(self, folder: Path) -> None:
        (folder / "ours.py").write_text(OURS)
        self.data = folder / "data"
        os.environ["OSTLER_DATA"] = str(self.data)
        sys.path.insert(0, str(folder))
        import ours

        self.one, self.app = ours.noop.enqueue, ours.app
        argv = [sys.executable, "-m", "ostler", "up", "ours.py", "--port", "0", "--pool", "bench=2"]
        self.start = lambda: subprocess.Popen(argv, cwd=folder, env={**os.environ, "OSTLER_LOG_LEVEL": "error"})

    def many(self, count: int) -> None:
        import ours

        for start in range(0, count, 1000):
            ours.noop.enqueue_many([{}] * min(1000, count - start))

    def left(self) -> int:
        found = self.app.producer.store().jobs.depths().get("bench", {})
        return found.get("queued", 0) + found.get("processing", 0)


class Theirs:
    name = "huey"

    def __init__(self, folder: Path) -> None:
        (folder / "theirs.py").write_text(THEIRS.format(path=str(folder / "huey.db")))
        sys.path.insert(0, str(folder))
        import theirs

        self.one, self.huey = theirs.noop, theirs.huey
        consumer = [sys.executable, "-m", "huey.bin.huey_consumer", "theirs.huey", "-w", "2", "-k", "process", "-q"]
        self.start = lambda: subprocess.Popen(consumer, cwd=folder, stderr=subprocess.DEVNULL)

    def many(self, count: int) -> None:
        for _ in range(count):
            self.one()

    def left(self) -> int:
        return self.huey.pending_count()


def enqueues(side: Ours | Theirs, count: int) -> tuple[float, float]:
    """(jobs a second, microseconds of CPU for each)."""
    cpu, began = time.process_time(), time.perf_counter()
    for _ in range(count):
        side.one()
    return count / (time.perf_counter() - began), (time.process_time() - cpu) / count * 1e6


def drain(side: Ours | Theirs, count: int) -> tuple[float, float]:
    """(jobs a second, microseconds of CPU for each, of all processes) from the first job that is gone to the last."""
    side.many(count)
    total = side.left()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = side.start()
    _wait(lambda: side.left() < total)
    rest, began = side.left(), time.perf_counter()
    _wait(lambda: side.left() == 0)
    took = time.perf_counter() - began
    process.send_signal(signal.SIGTERM if isinstance(side, Ours) else signal.SIGINT)
    process.wait(60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return rest / took, (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / total * 1e6


def _wait(found: Callable[[], bool]) -> None:
    until = time.monotonic() + 300
    while not found():
        if time.monotonic() > until:
            raise SystemExit("waited in vain")
        time.sleep(0.005)


def main() -> None:
    if importlib.util.find_spec("huey") is None:
        print("huey is not installed: pip install huey, and run this again")
        return
    count, rounds = (int(a) for a in (*sys.argv[1:], "20000", "3")[:2]) if len(sys.argv) > 2 else (20_000, 3)
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        sides: list[Ours | Theirs] = [Ours(Path(folder)), Theirs(Path(folder))]
        for side in sides:
            enqueues(side, 3000)  # until its log of changes has the length that it keeps
        plan = ((enqueues, 250), (enqueues, 250)) * 8, ((drain, count),)
        for verb, jobs in (step for _ in range(rounds) for steps in plan for step in steps):
            for side in sides:
                found.setdefault(verb.__name__, {side.name: [] for side in sides})[side.name].append(verb(side, jobs))
            sides.reverse()  # who is first changes: the disk and the machine are shared
    for what, by_side in found.items():
        rates = {name: statistics.median(rate for rate, _ in runs) for name, runs in by_side.items()}
        cpus = {name: statistics.median(cpu for _, cpu in runs) for name, runs in by_side.items()}
        ratio = statistics.median(
            ours / theirs for (ours, _), (theirs, _) in zip(by_side["ostler"], by_side["huey"], strict=True)
        )
        print(
            f"{what}: " + ", ".join(f"{n} {rates[n]:,.0f}/s ({cpus[n]:.0f} us CPU)" for n in rates) + f", x {ratio:.2f}"
        )
        print("   ", json.dumps({name: [round(rate) for rate, _ in runs] for name, runs in by_side.items()}))


if __name__ == "__main__":
    main()
