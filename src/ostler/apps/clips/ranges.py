"""Range requests (RFC 9110, section 14). Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

_ONE = re.compile(r"bytes=\s*(\d*)\s*-\s*(\d*)\s*", re.IGNORECASE)


class Unsatisfiable(ValueError):
    """No byte of the wanted range exists: 416."""


class Piece(NamedTuple):
    """Bytes from `first` to `last`, both included."""

    first: int
    last: int

    @property
    def length(self) -> int:
        return self.last - self.first + 1


def wanted(header: str | None, size: int) -> Piece | None:
    """The piece that a Range header asks for; None when the whole is to be sent.

    A header that cannot be understood, and one that asks for several pieces, may be ignored by the RFC, and is.
    """
    found = _ONE.fullmatch(header.strip()) if header else None
    if found is None or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if not first:  # the last so many bytes
        count = int(last)
        if count == 0 or size == 0:
            raise Unsatisfiable
        return Piece(max(0, size - count), size - 1)
    if last and int(last) < int(first):
        return None
    if int(first) >= size:
        raise Unsatisfiable
    return Piece(int(first), min(int(last), size - 1) if last else size - 1)
