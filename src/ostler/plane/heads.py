"""Heads of requests that were seen before. A client that asks again with the same headers is not parsed, and not judged, again.

Only a request that is whole in one read is found here: the bytes of its head, without the digits of its length, are those of an
earlier request that the parser has accepted, and what follows them is its body. The same bytes mean the same.
"""

from __future__ import annotations

import re
from typing import Any

_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: (\d{1,12})\r\n")
_MOST = 256  # heads that are remembered
_LONGEST = 4096  # bytes of one
_END = b"\r\n\r\n"


class Seen:
    """What a head says. All requests with this head share it: nothing in `fields` is ever changed."""

    __slots__ = ("fields", "head", "memo", "plain")

    def __init__(self, head: bytes, fields: dict[str, Any]) -> None:
        self.head = head  # without the digits of its length
        self.fields = fields  # attributes of the request
        self.plain: tuple[Any, bool] | None = (
            None  # whether calls with it can be lent, by this rule of access: see lending.py
        )
        self.memo: Any = None  # whatever the route wants to remember of such heads


class Heads:
    """The heads that were seen lately."""

    def __init__(self) -> None:
        self._seen: dict[bytes, Seen] = {}

    def find(self, data: bytes) -> tuple[Seen, bytes] | None:
        """What is known of the head of these bytes, and their body; None unless they are exactly one request."""
        end = data.find(_END, 0, _LONGEST)
        found = _LENGTH.search(data, 0, end + 2) if end > 0 else None
        if found is None or len(data) - end - 4 != int(found[1]):
            return None
        start, stop = found.span(1)
        seen = self._seen.get(data[:start] + data[stop:end])
        return None if seen is None else (seen, data[end + 4 :])

    def remember(self, data: bytes, length: int, fields: dict[str, Any]) -> None:
        """These bytes were parsed as one request with a body of that length, and nothing else."""
        end = data.find(_END, 0, _LONGEST)
        found = _LENGTH.search(data, 0, end + 2) if end > 0 else None
        if found is None or int(found[1]) != length or len(data) - end - 4 != length:
            return
        if len(self._seen) >= _MOST:
            self._seen.clear()
        start, stop = found.span(1)
        head = data[:start] + data[stop:end]
        self._seen[head] = Seen(head, fields)
