"""Nodes in the store: who lives, what its app declares, what ended nodes leave behind, and what operators want of them.

A node is one start of `ostler up`. Its id is made anew each time and holds its name, which is for people. It lives while its row
says so; its beat renews that, and any other node declares it dead when the beat is older than its lease by the store's clock.
From then on nothing that it writes is taken: every turn and every beat finds the row alive, or is refused with `NodeLost`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ostler.store import limits, sessions
from ostler.store.database import Database
from ostler.store.identity import LIVE, lost_node

_AWAY_MS = 24 * 3600 * 1000  # a schedule that nobody declares is kept for so long after its time: its app may come back


@dataclass(frozen=True, slots=True)
class NodeRow:
    """What a node says of itself when it starts."""

    id: str
    name: str
    lease_ms: int
    host: str | None = None
    home: str | None = None
    boot_id: str | None = None
    pid: int | None = None
    pid_start: int | None = None
    token: str | None = None
    url: str | None = None
    version: str | None = None


class Nodes:
    """The nodes of this store."""

    def __init__(
        self,
        db: Database,
        recover: Callable[[str, int, str], list[int]],
        end_sessions: Callable[[str, str, str], list[sessions.Lost]],
    ) -> None:
        self._db, self._recover, self._end_sessions = db, recover, end_sessions

    # ---- the life of a node

    def register(self, node: NodeRow) -> None:
        """A node starts. It takes over the history of its predecessor, the last one of its name that has ended: failed workers
        stay failed. Of two that start at once one gets it.
        """
        with self._db.transaction():
            self._db.run("node_register", **asdict(node), now=self._db.now())
            for row in self._db.run("predecessor", id=node.id, name=node.name, home=node.home):
                if self._db.run("inherit", id=row["id"], heir=node.id):
                    self._db.run("inherit_health", id=row["id"], heir=node.id)
                    self._db.run("inherit_exits", id=row["id"], heir=node.id)

    def beat(self, node: str) -> int:
        """The node lives; when, by the store's clock. Raises NodeLost when it was declared dead."""
        now = self._db.now()
        if not self._db.run("node_beat", id=node, now=now, skew=time.time_ns() // 1_000_000 - now):
            raise lost_node(node)
        return now

    def mark(self, node: str, status: str) -> bool:
        """It is healthy, or stopping; False when it was declared dead."""
        return bool(self._db.run("node_mark", id=node, status=status, now=self._db.now()))

    def end(self, node: str) -> list[int]:
        """It has stopped in order. What it still holds is released at once; the jobs."""
        self._db.run("node_end", id=node, now=self._db.now())
        rows = self._db.run("node", id=node)
        return self.release(dict(rows[0])) if rows and not rows[0]["released"] else []

    def all(self) -> list[dict[str, Any]]:
        """Every node that lives or ended not long ago, by name and age. `alive` is by the store's clock."""
        now = self._db.now()
        return [_node(row, now) for row in self._db.run("nodes")]

    def alive(self) -> list[dict[str, Any]]:
        """The nodes that live."""
        return [node for node in self.all() if node["alive"]]

    # ---- what ended nodes leave behind

    def declare_dead(
        self, own: str, home: str, judge: Callable[[int], bool] = lambda _: True, since: int | None = None
    ) -> list[dict[str, Any]]:
        """Nodes of our own data directory (we hold its lock), and where `judge(now)` those whose beat is older than their lease, are
        dead now. `since`: when we began. A node of our directory that started later runs on a copy of it, and lives.

        The time is taken before `judge` is asked: a statement that reaches the store only after an outage speaks of the time before.
        Who is writing at this moment is passed over.
        """
        now = self._db.now()
        since = now if since is None else since
        rows = self._db.run("declare_dead", id=own, home=home, now=now, since=since, judge=int(judge(now)))
        return [dict(row) for row in rows]

    def unreleased(self) -> list[dict[str, Any]]:
        """Nodes that have ended and whose jobs and workers are still theirs."""
        return [dict(row) for row in self._db.run("unreleased")]

    def release(self, node: Mapping[str, Any]) -> list[int]:
        """Requeue the jobs of a node that has ended, without blame, mark its workers stopped and end its sessions; the jobs. Idempotent,
        and done by one at a time: empty when another does it.
        """
        is_dead = node["status"] == "dead"
        why = "its node died" if is_dead else "its node has stopped"
        with self._db.transaction():
            if not self._db.try_lock(f"release:{node['id']}"):
                return []
            jobs = self._recover(node["id"], self._db.now(), why)
            self._db.run("workers_released", node=node["id"])
            self._end_sessions(node["id"], *(sessions.NODE_LOST if is_dead else sessions.NODE_STOPPED))
            self._db.run("node_released", id=node["id"])
        return jobs

    def forget(self, before: int) -> list[str]:
        """Delete the rows of nodes that ended before this time, with those of their workers that nobody took over."""
        with self._db.transaction():
            gone = [str(row["id"]) for row in self._db.run("forget_nodes", before=before)]
            for node in gone:
                self._db.run("forget_node_rows", id=node)
            self._db.run("forget_wishes", before=before)
        return gone

    def forget_one(self, node: str) -> bool:
        """Delete the row of one node that has ended; False while it has not, or when its jobs are not given back yet."""
        with self._db.transaction():
            gone = bool(self._db.run("forget_node", id=node))
            if gone:
                self._db.run("forget_node_rows", id=node)
        return gone

    def running(self) -> dict[str, int]:
        """How many jobs each node runs."""
        return {str(row["node"]): int(row["n"]) for row in self._db.run("running_by_node")}

    # ---- what apps declare

    def declare(self, node: str, tasks: Iterable[Mapping[str, Any]], schedules: Sequence[Mapping[str, Any]]) -> None:
        """Record what the node's app declares, so that every producer can check against it. What no living node declares any more
        is gone: it cannot be enqueued, and does not fire. A schedule that did not change keeps its next time, also when its app
        was away for less than a day: what it missed fires once.
        """
        tasks = list(tasks)
        with self._db.transaction():
            self._db.lock(["declare"])
            rows = [(node, "task", t["name"]) for t in tasks] + [(node, "schedule", s["name"]) for s in schedules]
            for task in tasks:
                self._db.run("declare_task", **task, now=self._db.now())
            for schedule in schedules:
                self._db.run("schedule_put", **{**schedule, "step": json.dumps(schedule["step"])})
            self._db.run("declared_clear", node=node)
            if rows:
                self._db.run_many("declared_put", rows)
            self._drop()

    def drop_undeclared(self) -> None:
        """Tasks and schedules that only ended nodes declared are gone."""
        with self._db.transaction():
            self._db.lock(["declare"])
            self._drop()

    def _drop(self) -> None:
        self._db.run("declared_drop")
        self._db.run("tasks_gone")
        self._db.run("schedules_gone", before=self._db.now() - _AWAY_MS)

    def declaring(self, task: str) -> set[str]:
        """The nodes that declare a task; some of them may have ended."""
        return {row["node"] for row in self._db.run("declares", name=task)}

    def strangers(self) -> bool:
        """Whether jobs wait at the head of a queue whose task no node declares: `park` would take them out of the line. Reads only."""
        return any(self._db.run("strangers", queue=row["queue"]) for row in self._db.run("task_queues"))

    def park(self) -> int:
        """Take a part of the jobs whose task is gone out of the line, and put those back whose task is there again; how many moved.

        They stay queued: nothing is lost while no node can run them. Tasks that no node has declared yet count as gone.
        """
        with self._db.transaction():
            for queue in self._db.run("task_queues"):
                for row in self._db.run("strangers", queue=queue["queue"]):
                    self._db.run("stranger_put", name=row["task"], queue=queue["queue"], now=self._db.now())
            rows = self._db.run("unpark")
            for task in self._db.run("gone_tasks"):
                rows += self._db.run("park", queue=task["queue"], task=task["name"])
            limits.put_heads(self._db, {(r["queue"], r["limit_key"]) for r in rows if r["limit_key"] is not None})
            if rows:
                self._db.ring({row["queue"] for row in rows})
        return len(rows)

    def unserved(self) -> list[dict[str, Any]]:
        """Queued jobs of tasks that no living node declares: task, queue and how many."""
        return [dict(row) for row in self._db.run("unserved")]

    # ---- what operators want

    def wish(self, node: str, verb: str, target: str) -> int:
        """Have a node do something to a worker or pool of its own; the wish's number, by which `answer` is asked."""
        with self._db.transaction():
            number = int(self._db.run("wish", node=node, verb=verb, target=target, now=self._db.now())[0]["id"])
            self._db.ring_all()
        return number

    def wishes(self, node: str) -> list[dict[str, Any]]:
        """What operators want of this node and it has not answered, oldest first."""
        return [dict(row) for row in self._db.run("wishes", node=node)]

    def grant(self, wish: int, answer: Mapping[str, Any]) -> None:
        """The node did it, or says why not."""
        self._db.run("wish_done", id=wish, answer=json.dumps(answer), now=self._db.now())

    def answer(self, wish: int) -> dict[str, Any] | None:
        """What came of a wish; None while the node has not answered."""
        rows = self._db.run("wish_answer", id=wish)
        return json.loads(rows[0]["answer"]) if rows and rows[0]["done_at"] is not None else None


def _node(row: Any, now: int) -> dict[str, Any]:
    found = dict(row)
    alive = found["status"] in LIVE and found["beat_at"] + found["lease_ms"] >= now
    return {**found, "waits": json.loads(found["waits"]), "alive": alive, "age_ms": max(0, now - found["beat_at"])}
