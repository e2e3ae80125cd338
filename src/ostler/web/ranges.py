"""Range requests (RFC 9110, section 14). Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

_DIGITS = 20  # more than any size has
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
        count = _number(last)
        if count == 0 or size == 0:
            raise Unsatisfiable
        return Piece(max(0, size - count), size - 1)
    begin, end = _number(first), _number(last) if last else size - 1
    if last and end < begin:
        return None
    if begin >= size:
        raise Unsatisfiable
    return Piece(begin, min(end, size - 1))


def _number(digits: str) -> int:
    """The number, or another that is also past every end: Python refuses to read thousands of digits."""
    return int(digits.lstrip("0")[:_DIGITS] or "0")
