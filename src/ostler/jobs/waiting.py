"""Why a queued job does not run yet, and when a cancelled one is stopped: one answer for the API, the CLI and the job's page.

`gather` reads the facts, `reason` decides. Pure but for the reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ostler.lifecycle import ends
from ostler.store.limits import QueueLimit, next_token
from ostler.store.store import Store

_MOST = 1000  # jobs before it that are counted


@dataclass(frozen=True, slots=True)
class Facts:
    """What decides when a queued job runs. `workers` are those of its queue's pool on running nodes, by status."""

    now: int
    queue: str
    nodes: int
    paused: bool
    workers: Mapping[str, int]
    paused_all: bool = False
    run_at: int | None = None
    task: str | None = None  # the task, where no running node declares it
    held: str | None = None  # by backpressure, because of
    running: int = 0  # jobs of the queue
    at_once: int | None = None
    key: str | None = None  # its limit key, how many of that run, and how many may
    key_running: int = 0
    key_most: int = 0
    next_token: int | None = None  # when the queue's rate allows the next job
    ahead: int = 0
    where: str = ""  # the store, in words
    crash: str | None = None  # how its last worker ended, where none is ready
    memory: str | None = None  # what a stopped worker waits for, or why it can have no memory


def reason(f: Facts) -> dict[str, Any]:
    """The first thing that holds it: `reason` for programs, `text` for people, and the figures behind them."""
    if f.run_at is not None and f.run_at > f.now:
        wait = (f.run_at - f.now) / 1000
        return _because("scheduled", f"it is scheduled to run in {wait:.0f} s", until=f.run_at)
    if not f.nodes:
        return _because("no_node", f"no node is running{f.where and f' {f.where}'}; start one with 'ostler up'")
    if f.task is not None:
        text = (
            f"no running node declares task {f.task!r}. A node runs the code that it was started with: if the task is new, restart the node "
            "(or run it with 'ostler up --reload'). Otherwise deploy an app that has it, or cancel the job"
        )
        return _because("no_task", text)
    if not f.workers:
        text = f"no running node has workers for queue {f.queue!r}; start a node with --pool {f.queue}=2, or, if the queue is new, restart the node"
        return _because("no_worker", text)
    if f.paused_all:
        return _because("paused", "all pools are paused; to resume: ostler resume")
    if f.paused:
        return _because("paused", f"pool {f.queue} is paused; to resume: ostler resume {f.queue}")
    if able := f.workers.get("healthy", 0):
        return _in_line(f, able)
    if f.workers.get("starting") or f.workers.get("crashed"):
        why = f": {f.crash}. They are restarted" if f.crash else " yet; they are being started"
        return _because("starting", f"no worker of pool {f.queue} is ready{why}")
    if f.memory:
        return _because("memory", f"pool {f.queue} has no running worker; the next one {f.memory}")
    if f.workers.get("failed"):
        return _because(
            "failed", f"the workers of pool {f.queue} have failed; check their logs, then run: ostler restart {f.queue}"
        )
    return _because("stopped", f"the workers of pool {f.queue} are stopped; to start them: ostler resume {f.queue}")


def _in_line(f: Facts, able: int) -> dict[str, Any]:
    if f.held:
        return _because("backpressure", f"queue {f.queue} is held: {f.held}")
    if f.key is not None and f.key_running >= f.key_most:
        text = f"{f.key_running} of at most {f.key_most} jobs with limit key {f.key!r} are running"
        return _because("limit", text, running=f.key_running, most=f.key_most)
    if f.at_once is not None and f.running >= f.at_once:
        text = f"{f.running} of at most {f.at_once} jobs of queue {f.queue} are running"
        return _because("limit", text, running=f.running, most=f.at_once)
    if f.next_token is not None and f.next_token > f.now:
        text = (
            f"the rate of queue {f.queue} is reached; the next job may begin in {(f.next_token - f.now) / 1000:.1f} s"
        )
        return _because("rate", text, until=f.next_token)
    if not f.ahead:
        return _because("next", f"it is next: one of {able} workers takes it as soon as it is free", ahead=0)
    count = f"more than {_MOST}" if f.ahead > _MOST else str(f.ahead)
    jobs = "job is" if f.ahead == 1 else "jobs are"
    return _because("line", f"{count} {jobs} ahead of it", ahead=f.ahead)


def _because(code: str, text: str, **more: Any) -> dict[str, Any]:
    return {"reason": code, "text": text, **more}


def leaving(job: Mapping[str, Any], now: int, grace: float) -> dict[str, Any] | None:
    """When a running job that was cancelled is stopped; None for others. `job` is its view, with the newest events."""
    if job["status"] != "processing" or not job["cancel_requested"]:
        return None
    asked = [event["at"] for event in job["events"] if event["name"] == "cancel:requested"]
    until = asked[-1] + round(grace * 1000) if asked else now
    left = (until - now) / 1000
    text = f"it was asked to stop, and is killed in {left:.0f} s unless it ends first (cancel_grace)"
    return _because("cancelling", text if left > 0 else "it did not stop when asked, and is being killed", until=until)


def explain(
    store: Store,
    job: int,
    now: int,
    *,
    limits: Mapping[str, QueueLimit] | None = None,
    held: Mapping[str, str] | None = None,
    nobody: bool = False,
    where: str = "",
) -> dict[str, Any] | None:
    """Why the job waits; None when it is not queued. `limits` and `held` are known to a running node alone.

    `nobody`: no node runs, whatever the heartbeats say. `where`: the store, in words.
    """
    found = store.jobs.standing(job, _MOST)
    if found is None:
        return None
    queue = found["queue"]
    enabled, paused = store.meta.pauses()
    alive = set() if nobody else {n["id"] for n in store.nodes.alive()}
    workers: dict[str, int] = {}
    memory: str | None = None
    pool = [w for w in store.health.get_all_workers() if w["pool"] == queue and w["node"] in alive]
    for worker in pool:
        workers[worker["status"]] = workers.get(worker["status"], 0) + 1
        if worker["status"] == "stopped":
            memory = memory or (worker["metadata"] or {}).get("waiting_for")
    limit = (limits or {}).get(queue, QueueLimit())
    return reason(
        Facts(
            now=now,
            queue=queue,
            nodes=len(alive),
            paused=queue in paused,
            paused_all=not enabled,
            workers=workers,
            run_at=found["run_at"] if found["later"] == 1 else None,
            task=None if alive & store.nodes.declaring(found["task"]) else found["task"],
            held=(held or {}).get(queue),
            running=found["running_queue"],
            at_once=limit.at_once,
            key=found["limit_key"],
            key_running=found["running_key"],
            key_most=found["limit_max"] or 0,
            next_token=next_token(store.db, queue, limit, now) if limit.rate else None,
            ahead=found["ahead"],
            memory=memory,
            crash=None if "healthy" in workers else _last_crash(store, pool),
            where=where,
        )
    )


def _last_crash(store: Store, pool: list[dict[str, Any]]) -> str | None:
    """How the worker of the pool that crashed last ended, if it has not been ready since."""
    for worker in (w for w in pool if w["status"] in ("crashed", "starting") and w["exit_code"] is not None):
        for end in store.health.exits(worker["node"], worker["component"], 1):
            if end["kind"] == "crash":
                return f"{worker['component']} {ends.told(end['reason'], end['code'], end['signal'], end['log'])}"
    return None
