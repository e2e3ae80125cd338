from __future__ import annotations

import pytest

from ostler.lifecycle.wire import Frames, encode


def test_frames_survive_any_cut() -> None:
    frames = [["ready", {}], ["note", 1, "text with \n newline and ü"], ["beat", 1.5, 2.0]]
    data = b"".join(encode(f) for f in frames)
    for size in (1, 2, 7, 1000):
        reader, found = Frames(), []
        for i in range(0, len(data), size):
            found += reader.feed(data[i : i + size])
        assert found == frames


@pytest.mark.parametrize("junk", [b"hello\n", b"{}\n", b"[]\n", b"[1]\n", b"\xff\xfe\n"])
def test_what_is_not_a_frame_is_refused(junk: bytes) -> None:
    reader = Frames()
    assert reader.feed(encode(["ready", {}]) + junk + encode(["beat", 1, 1])) == [["ready", {}]]
    assert "not a frame" in (reader.broken or "")
