"""`ostler events`: what happens on the node, as it happens."""

from __future__ import annotations

import json
import os
import select
import sys
import threading
from typing import Any

import click

from ostler.cli import show, words
from ostler.cli.options import as_json, where
from ostler.cli.stream import Event, follow
from ostler.config import Settings

# Everything but the sum of all queues, which says again what each queue has said.
_USEFUL = "queue:jobs,queue:*:status,worker:*:status,call:*:status,session:*:status,system:*"


@click.command()
@click.option(
    "--topics", default=_USEFUL, metavar="T,T…", help="Only these topics, such as worker:*:status (default: all)."
)
@click.option("--once", is_flag=True, help="Print the current state and exit.")
@click.option("--last", metavar="ID", help="Continue after the event with this id.")
@where
@as_json
def events(known: Settings, topics: str, once: bool, last: str | None, json_: bool) -> None:
    """Print the current state, then every change as it happens. --json prints one event per line."""
    threading.Thread(target=_leave_with_the_reader, daemon=True).start()
    tell = _as_json if json_ else _Teller(quiet=once).tell
    try:
        for event in follow(known, topics, last, again=not once, lost=_lost):
            if event is not None:
                tell(event)
                if once and event.is_live:
                    return
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        os._exit(0)  # nobody reads; there is nothing to flush to


def _leave_with_the_reader() -> None:
    """End when whoever read our output goes (`| head`), even if there is nothing to write that would tell."""
    gone = select.poll()
    gone.register(sys.stdout.fileno(), 0)  # errors alone
    gone.poll()
    os._exit(0)


def _lost(is_lost: bool) -> None:
    said = "lost the connection to the node, retrying" if is_lost else "the node is back"
    print(f"ostler: {said}", file=sys.stderr, flush=True)


def _as_json(event: Event) -> None:
    print(json.dumps({"id": event.id, **event.body}), flush=True)


class _Teller:
    """Says what changed, which needs what was."""

    def __init__(self, *, quiet: bool) -> None:
        self._console, self._quiet = show.console(), quiet
        self._before: dict[str, dict[str, Any]] = {}

    def tell(self, event: Event) -> None:
        body, key = event.body, words.key(event.body)
        if body["topic"] == "stream":
            if body["type"] == "resync":
                self._before.clear()
            if self._quiet:
                return
        self._console.print(words.line(body, self._before.get(key)))
        sys.stdout.flush()
        if "job" in body and body["job"]["status"] != "processing":  # of these there may be too many to keep
            self._before.pop(key, None)
        elif body["type"] != "resync":
            self._before[key] = body
