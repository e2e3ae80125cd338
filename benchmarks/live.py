"""The live state: how soon a client sees a change, and what watching costs. One run prints one table.

    python benchmarks/live.py [--only latency,idle,memory,throughput] [--jobs 100000] [--idle 60]

What each figure is:

- latency: a job is stored by another process and its handler takes `time.time()` as its last act; each client takes it again when
  its socket gives it the event of that job as `done`. In between: the result to the node, the turn that commits it, the look into
  the store, the frame, the sockets. All clients are one process on the same machine, which reads its sockets one after another:
  with many clients the last of them are late by the client's own work, too; `first` is the client that had it first.
- CPU per change: user and system time of the node's process over the run, less that of the same jobs with nobody watching.
- idle: bytes that a client of all topics gets from a node on which nothing happens.
- memory: resident size of the node before and after a flood that is watched.
- throughput: no-op jobs with 0, 1 and 100 clients watching everything, interleaved; the ratio to nobody watching.

Figures of a shared machine: compare ratios within one run; CPU time is steadier than wall time.
"""

from __future__ import annotations

import argparse
import os
import resource
import selectors
import socket
import sqlite3
import statistics
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent))
from jobs import Bench  # noqa: E402


class Crowd:
    """Clients of one topic list, read by one thread. `marks`: text -> when each client saw it."""

    def __init__(self, url: str, count: int, topics: str = "*") -> None:
        where = urlsplit(url)
        self.received = 0
        self.selector = selectors.DefaultSelector()
        self.sockets: list[socket.socket] = []
        self.tails: dict[socket.socket, bytes] = {}
        self.mark: bytes | None = None
        self.seen: dict[socket.socket, float] = {}
        self.all_seen = threading.Event()
        for _ in range(count):
            s = socket.create_connection((where.hostname, where.port))
            s.sendall(f"GET /api/v1/events?topics={topics} HTTP/1.1\r\nHost: {where.netloc}\r\n\r\n".encode())
            s.setblocking(False)
            self.sockets.append(s)
            self.tails[s] = b""
            self.selector.register(s, selectors.EVENT_READ)
        self.expect(b'"type":"live"')
        self.open = True
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()
        self.wait()

    def expect(self, mark: bytes) -> None:
        self.all_seen.clear()
        self.seen = {}
        self.mark = mark

    def wait(self) -> list[float]:
        """When each client saw the mark."""
        if self.sockets and not self.all_seen.wait(60):
            raise SystemExit(f"{len(self.sockets) - len(self.seen)} clients never saw {self.mark!r}")
        return sorted(self.seen.values())

    def _read(self) -> None:
        while self.open:
            for key, _ in self.selector.select(0.2):
                s, mark = key.fileobj, self.mark
                try:
                    data = s.recv(1 << 18)
                except (BlockingIOError, OSError):
                    continue
                now = time.time()
                self.received += len(data)
                text = self.tails[s] + data
                if mark and s not in self.seen and mark in text:
                    self.seen[s] = now
                    if len(self.seen) == len(self.sockets):
                        self.all_seen.set()
                self.tails[s] = text[-len(mark or b"") :]

    def close(self) -> None:
        self.open = False
        self.thread.join()
        for s in self.sockets:
            s.close()
        self.selector.close()


def ms(values: list[float], share: float) -> float:
    return 1000 * sorted(values)[min(len(values) - 1, int(len(values) * share))]


def rss(bench: Bench) -> float:
    return int(Path(f"/proc/{bench.node.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def latency(bench: Bench, clients: tuple[int, ...], count: int) -> None:
    import bench_app

    alone: dict[int, float] = {}
    for crowd_size in (0, *clients):
        crowd = Crowd(bench.url, crowd_size, "queue:jobs,worker:*:status,queue:*:status,system:health")
        first, each = [], []
        before = bench.cpu([bench.node.pid])[bench.node.pid]
        for _ in range(count):
            # The job is known by its stamp: a client may see its end before `enqueue` has returned its id.
            stamp = f"{time.time_ns()}"
            crowd.expect(f'"result":"[\\"{stamp}\\",'.encode())
            job = int(bench_app.ends.enqueue(stamp=stamp))
            seen = crowd.wait()
            time.sleep(0.1)
            ended = bench.get(f"/api/v1/jobs/{job}")["result"][1]
            if seen:
                first.append(seen[0] - ended)
                each += [t - ended for t in seen]
        cost = (bench.cpu([bench.node.pid])[bench.node.pid] - before) / count
        crowd.close()
        alone[crowd_size] = cost
        if crowd_size:
            print(
                f"handler's end -> client's socket, {crowd_size:5,} clients   p50 {ms(each, 0.5):6.1f} ms, p99 {ms(each, 0.99):6.1f} ms, "
                f"max {ms(each, 1):6.1f} ms (first client p50 {ms(first, 0.5):.1f} ms); node {1000 * (cost - alone[0]):.1f} ms CPU a job "
                f"beyond the {1000 * alone[0]:.1f} ms of an unwatched one"
            )


def idle(bench: Bench, seconds: float) -> None:
    crowd = Crowd(bench.url, 1)
    time.sleep(2)
    before = crowd.received
    time.sleep(seconds)
    print(f"idle node, one client of everything, {seconds:g} s: {crowd.received - before} bytes (keep-alives)")
    crowd.close()


def flood(bench: Bench, count: int, watchers: int) -> tuple[float, float]:
    """(jobs per second, microseconds of the node's CPU per job)."""
    import bench_app

    from ostler.jobs.producer import prepare

    job = prepare({"noop": bench_app.noop.row}, "noop", {}, 1000)
    bench.post("/api/v1/workers/pause")
    for start in range(0, count, 1000):
        bench_app.app.producer.enqueue([job] * min(1000, count - start))
    crowd = Crowd(bench.url, watchers)
    db = sqlite3.connect(bench.folder / "data" / "ostler.db")
    pid = bench.node.pid
    before, began = bench.cpu([pid])[pid], time.perf_counter()
    bench.post("/api/v1/workers/resume")
    while db.execute(
        "SELECT EXISTS (SELECT 1 FROM jobs WHERE status = 'queued' AND later = 0) OR EXISTS (SELECT 1 FROM jobs WHERE status = 'processing')"
    ).fetchone()[0]:
        time.sleep(0.02)
    took = time.perf_counter() - began
    cost = bench.cpu([pid])[pid] - before
    db.close()
    crowd.close()
    return count / took, 1e6 * cost / count


def memory(bench: Bench, count: int) -> None:
    sizes = [rss(bench)]
    for _ in range(5):
        flood(bench, count // 5, 1)
        sizes.append(rss(bench))
    shown = ", ".join(f"{s:.1f}" for s in sizes)
    print(f"memory of the node at its start and after each fifth of {count:,} watched no-op jobs: {shown} MB")


def throughput(bench: Bench, count: int, rounds: int) -> None:
    found: dict[int, list[tuple[float, float]]] = {0: [], 1: [], 100: []}
    for n in range(rounds):
        order = list(found)[n % 3 :] + list(found)[: n % 3]  # nobody is always first
        for watchers in order:
            found[watchers].append(flood(bench, count, watchers))
    for watchers, runs in found.items():
        rates = [rate for rate, _ in runs]
        ratio = statistics.median(rate / alone for rate, (alone, _) in zip(rates, found[0], strict=True))
        each = ", ".join(f"{r:,.0f}" for r in rates)
        cost = statistics.median(c for _, c in runs)
        print(
            f"no-op jobs, {watchers:3} watching: {statistics.median(rates):8,.0f} jobs/s, ratio {ratio:.2f} ({each}); node {cost:.0f} us CPU/job"
        )


ENDS = """
@app.job(queue="bench")
def ends(job, stamp: str) -> list:
    return [stamp, time.time()]
"""

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="latency,idle,memory,throughput")
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--idle", type=float, default=60)
    options = parser.parse_args()
    chosen = options.only.split(",")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    parts = {
        "idle": lambda bench: idle(bench, options.idle),
        "latency": lambda bench: latency(bench, (1, 100, 1000), 60),
        "memory": lambda bench: memory(bench, options.jobs),
        "throughput": lambda bench: throughput(bench, 20_000, 6),
    }
    for name, part in parts.items():
        if name in chosen:
            bench = Bench(2, ENDS)  # a node of its own: what one leaves in memory is not seen by the next
            try:
                part(bench)
            finally:
                bench.close()
                sys.path.remove(str(bench.folder))
                sys.modules.pop("bench_app", None)
