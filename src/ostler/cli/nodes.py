"""All nodes of a store from the terminal: who they are, and whether everything is well."""

from __future__ import annotations

from typing import Any

import click

from ostler.calls.address import node_url
from ostler.cli import client, show
from ostler.cli.options import as_json, where
from ostler.config import Settings
from ostler.errors import Conflict
from ostler.live.condition import complaints
from ostler.live.incidents import failed_lately
from ostler.store import fleet
from ostler.store.fleet import Fleet

_SKEW = 1000  # ms by which a node's clock may differ before it is shown


@click.command()
@click.option("--forget", metavar="NODE", help="Remove a dead node that will not come back from the list.")
@where
@as_json
def nodes(known: Settings, forget: str | None, json_: bool) -> None:
    """List all nodes with state, address, workers, running jobs and last heartbeat."""
    if forget is not None:
        _forget(known, forget)
        return
    found = client.everyone(known)
    if json_:
        show.as_json({"nodes": [fleet.shown(node) for node in found.nodes]})
        return
    columns = ("node", "state", "url", "version", ">workers", ">running", "last heartbeat", ">clock", "id")
    show.table(columns, map(_row, found.nodes), "no nodes; start one with 'ostler up'")


def _row(node: dict[str, Any]) -> tuple[Any, ...]:
    clock = f"{node['skew_ms'] / 1000:+.1f} s" if abs(node["skew_ms"]) > _SKEW else ""
    beat = f"{show.span(node['heartbeat_age'])} ago"
    return (
        node["label"],
        show.state(state_of(node)),
        node["url"] or "loopback only",
        node["version"],
        sum(node["workers"].values()),
        node["running"],
        beat,
        clock,
        node["id"],
    )


def state_of(node: dict[str, Any]) -> str:
    """Its status, or that it has not been heard for longer than its lease."""
    return str(node["status"]) if node["alive"] or node["status"] in ("stopped", "dead") else "silent"


def _forget(known: Settings, name: str) -> None:
    with client.writable_store(known) as opened:
        node = fleet.read(opened).node(name)
        if not opened.nodes.forget_one(node["id"]):
            raise Conflict(f"node {node['label']} is {state_of(node)}; only a stopped or dead node can be forgotten")
    print(f"forgot node {node['label']}")


@click.command()
@where
@as_json
def health(known: Settings, json_: bool) -> None:
    """Show whether all nodes are healthy, and what is wrong if not. Exits with 0 if healthy, else 1."""
    if node_url(known) is not None:
        found = client.request(known, "GET", "/api/v1/health")
    else:
        with client.open_store(known) as opened:
            everyone, enabled, paused = fleet.read(opened), *opened.meta.pauses()
            fails = failed_lately(opened)
        if not client.is_running(known, everyone):
            _down(known, everyone, json_)
        found = _from_store(everyone, enabled, sorted(paused), fails)
    if json_:
        show.as_json(found)
    else:
        _tell(found)
    raise SystemExit(0 if found["status"] == "healthy" else 1)


def _down(known: Settings, everyone: Fleet, json_: bool) -> None:
    last = show.span(min(n["heartbeat_age"] for n in everyone.nodes)) + " ago" if everyone.nodes else "never"
    if json_:
        show.as_json({"status": "down", "errors": ["no node is running"], "nodes": [], "workers": {}})
    else:
        print(f"down: no node is running in {known.data_dir} (last heard: {last}); start one with 'ostler up'")
    raise SystemExit(1)


def _from_store(everyone: Fleet, enabled: bool, paused: list[str], fails: list[dict[str, Any]]) -> dict[str, Any]:
    """What the store alone tells, where no node runs here."""
    errors, counts = complaints(everyone), dict[str, int]()
    for worker in everyone.workers:
        counts[worker["status"]] = counts.get(worker["status"], 0) + 1
    return {
        "status": "degraded" if errors else "healthy",
        "errors": errors,
        "failing": fails,
        "paused": paused if enabled else sorted({worker["pool"] for worker in everyone.workers}),
        "nodes": [fleet.shown(node) for node in everyone.nodes],
        "workers": counts,
    }


def _tell(found: dict[str, Any]) -> None:
    show.console().print(show.state(found["status"]), f": {_counts(found['workers'])}", sep="")
    for error in found["errors"]:
        print(f"  {error}")
    if fails := found["failing"]:
        words = ", ".join(f"{one['count']} of {one['task']} ({one['code']})" for one in fails[:3])
        more = f" and {len(fails) - 3} other kinds" if len(fails) > 3 else ""
        print(f"  jobs that failed in the last hour: {words}{more}; see: ostler jobs --status failed")
    if found["paused"]:
        print(f"  paused: {', '.join(found['paused'])}")
    if len(found["nodes"]) > 1:
        for node in found["nodes"]:
            words = f": {_counts(node['workers'])}, {node['running']} running"
            show.console().print(f"  node {node['label']} is ", show.state(state_of(node)), words, sep="")


def _counts(workers: dict[str, int]) -> str:
    return ", ".join(f"{n} {status}" for status, n in sorted(workers.items())) or "no workers"
