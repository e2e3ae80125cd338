"""Recordings as callers send them, decoded within bounds. WAV is read here; other formats by soundfile. Python 3.9, with numpy."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from typing import Any

from ostler import InputError
from ostler.apps.models import given

RATE = 16_000
_RATES = (4_000, 384_000)
_CHANNELS = 32
_SILENT = 1e-4  # the peak of 16-bit noise that nobody hears
_OPEN = (0, 0xFFFFFFFF)  # the length of data that a stream writes, which does not know its end
_PCM, _FLOAT, _MORE = 1, 3, 0xFFFE
# (format, bits) -> what numpy calls it, and the value of full scale
_KINDS = {
    (_PCM, 8): ("u1", 128.0),
    (_PCM, 16): ("<i2", 32768.0),
    (_PCM, 32): ("<i4", 2147483648.0),
    (_FLOAT, 32): ("<f4", 1.0),
    (_FLOAT, 64): ("<f8", 1.0),
}


def read(payload: Any, least: float = 0.1) -> tuple[Any, Mapping[str, Any]]:
    """The recording as 16 kHz mono (numpy float32 from -1 to 1), and the options beside it; raises InputError.

    How long it is is read from its head, so nothing longer than the limit is decoded. `least` is in seconds.
    """
    import numpy as np  # noqa: PLC0415

    data, options = given.file(payload, "audio", given.limit("audio_bytes"))
    wave = bytes(data[:4]) == b"RIFF" and bytes(data[8:12]) == b"WAVE"
    samples, rate = _wave(data) if wave else _other(data)
    if not np.isfinite(samples).all():
        raise InputError("the audio has samples that are NaN or infinite")
    if samples.ndim > 1:
        samples = samples.mean(axis=1)
    seconds = len(samples) / rate
    if seconds < least:
        raise InputError(f"the audio must have {least:g} s, found {seconds:.2f} s")
    samples = np.clip(samples, -1.0, 1.0)
    if np.abs(samples).max() < _SILENT:
        raise InputError(
            f"the audio is silent: no sample of its {seconds:.1f} s is louder than {_SILENT:g} of full scale"
        )
    return resampled(samples, rate), options


def resampled(samples: Any, rate: int) -> Any:
    """At 16 kHz, by way of its spectrum: nothing above half the new rate is left to disturb."""
    import numpy as np  # noqa: PLC0415

    if rate == RATE or not len(samples):
        return samples.astype(np.float32)
    pieces = []
    for start in range(0, len(samples), rate * 30):  # a spectrum of 30 s at a time
        piece = samples[start : start + rate * 30]
        wanted = max(1, round(len(piece) * RATE / rate))
        spectrum = np.fft.rfft(piece)
        kept = np.zeros(wanted // 2 + 1, dtype=spectrum.dtype)
        size = min(len(kept), len(spectrum))
        kept[:size] = spectrum[:size]
        pieces.append(np.fft.irfft(kept, wanted) * (wanted / len(piece)))
    return np.concatenate(pieces).astype(np.float32)


def _wave(data: memoryview) -> tuple[Any, int]:
    """A RIFF file: 8, 16, 24 and 32 bits, or floats."""
    kind = channels = rate = bits = 0
    for name, size, at in _chunks(data):
        if name == b"fmt " and size >= 16:
            if at + size > len(data):
                break
            kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", data, at)
            if kind == _MORE and size >= 26:
                (kind,) = struct.unpack_from("<H", data, at + 24)
        elif name == b"data" and rate:
            return _samples(data[at:], size, kind, channels, rate, bits), rate
    raise InputError("the audio is not a whole WAV file: it ends before its samples begin")


def _chunks(data: memoryview) -> Any:
    at = 12
    while at + 8 <= len(data):
        name, size = bytes(data[at : at + 4]), int.from_bytes(data[at + 4 : at + 8], "little")
        yield name, size, at + 8
        at += 8 + size + size % 2


def _samples(data: memoryview, size: int, kind: int, channels: int, rate: int, bits: int) -> Any:
    import numpy as np  # noqa: PLC0415

    if not (_RATES[0] <= rate <= _RATES[1] and 0 < channels <= _CHANNELS):
        raise InputError(f"the audio has {channels} channels at {rate} Hz, which cannot be")
    if (kind, bits) not in _KINDS and (kind, bits) != (_PCM, 24):
        raise InputError(f"the audio is WAV of format {kind} with {bits} bits; send PCM or floats")
    frame = channels * bits // 8
    if size in _OPEN:
        size = len(data) // frame * frame
    if size > len(data):
        raise InputError(f"the audio is incomplete: its head says {size} bytes of samples, and {len(data)} are there")
    frames = size // frame
    _check(frames / rate)
    if bits == 24:
        padded = np.zeros((frames * channels, 4), dtype=np.uint8)
        padded[:, 1:] = np.frombuffer(data[: frames * frame], dtype=np.uint8).reshape(-1, 3)
        found = padded.view("<i4")[:, 0] / 2147483648.0
    else:
        name, full = _KINDS[kind, bits]
        found = np.frombuffer(data[: frames * frame], dtype=name) / full
        if bits == 8:
            found -= 1.0
    return found.astype(np.float32).reshape(-1, channels)


def _other(data: memoryview) -> tuple[Any, int]:
    """FLAC, Ogg, MP3 and what else libsndfile knows."""
    try:
        import soundfile  # noqa: PLC0415
    except ImportError:
        raise InputError(
            "the audio is not WAV, and this environment reads nothing else (it has no soundfile)"
        ) from None
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if not (_RATES[0] <= file.samplerate <= _RATES[1] and 0 < file.channels <= _CHANNELS):
                raise InputError(f"the audio has {file.channels} channels at {file.samplerate} Hz, which cannot be")
            most = int(given.limit("audio_seconds") * file.samplerate)
            found = file.read(most + 1, dtype="float32", always_2d=True)
            _check(len(found) / file.samplerate)
            if len(found) < min(file.frames, most):
                raise InputError(
                    f"the audio is incomplete: its head says {file.frames} samples, and {len(found)} can be read"
                )
            return found, file.samplerate
    except (soundfile.SoundFileError, RuntimeError, ValueError) as error:
        raise InputError(f"the audio cannot be read: {error}") from None


def _check(seconds: float) -> None:
    most = given.limit("audio_seconds")
    if seconds > most:
        raise InputError(f"the audio may have {most:g} s, found {seconds:.1f} s; cut it into pieces")
