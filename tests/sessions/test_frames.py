"""WebSocket frames, as a relay follows them."""

from __future__ import annotations

import os
import random
import struct

import pytest

from ostler.sessions import frames
from ostler.sessions.frames import BadFrame, Closed, Track, Unframed


def frame(opcode: int, payload: bytes, *, mask: bytes = b"", fin: bool = True, wide: int = 0) -> bytes:
    """A frame by the letter of the RFC; `wide`: with a longer length field than it needs."""
    size = len(payload)
    if wide == 2 or (not wide and 126 <= size < 65_536):
        length = bytes((126 | (0x80 if mask else 0),)) + struct.pack("!H", size)
    elif wide == 8 or size >= 65_536:
        length = bytes((127 | (0x80 if mask else 0),)) + struct.pack("!Q", size)
    else:
        length = bytes((size | (0x80 if mask else 0),))
    body = bytes(b ^ mask[i % 4] for i, b in enumerate(payload)) if mask else payload
    return bytes((opcode | (0x80 if fin else 0),)) + length + mask + body


def test_boundaries_are_found_however_the_bytes_come() -> None:
    chance = random.Random(3)
    for _ in range(60):
        whole, ends = b"", {0}
        for _ in range(chance.randint(1, 8)):
            mask = os.urandom(4) if chance.random() < 0.5 else b""
            size = chance.choice((0, 1, 5, 125, 126, 300, 65_535, 65_536, 70_000))
            opcode = chance.choice((0, 1, 2, 9, 10))
            whole += frame(opcode, bytes(min(size, 125) if opcode > 7 else size), mask=mask, fin=opcode > 7)
            ends.add(len(whole))
        track, at = Track(), 0
        while at < len(whole):
            step = chance.choice((1, 2, 3, 7, 50, 1000, 100_000))
            track.feed(whole[at : at + step])
            at = min(at + step, len(whole))
            assert track.between == (at in ends), (at, sorted(ends))


def test_pings_and_pongs_do_not_count_and_anything_else_does() -> None:
    track = Track()
    assert not track.feed(frame(9, b"ping"))
    assert not track.feed(frame(10, b"", mask=b"abcd") + frame(9, b"x"))
    assert track.feed(frame(9, b"x") + frame(1, b"text"))
    assert track.feed(frame(2, bytes(100))[:50])
    assert track.feed(frame(2, bytes(100))[50:])


@pytest.mark.parametrize("step", [1, 2, 5, 1000])
@pytest.mark.parametrize("mask", [b"", b"\x01\x02\x03\xff"])
def test_a_close_frame_that_goes_by_is_read(step: int, mask: bytes) -> None:
    told: list[bool] = []
    track = Track(lambda: told.append(True))
    whole = frame(1, b"last words", mask=mask) + frame(8, b"\x0f\xa0" + "später".encode(), mask=mask)
    for at in range(0, len(whole), step):
        assert track.closed is None
        track.feed(whole[at : at + step])
    assert (track.closed, told, track.between) == (Closed(4000, "später"), [True], True)
    track.feed(frame(8, b"\x03\xe8", mask=mask))
    assert track.closed == Closed(4000, "später"), "the first one counts"


def test_a_close_frame_of_our_own_fits_and_is_cut_between_characters() -> None:
    assert frames.close(1011, "why") == b"\x88\x05\x03\xf3why"
    assert frames.close(1011, "\ud800") == b"\x88\x03\x03\xf3?", "half of a character"
    long = frames.close(1008, "ä" * 100)
    assert len(long) <= 127
    track = Track()
    track.feed(long)
    assert track.closed == Closed(1008, "ä" * 61)
    assert frames.read_close(b"") == Closed(frames.NO_CODE, "")


def test_a_frame_without_end_costs_no_memory() -> None:
    track = Track()
    track.feed(b"\x82\x7f" + struct.pack("!Q", 1 << 62))
    piece = bytes(1 << 20)
    for _ in range(100):
        assert track.feed(piece)
    assert not track.between
    unframed = Unframed()
    unframed.feed(b"\x82\xff" + struct.pack("!Q", 1 << 62) + b"abcd")
    for _ in range(20):
        out, _ = unframed.feed(piece)
        assert len(out) == len(piece)


@pytest.mark.parametrize("step", [1, 3, 64, 100_000])
def test_a_clients_frames_are_taken_apart(step: int) -> None:
    body = os.urandom(70_000)
    whole = (
        frame(2, body[:10], mask=b"1234", fin=False)
        + frame(9, b"are you there", mask=b"abcd")
        + frame(0, body[10:], mask=b"wxyz")
        + frame(2, b"", mask=b"wxyz")
        + frame(10, b"unasked", mask=b"wxyz")
        + frame(8, b"\x03\xe8done", mask=b"wxyz")
        + b"nothing counts behind it"
    )
    unframed, out, back = Unframed(), b"", b""
    for at in range(0, len(whole), step):
        carried, answers = unframed.feed(whole[at : at + step])
        out += carried
        back += answers
    assert out == body
    assert back == frames.pong(b"are you there")
    assert unframed.closed == Closed(1000, "done")


@pytest.mark.parametrize(
    "data",
    [
        frame(2, b"not masked"),
        frame(9, bytes(126), mask=b"abcd"),
        frame(8, b"\x03\xe8", mask=b"abcd", fin=False),
        bytes((0xC2,)) + frame(2, b"compressed", mask=b"abcd")[1:],
    ],
)
def test_a_frame_that_is_not_allowed_is_refused(data: bytes) -> None:
    with pytest.raises(BadFrame):
        Unframed().feed(data)


def test_masks_go_on_where_they_stopped() -> None:
    data, mask = os.urandom(1000), os.urandom(4)
    hidden = frames.masked(data, mask)
    assert frames.masked(hidden[:333], mask) + frames.masked(hidden[333:], mask, 333) == data
