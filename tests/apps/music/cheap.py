"""The music tagger with its real decoder and writer, and a model that costs nothing: the means of a few bands."""

import numpy

from ostler.apps.music import app, tagging
from ostler.apps.music.tagger import Tagger


class Bands:
    frames = hop = 187

    def __call__(self, windows):
        means = windows.mean(axis=1)
        return means[:, :50] / (1 + means[:, :50]), means.repeat(3, axis=1)[:, :200].astype(numpy.float32)


tagging._loaded.append(Tagger("bands", [f"band{n}" for n in range(50)], Bands()))
__all__ = ["app"]
