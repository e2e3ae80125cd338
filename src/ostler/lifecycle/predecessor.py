"""Nodes that died without a stop: what they left running is ended, and their jobs are requeued.

A node is recognised by pid and start time on the same boot of the machine, never by its name alone: names and pids are
used again.
"""

from __future__ import annotations

import os
from typing import Any

from ostler.lifecycle import family
from ostler.store import now_ms
from ostler.store.store import Store
from ostler.store.sweep import recover_dead_nodes


def recover(store: Store, stale_after: float | None = None, own: str | None = None) -> list[int]:
    """Recover what dead nodes left; the ids of the requeued jobs.

    At a start, every node whose process is not found here is dead. Later (`own` is this node's name), one on another machine
    or boot is dead when it was not heard for `stale_after` seconds.
    """
    heard = now_ms() - int((stale_after or 0.0) * 1000)

    def alive(row: dict[str, Any]) -> bool:
        return _is_alive(row) or (own is not None and (row["node"] == own or row["last_heartbeat"] > heard))

    return recover_dead_nodes(store, now_ms(), alive, _end)


def _is_alive(row: dict[str, Any]) -> bool:
    same_boot = (row["metadata"] or {}).get("boot_id") == family.boot_id()
    return same_boot and row["pid"] != os.getpid() and family.is_alive(row["pid"], row["pid_start"])


def _end(node: dict[str, Any], workers: list[dict[str, Any]]) -> int:
    metadata = node["metadata"] or {}
    if metadata.get("boot_id") != family.boot_id():
        return 0  # another boot of the machine: nothing of it can be alive
    roots = [w["pid"] for w in workers if family.is_alive(w["pid"], w["pid_start"])]
    return family.kill(f"{metadata['token']}/" if metadata.get("token") else "\0", roots)
