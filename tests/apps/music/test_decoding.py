"""From files to samples: what is in them, within limits, and whatever people have on their disks."""

from __future__ import annotations

import errno
import json
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import mutagen.flac
import mutagen.id3
import mutagen.mp4
import numpy as np
import pytest

from ostler.apps.music import writing
from ostler.apps.music.decode import Limits, Source, Undecodable
from tests.apps.music import sounds


def decoded(path: Path, **limits: float) -> tuple[np.ndarray, Source]:
    source = Source(path, Limits(**limits))
    return np.concatenate(list(source.pieces())), source


@pytest.mark.parametrize("kind", sounds.KINDS)
def test_every_format_is_decoded_to_mono_at_16_khz(kind: str, tmp_path: Path) -> None:
    path = sounds.save(tmp_path / f"a.{kind}", sounds.tone(2, 48_000, 1000), rate=48_000)
    samples, source = decoded(path)
    assert samples.dtype == np.float32 and samples.ndim == 1
    assert source.seconds == pytest.approx(2, abs=0.1) and len(samples) == round(source.seconds * 16_000)
    middle = samples[8_000:24_000]
    assert np.abs(np.fft.rfft(middle)).argmax() == 1000, "one second: the bins are hertz"
    assert np.abs(middle).max() == pytest.approx(0.3, abs=0.03)


def test_the_channels_are_averaged(tmp_path: Path) -> None:
    path, left = tmp_path / "a.wav", sounds.tone(1, 16_000)
    import wave

    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((np.stack([left, -left / 2], 1) * 32767).astype("<i2").tobytes())
    samples, _ = decoded(path)
    assert np.abs(samples - left / 4).max() < 1e-4


def _picture(width: int, height: int) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * (width // 8 + 1) * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(64, 64), (12_000, 9_000)])
def test_covers_do_not_matter_however_large(size: tuple[int, int], tmp_path: Path) -> None:
    picture = _picture(*size)
    mp3, flac, m4a = (sounds.save(tmp_path / f"a.{kind}") for kind in ("mp3", "flac", "m4a"))
    tags = mutagen.id3.ID3()
    tags.add(mutagen.id3.APIC(encoding=3, mime="image/png", type=3, desc="", data=picture))
    tags.save(mp3)
    found = mutagen.File(flac)
    block = mutagen.flac.Picture()
    block.data, block.mime, block.type = picture, "image/png", 3
    found.add_picture(block)
    found.save()
    found = mutagen.File(m4a)
    found["covr"] = [mutagen.mp4.MP4Cover(picture, mutagen.mp4.MP4Cover.FORMAT_PNG)]
    found.save()
    for path in (mp3, flac, m4a):
        assert decoded(path)[1].seconds == pytest.approx(2, abs=0.1)
        assert writing.write(path, {"tags": "jazz"}).changed


def test_what_is_longer_than_the_limit_is_cut(tmp_path: Path) -> None:
    path = sounds.save(tmp_path / "a.flac", sounds.noise(30, 8_000), rate=8_000, channels=1)
    samples, source = decoded(path, seconds=12.5)
    assert (len(samples), source.seconds, source.cut) == (12.5 * 16_000, 12.5, True)
    assert decoded(path, seconds=20)[1].cut  # where a piece ends, too
    _, whole = decoded(path)
    assert not whole.cut and whole.seconds == pytest.approx(30, abs=0.01)


def test_decoding_ends_when_its_time_is_over(tmp_path: Path) -> None:
    path = sounds.save(tmp_path / "a.flac")
    with pytest.raises(Undecodable, match="took more than"):
        decoded(path, time=-1)


def test_memory_is_limited_while_a_file_is_decoded_and_not_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(sounds.save(tmp_path / "a.flac"), Limits(memory=100))
    pieces = source.pieces()
    next(pieces)
    with pytest.raises(MemoryError):
        bytearray(300 << 20)
    pieces.close()
    bytearray(300 << 20)

    def greedy(*_: object, **__: object) -> None:
        bytearray(300 << 20)

    monkeypatch.setattr("ostler.apps.music.decode.av.open", greedy)
    with pytest.raises(Undecodable, match="more than 100 MB of memory"):
        next(source.pieces())


def test_a_file_that_is_not_there_and_a_directory_are_no_bad_audio(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        decoded(tmp_path / "none.mp3")
    with pytest.raises(OSError) as caught:
        decoded(tmp_path)
    assert caught.value.errno in (errno.EISDIR, errno.EINVAL, errno.EIO)


def test_damaged_packets_are_skipped_and_counted(tmp_path: Path) -> None:
    path = sounds.save(tmp_path / "a.flac", sounds.noise(4))
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 3, len(data) // 2, 997):
        data[at] ^= 0x55
    path.write_bytes(data)
    samples, source = decoded(path)
    assert 1 < source.seconds <= 4.1 and np.isfinite(samples).all()


def test_a_playlist_does_not_make_the_decoder_open_other_files(tmp_path: Path) -> None:
    sounds.save(tmp_path / "secret.mp3")
    for text in ("#EXTM3U\n#EXTINF:2,\nsecret.mp3\n#EXT-X-ENDLIST\n", "ffconcat version 1.0\nfile secret.mp3\n"):
        (tmp_path / "a.mp3").write_text(text)
        with pytest.raises(Undecodable):
            decoded(tmp_path / "a.mp3")


def test_not_a_number_in_a_file_does_not_spoil_the_rest(tmp_path: Path) -> None:
    values = np.full(32_000, np.nan, "<f4")
    values[16_000:] = sounds.tone(1, 16_000)
    header = struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF",
        36 + values.nbytes,
        b"WAVE",
        b"fmt ",
        16,
        3,
        1,
        16_000,
        64_000,
        4,
        32,
        b"data",
        values.nbytes,
    )
    (tmp_path / "a.wav").write_bytes(header + values.tobytes())
    samples, _ = decoded(tmp_path / "a.wav")
    assert np.isfinite(samples).all() and np.abs(samples[17_000:]).max() > 0.2


# ---- the corpus

_RUN = """
import json, os, resource, sys, time
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.fsync = lambda fd: None  # the disk is not what is tested, and slow
from pathlib import Path
from ostler import Fail
from ostler.apps.music import writing
from ostler.apps.music.decode import Limits, Source
from ostler.apps.music.spectrogram import Spectrogram

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

good = Path(sys.argv[1]) / "good.mp3"
for _ in Source(good).pieces():
    pass
writing.write(good, {"tags": "x"})
before = peak()
for path in sorted(Path(sys.argv[1]).iterdir()):
    began, source = time.process_time(), Source(path, Limits(seconds=60, time=20))
    old = path.read_bytes()
    try:
        spectrogram = Spectrogram()
        for piece in source.pieces():
            spectrogram.push(piece)
        said = ["decoded", source.seconds]
    except Fail as error:
        said = ["failed", str(error)]
    took = time.process_time() - began
    try:
        writing.read(path)
        writing.write(path, {"tags": ["jazz"]})
        written = writing.ours(path)
    except Fail as error:
        written = str(error)
        assert path.read_bytes() == old, path
    print(json.dumps([path.name, *said, took, written]), flush=True)
print(json.dumps(["memory", peak() - before]))
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [80, pytest.param(500, marks=pytest.mark.soak)])
def test_damaged_files_are_decoded_or_refused_with_a_reason(count: int, tmp_path: Path) -> None:
    """In one process, which must not crash, hang or grow; and each is tagged, or refused and left as it is."""
    assert sounds.corpus(tmp_path / "corpus", count) == count
    done = subprocess.run(
        [sys.executable, "-c", _RUN, tmp_path / "corpus"], capture_output=True, text=True, timeout=280
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (lines[-1:], done.stderr[-2000:])
    (_, grown), files = lines.pop(), lines
    assert len(files) == count
    kinds = {"decoded": 0, "failed": 0}
    for name, how, what, took, written in files:
        kinds[how] += 1
        assert how == "decoded" and what > 0 or len(what) > 10, name
        assert took < 20, name
        assert isinstance(written, str) and len(written) > 10 or written == {"tags": ["jazz"]}, name
    assert min(kinds.values()) > count / 5, kinds
    assert grown < 200, f"{grown} MB more than for a good file"
