"""Three nodes, jobs of all kinds, and random kills of workers, nodes and the server: every job ends as it should, once."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.harness import ROOT
from tests.nodes import producing
from tests.nodes.fleet import FLOCK, Fleet, Member

POOLS = ("--pool", "work=2", "--pool", "narrow=2", "--pool", "paced=1", "--pool", "keys=2")
ENDS = {"done", "failed", "cancelled"}
BACK = {"requeued:retry", "requeued:crash", "requeued:stale", "aborted:shutdown", "returned"}


@dataclass
class Chaos:
    """The kills, and what was seen between them."""

    fleet: Fleet
    nodes: list[Member]
    dice: random.Random
    quiet: float
    done: Counter[str] = field(default_factory=Counter)
    down: dict[int, float] = field(default_factory=dict)  # node -> when it is started again

    def step(self) -> None:
        """One act, chosen by the dice, and a rest."""
        self._start_again()
        act = self.dice.choices(["worker", "node", "restart", "kill"], [20, 3, 1, 1])[0]
        match act:
            case "worker":
                self._kill_a_worker()
            case "node" if len(self.down) < len(self.nodes) - 1:
                number = self.dice.choice([n for n in range(len(self.nodes)) if n not in self.down])
                self.nodes[number].kill()
                self.down[number] = time.monotonic() + self.dice.choice([0.0, 0.0, 12.0])
                self.done["nodes killed"] += 1
            case "restart":
                self.fleet.server.restart()
                self.done["servers restarted"] += 1
            case "kill":
                self.fleet.server.kill()
                self.fleet.server.start()
                self.done["servers killed"] += 1
        time.sleep(self.dice.uniform(0, 2 * self.quiet))

    def _start_again(self, *, all_of_them: bool = False) -> None:
        for number, at in [*self.down.items()]:
            if all_of_them or time.monotonic() >= at:
                self.nodes[number].start_process()
                del self.down[number]

    def _kill_a_worker(self) -> None:
        busy = "EXISTS (SELECT 1 FROM ostler.jobs j WHERE j.status = 'processing' AND j.node = h.node AND j.worker = h.component)"
        pids = self.fleet.rows(
            f"SELECT pid FROM ostler.health h WHERE status = 'healthy' AND pid IS NOT NULL AND {busy}"
        )
        if pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.dice.choice(pids)["pid"], signal.SIGKILL)
                self.done["workers killed"] += 1

    def over(self) -> None:
        self._start_again(all_of_them=True)

    def look(self) -> None:
        """What holds at every moment: no limit is exceeded."""
        narrow = "SELECT count(*) FROM ostler.jobs WHERE status = 'processing' AND queue = 'narrow'"
        keys = "SELECT coalesce(max(n), 0) FROM (SELECT count(*) AS n FROM ostler.jobs WHERE status = 'processing' AND queue = 'keys' GROUP BY limit_key) AS k"
        with contextlib.suppress(psycopg.OperationalError):
            assert self.fleet.one(narrow) <= 3
            assert self.fleet.one(keys) <= 2
            self.done["looks"] += 1


def run(fleet: Fleet, tmp_path: Path, *, numbers: int, quiet: float, patience: float) -> dict[str, Any]:
    intervals = tmp_path / "intervals"
    intervals.mkdir()
    env = {
        "OSTLER_HEARTBEAT_INTERVAL": "1",
        "OSTLER_NODE_LEASE": "8",
        "FLOCK": str(intervals),
        "OSTLER_LOG_LEVEL": "warning",
    }
    began = time.monotonic()
    nodes = fleet.nodes(3, *POOLS, app=FLOCK, **env)
    ledgers = [tmp_path / f"ledger{n}" for n in range(2)]
    path = os.pathsep.join([str(ROOT.parent), os.environ.get("PYTHONPATH", "")])
    producers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.nodes.producing", str(ledger), str(n * numbers), str(numbers // 2)],
            env={**os.environ, "OSTLER_STORE": fleet.url, "PYTHONPATH": path, "OSTLER_STORE_PATIENCE": "60"},
            cwd=tmp_path,
        )
        for n, ledger in enumerate(ledgers)
    ]
    chaos = Chaos(fleet, nodes, random.Random(int(os.environ.get("OSTLER_DICE", "5"))), quiet)
    left = "SELECT count(*) FROM ostler.jobs WHERE status IN ('queued', 'processing')"
    deadline = time.monotonic() + patience
    try:
        while True:
            chaos.step()
            chaos.look()
            with contextlib.suppress(psycopg.OperationalError):
                if all(p.poll() is not None for p in producers) and fleet.one(left) < 100:
                    break
            assert time.monotonic() < deadline, f"{chaos.done}\n{fleet.logs()}"
        chaos.over()
        assert [p.wait() for p in producers] == [0, 0]
        fleet.until(lambda: fleet.one(left) == 0, "all jobs to end", patience=max(60.0, deadline - time.monotonic()))
    finally:
        for producer in producers:
            if producer.poll() is None:
                producer.kill()
                producer.wait()
    took = time.monotonic() - began
    found = check(fleet, [json.loads(line) for ledger in ledgers for line in ledger.read_text().splitlines()])
    check_intervals(intervals)
    return {**found, **chaos.done, "seconds": round(took, 1), "jobs/s": round(found["jobs"] / took)}


# ---- what must hold at the end


def check(fleet: Fleet, ledger: list[list[Any]]) -> dict[str, Any]:
    jobs = fleet.rows(
        "SELECT id, task, status, args, result, error, seq, attempt, batch, chain, unique_key, created_at, finished_at FROM ostler.jobs ORDER BY id"
    )
    wrong = [j for j in jobs if j["status"] != ("failed" if j["task"] == "wrong" else "done")]
    assert not wrong, wrong[:5]
    check_numbers(jobs, ledger)
    check_timelines(fleet, jobs)
    check_depths(fleet)
    check_flows(fleet, jobs, ledger)
    check_unique(jobs)
    check_rate(fleet)
    events = fleet.rows("SELECT name, count(*) AS n FROM ostler.timeline GROUP BY name ORDER BY name")
    doubts = sum(1 for *_, outcome in ledger if outcome == "doubt")
    return {"jobs": len(jobs), "doubts": doubts, "events": {row["name"]: row["n"] for row in events}}


def check_numbers(jobs: list[dict[str, Any]], ledger: list[list[Any]]) -> None:
    """What was acknowledged is there once, what is in doubt at most once."""
    stored = Counter(json.loads(j["args"])["n"] for j in jobs if j["task"] in ("plain", "told"))
    assert max(stored.values()) == 1, "an enqueue was stored twice"
    sure, doubtful = set[int](), set[int]()
    for kind, number, size, outcome in ledger:
        if kind in ("some", "one", "told", "batch"):
            (sure if outcome == "ok" else doubtful).update(range(number, number + size))
    assert not sure - stored.keys(), "an acknowledged job is lost"
    assert not stored.keys() - sure - doubtful, "a job was stored that nobody knows of"


def check_timelines(fleet: Fleet, jobs: list[dict[str, Any]]) -> None:
    """No gap, one end, and it is the last; each run begins after the one before it has ended."""
    timelines: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for row in fleet.rows("SELECT job, seq, name FROM ostler.timeline ORDER BY job, seq"):
        timelines[row["job"]].append((row["seq"], row["name"]))
    for job in jobs:
        events = timelines.pop(job["id"])
        told = f"job {job['id']} {job['task']}: {events}"
        assert [seq for seq, _ in events] == list(range(1, job["seq"] + 1)), told
        names = [name for _, name in events if name not in ("progress", "half", "begun")]
        assert names[0] == "created" and names[-1] == job["status"], told
        assert sum(name in ENDS for name in names) == 1, told
        runs = names[1:-1]
        assert runs[0::2] == ["processing"] * (len(runs) // 2 + 1) and set(runs[1::2]) <= BACK, told
    assert not timelines


def check_depths(fleet: Fleet) -> None:
    counted = "SELECT queue, status, count(*) AS n FROM ostler.jobs WHERE status <> 'done' GROUP BY 1, 2 ORDER BY 1, 2"
    kept = "SELECT queue, status, sum(n)::bigint AS n FROM ostler.depths GROUP BY 1, 2 HAVING sum(n) <> 0 ORDER BY 1, 2"
    assert fleet.rows(kept) == fleet.rows(counted)


def check_flows(fleet: Fleet, jobs: list[dict[str, Any]], ledger: list[list[Any]]) -> None:
    """Every batch has called back once, every chain has gone on step by step to its end."""
    outcomes = Counter((kind, outcome) for kind, *_, outcome in ledger)
    batches = fleet.rows("SELECT id, total, pending, failed, callback_job FROM ostler.batches")
    assert outcomes["batch", "ok"] <= len(batches) <= outcomes["batch", "ok"] + outcomes["batch", "doubt"]
    assert all((b["total"], b["pending"], b["failed"]) == (producing.BATCH, 0, 0) for b in batches)
    reports = [json.loads(j["args"])["summary"]["batch"] for j in jobs if j["task"] == "report"]
    assert sorted(reports) == sorted(b["id"] for b in batches)
    assert {j["id"] for j in jobs if j["task"] == "report"} == {b["callback_job"] for b in batches}
    chains: dict[int, list[int]] = defaultdict(list)
    for job in jobs:
        if job["chain"] is not None:
            chains[job["chain"]].append(int(job["result"]))
    assert outcomes["chain", "ok"] <= len(chains) <= outcomes["chain", "ok"] + outcomes["chain", "doubt"]
    for first, results in chains.items():
        assert results == list(range(results[0], results[0] + producing.CHAIN)), f"chain {first}: {results}"


def check_unique(jobs: list[dict[str, Any]]) -> None:
    """Of one key there is never a second job before the first has ended."""
    keyed: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for job in jobs:
        if job["unique_key"] is not None:
            keyed[job["unique_key"]].append(job)
    for same in keyed.values():
        for one, following in zip(same, same[1:], strict=False):
            assert following["created_at"] >= one["finished_at"], (one, following)


def check_rate(fleet: Fleet) -> None:
    """No window has more claims than the rate and what may be saved up allow."""
    at = "SELECT e.at FROM ostler.timeline e JOIN ostler.jobs j ON j.id = e.job WHERE j.queue = 'paced' AND e.name = 'processing' ORDER BY 1"
    times = [row["at"] / 1000 for row in fleet.rows(at)]
    for first in range(0, len(times), 7):
        for last in range(first, len(times), 7):
            assert last - first + 1 <= 40 + 40 * (times[last] - times[first]) + 1


def check_intervals(folder: Path) -> None:
    """As the jobs themselves have seen it: so many of a queue or key at once, and no more."""
    moments: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for file in folder.iterdir():
        for line in file.read_text().splitlines():
            _, _, kind, began, ended = line.split()
            if kind != "paced":
                moments[kind] += [(float(began), 1), (float(ended), -1)]
    assert moments["narrow"]
    for kind, changes in moments.items():
        now = most = 0
        for _, change in sorted(changes):
            now += change
            most = max(most, now)
        assert most <= (3 if kind == "narrow" else 2), f"{kind}: {most} at once"


# ---- the tests


@pytest.mark.timeout(300)
def test_a_few_thousand_jobs_survive_kills_of_workers_nodes_and_the_server(fleet: Fleet, tmp_path: Path) -> None:
    found = run(fleet, tmp_path, numbers=3000, quiet=0.7, patience=240)
    print(json.dumps(found))
    assert found["jobs"] > 3000
    assert found["workers killed"] >= 3, found


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_fifty_thousand_jobs_survive_kills_of_workers_nodes_and_the_server(fleet: Fleet, tmp_path: Path) -> None:
    found = run(fleet, tmp_path, numbers=50_000, quiet=2.0, patience=3600)
    print(json.dumps(found, indent=1))
    assert found["jobs"] >= 50_000
