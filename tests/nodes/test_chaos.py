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
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.harness import ROOT
from tests.nodes.checks import check, check_intervals
from tests.nodes.fleet import FLOCK, Fleet, Member

FAR = 10_000_000  # between the numbers of two producers
ACTS = ["worker"] * 4 + ["node", "node", "restart", "kill"]
"""What is done to each fleet at least, whatever the dice say."""
POOLS = ("--pool", "work=2", "--pool", "narrow=2", "--pool", "paced=1", "--pool", "keys=2")


@dataclass
class Chaos:
    """The kills, and what was seen between them."""

    fleet: Fleet
    nodes: list[Member]
    dice: random.Random
    quiet: float
    done: Counter[str] = field(default_factory=Counter)
    down: dict[int, float] = field(default_factory=dict)  # node -> when it is started again
    due: list[str] = field(default_factory=lambda: [*ACTS])

    def step(self) -> None:
        """One act, chosen by the dice, and a rest. Those that are due come first, in any order."""
        self._start_again()
        if self.due:
            act = self.due.pop(self.dice.randrange(len(self.due)))
        else:
            act = self.dice.choices(["worker", "node", "restart", "kill"], [20, 3, 1, 1])[0]
        match act:
            case "worker":
                if not self._kill_a_worker():
                    self.due.append(act)  # none was busy at that moment
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

    def _kill_a_worker(self) -> bool:
        busy = "EXISTS (SELECT 1 FROM ostler.jobs j WHERE j.status = 'processing' AND j.node = h.node AND j.worker = h.component)"
        pids = self.fleet.rows(
            f"SELECT pid FROM ostler.health h WHERE status = 'healthy' AND pid IS NOT NULL AND {busy}"
        )
        if pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.dice.choice(pids)["pid"], signal.SIGKILL)
                self.done["workers killed"] += 1
                return True
        return False

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
    ledgers, enough = [tmp_path / f"ledger{n}" for n in range(2)], tmp_path / "enough"
    path = os.pathsep.join([str(ROOT.parent), os.environ.get("PYTHONPATH", "")])
    producers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.nodes.producing", ledger, str(n * FAR), str(numbers // 2), enough],
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
            if not chaos.due:
                enough.touch()
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
    done = chaos.done
    assert done["workers killed"] >= 4 and done["nodes killed"] >= 2, done
    assert done["servers restarted"] and done["servers killed"], done
    return {**found, **done, "seconds": round(took, 1), "jobs/s": round(found["jobs"] / took)}


# ---- the tests


@pytest.mark.timeout(300)
def test_a_few_thousand_jobs_survive_kills_of_workers_nodes_and_the_server(fleet: Fleet, tmp_path: Path) -> None:
    found = run(fleet, tmp_path, numbers=1500, quiet=0.7, patience=240)
    print(json.dumps(found))
    assert found["jobs"] > 1500


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_fifty_thousand_jobs_survive_kills_of_workers_nodes_and_the_server(fleet: Fleet, tmp_path: Path) -> None:
    found = run(fleet, tmp_path, numbers=50_000, quiet=2.0, patience=3600)
    print(json.dumps(found, indent=1))
    assert found["jobs"] >= 50_000
