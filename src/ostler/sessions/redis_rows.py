"""Workers and sessions as the registry in Redis has them: names of keys, fields of hashes, rows as JSON. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ostler.sessions.registry import AVAILABLE, SERVE, Registered, SessionRow, WorkerEntry
from ostler.store.identity import name_of
from ostler.store.store import now_ms

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class Own:
    """A worker of this node as the server should have it."""

    def __init__(self, entry: WorkerEntry, node: str) -> None:
        self.id = worker_id(node, entry)
        self.field = field_of(entry.serves, self.id)
        self.turn = ""  # the number of what it was written with; '': nobody knows, so it is written anew
        self.sessions: set[str] = set()  # that the server has
        self.wanted = SERVE
        self.started_at = now_ms()

    def whole(self, entry: WorkerEntry, node: str, url: str, number: str, live: Iterable[SessionRow]) -> list[Any]:
        """All that the server is to have of it, with its live sessions."""
        told = {
            "browserType": entry.serves,
            # The node's relay, or, where the node has no address for others, the worker's own.
            "wsEndpoint": f"ws{url.removeprefix('http')}/sessions/{entry.serves}" if url else entry.address,
            "status": entry.status,
            "node": node,
            "name": name_of(node) or node,
            "url": url,
            "pool": entry.pool,
            "component": entry.component,
            "generation": entry.generation,
            "address": entry.address,
            "slots": entry.slots,
            "lifetime": entry.lifetime,
            "versions": json.dumps(entry.versions),
            "startedAt": self.started_at,
            "turn": number,
        }
        rows = [text for row in live for text in (row.id, packed(row))]
        about = json.dumps([node, entry.pool, entry.component, entry.generation])
        pairs = [str(text) for pair in told.items() for text in pair]
        return [self.field, self.id, pairs, rows, entry.served, self.wanted, about]

    def beat(self, entry: WorkerEntry, moved: dict[str, SessionRow]) -> list[Any]:
        """What has changed since the last one."""
        rows = [text for id_ in self.sessions & moved.keys() for text in (id_, packed(moved[id_]))]
        return [self.field, self.id, self.turn, len(self.sessions), entry.served, entry.status, rows]


def worker_id(node: str, worker: WorkerEntry | Registered) -> str:
    """A worker's id in keys: name and start of its node, pool, number and generation, such as `web1-3fa9c2-chromium-0-7`."""
    name, _, start = node.rpartition("@")
    number = worker.component.rpartition(":")[2]
    return _safe(f"{name}-{start[:6]}-{worker.pool}-{number}-{worker.generation}")


def field_of(serves: str, id_: str) -> str:
    """The worker in keys and in hashes of all workers (lua/common.lua)."""
    return f"{_safe(serves)}:{id_}"


def _safe(text: str) -> str:
    return _UNSAFE.sub("-", text)


def packed(row: SessionRow) -> str:
    return json.dumps(row._asdict())


def unpacked(text: str) -> SessionRow:
    """A row that a node wrote, perhaps one of another version."""
    told = json.loads(text)
    return SessionRow(**{name: told.get(name) for name in SessionRow._fields})


def registered(flat: Sequence[str], in_use: int, served: str | None) -> Registered:
    """A worker of any node, as the server lists it."""
    has = dict(zip(flat[::2], flat[1::2], strict=True))
    return Registered(
        node=has["node"],
        name=has["name"],
        url=has["url"] or None,
        pool=has["pool"],
        serves=has["browserType"],
        component=has["component"],
        generation=int(has["generation"]),
        address=has["address"],
        slots=int(has["slots"]),
        lifetime=int(has["lifetime"]),
        served=int(served or 0),
        in_use=in_use,
        status=has.get("status", AVAILABLE),
        wanted=has.get("wanted", SERVE),
        versions=tuple(json.loads(has["versions"])),
        started_at=int(has["startedAt"]),
        beat_at=int(has["lastHeartbeat"]) * 1000,
    )
