"""The node's events as they come, over connections that may break and are made again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from urllib.parse import urlencode

from ostler.cli import client
from ostler.config import Settings
from ostler.errors import StoreBusy

_FIRST, _LONGEST = 0.1, 3.0  # seconds between two tries to come back


class Event(NamedTuple):
    """One event and its id, which only some of a stream's own frames lack."""

    id: str | None
    body: dict[str, Any]

    @property
    def is_live(self) -> bool:
        """Whether the snapshot ends here."""
        return (self.body["topic"], self.body["type"]) == ("stream", "live")


def parse(lines: Iterable[bytes]) -> Iterator[Event | None]:
    """The events of a stream; None for a sign of life."""
    id_, data = None, []
    for raw in lines:
        name, _, value = raw.decode().rstrip("\r\n").partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            id_ = value
        elif name == "data":
            data.append(value)
        elif raw.startswith(b":"):
            yield None
        elif not name:  # an empty line: the event is whole
            if data:
                yield Event(id_, json.loads("\n".join(data)))
            id_, data = None, []


def follow(
    settings: Settings,
    topics: str,
    last: str | None = None,
    *,
    again: bool = True,
    lost: Callable[[bool], None] = lambda _: None,
) -> Iterator[Event | None]:
    """Events without end. A node that was there and goes is waited for, and `lost` is told so; one that never was is an error."""
    patience = max(60.0, 3 * settings.event_keepalive)
    pause, is_lost, was_there = _FIRST, False, False
    while True:
        try:
            asked = {"topics": topics} | ({"last": last} if last else {})
            with client.reply(settings, "GET", f"/api/v1/events?{urlencode(asked)}", patience=patience) as response:
                was_there = True
                if is_lost:
                    is_lost = False
                    lost(False)
                for event in parse(response):
                    pause = _FIRST
                    last = event.id or last if event else last
                    yield event
            raise StoreBusy("the node ended the stream")
        except (client.NoNode, StoreBusy):
            if not (was_there and again):
                raise
        if not is_lost:
            is_lost = True
            lost(True)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
