"""Models from a directory of ONNX files, as Essentia publishes them: one that takes spectrograms, and heads that take its embeddings.

Beside each `NAME.onnx` is `NAME.json`, which lists the `classes`. onnxruntime is needed for these alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ostler import ConfigError
from ostler.apps.music.spectrogram import BANDS, Floats

_BATCH = 16  # windows at a time, where the model leaves it open


class _Part:
    """One ONNX file: its session, its classes, and which of its outputs are scores and embeddings."""

    def __init__(self, path: Path) -> None:
        self.path, self.session = path, _session(path)
        self.classes = _classes(path.with_suffix(".json"))
        (self.input, *others) = self.session.get_inputs()
        if others:
            raise ConfigError(f"the model {path} takes {len(others) + 1} inputs; only models with one can be used")
        self.takes_frames = len(self.input.shape) >= 3
        widths = {one.name: one.shape[-1] for one in self.session.get_outputs()}
        self.scores = next((name for name, width in widths.items() if width == len(self.classes)), None)
        self.vectors = next((name for name in widths if name != self.scores), None)
        if self.scores is None:
            raise ConfigError(
                f"no output of the model {path} has the width of its {len(self.classes)} classes; outputs: {widths}"
            )

    def run(self, values: Floats) -> tuple[Floats, Floats]:
        """Scores and embeddings (empty where it has none); a model with a fixed batch gets it filled with zeros."""
        fixed = self.input.shape[0] if isinstance(self.input.shape[0], int) else None
        names = [name for name in (self.scores, self.vectors) if name]
        results: list[list[Floats]] = [[] for _ in names]
        for start in range(0, len(values), fixed or _BATCH):
            part = values[start : start + (fixed or _BATCH)]
            count = len(part)
            if fixed and count < fixed:
                part = np.concatenate([part, np.zeros((fixed - count, *part.shape[1:]), np.float32)])
            shape = [
                len(part),
                *(n if isinstance(n, int) else m for n, m in zip(self.input.shape[1:], part.shape[1:], strict=False)),
            ]
            for result, output in zip(
                results, self.session.run(names, {self.input.name: part.reshape(shape)}), strict=True
            ):
                result.append(output[:count].reshape(count, -1))
        joined = [np.concatenate(result) for result in results]
        return joined[0], joined[1] if len(joined) > 1 else np.empty((len(values), 0), np.float32)


class OnnxModel:
    """All ONNX files of a directory as one model: the classes of the first, then those of the heads in the order of their names."""

    def __init__(self, directory: Path) -> None:
        parts = [_Part(path) for path in sorted(directory.glob("*.onnx"))]
        bodies = [part for part in parts if part.takes_frames]
        if len(bodies) != 1:
            raise ConfigError(
                f"the model in {directory} needs one ONNX file that takes spectrograms (windows, frames, {BANDS} bands), found {len(bodies)}"
            )
        self._body, self._heads = bodies[0], [part for part in parts if not part.takes_frames]
        if self._heads and self._body.vectors is None:
            raise ConfigError(
                f"the heads in {directory} need embeddings, and {self._body.path.name} has no second output that gives them"
            )
        frames = self._body.input.shape[-2] if self._body.input.shape[-1] == BANDS else None
        if not isinstance(frames, int) or frames < 1:
            raise ConfigError(
                f"the input of {self._body.path} is {self._body.input.shape}, not (windows, frames, {BANDS} bands)"
            )
        self.frames, self.hop = frames, max(1, frames // 2)  # windows overlap by half, as Essentia's do
        self.tags = _named([self._body, *self._heads])

    def __call__(self, windows: Floats) -> tuple[Floats, Floats]:
        scores, vectors = self._body.run(windows)
        all_scores = [scores, *(head.run(vectors)[0] for head in self._heads)]
        return np.concatenate(all_scores, axis=1), vectors


def _session(path: Path) -> Any:
    try:
        import onnxruntime  # noqa: PLC0415
    except ImportError:
        raise ConfigError(f"the model {path} needs onnxruntime: pip install onnxruntime") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # workers are processes: one core each
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001  onnxruntime's errors have no common class
        raise ConfigError(f"the model {path} cannot be loaded: {error}") from None


def _classes(path: Path) -> list[str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["classes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} must be a JSON file with a list `classes` ({type(error).__name__}: {error})"
        ) from None
    return [str(name) for name in found]


def _named(parts: list[_Part]) -> list[str]:
    """All classes. A name that two files have gets the file's name in front."""
    every = [name for part in parts for name in part.classes]
    return [name if every.count(name) == 1 else f"{part.path.stem}: {name}" for part in parts for name in part.classes]
