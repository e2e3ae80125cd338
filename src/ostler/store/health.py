"""Health of the node and its workers: seed 001's HealthOperations, in one place.

The supervisor is the only caller of the writing verbs. Each names the generation that it speaks of; a write of an
older generation finds no row and returns False, so a ghost never overwrites its successor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ostler.store.database import Database
from ostler.store.rows import ExitRow


class Health:
    """The health rows of one node (and, for reading, of all)."""

    def __init__(self, db: Database) -> None:
        self._db = db

    # ---- writing, one generation at a time

    def register(self, node: str, component: str, pool: str | None, now: int, key: str | None = None) -> None:
        """Make sure that the row exists before anything is spawned; counters of an earlier run stay."""
        self._db.run("register", node=node, component=component, pool=pool, now=now, key=key)

    def mark_starting(
        self,
        node: str,
        component: str,
        generation: int,
        pid: int | None,
        pid_start: int | None,
        now: int,
        metadata: dict[str, Any] | None = None,
    ) -> bool:
        """A process was spawned. Refused unless the generation is newer than the row's."""
        return bool(
            self._db.run(
                "mark_starting",
                node=node,
                component=component,
                generation=generation,
                pid=pid,
                pid_start=pid_start,
                now=now,
                metadata=_text(metadata),
            )
        )

    def mark(self, node: str, component: str, generation: int, status: str, now: int) -> bool:
        """Set the status alone; False when the row has a newer generation."""
        return bool(self._db.run("mark", node=node, component=component, generation=generation, status=status, now=now))

    def mark_waiting(self, node: str, component: str, generation: int, why: str | None) -> bool:
        """Why a stopped worker is not started, in the row's metadata as `waiting_for`; None: it waits for nothing."""
        values = {"node": node, "component": component, "generation": generation, "why": why}
        return bool(self._db.run("mark_waiting", **values))

    def mark_stopped(self, node: str, exit_: ExitRow, exit_code: int | None) -> bool:
        """It ended because it was asked to, or cleanly by itself."""
        return self._ended(node, exit_, exit_code, "stopped")

    def mark_crashed(self, node: str, exit_: ExitRow, exit_code: int | None) -> bool:
        """It ended unasked: kept with reason, code, signal, last log lines and peak memory, and counted where it counts."""
        with self._db.transaction():
            held, new = self._ended_inside(node, exit_, exit_code, "crashed")
            if new and exit_.counted:
                self._db.run(
                    "increment_restart_count",
                    node=node,
                    component=exit_.component,
                    generation=exit_.generation,
                    now=exit_.at,
                )
        return held

    def _ended(self, node: str, exit_: ExitRow, exit_code: int | None, status: str) -> bool:
        with self._db.transaction():
            return self._ended_inside(node, exit_, exit_code, status)[0]

    def _ended_inside(self, node: str, exit_: ExitRow, exit_code: int | None, status: str) -> tuple[bool, bool]:
        """(whether the row is still this generation's, whether the end was not known yet)."""
        metadata = {
            "signal": exit_.signal,
            "peak_rss_mb": exit_.peak_rss_mb,
            "log": exit_.log,
            "at": exit_.at,
            "item": exit_.item,
        }
        held = self._db.run(
            "mark_ended",
            node=node,
            component=exit_.component,
            generation=exit_.generation,
            status=status,
            exit_code=exit_code,
            exit_reason=exit_.reason,
            metadata=_text(metadata),
        )
        return bool(held), bool(held) and self.add_exit(node, exit_)

    def add_exit(self, node: str, exit_: ExitRow) -> bool:
        """Keep an end in the history, without touching the row; False when it is there already."""
        return bool(
            self._db.run(
                "add_exit",
                node=node,
                component=exit_.component,
                generation=exit_.generation,
                at=exit_.at,
                reason=exit_.reason,
                code=exit_.code,
                signal=exit_.signal,
                kind=exit_.kind,
                peak_rss_mb=exit_.peak_rss_mb,
                counted=int(exit_.counted),
                item=exit_.item,
                log=json.dumps(exit_.log),
            )
        )

    def end_streak(self, node: str, component: str, generation: int) -> None:
        """It was healthy long enough: the next crash waits one second again."""
        self._db.run("end_streak", node=node, component=component, generation=generation)

    def forgive(self, node: str, component: str, generation: int) -> None:
        """It finished something: the crash streak ends and no crash in the window counts any more. The lifetime count stays."""
        with self._db.transaction():
            if self._db.run("end_streak", node=node, component=component, generation=generation):
                self._db.run("forgive_crashes", node=node, component=component)

    def update_heartbeats(self, node: str, beats: list[tuple[str, int, int, float | None]]) -> int:
        """All beats of the node in one statement: (component, generation, at, rss_mb). Returns how many rows took one."""
        return len(self._db.run("heartbeats", node=node, batch=json.dumps(beats)))

    def reset_restart_count(self, node: str, component: str) -> bool:
        """Forget the crashes; a failed or crashed worker becomes `stopped`. Starts nothing."""
        with self._db.transaction():
            self._db.run("forget_exits", node=node, component=component)
            return bool(self._db.run("reset_restart_count", node=node, component=component))

    def remove(self, node: str, component: str) -> None:
        """Drop the row of a slot that the configuration no longer has."""
        self._db.run("remove_component", node=node, component=component)

    def prune(self, before: int) -> None:
        """Drop exit records older than `before`."""
        self._db.run("prune_exits", before=before)

    # ---- reading

    def get_component(self, node: str, component: str) -> dict[str, Any] | None:
        rows = self._db.run("component", node=node, component=component)
        return _health(rows[0]) if rows else None

    def get_all_workers(self, node: str | None = None) -> list[dict[str, Any]]:
        """Worker rows of one node or of all."""
        return sorted(
            (_health(r) for r in self._db.run("workers", node=node)),
            key=lambda w: (w["node"], w["pool"], _number(w["component"])),
        )

    def served(self, since: int) -> frozenset[str]:
        """The pools that a running node has workers for; a node runs when its heartbeat is newer than `since`."""
        return frozenset(str(row["pool"]) for row in self._db.run("served_pools", since=since))

    def counted_exits(self, node: str, component: str, since: int) -> list[tuple[int, str]]:
        """(at, kind) of the exits since then that no reset has forgotten, oldest first."""
        return [
            (r["at"], r["kind"]) for r in self._db.run("counted_exits", node=node, component=component, since=since)
        ]

    def exits(self, node: str, component: str, limit: int = 20) -> list[dict[str, Any]]:
        """The newest exit records of one worker."""
        return [
            {**dict(r), "counted": bool(r["counted"]), "log": json.loads(r["log"] or "[]")}
            for r in self._db.run("exits", node=node, component=component, limit=limit)
        ]


class Meta:
    """Small facts that outlive a node: `worker_enabled`, `pool_paused:{pool}`. What is set survives a power cut."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def get(self, key: str) -> str | None:
        rows = self._db.run("meta_get", key=key)
        return str(rows[0]["value"]) if rows else None

    def set(self, key: str, value: str) -> None:
        with self._db.synced():
            self._db.run("meta_set", key=key, value=value)

    def set_pauses(self, flags: Mapping[str, str], *, resume_all: bool = False) -> None:
        """Set flags of pauses, of all nodes, and wake them. `resume_all` also ends the pauses of single pools."""
        with self._db.synced(), self._db.transaction():
            paused = self.pauses()[1] if resume_all else ()
            for key, value in {**{f"pool_paused:{pool}": "false" for pool in paused}, **flags}.items():
                self._db.run("meta_set", key=key, value=value)
            if self._db.shared:  # else there is one node, which does this itself
                self._db.ring_all()

    def once(self, key: str, value: str) -> str:
        """What the key has, or the value, which it has from then on. Of two who ask at once, both get the same."""
        with self._db.synced(), self._db.transaction():
            self._db.lock([f"meta:{key}"])
            found = self.get(key)
            if found is None:
                self._db.run("meta_set", key=key, value=value)
            return found or value

    def delete(self, key: str) -> None:
        with self._db.synced():
            self._db.run("meta_delete", key=key)

    def pauses(self) -> tuple[bool, frozenset[str]]:
        """(worker_enabled, the paused pools)."""
        flags = {str(r["key"]): str(r["value"]) for r in self._db.run("meta_like")}
        pools = frozenset(
            k.removeprefix("pool_paused:") for k, v in flags.items() if k != "worker_enabled" and v == "true"
        )
        return flags.get("worker_enabled", "true") == "true", pools


def _number(component: str) -> int:
    return int(component.rpartition(":")[2])


def _health(row: Any) -> dict[str, Any]:
    return {**dict(row), "metadata": json.loads(row["metadata"]) if row["metadata"] else None}


def _text(value: dict[str, Any] | None) -> str | None:
    return None if value is None else json.dumps(value)
