"""Sessions in the store: the workers that take them, who has a slot, and how each one ended.

What a worker has in use is counted from rows, so no crash leaks a slot. Everything that changes the rows of a node is done under one
lock of the store (`sessions:<node>`), and the statement that admits compares with what is there at that moment: two connections
never admit more than a worker has slots and lifetime for.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ostler.store.database import Database

AVAILABLE, DRAINING = "available", "draining"
SERVE, DRAIN = "serve", "drain"

UNUSED = ("unused", "its admission was in doubt, and nobody used it")
NODE_LOST = ("node-lost", "its node died")
NODE_STOPPED = ("shutdown", "its node has stopped")


class WorkerKey(NamedTuple):
    """A worker of one node."""

    component: str
    generation: int


class WorkerEntry(NamedTuple):
    """What a node says of a worker that takes sessions. `lifetime` 0: no limit; `versions` empty: any client."""

    component: str
    generation: int
    pool: str
    serves: str
    address: str
    slots: int
    lifetime: int
    served: int = 0
    status: str = AVAILABLE
    versions: tuple[str, ...] = ()

    @property
    def worker(self) -> WorkerKey:
        return WorkerKey(self.component, self.generation)


class Admission(NamedTuple):
    """A session that wants a slot of this worker. The id is made by whoever asks, so that asking twice is asking once."""

    id: str
    component: str
    generation: int
    pool: str
    serves: str
    owner: str
    priority: int = 0
    client: str | None = None
    agent: str | None = None
    key: str | None = None
    via: str | None = None
    waited_ms: float = 0.0

    @property
    def worker(self) -> WorkerKey:
        return WorkerKey(self.component, self.generation)


class Ended(NamedTuple):
    """A session that is over."""

    id: str
    reason: str
    text: str | None = None
    code: int | None = None
    bytes_in: int = 0
    bytes_out: int = 0


class Verdict(NamedTuple):
    """Whether a session has the slot. `why` not: full, lifetime, draining, unknown (the worker is not registered), taken (another
    session has this id) or ended (this very session is over).
    """

    ok: bool
    why: str = ""


class Beat(NamedTuple):
    """A worker is there: its state, how many sessions it had in all, and the bytes (in, out) of those that it has."""

    component: str
    generation: int
    status: str
    served: int
    live: Mapping[str, tuple[int, int]]

    @property
    def worker(self) -> WorkerKey:
        return WorkerKey(self.component, self.generation)


class SessionRow(NamedTuple):
    """A session as it is recorded. `ended_at` None: it is live."""

    id: str
    pool: str
    serves: str
    node: str
    component: str
    generation: int
    owner: str
    priority: int
    client: str | None
    agent: str | None
    key: str | None
    via: str | None
    waited_ms: float
    started_at: int
    ended_at: int | None
    reason: str | None
    text: str | None
    code: int | None
    bytes_in: int
    bytes_out: int
    seen_at: int

    @classmethod
    def begun(cls, node: str, about: Admission, at: int) -> SessionRow:
        """The row of a session that has just been admitted."""
        rest = about._asdict()
        empty: dict[str, Any] = dict.fromkeys(("ended_at", "reason", "text", "code"))
        return cls(**rest, **empty, node=node, started_at=at, seen_at=at, bytes_in=0, bytes_out=0)

    def over(self, ended: Ended, at: int) -> SessionRow:
        """The same, ended."""
        return self._replace(ended_at=at, **{k: v for k, v in ended._asdict().items() if k != "id"})


class Lost(NamedTuple):
    """What a node that has ended still had: a worker, or (component '') sessions of workers that were gone already."""

    node: str
    component: str
    generation: int
    pool: str
    beat_at: int
    sessions: tuple[str, ...]


class SessionRecords:
    """Sessions and their workers. A node writes its own rows; all nodes read."""

    def __init__(self, db: Database) -> None:
        self._db = db

    # ---- what a node says of its own

    def announce(self, node: str, workers: Sequence[WorkerEntry]) -> None:
        """These workers take sessions. A second time changes nothing; a node that was declared dead announces none."""
        with self._db.transaction(_lock(node)):
            self._put(node, workers, self._db.now())

    def turn(self, node: str, ended: Sequence[Ended], wanted: Sequence[Admission]) -> list[Verdict]:
        """End the ones, then admit the others in their order, as one. A turn that comes twice is the same turn."""
        now = self._db.now()
        with self._db.transaction(_lock(node)):
            if ended:
                self._db.run_many("end_sessions", [(one.id, now, *one[1:]) for one in ended])
            return self._admit(node, wanted, now) if wanted else []

    def beat(
        self, node: str, beats: Sequence[Beat], known: Sequence[WorkerEntry], live: Sequence[SessionRow]
    ) -> dict[WorkerKey, str]:
        """The workers are there; what is wanted of each: serve or drain. `known` and `live` are all workers and sessions of the node:
        what of them is missing is put back, and other live rows of the node are ended.
        """
        now = self._db.now()
        bytes_of = {id_: moved for beat in beats for id_, moved in beat.live.items()}
        with self._db.transaction(_lock(node)):
            wanted = self._beat_workers(node, beats, now)
            if missing := [entry for entry in known if entry.worker not in wanted]:
                self._put(node, missing, now)
            seen = [(row.id, *bytes_of.get(row.id, (row.bytes_in, row.bytes_out))) for row in live]
            found = (
                {row[0] for row in self._db.run("seen_sessions", now=now, batch=json.dumps(seen))} if seen else set()
            )
            if lost := [row for row in live if row.id not in found]:
                self._db.run_many("add_sessions", [row._replace(node=node) for row in lost])
            reason, text = UNUSED
            ids = json.dumps([row.id for row in live])
            self._db.run("end_strays", node=node, ids=ids, now=now, reason=reason, text=text)
        return {beat.worker: wanted.get(beat.worker, SERVE) for beat in beats}

    def leave(self, node: str, worker: WorkerKey, reason: str, text: str) -> list[str]:
        """The worker takes no more sessions; those that it had ended for this reason. Their ids."""
        who = {"node": node, "component": worker.component, "generation": worker.generation}
        with self._db.transaction(_lock(node)):
            ended = self._db.run("end_worker_sessions", **who, now=self._db.now(), reason=reason, text=text)
            self._db.tell("drop_session_worker", **who)
        return [row["id"] for row in ended]

    def orders(self, node: str) -> list[str]:
        """Live sessions of the node that somebody asked to end."""
        return [row["id"] for row in self._db.run("session_orders", node=node)]

    def _put(self, node: str, workers: Sequence[WorkerEntry], now: int) -> None:
        rows = [(node, *entry[:-1], json.dumps(list(entry.versions)), now) for entry in workers]
        if rows:
            self._db.run_many("put_session_workers", rows)

    def _beat_workers(self, node: str, beats: Sequence[Beat], now: int) -> dict[WorkerKey, str]:
        batch = json.dumps([beat[:4] for beat in beats])
        rows = self._db.run("beat_session_workers", node=node, now=now, batch=batch) if beats else []
        return {WorkerKey(row["component"], row["generation"]): row["wanted"] for row in rows}

    def _admit(self, node: str, wanted: Sequence[Admission], now: int) -> list[Verdict]:
        rows = self._db.run("admit_sessions", node=node, now=now, wanted=json.dumps(wanted))
        admitted = {row["id"] for row in rows}
        served = Counter((row["component"], row["generation"]) for row in rows)
        if served:
            self._db.run_many("count_served", [(node, *worker, n) for worker, n in served.items()])
        refused = [about for about in wanted if about.id not in admitted]
        why = self._why(node, refused) if refused else {}
        return [why.get(about.id, Verdict(ok=True)) for about in wanted]

    def _why(self, node: str, refused: Sequence[Admission]) -> dict[str, Verdict]:
        there = {row["id"]: row for row in self._db.run("sessions_of", ids=json.dumps([about.id for about in refused]))}
        rooms = {
            WorkerKey(row["component"], row["generation"]): row for row in self._db.run("session_rooms", node=node)
        }
        return {about.id: _verdict(node, about, there.get(about.id), rooms.get(about.worker)) for about in refused}

    # ---- ends of nodes

    def release_inside(self, node: str, reason: str, text: str) -> list[Lost]:
        """Inside a transaction: a node has ended, so its sessions have, and its workers are no more."""
        self._db.lock([_lock(node)])
        ended = self._db.run("end_node_sessions", node=node, now=self._db.now(), reason=reason, text=text)
        ids: dict[tuple[str, int], list[str]] = {}
        for row in ended:
            ids.setdefault((row["component"], row["generation"]), []).append(row["id"])
        lost = [
            Lost(node, w["component"], w["generation"], w["pool"], w["beat_at"], tuple(ids.pop((w[0], w[1]), ())))
            for w in self._db.run("drop_node_session_workers", node=node)
        ]
        rest = tuple(id_ for found in ids.values() for id_ in found)
        return [*lost, Lost(node, "", 0, "", 0, rest)] if rest else lost

    def sweep(self) -> list[Lost]:
        """What nodes that have ended still have here is ended. Any node does this, as often as it likes."""
        found: list[Lost] = []
        for row in self._db.run("session_nodes_gone"):
            with self._db.transaction():
                found += self.release_inside(row["node"], *NODE_LOST)
        return found

    # ---- what anybody asks

    def workers(self) -> list[dict[str, Any]]:
        """The workers of all living nodes: node, name, url, pool, serves, component, generation, address, slots, lifetime, served, in_use,
        status, wanted, versions, started_at, beat_at.
        """
        rows = self._db.run("session_workers", now=self._db.now())
        return [{**dict(row), "versions": json.loads(row["versions"])} for row in rows]

    def want(self, node: str, worker: WorkerKey, state: str) -> bool:
        """Have a worker of any node serve or drain. It admits none from this moment on; its node learns of it at the next beat."""
        with self._db.synced(), self._db.transaction():  # nobody says it again
            found = self._db.run("want_session_worker", node=node, **worker._asdict(), wanted=state)
            self._db.ring_all()
        return bool(found)

    def end(self, session: str) -> bool:
        """Ask the node of a live session to end it; False when there is none."""
        with self._db.synced(), self._db.transaction():  # nobody says it again
            found = self._db.run("want_session_end", id=session)
            if found:
                self._db.ring_all()
        return bool(found)

    def add(self, rows: Sequence[SessionRow]) -> None:
        """Sessions that are recorded elsewhere while they live. A second time changes nothing."""
        if rows:
            with self._db.transaction():
                self._db.run_many("add_sessions", rows)

    def find(self, session: str) -> dict[str, Any] | None:
        """One session, live or ended."""
        rows = self._db.select("sessions", ["session_id"], id=session, limit=1)
        return dict(rows[0]) if rows else None

    def list(
        self, *, state: str = "all", limit: int = 50, before: tuple[int, str] | None = None, **filters: str | None
    ) -> tuple[list[dict[str, Any]], tuple[int, str] | None]:
        """The newest first, and where the next page begins. `state` is live, ended or all; filters are `pool` (also by the name that
        clients ask for), `owner`, `component` and `node`.
        """
        given: dict[str, Any] = {name: value for name, value in filters.items() if value is not None}
        conditions = [f"session_{name}" for name in given]
        if state != "all":
            conditions.append(f"session_{state}")
        if before is not None:
            conditions.append("session_before")
            given |= {"at": before[0], "before": before[1]}
        rows = self._db.select("sessions", conditions, **given, limit=limit + 1)
        page = [dict(row) for row in rows[:limit]]
        return page, (page[-1]["started_at"], page[-1]["id"]) if len(rows) > limit else None

    def purge(self, before: int | None, kept: int, most: int) -> bool:
        """Delete some of those that ended before this time (None: age does not matter), or beyond the newest `kept` (0: their number
        does not); whether there may be more. Live ones stay.
        """
        until: tuple[int, str] = (-1, "") if before is None else (before, "")
        if kept and (beyond := self._db.run("sessions_beyond", kept=kept)):
            until = max(until, (beyond[0]["ended_at"], beyond[0]["id"]))
        return len(self._db.run("purge_sessions", at=until[0], id=until[1], most=most)) == most


def _lock(node: str) -> str:
    return f"sessions:{node}"


def _verdict(node: str, about: Admission, there: Any, room: Any) -> Verdict:
    """Why a session was not admitted; or that it was, the first time that it was asked for."""
    if there is not None:
        if (there["node"], there["component"], there["generation"]) != (node, *about.worker):
            return Verdict(ok=False, why="taken")
        return Verdict(ok=there["ended_at"] is None, why="" if there["ended_at"] is None else "ended")
    if room is None:
        return Verdict(ok=False, why="unknown")
    if room["status"] != AVAILABLE or room["wanted"] != SERVE:
        return Verdict(ok=False, why="draining")
    spent = room["lifetime"] and room["served"] >= room["lifetime"]
    return Verdict(ok=False, why="lifetime" if spent else "full")
