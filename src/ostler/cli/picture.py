"""The board as a person sees it, in as many columns and lines as there are. Pure."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ostler.cli import show, words
from ostler.cli.board import Board
from ostler.cli.words import State, clean, clock

_BLOCKS = "▁▂▃▄▅▆▇█"
_ALL = 10_000  # lines, where nothing has to fit
_REASONS, _INCIDENTS = 3, 8

Row = tuple[float, Sequence[Any]]  # how much one wants to see it, and its cells


class Section(NamedTuple):
    """A table. `>` before a column: its figures stand to the right; `*`: it takes the room that is left."""

    columns: str
    rows: list[Row]
    none: str
    total: int = 0  # where there are more than are known here


def picture(board: Board, now: int, width: int, height: int | None = None) -> Group:
    """Everything; in so many lines, where a height is given."""
    fill = height is not None
    gap = height is None or height >= 30
    head = [
        _title(board, now, fill=fill),
        *_reasons(board, width, _REASONS if fill else _ALL),
        *_figures(board, now, width),
    ]
    pools = [_sessions(board, width)] if board.sessions else []
    sections = [_queues(board, now), *pools, _workers(board, now), _jobs(board, now, width), _incidents(board, now)]
    room = _ALL if height is None else height - len(head) - (1 + gap) * len(sections)
    parts: list[RenderableType] = [*head]
    for section, lines in zip(sections, share(room, [max(len(s.rows), s.total) for s in sections]), strict=True):
        if lines or (not section.rows and room >= 0):  # that there is none takes the line of the heading
            parts += [Text()] * gap + [_table(section, lines, fill=fill)]
    return Group(*parts)


def share(room: int, wants: Sequence[int]) -> list[int]:
    """So many lines for each: none gets more than it wants, and what the small ones leave goes to the others."""
    given = [0] * len(wants)
    for place, (want, which) in enumerate(sorted((want, which) for which, want in enumerate(wants))):
        given[which] = min(want, max(0, room) // (len(wants) - place))
        room -= given[which]
    return given


def fit(rows: list[Row], lines: int, total: int = 0) -> tuple[list[Row], int]:
    """Those that are shown, in their order, and how many are not; the line that says so is one of `lines`."""
    total = max(total, len(rows))
    if total <= lines:
        return rows, 0
    kept = sorted(sorted(range(len(rows)), key=lambda i: -rows[i][0])[: max(0, lines - 1)])
    return [rows[i] for i in kept], total - len(kept)


def spark(values: Sequence[float]) -> str:
    """A line of blocks, the highest value at full height; only nothing is at the bottom."""
    top = max(values, default=0) or 1
    return "".join(_BLOCKS[1 + int(v / top * 6)] if v > 0 else _BLOCKS[0] for v in values)


def bar(percent: float, width: int) -> Text:
    full = round(max(0.0, min(100.0, percent)) / 100 * width)
    return Text.assemble(("━" * full, "cyan"), ("╌" * (width - full), "dim"))


def _table(section: Section, lines: int, *, fill: bool) -> RenderableType:
    if not section.rows:
        return Text(section.none, style="dim")
    rows, more = fit(section.rows, lines, section.total)
    table = Table(box=None, pad_edge=False, header_style="bold underline", expand=fill)
    for name in section.columns.split("|"):
        side, ratio = "right" if name.startswith(">") else "left", 1 if fill and name.startswith("*") else None
        table.add_column(name.lstrip(">*"), justify=side, ratio=ratio, no_wrap=True)  # type: ignore[arg-type]
    for _, cells in rows:
        table.add_row(*(c if isinstance(c, Text) else Text(clean("" if c is None else c)) for c in cells))
    return Group(table, Text(f"… and {more:,} more", style="dim")) if more else table


def _line(*parts: str | Text | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _title(board: Board, now: int, *, fill: bool) -> RenderableType:
    status = show.state(board.health["status"])
    if board.lost:
        status = Text("connection lost, retrying", style="bold red")
    up = f", up {_since(board.node['started_at'], now)}" if board.node and not board.lost else ""
    if board.several:
        alive = sum(bool(n["alive"]) for n in board.nodes.values())
        up += f", {alive} of {len(board.nodes)} nodes live"
    left = _line(("● ", str(status.style)), status, (f"  {clean(board.node.get('node', ''))}{up}", "dim"))
    title = Table.grid(expand=fill, padding=(0, 2))
    title.add_column(ratio=1 if fill else None)
    title.add_row(left, _line((f"{clock(now)}   q quits" if fill else clock(now), "dim")))
    return title


def _reasons(board: Board, width: int, most: int) -> list[Text]:
    """What is wrong: the first reason whole, with what to do about it, then as many as fit."""
    lines: list[str] = []
    errors = board.health["errors"]
    for place, error in enumerate(errors):
        wrapped = textwrap.wrap(clean(error), max(20, width), initial_indent="  ", subsequent_indent="    ")
        if lines and len(lines) + len(wrapped) > most:
            lines.append(f"  … and {len(errors) - place} more")
            break
        lines += wrapped
    return [_line((line, "yellow")) for line in lines]


def _figures(board: Board, now: int, width: int) -> list[Text]:
    lines, room = [], max(10, min(60, width - 46))
    if total := board.total:
        figures = {"running": total["running"], "waiting": total["pending"], "done": total["completed"]}
        figures |= {name: total[name] for name in ("scheduled", "failed") if total[name]}
        parts = [Text.assemble((f"{n:,}", "bold"), f" {name}") for name, n in figures.items()]
        eta = _eta(total, now)
        lines.append(_line(Text("   ").join(parts), f"   empty in {eta}" if eta else ""))
    counts, took = board.series(now, "done", room), "no runs yet"
    done = f" {board.rate(now):.1f}/s, {sum(counts):,.0f} in {board.span}"
    if (whole := board.whole) and whole["done"]:
        figures = {"p50 ": whole["run_p50"], "p95 ": whole["run_p95"], "waited p95 ": whole["wait_p95"]}
        took = ", ".join(f"{name}{show.span(n)}" for name, n in figures.items() if n is not None)
    lines.append(_line(("done ", "dim"), (spark(counts), "cyan"), done))
    return [*lines, _line(("took ", "dim"), (spark(board.series(now, "run_p95", room)), "cyan"), f" {took}")]


def _since(at: int | None, now: int) -> str:
    return "" if at is None else show.span(max(0, now - at) / 1000)


def _eta(queue: State, now: int) -> str:
    if not queue["pending"] and not queue["running"]:
        return ""
    return "?" if queue["eta"] is None else _since(now, queue["told_at"] + int(queue["eta"] * 1000))


def _queues(board: Board, now: int) -> Section:
    rows: list[Row] = []
    for q in sorted(board.queues.values(), key=lambda q: str(q["queue"])):
        average = "" if q["avg_time"] is None else show.span(q["avg_time"])
        counts = [f"{q[name]:,}" for name in ("pending", "running", "completed", "failed")]
        empty = "paused" if q["paused"] else _eta(q, now)
        rows.append((q["pending"] + q["running"], (q["queue"], *counts, average, empty, q["workers"], "")))
    return Section("queue|>waiting|>running|>done|>failed|>average|>empty in|>workers|*", rows, "no queues")


def _sessions(board: Board, width: int) -> Section:
    rows: list[Row] = []
    for pool in sorted(board.sessions.values(), key=lambda p: str(p["pool"])):
        leaving = sum(w["in_use"] for w in pool["workers"] if w["status"] in ("draining", "stopping"))
        serving = sum(w["serves"] for w in pool["workers"])
        slots = show.cells(pool["in_use"] - leaving, pool["slots"], max(8, min(40, width - 70)))
        waiting = Text(f"{pool['waiting']:,}", style="yellow" if pool["waiting"] else "")
        counts = (f"{pool['in_use']:,}", f"{pool['free']:,}", f"{leaving:,}" if leaving else "", waiting)
        state = "paused" if pool["paused"] else ""
        rows.append(
            (
                pool["waiting"] + 1,
                (pool["pool"], *counts, f"{serving}/{len(pool['workers'])}", Text(slots, "cyan"), state),
            )
        )
    return Section("sessions|>in use|>free|>leaving|>waiting|>workers|slots|*", rows, "no session pools")


def _workers(board: Board, now: int) -> Section:
    rows: list[Row] = []
    for w in sorted(board.workers.values(), key=lambda w: (w["node"], w["pool"], w["id"])):
        memory = "" if w["rss_mb"] is None else f"{w['rss_mb']:.0f} MB"
        figures = (w["pid"], _since(w["started_at"], now), memory, w["restart_count"])
        wanted = 2 * (w["status"] != "healthy") + bool(w["current_job"])
        rows.append((wanted, (w["name"], show.state(w["status"]), *figures, _doing(w, now))))
    return Section("worker|state|>pid|>age|>memory|>crashes|*doing", rows, "no workers")


def _doing(w: State, now: int) -> str:
    if w["current_job"]:
        return f"job {w['current_job']} {w['task']}"
    if w["status"] in ("crashed", "failed", "stopped") and w["last_exit"]:
        again = f", starts in {_since(now, w['restart_at'])}" if w["restart_at"] else ""
        return f"{w['last_exit']['text']}{again}"
    return "paused" if w["paused"] else "idle" if w["status"] == "healthy" else ""


def _jobs(board: Board, now: int, width: int) -> Section:
    rows: list[Row] = []
    breadth = max(8, min(40, width - 70))
    for j in sorted(board.jobs.values(), key=lambda j: (j["started_at"] or now, j["id"])):
        done = ("", "") if j["progress"] is None else (bar(j["progress"], breadth), f"{j['progress']:.0f} %")
        node = f"{board.label(j['node_id'])}/" if board.several else ""
        on = (f"{node}{str(j['worker'] or '').removeprefix('worker:')}",) if width >= 100 else ()
        rows.append((0, (j["id"], j["task"], *on, _since(j["started_at"], now), *done, j["stage"])))
    columns = f">job|task|{'worker|' if width >= 100 else ''}>for|progress|>|*stage"
    return Section(columns, rows, "no running jobs", board.total["running"] if board.total and rows else 0)


def _incidents(board: Board, now: int) -> Section:
    rows: list[Row] = []
    for i in sorted(board.incidents.values(), key=lambda i: -i["at"])[:_INCIDENTS]:
        today = time.localtime(i["at"] / 1000)[:3] == time.localtime(now / 1000)[:3]
        when = Text(clock(i["at"]) if today else show.moment(i["at"])[5:], style="dim")
        node = Text(f"{clean(i['node'])}  " if board.several else "", style="dim")
        rows.append((i["at"], (when, node + words.incident(i))))
    return Section("last|*incidents", rows, "no incidents")
