"""Short sounds of every format that the music tagger knows, made by PyAV's encoders."""

from __future__ import annotations

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
