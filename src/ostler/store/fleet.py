"""All nodes and their workers, as any of them reads it from the store: who is called what, and which one a name means.

A node is called by its name, or by its id where two nodes that live share the name. Where more than one node lives, a worker's
full name is `node/worker:pool:n`; `worker:pool:n` is enough while it means one worker only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ostler.errors import Conflict, NotFound
from ostler.store.identity import LIVE
from ostler.store.store import Store
from ostler.store.views import NODE

_ENDED_FOR = 86_400_000  # ms for which a dead node that nobody replaced is shown


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the store said at one moment. Rows of nodes and workers are as `views` describes them, with more beside."""

    nodes: list[dict[str, Any]]
    """Those that live, and those that died and came back under no name. Where none lives: all that are known."""
    workers: list[dict[str, Any]]
    """Workers of the nodes that live; where none lives, what was last known."""
    now: int
    """The store's clock."""

    @property
    def living(self) -> list[dict[str, Any]]:
        return [node for node in self.nodes if node["alive"]]

    @property
    def several(self) -> bool:
        """Whether more than one node lives, so that a worker's name needs its node's."""
        return len(self.living) > 1

    def label(self, node: str | None) -> str | None:
        """What a node is called; of one that is not known any more, the name in its id."""
        found = next((n["label"] for n in self.nodes if n["id"] == node), None)
        return found or (node and node.rpartition("@")[0]) or node

    def node(self, name: str) -> dict[str, Any]:
        """The node of that name or id; raises NotFound or Conflict."""
        found = [n for n in self.nodes if name in (n["label"], n["id"])] or [n for n in self.nodes if name == n["name"]]
        if len(found) == 1:
            return found[0]
        known = ", ".join(n["label"] for n in self.nodes) or "none"
        if not found:
            raise NotFound(f"there is no node {name!r}; known: {known}")
        raise Conflict(f"{len(found)} nodes are called {name!r}; name one by its id: {known}")

    def matching(self, name: str) -> list[dict[str, Any]]:
        """The workers that a name means: one worker (`n1/worker:tag:0`, `tag:0`), or all of a pool (`tag`, `n1/tag`)."""
        place, _, short = name.rpartition("/")
        rows = self.workers
        if place:
            wanted = self.node(place)["id"]
            rows = [w for w in rows if w["node_id"] == wanted]
        found = [w for w in rows if short in (w["component"], w["component"].removeprefix("worker:"))]
        return found or [w for w in rows if short == w["pool"]]

    def worker(self, name: str) -> dict[str, Any]:
        """The one worker that a name means; raises NotFound, or Conflict with the candidates."""
        found = [w for w in self.matching(name) if name.rpartition("/")[2] != w["pool"]]
        if len(found) == 1:
            return found[0]
        if not found:
            known = ", ".join(w["name"] for w in self.workers) or "none"
            raise NotFound(f"there is no worker {name!r}; known: {known}")
        raise Conflict(f"{name} runs on {len(found)} nodes; name one: {', '.join(w['name'] for w in found)}")

    def several_named(self, name: str) -> list[dict[str, Any]]:
        """`matching` for a verb that takes a pool, too: of a worker's name one worker; raises NotFound or Conflict."""
        found = self.matching(name)
        if not found:
            known = ", ".join(w["name"] for w in self.workers) or "none"
            raise NotFound(f"there is no worker or pool {name!r}; known: {known}")
        return found if name.rpartition("/")[2] == found[0]["pool"] else [self.worker(name)]


def read(store: Store) -> Fleet:
    """The nodes and workers of the store, now."""
    now = store.now()
    return put_together(store.nodes.all(), store.health.get_all_workers(), store.nodes.running(), now)


def put_together(
    nodes: Sequence[Mapping[str, Any]], workers: Sequence[Mapping[str, Any]], running: Mapping[str, int], now: int
) -> Fleet:
    """Choose what is shown, and give it names. Pure."""
    living = [n for n in nodes if n["alive"]]
    names = [n["name"] for n in living]
    shown = [n for n in nodes if n["status"] in LIVE or _is_missed(n, names, now)]
    if not living:
        newest = {n["name"]: n["id"] for n in nodes if n["heir"] is None}  # oldest first
        shown = [n for n in nodes if n["status"] in LIVE or n["id"] in newest.values()]
    labels = {n["id"]: n["id"] if names.count(n["name"]) > 1 else n["name"] for n in shown}
    rows = [
        _worker(w, n, labels[n["id"]], now, several=len(living) > 1)
        for n in shown
        if n["alive"] or not living
        for w in workers
        if w["node"] == n["id"]
    ]
    return Fleet([_node(n, labels[n["id"]], rows, running) for n in shown], rows, now)


def _is_missed(node: Mapping[str, Any], living: Sequence[str], now: int) -> bool:
    """Whether it died, and no node has come back under its name."""
    return (
        node["status"] == "dead"
        and node["heir"] is None
        and node["name"] not in living
        and (node["ended_at"] or 0) > now - _ENDED_FOR
    )


def is_idle(status: str, key: str | None) -> bool:
    """Whether it is a slot on demand, such as a model's, that nobody needs now: that is no missing worker."""
    return status == "stopped" and key is not None


def _worker(row: Mapping[str, Any], node: Mapping[str, Any], label: str, now: int, *, several: bool) -> dict[str, Any]:
    component = row["component"]
    age = max(0, now - row["last_heartbeat"] + node["skew_ms"]) / 1000
    name = f"{label}/{component}" if several else component
    return {**row, "name": name, "node": label, "node_id": node["id"], "heartbeat_age": age}


def _node(
    row: Mapping[str, Any], label: str, workers: Sequence[Mapping[str, Any]], running: Mapping[str, int]
) -> dict[str, Any]:
    counts: dict[str, int] = {}
    for worker in workers:
        if worker["node_id"] == row["id"]:
            status = "idle" if is_idle(worker["status"], worker.get("key")) else worker["status"]
            counts[status] = counts.get(status, 0) + 1
    more = {"label": label, "workers": counts, "running": running.get(row["id"], 0)}
    return {**row, **more, "last_heartbeat": row["beat_at"], "heartbeat_age": row["age_ms"] / 1000}


def shown(node: Mapping[str, Any]) -> dict[str, Any]:
    """A node as the API and the CLI show it."""
    return {name: node[name] for name in NODE}
