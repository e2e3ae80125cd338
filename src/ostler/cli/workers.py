"""Workers from the terminal: look at them, and tell them what to do."""

from __future__ import annotations

from typing import Any

import click

from ostler.cli import client, show
from ostler.cli.options import as_json, where
from ostler.config import Settings
from ostler.errors import NotFound
from ostler.lifecycle import ends


@click.command()
@click.argument("worker", required=False)
@where
@as_json
def workers(known: Settings, worker: str | None, json_: bool) -> None:
    """All workers: state, process, memory, current job, crashes; or WORKER with its history of exits."""
    with client.open_store(known) as opened:
        rows = [ends.shown(row) for row in opened.health.get_all_workers()]
        enabled, paused = opened.meta.pauses()
        if worker is not None:
            _one(opened, rows, worker, json_)
            return
    for row in rows:
        row["paused"] = not enabled or row["pool"] in paused
    if json_:
        show.as_json({"workers": rows, "node_running": client.node_url(known) is not None})
        return
    columns = ("worker", "status", ">pid", ">gen", ">job", ">MB", ">crashes", "last beat", "what")
    show.table(columns, map(_row, rows), "no workers are known; start a node with 'ostler up'")
    if client.node_url(known) is None:
        print("no node is running: this is what was last known")


def _row(w: dict[str, Any]) -> tuple[Any, ...]:
    rss = "" if w["rss_mb"] is None else f"{w['rss_mb']:.0f}"
    what = "paused" if w["paused"] else ""
    if w["exit_text"] and w["status"] in ("crashed", "failed", "stopped"):
        what = w["exit_text"]
    return (
        w["component"],
        show.state(w["status"]),
        w["pid"],
        w["generation"],
        w["current_job"],
        rss,
        w["restart_count"],
        show.ago(w["last_heartbeat"]),
        what,
    )


def _one(opened: Any, rows: list[dict[str, Any]], worker: str, json_: bool) -> None:
    row = next((r for r in rows if worker in (r["component"], r["component"].removeprefix("worker:"))), None)
    if row is None:
        raise NotFound(f"there is no worker {worker!r}; known are: {', '.join(r['component'] for r in rows) or 'none'}")
    exits = ends.exits(opened.health.exits(row["node"], row["component"]))
    if json_:
        show.as_json({**row, "exits": exits})
        return
    show.console().print(
        f"{row['component']}  ",
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
    show.table(("ended", ">gen", "kind", "how", "item", ">peak MB"), shown, "it has never ended")
    for line in exits[0]["log"][-10:] if exits else ():
        show.console().print(f"  | {line}")


@click.command()
@where
@as_json
def health(known: Settings, json_: bool) -> None:
    """Is everything well? Exit code 0 when healthy, 1 when degraded, error or down."""
    if client.node_url(known) is None:
        with client.open_store(known) as opened:
            nodes = opened.nodes.all()
        last = show.ago(max(n["beat_at"] for n in nodes)) if nodes else "never"
        if json_:
            show.as_json({"status": "down", "errors": ["no node is running"], "nodes": [], "workers": {}})
        else:
            print(f"down: no node is running on {known.data_dir} (last heard: {last}); start one with 'ostler up'")
        raise SystemExit(1)
    found = client.request(known, "GET", "/api/v1/health")
    if json_:
        show.as_json(found)
    else:
        counts = ", ".join(f"{n} {status}" for status, n in sorted(found["workers"].items())) or "no workers"
        show.console().print(show.state(found["status"]), f": {counts}", sep="")
        for error in found["errors"]:
            print(f"  {error}")
        if found["paused"]:
            print(f"  paused: {', '.join(found['paused'])}")
    raise SystemExit(0 if found["status"] == "healthy" else 1)


def _targets(known: Settings, names: tuple[str, ...]) -> list[str]:
    """Worker names; a pool's name stands for all of its workers, `tag:0` for `worker:tag:0`."""
    rows = client.request(known, "GET", "/api/v1/workers")["workers"]
    found: list[str] = []
    for name in names:
        matches = [
            w["component"] for w in rows if name in (w["component"], w["component"].removeprefix("worker:"), w["pool"])
        ]
        if not matches:
            raise NotFound(
                f"there is no worker or pool {name!r}; known are: {', '.join(w['component'] for w in rows) or 'none'}"
            )
        found += matches
    return found


def _verb(name: str, help_: str, done: str) -> click.Command:
    @click.command(name, help=help_)
    @click.argument("worker", nargs=-1, required=True)
    @where
    def command(known: Settings, worker: tuple[str, ...]) -> None:
        for component in _targets(known, worker):
            client.request(known, "POST", f"/api/v1/workers/{component}/{name}")
            print(f"{component} {done}")

    return command


drain = _verb("drain", "WORKER (or a pool) finishes what it has, exits and stays stopped.", "drains")
restart = _verb(
    "restart", "Reset WORKER (or a pool) and start it; a running one finishes what it has first.", "restarts"
)
reset = _verb("reset", "Forget the crashes of WORKER (or a pool): failed becomes stopped.", "is reset")
kill = _verb("kill", "SIGKILL WORKER (or a pool) now. Its job counts a crash.", "was killed")


def _flag(name: str, help_: str) -> click.Command:
    @click.command(name, help=help_)
    @click.argument("pool", nargs=-1)
    @where
    def command(known: Settings, pool: tuple[str, ...]) -> None:
        for path in [f"/api/v1/pools/{p}/{name}" for p in pool] or [f"/api/v1/workers/{name}"]:
            client.request(known, "POST", path)
        print(f"{', '.join(pool) or 'all pools'} {name}d")
        if pool and name == "resume" and not client.request(known, "GET", "/api/v1/info")["worker_enabled"]:
            print("all pools are still paused; to go on: ostler resume")

    return command


pause = _flag("pause", "Workers of POOL (default: all) stay alive and take nothing new.")
resume = _flag("resume", "Workers of POOL (default: all) take work again; stopped ones start, failed ones do not.")
