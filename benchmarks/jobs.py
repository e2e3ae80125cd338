"""Jobs through isolated worker processes: throughput, latency, idle cost. One run prints one table.

    python benchmarks/jobs.py [jobs] [--only throughput,latency,idle,crash] [--store URL]

`--store postgres` starts a private PostgreSQL server for the run (fsync on); then commits, statements and bytes of WAL for each job
are printed, too.

Figures of a shared machine: compare ratios within one run; CPU time is steadier than wall time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
APP = """
import time
from ostler import Ostler
app = Ostler()

@app.job(queue="bench")
def noop(job): ...

@app.job(queue="bench")
def stamp(job, sent: float) -> float:
    return time.time() - sent

@app.job(queue="bench")
def hang(job):
    job.event("begun")
    time.sleep(60)
"""


class Bench:
    def __init__(self, workers: int, more: str = "") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ostler-bench-"))
        (self.folder / "bench_app.py").write_text(APP + more)
        self.env = {
            **os.environ,
            "OSTLER_DATA": str(self.folder / "data"),
            "OSTLER_LOG_LEVEL": "error",
            "OSTLER_STORE": os.environ.get("OSTLER_STORE", ""),
            "OSTLER_CANCEL_GRACE": "0.05",
            "OSTLER_TERM_GRACE": "0.2",
            "OSTLER_LOAD_THRESHOLD": "1000",  # what else runs on the machine must not pause the claiming
        }
        self.env |= {"OSTLER_BACKOFF_MAX": "0.1", "OSTLER_RESTART_LIMIT": "1000", "OSTLER_RESTART_LIFETIME": "1000"}
        argv = [sys.executable, "-m", "ostler", "up", "bench_app.py", "--port", "0", "--pool", f"bench={workers}"]
        self.node = subprocess.Popen(argv, cwd=self.folder, env=self.env)
        self.url = self._wait(self._address)
        self._wait(lambda: self.get("/readyz", quiet=True))
        self._wait(lambda: all(w["status"] == "healthy" for w in self.get("/api/v1/workers")["workers"]))
        os.environ["OSTLER_DATA"] = str(self.folder / "data")
        sys.path.insert(0, str(self.folder))

    def _address(self):
        try:
            return json.loads((self.folder / "data" / "node.json").read_text())["url"]
        except OSError:
            return None

    def _wait(self, found):
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                if value := found():
                    return value
            except OSError:
                pass
            time.sleep(0.02)
        raise SystemExit("waited in vain")

    def get(self, path: str, quiet: bool = False):
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return json.loads(response.read())

    def post(self, path: str, body=None):
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(
            urllib.request.Request(self.url + path, data=data, method="POST"), timeout=30
        ) as response:
            return json.loads(response.read())

    def processes(self) -> list[int]:
        return [self.node.pid, *(w["pid"] for w in self.get("/api/v1/workers")["workers"] if w["pid"])]

    def cpu(self, pids: list[int]) -> dict[int, float]:
        tick = os.sysconf("SC_CLK_TCK")
        return {
            p: sum(map(int, Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split()[11:13])) / tick for p in pids
        }

    def close(self) -> None:
        self.node.terminate()
        self.node.wait(30)


def throughput(bench: Bench, count: int) -> None:
    import bench_app

    from ostler.jobs.producer import prepare

    producer = bench_app.app.producer
    server = Counters(producer.store())
    job = prepare({"noop": bench_app.noop.row}, "noop", {}, 1000)
    bench.post("/api/v1/workers/pause")
    began = time.perf_counter()
    for start in range(0, count, 1000):
        producer.enqueue([job] * min(1000, count - start))
    bulk = count / (time.perf_counter() - began)
    stored = server.since_last()
    pids = bench.processes()
    before, began = bench.cpu(pids), time.perf_counter()
    bench.post("/api/v1/workers/resume")
    while any(producer.store().jobs.depths().get("bench", {}).get(s) for s in ("queued", "processing")):
        time.sleep(0.02)
    took = time.perf_counter() - began
    after = bench.cpu(pids)
    node = after[pids[0]] - before[pids[0]]
    workers = sum(after[p] - before[p] for p in pids[1:])
    print(f"bulk enqueue (1,000 a commit)   {bulk:10,.0f} jobs/s")
    print(
        f"no-op jobs, {len(pids) - 1} workers           {count / took:10,.0f} jobs/s   node {1e6 * node / count:.0f} us CPU/job, workers {1e6 * workers / count:.0f} us CPU/job"
    )
    if stored:
        moved = server.since_last()
        for what, found in (("stored", stored), ("run", moved)):
            each = ", ".join(f"{found[name] / count:.3g} {name}" for name in found)
            print(f"the server, for each job {what}:  {each}")


class Counters:
    """What the server counts: commits, statements, bytes of WAL. Nothing on SQLite."""

    _NOW = """
        SELECT xact_commit AS commits, pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint AS "bytes of WAL",
               (SELECT sum(calls)::bigint FROM pg_stat_statements) AS statements
          FROM pg_stat_database WHERE datname = current_database()"""

    def __init__(self, store) -> None:
        self._db = store.db if store.db.dialect == "postgres" else None
        self._last = self._now()

    def _now(self) -> dict[str, int]:
        if self._db is None:
            return {}
        time.sleep(1.1)  # statistics come with a delay
        return dict(self._db._query(self._NOW)[0])

    def since_last(self) -> dict[str, int]:
        before, self._last = self._last, self._now()
        return {name: self._last[name] - before[name] for name in before}


@contextlib.contextmanager
def store_of(url: str):
    """The store's URL for the run; `postgres` is a private server."""
    if url != "postgres":
        yield url
        return
    sys.path.insert(0, str(ROOT))
    from tests.servers import Server

    with Server(fsync="on", shared_preload_libraries="pg_stat_statements") as server:
        name = server.create_database()
        server.sql("CREATE EXTENSION pg_stat_statements", database=name)
        yield server.url(name)


def latency(bench: Bench, count: int) -> None:
    import bench_app

    def python() -> int:
        return int(bench_app.stamp.enqueue(sent=time.time()))

    def http() -> int:
        return bench.post("/api/v1/jobs", {"task": "stamp", "args": {"sent": time.time()}})["id"]

    # With 20 ms between them everything is asleep and nothing is in the processor's caches; with 5 ms it is.
    for name, send, gap in (("Python", python, 0.02), ("Python", python, 0.005), ("HTTP", http, 0.02)):
        ids = []
        for _ in range(count):
            ids.append(send())
            time.sleep(gap)
        time.sleep(0.5)
        waits = sorted(1000 * bench.get(f"/api/v1/jobs/{i}")["result"] for i in ids)
        print(
            f"enqueue ({name}) -> handler start, idle node, one every {1000 * gap:.0f} ms   p50 {statistics.median(waits):.1f} ms, p99 {waits[int(len(waits) * 0.99) - 1]:.1f} ms, max {waits[-1]:.1f} ms"
        )


def crash(bench: Bench, count: int) -> None:
    waits = []
    for _ in range(count):
        bench._wait(lambda: all(w["status"] == "healthy" for w in bench.get("/api/v1/workers")["workers"]))
        job = bench.post("/api/v1/jobs", {"task": "hang"})["id"]
        bench._wait(lambda: any(e["name"] == "begun" for e in bench.get(f"/api/v1/jobs/{job}")["events"]))
        found = bench.get(f"/api/v1/jobs/{job}")
        pid = next(w["pid"] for w in bench.get("/api/v1/workers")["workers"] if w["component"] == found["worker"])
        killed = time.time() * 1000
        os.kill(pid, signal.SIGKILL)
        back = bench._wait(
            lambda: next(
                (e["at"] for e in bench.get(f"/api/v1/jobs/{job}")["events"] if e["name"] == "requeued:crash"), None
            )
        )
        waits.append(back - killed)
        bench.post(f"/api/v1/jobs/{job}/cancel")
        bench._wait(lambda: bench.get(f"/api/v1/jobs/{job}")["status"] == "cancelled")
    waits.sort()
    print(
        f"worker killed -> its job back in the queue     p50 {statistics.median(waits):.1f} ms, max {waits[-1]:.1f} ms ({count} kills)"
    )


def idle(bench: Bench, seconds: float) -> None:
    pids = bench.processes()
    time.sleep(2)
    before = bench.cpu(pids)
    time.sleep(seconds)
    after = bench.cpu(pids)
    used = {p: 100 * (after[p] - before[p]) / seconds for p in pids}
    rss = {p: int(Path(f"/proc/{p}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6 for p in pids}
    print(
        f"idle node, {len(pids) - 1} workers, {seconds:g} s: {sum(used.values()):.2f} % of a core in all (node {used[pids[0]]:.2f} %)"
    )
    print(f"memory: node {rss[pids[0]]:.0f} MB, a worker {statistics.median(rss[p] for p in pids[1:]):.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("jobs", type=int, nargs="?", default=50_000)
    parser.add_argument("--only", default="throughput,latency,crash,idle")
    parser.add_argument("--store", default="", help="a store's URL, or 'postgres' for a private server")
    options = parser.parse_args()
    chosen = set(options.only.split(","))
    with store_of(options.store) as os.environ["OSTLER_STORE"]:
        if chosen & {"throughput", "latency", "crash"}:
            with contextlib.closing(Bench(2)) as bench:
                if "latency" in chosen:
                    latency(bench, 200)
                if "throughput" in chosen:
                    throughput(bench, options.jobs)
                if "crash" in chosen:
                    crash(bench, 10)
        if "idle" in chosen:
            sys.modules.pop("bench_app", None)
            with contextlib.closing(Bench(16)) as bench:
                idle(bench, 30)


if __name__ == "__main__":
    main()
