"""Tables and times for people. Loaded only when something is shown."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from rich.console import Console
from rich.table import Table
from rich.text import Text

_COLOURS = {
    "healthy": "green",
    "ready": "green",
    "building": "cyan",
    "outdated": "yellow",
    "not built": "yellow",
    "done": "green",
    "starting": "cyan",
    "processing": "cyan",
    "draining": "yellow",
    "stopping": "yellow",
    "degraded": "yellow",
    "queued": "white",
    "stopped": "bright_black",
    "cancelled": "bright_black",
    "crashed": "red",
    "dead": "bold red",
    "silent": "red",
    "failed": "bold red",
    "error": "bold red",
    "died": "bold red",
    "deadline": "red",
    "refused": "yellow",
    "running": "cyan",
    "streaming": "cyan",
    "leaving": "yellow",
    "available": "green",
    "live": "cyan",
    "opening": "cyan",
    "detached": "yellow",
    "suspect": "yellow",
    "ended": "bright_black",
}


def harmless(text: str) -> str:
    """The text without what could move the cursor, set a title or hide something: such characters are shown as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class _Quiet(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        """What jobs wrote is among it."""
        super().print(*(harmless(o) if isinstance(o, str) else o for o in objects), **options)

    def on_broken_pipe(self) -> None:
        """Whoever read has enough (`| head`): that is no failure."""
        try:
            super().on_broken_pipe()  # nothing more is written, also not at the exit
        except SystemExit:
            raise SystemExit(0) from None


def console(wide: int = 200, *, soft_wrap: bool = True) -> Console:
    # What users wrote is shown as it is: no markup, no emoji codes in worker names. A pipe has no width: nothing is cut off there.
    width = None if sys.stdout.isatty() else wide
    return _Quiet(highlight=False, soft_wrap=soft_wrap, markup=False, emoji=False, width=width)


def state(word: str) -> Text:
    return Text(word, style=_COLOURS.get(word, ""))


def styled(word: str, style: str) -> Text:
    return Text(word, style=style)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], empty: str) -> None:
    """A plain table, or one sentence when there is nothing."""
    rows = list(rows)
    if not rows:
        print(empty)
        return
    shown = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        numeric = column.startswith(">")
        last = column == columns[-1]
        shown.add_column(
            column.removeprefix(">"), justify="right" if numeric else "left", no_wrap=not last, overflow="fold"
        )
    for row in rows:
        shown.add_row(
            *(cell if isinstance(cell, Text) else Text("" if cell is None else harmless(str(cell))) for cell in row)
        )
    console().print(shown)


def as_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def ago(at: int | None) -> str:
    """'3 s ago' for a time in ms."""
    return "" if at is None else f"{since(at)} ago"


def since(at: int | None) -> str:
    """How long ago a time in ms is."""
    return "" if at is None else span(max(0.0, time.time() - at / 1000))


def size(number: float) -> str:
    """Bytes as a person reads them."""
    for unit in ("B", "KB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 10 else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} GB"


def cells(used: int, slots: int, most: int = 32) -> str:
    """Slots, one by one where there are few: taken ones are full."""
    used = min(used, slots)
    if slots > most:
        used, slots = round(used / slots * most), most
    return "■" * used + "□" * (slots - used)


def span(seconds: float) -> str:
    """A duration a person reads at a glance."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.0f} d"


def clock(at: int) -> str:
    """The local time of day with milliseconds."""
    return time.strftime("%H:%M:%S", time.localtime(at / 1000)) + f".{at % 1000:03d}"


def moment(at: int, zone: str | None = None) -> str:
    """The date and time in a time zone, with that, or the local time."""
    when = datetime.fromtimestamp(at / 1000, ZoneInfo(zone) if zone else None)
    return f"{when:%Y-%m-%d %H:%M}{f' {zone}' if zone else ''}"
