"""From an audio file to scores for tags and an embedding."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

# Before numpy is loaded, by this module or those below: workers are processes, and threads of two of them on the same cores would only wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from ostler.apps.music import weights
from ostler.apps.music.decode import Limits, Source
from ostler.apps.music.network import Network
from ostler.apps.music.spectrogram import BANDS, Floats, Spectrogram


class Model(Protocol):
    """What a model is to the tagger: from windows of a spectrogram (count, frames, bands) to scores and embeddings of each."""

    frames: int
    hop: int

    def __call__(self, windows: Floats) -> tuple[Floats, Floats]: ...


@dataclass(frozen=True, slots=True)
class Analysis:
    """What a model says of a track: the means over its windows. `damaged` packets were skipped; `cut` means that it is longer than the limit."""

    tags: list[str]
    scores: Floats
    embedding: Floats
    windows: int
    seconds: float
    damaged: int = 0
    cut: bool = False

    def best(self, count: int = 5) -> list[tuple[str, float]]:
        """The tags with the highest scores."""
        order = np.argsort(-self.scores)[:count]
        return [(self.tags[i], float(self.scores[i])) for i in order]


class Tagger:
    """A model that is loaded. Memory for a track does not depend on its length."""

    def __init__(self, name: str, tags: list[str], model: Model) -> None:
        self.name, self.tags, self._model = name, tags, model

    @classmethod
    def load(cls, name: str = "", directory: Path | None = None) -> Tagger:
        """The model of that name in the directory; `MSD_musicnn` and `MTT_musicnn` also from the installed package. Raises ConfigError.

        A name that has a directory of its own there is a set of ONNX models.
        """
        name = name or weights.DEFAULT
        if directory is not None and name not in (".", "..") and "/" not in name and (directory / name).is_dir():
            from ostler.apps.music.onnx import OnnxModel  # noqa: PLC0415

            model = OnnxModel(directory / name)
            return cls(name, model.tags, model)
        tags, found = weights.load(name, directory)
        return cls(name, tags, Network(found))

    def analyse(
        self,
        path: str | bytes | os.PathLike[str],
        *,
        limits: Limits | None = None,
        tick: Callable[[float], None] | None = None,
    ) -> Analysis:
        """Decode the file and run the model over all of it. Raises Undecodable (a Fail) with the reason, or OSError.

        `tick` is called now and then with the seconds that were analysed so far.
        """
        source = Source(path, limits or Limits())
        count, scores, embeddings = 0, np.zeros(0), np.zeros(0)
        for windows in self._windows(source):
            ours, vectors = self._model(windows)
            scores = ours.sum(axis=0, dtype=np.float64) + (scores if count else 0)
            embeddings = vectors.sum(axis=0, dtype=np.float64) + (embeddings if count else 0)
            count += len(windows)
            if tick is not None:
                tick(source.seconds)
        mean, embedding = ((total / count).astype(np.float32) for total in (scores, embeddings))
        return Analysis(self.tags, mean, embedding, count, source.seconds, source.damaged, source.cut)

    def _windows(self, source: Source) -> Iterator[Floats]:
        """Windows of the spectrogram, several at a time. What is left over at the end is dropped, as in musicnn; a track shorter than a window is
        repeated until it fills one, as in its training.
        """
        frames, hop = self._model.frames, self._model.hop
        rest, given = np.empty((0, BANDS), np.float32), False
        for more in _spectra(source):
            rest = np.concatenate([rest, more])
            count = (len(rest) - frames) // hop + 1 if len(rest) >= frames else 0
            if count:
                given = True
                yield np.stack([rest[i * hop : i * hop + frames] for i in range(count)])
                rest = rest[count * hop :]
        if not given:
            yield np.resize(rest, (1, frames, BANDS))


def _spectra(source: Source) -> Iterator[Floats]:
    spectrogram = Spectrogram()
    for piece in source.pieces():
        yield spectrogram.push(piece)
    yield spectrogram.end()
