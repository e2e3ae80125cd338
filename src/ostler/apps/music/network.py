"""The musicnn network (Pons and Serra, 2019) as matrix products: from windows of a mel spectrogram to tags and an embedding.

Training with weight decay left most filters of the published models with weights of 0 (in MSD_musicnn 497 of the 561 of the first layer). What such a
filter gives is the same number for every input, so it is worked out once, and only the others are computed. This is exact, and about ten times faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ostler.apps.music.spectrogram import BANDS, Floats

FRAMES = 187  # of a window: 3 seconds
BATCH = 4  # windows computed together: more do not fit into the caches and gain nothing
_EPSILON = 1e-3  # of batch normalisation in TensorFlow
_DEAD = 1e-6  # a filter that can change its output by no more than this, per unit of input, is a constant
_POSITIONS = 4  # neighbouring frequencies in one product
_STEPS = 17  # neighbouring frames in one product; 187 is 11 times that


@dataclass(frozen=True, slots=True)
class Affine:
    """Batch normalisation of a trained network: a factor and an offset per channel."""

    scale: Floats
    shift: Floats

    @classmethod
    def read(cls, weights: Mapping[str, Floats], number: int) -> Affine:
        name = _numbered("batch_normalization", number)
        scale = weights[f"{name}/gamma"] / np.sqrt(weights[f"{name}/moving_variance"] + _EPSILON)
        return cls(scale, weights[f"{name}/beta"] - weights[f"{name}/moving_mean"] * scale)

    def __call__(self, values: Floats) -> Floats:
        return values * self.scale + self.shift


@dataclass(frozen=True, slots=True)
class Filters:
    """A convolution, ReLU and normalisation. `live` are the filters that depend on the input; `constant` is what all filters give for no input."""

    kernel: Floats  # taps …, channels in, live filters
    bias: Floats
    after: Affine
    live: NDArray[np.intp]
    constant: Floats

    @classmethod
    def read(cls, weights: Mapping[str, Floats], number: int) -> Filters:
        kernel, bias = (weights[f"{_numbered('conv2d', number)}/{part}"] for part in ("kernel", "bias"))
        after = Affine.read(weights, number + 1)
        reach = np.abs(kernel).sum(axis=(0, 1, 2)) * np.abs(after.scale)
        live = np.flatnonzero(reach > _DEAD)
        constant = after(np.maximum(bias, 0))
        kept = Affine(after.scale[live], after.shift[live])
        return cls(np.ascontiguousarray(kernel[:, :, 0, live]), bias[live], kept, live, constant)

    def finish(self, sums: Floats) -> Floats:
        sums += self.bias
        return self.after(np.maximum(sums, 0, out=sums))


class _Pooled:
    """A layer whose largest value over the frequencies is kept.

    Bias, ReLU and a positive factor keep the order of values, so the maximum is taken first, of the bare sums. Of filters with a negative factor the
    smallest sum is wanted: their kernels are negated.
    """

    def __init__(self, filters: Filters) -> None:
        self.filters = filters
        self.sign: Floats = np.where(filters.after.scale < 0, -1, 1).astype(np.float32)
        self.kernel: Floats = filters.kernel * self.sign

    def finish(self, largest: Floats) -> Floats:
        return self.filters.finish(largest * self.sign)


class _Timbral(_Pooled):
    """Filters of 7 frames by many bands, padded in time."""

    def __init__(self, filters: Filters) -> None:
        super().__init__(filters)
        self.taps, self.bands, count = self.kernel.shape
        self.positions = BANDS - self.bands + 1
        # Rows: bands, then frames within a band; columns: the same filters at neighbouring positions.
        block = np.zeros((self.bands + _POSITIONS - 1, self.taps, _POSITIONS, count), np.float32)
        for position in range(_POSITIONS):
            block[position : position + self.bands, :, position] = self.kernel.transpose(1, 0, 2)
        self.block: Floats = block.reshape(-1, _POSITIONS * count)

    def __call__(self, columns: Floats) -> Floats:
        """`columns` has a row per frame: for each band its value in this frame and the three on both sides."""
        count = len(self.filters.live)
        largest = np.full((len(columns), _POSITIONS * count), -np.inf, np.float32)
        product = np.empty_like(largest)
        for position in range(0, self.positions, _POSITIONS):
            # The last group overlaps the one before it, which changes no maximum.
            start = min(position, self.positions - _POSITIONS) * self.taps
            np.matmul(columns[:, start : start + len(self.block)], self.block, out=product)
            np.maximum(largest, product, out=largest)
        return self.finish(largest.reshape(-1, _POSITIONS, count).max(axis=1))


class _Temporal(_Pooled):
    """Filters of one band by many frames, padded as TensorFlow's "same" does."""

    def __init__(self, filters: Filters) -> None:
        super().__init__(filters)
        self.taps, _, count = self.kernel.shape
        self.before = (self.taps - 1) // 2
        block = np.zeros((self.taps + _STEPS - 1, _STEPS, count), np.float32)
        for step in range(_STEPS):
            block[step : step + self.taps, step] = self.kernel[:, 0]
        self.block: Floats = block.reshape(-1, _STEPS * count)

    def __call__(self, windows: Floats) -> Floats:
        """`windows` has a row per window and band, with the frames in it."""
        count, rows = len(self.filters.live), len(windows)
        padded = np.pad(windows, ((0, 0), (self.before, self.taps - 1 - self.before)))
        result = np.empty((rows // BANDS, FRAMES, count), np.float32)
        product = np.empty((rows, self.block.shape[1]), np.float32)
        for start in range(0, FRAMES, _STEPS):
            np.matmul(padded[:, start : start + len(self.block)], self.block, out=product)
            largest = product.reshape(-1, BANDS, _STEPS, count).max(axis=1)
            result[:, start : start + _STEPS] = largest
        return self.finish(result)


class Network:
    """The network with given weights, by the names in the checkpoint. Safe to share among threads."""

    frames = hop = FRAMES  # of a window, and from one window to the next: they do not overlap

    def __init__(self, weights: Mapping[str, Floats]) -> None:
        self._input = Affine.read(weights, 0)
        first = [Filters.read(weights, number) for number in range(5)]
        self._timbral = [_Timbral(one) for one in first[:2]]
        self._temporal = [_Temporal(one) for one in first[2:]]
        self._middle = [Filters.read(weights, number) for number in (5, 6, 7)]
        self._pooled, self._last = Affine.read(weights, 9), Affine.read(weights, 10)
        self._dense = weights["dense/kernel"], weights["dense/bias"]
        self._output = weights["dense_1/kernel"], weights["dense_1/bias"]
        self._constant: Floats = np.concatenate([one.constant for one in first])
        offsets = np.cumsum([0, *(len(one.constant) for one in first)])
        self._places = [offsets[i] + one.live for i, one in enumerate(first)]

    def __call__(self, windows: Floats) -> tuple[Floats, Floats]:
        """Scores (0 to 1 per tag) and embeddings of windows: an array (any number, 187 frames, 96 bands)."""
        parts = [self._batch(windows[i : i + BATCH]) for i in range(0, len(windows), BATCH)]
        return np.concatenate([scores for scores, _ in parts]), np.concatenate([vectors for _, vectors in parts])

    def _batch(self, windows: Floats) -> tuple[Floats, Floats]:
        layers = [self._front(self._input(windows))]
        for number, filters in enumerate(self._middle):
            value = _over_time(filters, layers[-1])
            layers.append(value + layers[-1] if number else value)
        joined = np.concatenate(layers, axis=2)
        # TensorFlow puts the two side by side per channel: max, mean, max, mean …
        pooled = np.stack([joined.max(axis=1), joined.mean(axis=1)], axis=2).reshape(len(windows), -1)
        dense = np.maximum(self._pooled(pooled) @ self._dense[0] + self._dense[1], 0)
        embedding = self._last(dense)
        logits = embedding @ self._output[0] + self._output[1]
        return 1 / (1 + np.exp(-logits)), embedding

    def _front(self, windows: Floats) -> Floats:
        """The first layer: five groups of filters side by side."""
        count = len(windows)
        result = np.empty((count, FRAMES, len(self._constant)), np.float32)
        result[:] = self._constant
        columns = _columns(windows, self._timbral[0].taps)
        for layer, place in zip(self._timbral, self._places[:2], strict=True):
            result[:, :, place] = layer(columns).reshape(count, FRAMES, -1)
        rows = np.ascontiguousarray(windows.transpose(0, 2, 1)).reshape(-1, FRAMES)
        for over_time, place in zip(self._temporal, self._places[2:], strict=True):
            result[:, :, place] = over_time(rows)
        return result


def _columns(windows: Floats, taps: int) -> Floats:
    """A row per frame: for each band its values in the frames around this one, so that a patch of neighbouring bands is one piece of a row."""
    around = taps // 2
    padded = np.pad(windows, ((0, 0), (around, around), (0, 0)))
    columns = np.empty((len(windows), FRAMES, BANDS, taps), np.float32)
    for tap in range(taps):
        columns[..., tap] = padded[:, tap : tap + FRAMES]
    return columns.reshape(-1, BANDS * taps)


def _over_time(filters: Filters, values: Floats) -> Floats:
    """A convolution over frames that takes in all channels, padded with zeros."""
    taps = len(filters.kernel)
    padded = np.pad(values, ((0, 0), (taps // 2, taps // 2), (0, 0)))
    sums = sum(padded[:, tap : tap + FRAMES] @ filters.kernel[tap] for tap in range(taps))
    result = np.empty((*values.shape[:2], len(filters.constant)), np.float32)
    result[:] = filters.constant
    result[:, :, filters.live] = filters.finish(np.asarray(sums))
    return result


def _numbered(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name
