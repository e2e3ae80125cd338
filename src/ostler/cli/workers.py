"""Workers of all nodes from the terminal: look at them, and tell them what to do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import click

from ostler.calls.address import node_url
from ostler.cli import client, show
from ostler.cli.options import as_json, where
from ostler.config import Settings
from ostler.errors import Conflict, NotFound
from ostler.lifecycle import ends
from ostler.lifecycle.control import ALL
from ostler.lifecycle.pauses import NO_PAUSE, PLANE
from ostler.store import Store, fleet

_ANSWER = 5.0  # seconds for which a node elsewhere is waited for


@click.command()
@click.argument("worker", required=False)
@where
@as_json
def workers(known: Settings, worker: str | None, json_: bool) -> None:
    """List the workers of all nodes with state, process, memory, current job and crashes.

    WORKER is a worker, which is shown with its past exits, or a pool.
    """
    with client.open_store(known) as opened:
        found = fleet.read(opened)
        chosen = found.several_named(worker) if worker else found.workers
        if worker is not None and worker.rpartition("/")[2] != chosen[0]["pool"]:
            _one(opened, ends.shown(chosen[0]), json_)
            return
        enabled, paused = opened.meta.pauses()
    rows = [{**ends.shown(row), "paused": not enabled or row["pool"] in paused} for row in chosen]
    running = client.is_running(known, found)
    if json_:
        show.as_json({"workers": rows, "node_running": running})
        return
    columns = ("worker", "status", ">pid", ">gen", ">job", ">MB", ">crashes", "last beat", "what")
    show.table(columns, map(_row, rows), "no workers; start a node with 'ostler up'")
    if not running:
        print("no node is running; this is the last known state")


def _row(w: dict[str, Any]) -> tuple[Any, ...]:
    rss = "" if w["rss_mb"] is None else f"{w['rss_mb']:.0f}"
    what = "paused" if w["paused"] else ""
    if w["pool"] == PLANE:
        what = "data plane: takes the connections of clients"
    if w["exit_text"] and w["status"] in ("crashed", "failed", "stopped"):
        what = w["exit_text"]
    return (
        w["name"],
        show.state(w["status"]),
        w["pid"],
        w["generation"],
        w["current_job"],
        rss,
        w["restart_count"],
        f"{show.span(w['heartbeat_age'])} ago",
        what,
    )


def _one(opened: Any, row: dict[str, Any], json_: bool) -> None:
    exits = ends.exits(opened.health.exits(row["node_id"], row["component"]))
    if json_:
        show.as_json({**row, "exits": exits})
        return
    show.console().print(
        f"{row['name']}  ",
        show.state(row["status"]),
        f"  generation {row['generation']}, crashes {row['restart_count']}",
        sep="",
    )
    shown = [
        (
            show.ago(e["at"]),
            e["generation"],
            "crash, not counted" if e["kind"] == "crash" and not e["counted"] else e["kind"],
            e["text"],
            e["item"],
            e["peak_rss_mb"],
        )
        for e in exits
    ]
    show.table(("ended", ">gen", "kind", "how", "item", ">peak MB"), shown, "no exits")
    for line in exits[0]["log"][-10:] if exits else ():
        show.console().print(f"  | {line}")


def _verb(name: str, help_: str, done: str) -> click.Command:
    @click.command(name, help=f"{help_} WORKER is a name that `ostler workers` shows, or a pool, on any node.")
    @click.argument("worker", nargs=-1, required=True)
    @where
    def command(known: Settings, worker: tuple[str, ...]) -> None:
        ask = _ask_node if node_url(known) else _ask_store
        for full, answer in ask(known, worker, name):
            print(f"{full}: {answer}" if answer else f"{full} {done}")

    return command


def _ask_node(known: Settings, names: tuple[str, ...], verb: str) -> Iterator[tuple[str, str | None]]:
    """The node that runs here does it, or asks the one that has the worker."""
    found = client.everyone(known)
    targets = [worker["name"] for name in names for worker in found.several_named(name)]
    for target in targets:
        answer = client.request(known, "POST", f"/api/v1/workers/{quote(target)}/{verb}")
        yield answer["component"], answer.get("message")


def _ask_store(known: Settings, names: tuple[str, ...], verb: str) -> Iterator[tuple[str, str | None]]:
    """No node runs here: those elsewhere are asked through the store."""
    with client.nodes_by_store(known) as (opened, found):
        targets = [worker for name in names for worker in found.several_named(name)]
        wishes = [opened.nodes.wish(worker["node_id"], verb, worker["component"]) for worker in targets]
        for worker, wish in zip(targets, wishes, strict=True):
            yield worker["name"], _answered(opened, worker["node"], wish)


def _answered(opened: Store, node: str, wish: int) -> str | None:
    """What a node says of a wish; None: it is done. Raises what it raises."""
    until = time.monotonic() + _ANSWER
    while (answer := opened.nodes.answer(wish)) is None:
        if time.monotonic() > until:
            return f"requested; node {node} has not answered yet"
        time.sleep(0.05)
    if error := answer.get("error"):
        raise client.refusal(error["status"], error["message"])
    return None


drain = _verb("drain", "Let WORKER finish its current work, exit and stay stopped.", "is draining")
restart = _verb(
    "restart", "Restart WORKER after it has finished its current work; also clears a failed state.", "is restarting"
)
reset = _verb("reset", "Clear the crash history of WORKER, so that a failed worker can be started again.", "was reset")
kill = _verb(
    "kill",
    "Kill WORKER with SIGKILL. Its job runs again; that counts neither as a crash nor as an attempt.",
    "was killed",
)


def _flag(name: str, help_: str) -> click.Command:
    @click.command(name, help=help_)
    @click.argument("pool", nargs=-1)
    @where
    def command(known: Settings, pool: tuple[str, ...]) -> None:
        if node_url(known):
            for path in [f"/api/v1/pools/{quote(p)}/{name}" for p in pool] or [f"/api/v1/workers/{name}"]:
                client.request(known, "POST", path)
        else:
            _flag_in_store(known, pool, paused=name == "pause")
        print(f"{', '.join(pool) or 'all pools'} {name}d")
        if pool and name == "resume" and not _is_enabled(known):
            print("all pools are still paused; to resume them: ostler resume")

    return command


def _is_enabled(known: Settings) -> bool:
    if node_url(known):
        return bool(client.request(known, "GET", "/api/v1/info")["worker_enabled"])
    with client.open_store(known) as opened:
        return opened.meta.pauses()[0]


def _flag_in_store(known: Settings, pools: tuple[str, ...], *, paused: bool) -> None:
    """No node runs here: the flags are in the store, and all nodes read them."""
    with client.nodes_by_store(known) as (opened, found):
        if unknown := set(pools) - {worker["pool"] for worker in found.workers}:
            known_pools = ", ".join(sorted({worker["pool"] for worker in found.workers})) or "none"
            raise NotFound(f"there is no pool {min(unknown)!r}; known: {known_pools}")
        if paused and PLANE in pools:
            raise Conflict(NO_PAUSE)
        flags = {f"pool_paused:{pool}": str(paused).lower() for pool in pools} or {
            "worker_enabled": str(not paused).lower()
        }
        opened.meta.set_pauses(flags, resume_all=not pools and not paused)
        for node in found.living if not paused else ():
            for pool in pools or (ALL,):
                opened.nodes.wish(node["id"], "resume", pool)


pause = _flag("pause", "Stop taking new work in POOL (default: all pools); running work continues.")
resume = _flag("resume", "Take work again in POOL (default: all pools). Starts stopped workers, but not failed ones.")
