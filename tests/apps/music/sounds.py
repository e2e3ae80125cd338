"""Short sounds of every format that the music tagger knows, made by PyAV's encoders."""

from __future__ import annotations

import random
from pathlib import Path

import av
import mutagen
import numpy as np

RATE = 44_100
# Format name for FFmpeg, encoder, sample format.
KINDS = {
    "mp3": ("mp3", "libmp3lame", "fltp"),
    "flac": ("flac", "flac", "s16"),
    "ogg": ("ogg", "vorbis", "fltp"),
    "opus": ("ogg", "libopus", "flt"),
    "m4a": ("ipod", "aac", "fltp"),
    "wav": ("wav", "pcm_s16le", "s16"),
}


def tone(seconds: float, rate: int = RATE, frequency: float = 440) -> np.ndarray:
    return 0.3 * np.sin(2 * np.pi * frequency * np.arange(int(seconds * rate)) / rate)


def noise(seconds: float, rate: int = RATE, seed: int = 1) -> np.ndarray:
    return 0.2 * np.random.default_rng(seed).standard_normal(int(seconds * rate))


def beat(seconds: float, rate: int = RATE) -> np.ndarray:
    """A drum twice a second over a bass."""
    time = np.arange(int(seconds * rate)) / rate
    drum = np.exp(-30 * (time % 0.5)) * noise(seconds, rate)
    return drum * 2 + 0.3 * np.sign(np.sin(2 * np.pi * 55 * time)) * (time % 0.25 < 0.2)


def save(
    path: Path,
    sound: np.ndarray | None = None,
    *,
    kind: str | None = None,
    rate: int = RATE,
    channels: int = 2,
    **tags: str,
) -> Path:
    """Encode a sound (default: 2 s of a tone) as the format of the path's suffix, or of `kind`, and give it tags."""
    container, codec, form = KINDS[kind or path.suffix[1:]]
    sound = tone(2, rate) if sound is None else sound
    rate = 48_000 if codec == "libopus" else rate
    with av.open(str(path), "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate, layout="stereo" if channels == 2 else "mono")
        stream.codec_context.options = {"strict": "experimental"}  # FFmpeg's own Vorbis encoder
        resampler = av.AudioResampler(format=form, layout=stream.layout, rate=rate)
        samples = np.ascontiguousarray(np.stack([sound] * channels), np.float32).clip(-1, 1)
        for start in range(0, samples.shape[1], 1024):
            part = np.ascontiguousarray(samples[:, start : start + 1024])
            frame = av.AudioFrame.from_ndarray(part, format="fltp", layout=stream.layout.name)
            frame.sample_rate, frame.pts = rate, start
            for converted in resampler.resample(frame):
                out.mux(stream.encode(converted))
        out.mux(stream.encode(None))
    if tags:
        found = mutagen.File(path, easy=True)
        if found.tags is None:
            found.add_tags()
        if kind == "wav" or path.suffix == ".wav":
            for name, value in tags.items():
                found.tags.add(
                    getattr(mutagen.id3, {"title": "TIT2", "artist": "TPE1", "album": "TALB"}[name])(
                        encoding=3, text=value
                    )
                )
        else:
            found.update(tags)
        found.save()
    return path


def corpus(folder: Path, count: int) -> int:
    """Files that are damaged in all the ways in which files are."""
    folder.mkdir()
    good = {}
    for kind in KINDS:
        good[kind] = save(
            folder / f"good.{kind}", beat(1.5, 22_050), rate=24_000 if kind == "opus" else 22_050, title="x" * 40
        ).read_bytes()
    chance = random.Random(7)
    for number in range(count - len(good)):
        kind = chance.choice(list(good))
        data = bytearray(good[kind])
        what = number % 8
        if what == 0:  # truncated
            data = data[: chance.randrange(len(data))]
        elif what == 1:  # another format's name
            kind = chance.choice([k for k in good if k != kind])
        elif what == 2:  # nothing, or nothing but zeros
            data = bytearray(chance.choice([0, 1, 4096]))
        elif what == 3:
            data = bytearray(b"This is a text file, and not music.\n" * chance.randrange(1, 400))
        elif what == 4:  # bytes changed anywhere
            for _ in range(chance.randrange(1, 400)):
                data[chance.randrange(len(data))] = chance.randrange(256)
        elif what == 5:  # bytes changed in the header
            for _ in range(chance.randrange(1, 30)):
                data[chance.randrange(min(400, len(data)))] = chance.choice((0, 127, 128, 255, chance.randrange(256)))
        elif what == 6:  # a piece is missing, or is there twice
            start = chance.randrange(len(data))
            piece = data[start : start + chance.randrange(5000)]
            data = data[:start] + (piece * 3 if number % 2 else b"") + data[start + len(piece) :]
        else:  # noise with a good beginning
            data = data[: chance.randrange(8, 300)] + chance.randbytes(chance.randrange(20_000))
        (folder / f"{number:03}.{kind}").write_bytes(data)
    return len(list(folder.iterdir()))
