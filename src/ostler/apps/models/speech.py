"""Speech to text, by Moonshine. Python 3.9."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ostler import Body, cancelled
from ostler.apps.models import sound, weights

PACKAGED = ("moonshine-tiny-en",)
MARK = "encoder_model.ort"
_PIECE = 60  # seconds that are recognized at once; long recordings are cut where it is quiet
_SEARCH = 5  # seconds before the end of a piece in which the quietest place is looked for


class Speech:
    """A recording -> `{"text", "segments": [{"start", "end", "text"}], "seconds"}`. Times are seconds."""

    def load(self, model_id: str) -> None:
        folder = weights.find("speech", model_id) or weights.packaged("moonshine_voice", "assets", "tiny-en")
        self._engine = _transcriber(folder)

    def infer(self, payload: Any) -> dict[str, Any]:
        samples, _ = sound.read(payload)
        segments = [segment for start, piece in pieces(samples) for segment in self._segments(piece, start)]
        text = " ".join(segment["text"] for segment in segments)
        return {"text": text, "segments": segments, "seconds": round(len(samples) / sound.RATE, 3)}

    def transcribe(self, audio: Body, options: Mapping[str, Any]) -> dict[str, Any]:
        """For `/v1/audio/transcriptions`."""
        found = self.infer(audio)
        return {"text": found["text"], "segments": found["segments"], "duration": found["seconds"]}

    def _segments(self, piece: Any, start: int) -> list[dict[str, Any]]:
        if cancelled():
            return []
        offset = start / sound.RATE
        lines = self._engine.transcribe_without_streaming(piece.tolist(), sound.RATE).lines
        return [
            {
                "start": round(offset + line.start_time, 2),
                "end": round(offset + line.start_time + line.duration, 2),
                "text": line.text.strip(),
            }
            for line in lines
            if line.text.strip()
        ]


def pieces(samples: Any) -> list[tuple[int, Any]]:
    """The recording in pieces of at most 60 s with where each begins."""
    import numpy as np  # noqa: PLC0415

    found, start = [], 0
    step = sound.RATE // 20
    while len(samples) - start > _PIECE * sound.RATE:
        end = start + _PIECE * sound.RATE
        window = samples[end - _SEARCH * sound.RATE : end]
        loudness = np.square(window[: len(window) // step * step]).reshape(-1, step).mean(axis=1)
        cut = end - _SEARCH * sound.RATE + int(loudness.argmin()) * step + step // 2
        found.append((start, samples[start:cut]))
        start = cut
    return [*found, (start, samples[start:])]


def _transcriber(folder: Path) -> Any:
    """Moonshine's own, without the parts of its package that need an audio device and a network."""
    if "moonshine_voice" not in sys.modules:
        package = types.ModuleType("moonshine_voice")
        package.__path__ = [str(weights.packaged("moonshine_voice"))]
        sys.modules["moonshine_voice"] = package
    from moonshine_voice.moonshine_api import ModelArch  # noqa: PLC0415
    from moonshine_voice.transcriber import Transcriber  # noqa: PLC0415

    return Transcriber(str(folder), ModelArch.TINY if "tiny" in folder.name else ModelArch.BASE)
