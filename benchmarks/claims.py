"""What a claim costs however much waits: a turn that ends 100 jobs and claims 100, at several depths. One table for each store.

    python benchmarks/claims.py [--store postgres] [--most 1000000]

The best of the turns counts, because the machine may be shared; the median stands beside it. `undeclared` jobs are of a task that
no node declares, and stand first in line until upkeep parks them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from jobs import store_of  # noqa: E402

from ostler.store import Store  # noqa: E402
from ostler.store.nodes import NodeRow  # noqa: E402
from ostler.store.rows import Finish, NewJob, Turn  # noqa: E402

TASK = {"name": "t", "queue": "q", "attempts": 3, "timeout": None, "priority": 0, "policy": "{}", "parameters": "[]"}


def fill(store: Store, count: int, **job: object) -> None:
    one = NewJob(**{"task": "t", "queue": "q", "args": "{}", **job})  # type: ignore[arg-type]
    for start in range(0, count, 5000):
        store.jobs.enqueue([one] * min(5000, count - start), store.now())


def turns(store: Store, numbers: list[int], rounds: int = 40) -> tuple[float, float]:
    """(best, median) milliseconds of a turn that ends 100 jobs and claims 100."""
    took, ends = [], []
    for _ in range(rounds):
        numbers[0] += 1
        turn = Turn(
            "n@1", store.now(), finishes=ends, wants={"q": ["w:0"] * 100}, number=numbers[0], tasks=frozenset("t")
        )
        began = time.perf_counter()
        claims = store.turns.take(turn).claims
        took.append(1000 * (time.perf_counter() - began))
        ends = [Finish(c.id, c.fence, "done", 1, 2, "done") for c in claims]
        fill(store, 100)
    return min(took[5:]), statistics.median(took[5:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", default="")
    parser.add_argument("--most", type=int, default=1_000_000)
    options = parser.parse_args()
    with store_of(options.store) as url, tempfile.TemporaryDirectory() as folder:
        with Store.open(url, Path(folder), durable=False) as store:
            store.nodes.register(NodeRow("n@1", "n", 10**9, home="h"))
            store.nodes.declare("n@1", [TASK, {**TASK, "name": "gone"}], [])
            numbers, base = [0], 0.0
            for depth in (1000, 200_000, options.most):
                waiting = store.jobs.depths().get("q", {}).get("queued", 0)
                fill(store, depth - waiting)
                if store.db.shared:
                    store.db.ask("CHECKPOINT")  # type: ignore[attr-defined]  what was stored is on the disk by then
                best, median = turns(store, numbers)
                base = base or best
                print(
                    f"{depth:>9,} waiting                        best {best:6.2f} ms, median {median:6.2f} ms, x {best / base:.2f}"
                )
            fill(store, 200_000, task="gone", priority=5)
            best, median = turns(store, numbers, 15)
            print(
                f"200,000 undeclared before them, not parked  best {best:6.2f} ms, median {median:6.2f} ms, x {best / base:.2f}"
            )
            store.nodes.declare("n@1", [TASK], [])
            began = time.perf_counter()
            while store.nodes.park():
                pass
            print(f"they are parked in {time.perf_counter() - began:.1f} s")
            best, median = turns(store, numbers)
            print(
                f"200,000 undeclared, parked                  best {best:6.2f} ms, median {median:6.2f} ms, x {best / base:.2f}"
            )


if __name__ == "__main__":
    main()
