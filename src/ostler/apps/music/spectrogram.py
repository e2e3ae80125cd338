"""Mel spectrograms as librosa computes them for musicnn, with numpy alone and piece by piece, so that memory does not grow with a track's length."""

from __future__ import annotations

import functools
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]

RATE = 16_000  # samples a second
FFT = 512
HOP = 256
BANDS = 96


@functools.cache
def filters(rate: int = RATE, size: int = FFT, bands: int = BANDS) -> Floats:
    """Triangles on Slaney's mel scale, each of the same area: what `librosa.filters.mel` gives, transposed."""
    frequencies = np.linspace(0, rate / 2, size // 2 + 1)
    edges = _hertz(np.linspace(_mel(0.0), _mel(rate / 2), bands + 2))
    widths = np.diff(edges)
    ramps = edges[:, None] - frequencies
    rising, falling = -ramps[:-2] / widths[:-1, None], ramps[2:] / widths[1:, None]
    triangles = np.maximum(0, np.minimum(rising, falling))
    triangles *= (2 / (edges[2:] - edges[:-2]))[:, None]
    return np.ascontiguousarray(triangles.T, np.float32)


# Slaney's scale: 15 mel for each 1000 Hz up to there, then 27 for each factor of 6.4.
_LINEAR, _FROM = 200 / 3, 1000.0
_STEP = np.log(6.4) / 27


def _mel(hertz: float) -> float:
    return float(hertz / _LINEAR if hertz < _FROM else _FROM / _LINEAR + np.log(hertz / _FROM) / _STEP)


def _hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    knee = _FROM / _LINEAR
    return np.where(mel < knee, mel * _LINEAR, _FROM * np.exp(_STEP * (np.maximum(mel, knee) - knee)))


class Spectrogram:
    """Takes the samples of one track in pieces, gives the frames that are complete. The end of the track is padded with silence, as its beginning is."""

    def __init__(self) -> None:
        self._filters = filters()
        self._window = np.hanning(FFT + 1)[:-1].astype(np.float32)
        self._rest: Floats = np.zeros(FFT // 2, np.float32)

    def push(self, samples: Floats) -> Floats:
        """The frames (count, 96 bands) that these samples complete."""
        samples = np.concatenate([self._rest, samples])
        count = max(0, (len(samples) - FFT) // HOP + 1)
        self._rest = samples[count * HOP :]
        return self._frames(samples, count)

    def end(self) -> Floats:
        """The last frames of the track."""
        return self.push(np.zeros(FFT // 2, np.float32))

    def _frames(self, samples: Floats, count: int) -> Floats:
        if not count:
            return np.empty((0, BANDS), np.float32)
        pieces = np.lib.stride_tricks.sliding_window_view(samples, FFT)[: count * HOP : HOP]
        spectrum = np.fft.rfft(pieces * self._window, axis=1)
        power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32, copy=False)
        frames: Floats = np.log10(10_000 * (power @ self._filters) + 1)
        return frames
