"""Which bytes a Range header asks for."""

from __future__ import annotations

import pytest

from ostler.web import ranges


@pytest.mark.parametrize(
    ("header", "piece"),
    [
        (None, None),
        ("", None),
        ("bytes=0-", (0, 99)),
        ("bytes=0-0", (0, 0)),
        ("bytes=10-19", (10, 19)),
        ("Bytes=90-500", (90, 99)),
        ("bytes=-10", (90, 99)),
        ("bytes=-500", (0, 99)),
        ("bytes=19-10", None),
        ("bytes=-", None),
        (f"bytes=-{'9' * 5000}", (0, 99)),
        (f"bytes={'0' * 5000}7-{'9' * 5000}", (7, 99)),
        ("bytes=0-1,5-6", None),
        ("lines=0-1", None),
        ("bytes=a-b", None),
    ],
)
def test_ranges(header, piece) -> None:
    assert ranges.wanted(header, 100) == (None if piece is None else ranges.Piece(*piece))


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=100-200", "bytes=-0", f"bytes={'9' * 5000}-"])
def test_ranges_past_the_end(header) -> None:
    with pytest.raises(ranges.Unsatisfiable):
        ranges.wanted(header, 100)
