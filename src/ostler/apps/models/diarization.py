"""Who speaks when: Silero finds speech, Resemblyzer's encoder tells voices apart, k-means groups them. Python 3.9, with torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ostler import InputError, cancelled
from ostler.apps.models import given, sound, threads, weights

PACKAGED = ("silero-resemblyzer",)
MARK = "pretrained.pt"  # of a voice encoder of your own, saved as Resemblyzer saves it
_WINDOW, _HOP = 400, 160  # samples of a spectrum, and between two of them
_BANDS = 40
_FRAMES = 160  # spectra, 1.6 s, from which a voice is told
_STEP = 10  # spectra between two looks at the voice
_MOST = 8  # speakers
_ALIKE = 0.88  # voices whose vectors have a larger product are one voice


class Diarization:
    """A recording -> `{"speakers", "segments": [{"start", "end", "speaker"}], "seconds"}`. Option: `speakers`, if you know how many."""

    def load(self, model_id: str) -> None:
        import torch  # noqa: PLC0415
        from silero_vad import load_silero_vad  # noqa: PLC0415

        folder = weights.find("diarization", model_id) or weights.packaged("resemblyzer")
        torch.set_num_threads(threads.count())
        self._torch = torch
        self._ears = load_silero_vad()
        self._voice = _Voice(torch, folder / MARK)

    def infer(self, payload: Any) -> dict[str, Any]:
        samples, options = sound.read(payload, least=1.0)
        wanted = given.whole(options, "speakers", 0, 0, _MOST)
        frames = self._speech(samples)
        if not len(frames):
            raise InputError("there is no speech in the audio")
        segments = _segments(frames, self._labels(_spectra(_loud(samples)), frames, wanted))
        return {
            "speakers": len({segment["speaker"] for segment in segments}),
            "segments": segments,
            "seconds": round(len(samples) / sound.RATE, 3),
        }

    def _speech(self, samples: Any) -> Any:
        """The numbers of the spectra in which somebody speaks."""
        import numpy as np  # noqa: PLC0415
        from silero_vad import get_speech_timestamps  # noqa: PLC0415

        with self._torch.inference_mode():
            found = get_speech_timestamps(
                self._torch.from_numpy(samples), self._ears, sampling_rate=sound.RATE, min_silence_duration_ms=250
            )
        parts = [np.arange(part["start"] // _HOP, part["end"] // _HOP) for part in found]
        return np.concatenate(parts) if parts else np.empty(0, dtype=int)

    def _labels(self, spectra: Any, frames: Any, wanted: int) -> Any:
        """A number for each of these spectra: which voice it is. Looks of 1.6 s go over the speech alone, pauses are left out."""
        import numpy as np  # noqa: PLC0415

        speech = spectra[frames]
        starts = np.arange(0, max(1, len(speech) - _FRAMES + 1), _STEP)
        looks = np.stack([np.resize(speech[at : at + _FRAMES], (_FRAMES, _BANDS)) for at in starts])
        labels = _grouped(self._voice(looks), wanted)
        nearest = np.clip((np.arange(len(speech)) - _FRAMES // 2 + _STEP // 2) // _STEP, 0, len(starts) - 1)
        return labels[nearest]


class _Voice:
    """Resemblyzer's voice encoder: three LSTM layers over 1.6 s of sound, a unit vector of 256 numbers."""

    def __init__(self, torch: Any, file: Path) -> None:
        self._torch = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        saved = torch.load(str(file), map_location="cpu", weights_only=True)["model_state"]
        self._lstm, self._linear = torch.nn.LSTM(_BANDS, 256, 3, batch_first=True), torch.nn.Linear(256, 256)
        for name, layer in (("lstm.", self._lstm), ("linear.", self._linear)):
            layer.load_state_dict({key[len(name) :]: value for key, value in saved.items() if key.startswith(name)})
            layer.to(self._device).eval()

    def __call__(self, rows: Any) -> Any:
        torch, found = self._torch, []
        for start in range(0, len(rows), 64):
            if cancelled():
                raise InputError("cancelled")
            with torch.inference_mode():
                _, (hidden, _) = self._lstm(torch.from_numpy(rows[start : start + 64]).to(self._device))
                voice = torch.relu(self._linear(hidden[-1]))
                found.append(torch.nn.functional.normalize(voice, dim=1).cpu())
        return torch.cat(found).numpy()


def _grouped(voices: Any, wanted: int) -> Any:
    """A number for each vector: those with the same belong to one speaker. Without `wanted`, as many as can be told apart."""
    import numpy as np  # noqa: PLC0415
    from sklearn.cluster import KMeans  # noqa: PLC0415

    if wanted:
        return KMeans(min(wanted, len(voices)), n_init=10, random_state=0).fit_predict(voices)
    best = np.zeros(len(voices), dtype=int)
    for count in range(2, min(_MOST, len(voices)) + 1):
        found = KMeans(count, n_init=10, random_state=0).fit(voices)
        middles = found.cluster_centers_ / np.linalg.norm(found.cluster_centers_, axis=1, keepdims=True)
        if (middles @ middles.T - 2 * np.eye(count)).max() > _ALIKE:
            break
        best = found.labels_
    return best


def _segments(frames: Any, labels: Any) -> list[dict[str, Any]]:
    """From a voice for each spectrum to who speaks from when to when. Speakers are numbered as they begin."""
    names: dict[int, str] = {}
    found: list[dict[str, Any]] = []
    before = None
    for frame, label in zip(frames.tolist(), labels.tolist()):
        if before != (frame - 1, label):
            speaker = names.setdefault(label, f"SPEAKER_{len(names):02d}")
            found.append({"start": round(frame * _HOP / sound.RATE, 2), "end": 0.0, "speaker": speaker})
        found[-1]["end"] = round((frame + 1) * _HOP / sound.RATE, 2)
        before = (frame, label)
    return found


def _loud(samples: Any) -> Any:
    """As loud as what the encoder was trained with, if it is not louder."""
    import numpy as np  # noqa: PLC0415

    level = float(np.sqrt(np.mean(np.square(samples, dtype=np.float64))))
    return samples * np.float32(max(1.0, 10 ** (-30 / 20) / max(level, 1e-9)))


def _spectra(samples: Any) -> Any:
    """Power in 40 mel bands, 100 times a second, as librosa computes it."""
    import numpy as np  # noqa: PLC0415

    padded = np.pad(samples, _WINDOW // 2)
    count = 1 + (len(padded) - _WINDOW) // _HOP
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_WINDOW) / _WINDOW)).astype(np.float32)
    bands = _mel_bands(np)
    found = np.empty((count, _BANDS), dtype=np.float32)
    for start in range(0, count, 6000):  # a minute at a time
        at = np.arange(start, min(start + 6000, count))[:, None] * _HOP + np.arange(_WINDOW)
        found[start : start + 6000] = np.square(np.abs(np.fft.rfft(padded[at] * window))) @ bands
    return found


def _mel_bands(np: Any) -> Any:
    """Slaney's mel scale: triangles of equal area, linear up to 1 kHz and logarithmic from there."""
    top = 15 + 27 * np.log(sound.RATE / 2 / 1000) / np.log(6.4)
    mels = np.linspace(0, top, _BANDS + 2)
    edges = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp((mels - 15) * np.log(6.4) / 27))
    lines = np.linspace(0, sound.RATE / 2, _WINDOW // 2 + 1)[:, None]
    rising, falling = (lines - edges[:-2]) / np.diff(edges)[:-1], (edges[2:] - lines) / np.diff(edges)[1:]
    return (np.maximum(0, np.minimum(rising, falling)) * (2 / (edges[2:] - edges[:-2]))).astype(np.float32)
