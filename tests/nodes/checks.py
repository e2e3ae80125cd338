"""What must hold of jobs that many nodes have run, however the nodes fared."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tests.nodes import producing
from tests.nodes.fleet import Fleet

ENDS = {"done", "failed", "cancelled"}
BACK = {"requeued:retry", "requeued:crash", "requeued:stale", "aborted:shutdown", "aborted:killed", "returned"}


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


def check_intervals(folder: Path) -> dict[str, int]:
    """As the jobs themselves have seen it: so many of a queue or key at once, and no more."""
    moments: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for file in folder.iterdir():
        for line in file.read_text().splitlines():
            _, _, kind, began, ended = line.split()
            if kind != "paced":
                moments[kind] += [(float(began), 1), (float(ended), -1)]
    assert moments["narrow"]
    found = {}
    for kind, changes in moments.items():
        now = most = 0
        for _, change in sorted(changes):
            now += change
            most = max(most, now)
        assert most <= (3 if kind == "narrow" else 2), f"{kind}: {most} at once"
        found[kind] = most
    return found
