"""Nodes that have ended without giving back what they had: what still runs of them here is ended, and their jobs are requeued."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ostler.lifecycle import family
from ostler.store.nodes import NodeRow
from ostler.store.store import Store

log = logging.getLogger("ostler.lifecycle")


def recover(
    store: Store, member: NodeRow, judge: Callable[[int], bool] = lambda _: False, since: int | None = None
) -> list[int]:
    """Declare dead who is dead, and release what ended nodes left; the ids of the requeued jobs.

    A node is dead when its heartbeat is older than its lease by the store's clock, or when it used the data directory whose lock we
    hold before we began (`since`); never because its pid is not found here. Unless `judge(now)`, nobody is declared dead for its heartbeat.
    """
    for node in store.nodes.declare_dead(member.id, member.home or "", judge, since):
        log.warning("node %s is dead: its last heartbeat was %s ms ago", node["id"], store.now() - node["beat_at"])
    jobs: list[int] = []
    for node in store.nodes.unreleased():
        if node["home"] in (None, member.home):
            _end(store, node)
        back = store.nodes.release(node)
        if back:
            log.warning("requeued %d jobs of node %s", len(back), node["id"])
        jobs += back
    return jobs


def end_leftovers(store: Store, member: NodeRow) -> None:
    """End what the last node of this data directory has left running, also when another node has released its jobs long ago."""
    before = [n for n in store.nodes.all() if n["home"] == member.home and n["id"] != member.id and n["released"]]
    if before:
        _end(store, max(before, key=lambda node: int(node["started_at"])))


def _end(store: Store, node: dict[str, Any]) -> None:
    """End the processes that a node of our own data directory has left. On another boot of the machine there are none."""
    if node["boot_id"] != family.boot_id():
        return
    workers = store.health.get_all_workers(node["id"])
    roots = [w["pid"] for w in workers if family.is_alive(w["pid"], w["pid_start"])]
    if left := family.kill(f"{node['token']}/" if node["token"] else "\0", roots):
        log.warning("node %s (pid %s) had died; killed %d processes that it left behind", node["id"], node["pid"], left)
