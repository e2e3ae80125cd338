"""Upkeep that any node may run at any time: guarded, idempotent, so nobody is leader.

At a start it also ends what a dead predecessor left behind. A predecessor is recognised by pid and start time on the
same boot of the machine, never by its name alone, because names and pids are used again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ostler.store.rows import ExitRow
from ostler.store.store import Store

log = logging.getLogger("ostler.store")

_LIVE = ("starting", "healthy", "draining", "stopping")


def recover_dead_nodes(
    store: Store,
    now: int,
    is_alive: Callable[[dict[str, Any]], bool],
    end: Callable[[dict[str, Any], list[dict[str, Any]]], int],
) -> list[int]:
    """For each node that is not alive: end its processes, mark its workers stopped, send its jobs back. Returns the jobs.

    `is_alive` and `end` are the caller's eyes and hands: the store knows no processes.
    """
    jobs: list[int] = []
    for node in store.health.get_nodes():
        if is_alive(node):
            continue
        workers = [w for w in store.health.get_all_workers(node["node"]) if w["status"] in _LIVE]
        if node["status"] in _LIVE or workers:
            left = end(node, workers)
            log.warning(
                "node %s (pid %s) had died without a stop; %d processes of its were ended",
                node["node"],
                node["pid"],
                left,
            )
        for row in [*workers, *([node] if node["status"] in _LIVE else [])]:
            gone = ExitRow(row["component"], row["generation"], now, "node-died", "asked")
            store.health.mark_stopped(node["node"], gone, None)
        back = store.jobs.recover(node["node"], now, "its node died")
        if back:
            log.warning("%d jobs of node %s are back in the queue", len(back), node["node"])
        jobs += back
    return jobs
