"""From samples to scores: the spectrogram, the network, and where models come from. The weights are made up; test_reference.py has the real ones."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ostler import ConfigError
from ostler.apps.music import checkpoint, weights
from ostler.apps.music.decode import Limits, Undecodable
from ostler.apps.music.network import Network
from ostler.apps.music.spectrogram import Spectrogram, filters
from ostler.apps.music.tagger import Tagger
from tests.apps.music import checkpoints, sounds

# ---- the spectrogram


def whole(samples: np.ndarray) -> np.ndarray:
    spectrogram = Spectrogram()
    return np.concatenate([spectrogram.push(samples.astype(np.float32)), spectrogram.end()])


def test_a_spectrogram_is_what_its_definition_says() -> None:
    """The same by plain formulas: a Hann window, a Fourier sum, triangles of equal area on Slaney's scale, a logarithm."""
    samples = sounds.noise(0.2, 16_000)
    padded = np.concatenate([np.zeros(256), samples, np.zeros(256)])
    hann = [0.5 - 0.5 * math.cos(2 * math.pi * n / 512) for n in range(512)]
    waves = np.exp(-2j * np.pi * np.outer(np.arange(257), np.arange(512)) / 512)

    def mel(hertz: float) -> float:
        return hertz * 3 / 200 if hertz < 1000 else 15 + 27 * math.log(hertz / 1000) / math.log(6.4)

    def hertz(value: float) -> float:
        return value * 200 / 3 if value < 15 else 1000 * math.exp((value - 15) * math.log(6.4) / 27)

    edges = [hertz(mel(8000) * n / 97) for n in range(98)]
    frames = whole(samples)
    assert len(frames) == 1 + len(samples) // 256
    for frame in (0, 5, len(frames) - 1):
        power = np.abs(waves @ (padded[frame * 256 : frame * 256 + 512] * hann)) ** 2
        for band in (0, 10, 40, 95):
            low, middle, high = edges[band : band + 3]
            heights = [
                max(0, min((f - low) / (middle - low), (high - f) / (high - middle))) for f in np.arange(257) * 31.25
            ]
            value = math.log10(10_000 * float(power @ heights) * 2 / (high - low) + 1)
            assert frames[frame, band] == pytest.approx(value, abs=1e-4)


def test_pieces_of_any_length_give_the_same_frames() -> None:
    samples = sounds.beat(1, 16_000).astype(np.float32)
    spectrogram, frames, place = Spectrogram(), [], 0
    for size in (1, 255, 256, 257, 3000, 0, 12_231):
        frames.append(spectrogram.push(samples[place : place + size]))
        place += size
    assert place == len(samples)
    assert np.abs(np.concatenate([*frames, spectrogram.end()]) - whole(samples)).max() < 1e-5
    assert filters().shape == (257, 96)


# ---- the network


def plainly(weights: dict[str, np.ndarray], window: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The network as TensorFlow's layers define it, one sum after another."""

    def normal(values: np.ndarray, number: int) -> np.ndarray:
        part = {
            k: weights[f"batch_normalization_{number}/{k}" if number else f"batch_normalization/{k}"]
            for k in ("gamma", "beta", "moving_mean", "moving_variance")
        }
        return (values - part["moving_mean"]) / np.sqrt(part["moving_variance"] + 0.001) * part["gamma"] + part["beta"]

    def layer(image: np.ndarray, number: int, before: int, after: int) -> np.ndarray:
        name = f"conv2d_{number}" if number else "conv2d"
        kernel = weights[f"{name}/kernel"][:, :, 0].astype(np.float64)
        image = np.pad(image, ((before, after), (0, 0)))
        views = np.lib.stride_tricks.sliding_window_view(image, kernel.shape[:2])
        sums = np.einsum("tfij,ijc->tfc", views, kernel, optimize=True) + weights[f"{name}/bias"]
        return normal(np.maximum(sums, 0), number + 1)

    image = normal(window.astype(np.float64)[..., None], 0)[..., 0]
    pads = [(3, 3), (3, 3), (63, 64), (31, 32), (15, 16)]
    layers = [np.concatenate([layer(image, n, *pad).max(axis=1) for n, pad in enumerate(pads)], axis=1)]
    layers.append(layer(layers[0], 5, 3, 3)[:, 0])
    layers.append(layer(layers[1], 6, 3, 3)[:, 0] + layers[1])
    layers.append(layer(layers[2], 7, 3, 3)[:, 0] + layers[2])
    joined = np.concatenate(layers, axis=1)
    pooled = normal(np.stack([joined.max(axis=0), joined.mean(axis=0)], axis=1).reshape(-1), 9)
    embedding = normal(np.maximum(pooled @ weights["dense/kernel"] + weights["dense/bias"], 0), 10)
    return 1 / (1 + np.exp(-(embedding @ weights["dense_1/kernel"] + weights["dense_1/bias"]))), embedding


def test_the_network_is_what_its_layers_say() -> None:
    """Also where filters are dead, or have negative factors: leaving out what is constant changes nothing."""
    made = checkpoints.weights()
    windows = np.random.default_rng(5).uniform(0, 6, (5, 187, 96)).astype(np.float32)
    scores, vectors = Network(made)(windows)
    assert scores.shape == (5, 50) and vectors.shape == (5, 200)
    for window, score, vector in zip(windows, scores, vectors, strict=True):
        wanted, embedding = plainly(made, window)
        assert np.abs(score - wanted).max() < 1e-4
        assert np.abs(vector - embedding).max() < 1e-3 * max(1, np.abs(embedding).max())


# ---- checkpoints and weights


def test_a_checkpoint_is_read_without_tensorflow(tmp_path: Path) -> None:
    made = checkpoints.weights()
    checkpoints.write(tmp_path / "m", {**made, "step": np.array([7], np.int64), "scalar": np.float32(3)})
    found = checkpoint.read(f"{tmp_path / 'm'}/")
    assert set(found) == {*made, "scalar"} and found["scalar"].shape == ()
    assert all(np.array_equal(found[name], made[name]) for name in made)


@pytest.mark.parametrize("damage", ["index", "data", "magic"])
def test_a_damaged_checkpoint_is_refused(damage: str, tmp_path: Path) -> None:
    checkpoints.write(tmp_path, checkpoints.weights())
    path = tmp_path / (".data-00000-of-00001" if damage == "data" else ".index")
    data = path.read_bytes()
    path.write_bytes(
        {"index": b"\xff" * (len(data) - 60) + data[-60:], "data": data[:1000], "magic": data[:-8] + b"12345678"}[
            damage
        ]
    )
    with pytest.raises(checkpoint.BadCheckpoint):
        checkpoint.read(f"{tmp_path}/")


LABELS = [f"tag {n}" for n in range(50)]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel like that of musicnn."""
    folder = tmp_path_factory.mktemp("wheel")
    inside = folder / "files" / "musicnn"
    for name in weights.LABELS:
        checkpoints.write(inside / name, {**checkpoints.weights(), "conv2d/kernel/Adam": np.ones(3, np.float32)})
    (inside / "__init__.py").write_text("raise ImportError('it is not to be imported')\n")
    (inside / "configuration.py").write_text(f"SR = 16000\nMSD_LABELS = {LABELS!r}\nMTT_LABELS = {LABELS[::-1]!r}\n")
    info = folder / "files" / "musicnn-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: musicnn\nVersion: 0.1.0\nRequires-Dist: tensorflow (>=1.14)\n"
    )
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    (info / "RECORD").write_text("")
    with zipfile.ZipFile(folder / "musicnn-0.1.0-py3-none-any.whl", "w") as archive:
        for path in sorted((folder / "files").rglob("*")):
            archive.write(path, path.relative_to(folder / "files"))
    return folder


@pytest.fixture
def offline(package: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip and uv find that wheel alone."""
    found = hashlib.sha256((package / "musicnn-0.1.0-py3-none-any.whl").read_bytes()).hexdigest()
    monkeypatch.setattr(weights, "_HASH", f"sha256:{found}")
    monkeypatch.setattr(weights, "_installed", lambda: None)
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(package), "DISABLE_PIP_VERSION_CHECK": "1"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
        monkeypatch.setenv(f"UV_{name}", value)
    return package


def test_the_model_is_fetched_once_and_then_loaded_without_its_package(
    offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "models" / ".fetch-of-a-killed-process"
    left.mkdir(parents=True)
    os.utime(left, (0, 0))
    places = weights.fetch(tmp_path / "models")
    assert [p.name for p in (tmp_path / "models").iterdir() if p not in places] == [], "nothing else is left"
    monkeypatch.setattr(weights, "_download", None)
    assert weights.fetch(tmp_path / "models") == places
    tags, found = weights.load("MTT_musicnn", tmp_path / "models")
    assert tags == LABELS[::-1] and set(found) == set(checkpoints.weights())
    tagger = Tagger.load("", tmp_path / "models")
    assert (tagger.name, tagger.tags) == ("MSD_musicnn", LABELS)


def test_a_package_with_another_hash_is_not_used(
    offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_HASH", "sha256:" + "0" * 64)
    with pytest.raises(ConfigError, match="(?i)hash"):
        weights.fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_installed_package_is_used_and_not_imported(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(package / "files")
    assert Tagger.load("MTT_musicnn").tags == LABELS[::-1]


def test_without_a_model_the_error_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_installed", lambda: None)
    with pytest.raises(ConfigError, match="ostler music fetch"):
        Tagger.load("", tmp_path)
    with pytest.raises(ConfigError, match="no model 'other'"):
        Tagger.load("other", tmp_path)
    (tmp_path / "MSD_musicnn.npz").write_bytes(b"rubbish")
    with pytest.raises(ConfigError, match="damaged"):
        Tagger.load("", tmp_path)


# ---- the tagger


@pytest.fixture(scope="module")
def tagger() -> Tagger:
    return Tagger("made up", LABELS, Network(checkpoints.weights()))


def test_scores_are_means_over_windows_and_the_rest_at_the_end_is_dropped(tagger: Tagger, tmp_path: Path) -> None:
    path = sounds.save(tmp_path / "a.wav", sounds.beat(25, 16_000), rate=16_000, channels=1)
    seen: list[float] = []
    found = tagger.analyse(path, tick=seen.append)
    frames = whole(np.round(sounds.beat(25, 16_000).clip(-1, 1) * 32767) / 32768)
    assert (found.windows, found.seconds) == (len(frames) // 187, 25)
    scores, vectors = tagger._model(frames[: found.windows * 187].reshape(-1, 187, 96))
    assert np.abs(found.scores - scores.mean(axis=0)).max() < 0.01
    assert np.corrcoef(found.embedding, vectors.mean(axis=0))[0, 1] > 0.99
    assert (found.scores.dtype, found.embedding.dtype, found.embedding.shape) == (np.float32, np.float32, (200,))
    assert seen == sorted(seen) and seen[-1] == 25
    assert found.best(3)[0][1] == max(found.scores)


def test_a_track_shorter_than_a_window_is_repeated(tagger: Tagger, tmp_path: Path) -> None:
    found = tagger.analyse(sounds.save(tmp_path / "a.flac", sounds.tone(0.3)))
    assert found.windows == 1 and np.isfinite(found.scores).all()


def test_a_long_track_is_cut_and_a_bad_one_has_a_reason(tagger: Tagger, tmp_path: Path) -> None:
    path = sounds.save(tmp_path / "a.flac", sounds.noise(10, 8_000), rate=8_000)
    found = tagger.analyse(path, limits=Limits(seconds=7))
    assert (found.seconds, found.windows, found.cut) == (7, 2, True)
    path.write_bytes(b"")
    with pytest.raises(Undecodable, match="empty") as caught:
        tagger.analyse(path)
    assert caught.value.code == "UNDECODABLE"


def test_a_worker_computes_with_one_thread() -> None:
    """Two workers whose libraries start a thread for each core would spend their time waiting for each other."""
    code = (
        "import os, ostler.apps.music.tagger, numpy as np\n"
        "np.ones((2000, 2000), np.float32) @ np.ones((2000, 2000), np.float32)\n"
        "print(len(os.listdir('/proc/self/task')))\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


# ---- ONNX


def _proto(*fields: tuple[int, object]) -> bytes:
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += checkpoints.varint(number << 3) + checkpoints.varint(value)
        else:
            data = value.encode() if isinstance(value, str) else value
            out += checkpoints.varint(number << 3 | 2) + checkpoints.varint(len(data)) + data
    return out


def _value(name: str, *shape: object) -> bytes:
    dims = b"".join(_proto((1, _proto((1, n)) if isinstance(n, int) else _proto((2, n)))) for n in shape)
    return _proto((1, name), (2, _proto((1, _proto((1, 1), (2, dims))))))


def onnx(
    path: Path,
    inputs: tuple[object, ...],
    nodes: list[tuple[str, list[str], str]],
    outputs: dict[str, tuple],
    classes: list[str],
    **constants: np.ndarray,
) -> None:
    """An ONNX file, written by hand, and its JSON."""
    graph = b"".join(_proto((1, _proto(*((1, i) for i in ins), (2, out), (4, op)))) for op, ins, out in nodes) + _proto(
        (2, "g")
    )
    for name, value in constants.items():
        kind = 7 if value.dtype == np.int64 else 1
        graph += _proto((5, _proto(*((1, n) for n in value.shape), (2, kind), (8, name), (9, value.tobytes()))))
    graph += _proto((11, _value("x", *inputs)))
    graph += b"".join(_proto((12, _value(name, *shape))) for name, shape in outputs.items())
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(_proto((1, 9), (7, graph), (8, _proto((1, ""), (2, 18)))))
    path.with_suffix(".json").write_text(json.dumps({"name": path.stem, "classes": classes}))


@pytest.fixture
def essentia(tmp_path: Path) -> Path:
    """A model with a fixed batch of 4 windows of 128 frames, embeddings of 96, and a head on them, as Essentia's are."""
    mean = [("ReduceMean", ["x", "axes"], "emb")]
    chance = np.random.default_rng(1)
    kernel = chance.standard_normal((96, 3)).astype(np.float32)
    onnx(
        tmp_path / "effnet" / "body.onnx",
        (4, 128, 96),
        [("ReduceMean", ["x", "axes"], "kept"), ("Reshape", ["kept", "flat"], "emb"), ("MatMul", ["emb", "k"], "raw"), ("Sigmoid", ["raw"], "y")],
        {"y": (4, 3), "emb": (4, 96)},
        ["rock", "pop", "jazz"],
        axes=np.array([1]), flat=np.array([4, 96]), k=kernel,
    )  # fmt: skip
    onnx(
        tmp_path / "effnet" / "mood.onnx",
        ("n", 96),
        [("MatMul", ["x", "k"], "raw"), ("Softmax", ["raw"], "y")],
        {"y": ("n", 2)},
        ["happy", "rock"],
        k=kernel[:, :2].copy(),
    )
    assert mean
    return tmp_path


def test_onnx_models_of_a_directory_are_one_model(essentia: Path, tmp_path: Path) -> None:
    tagger = Tagger.load("effnet", essentia)
    assert tagger.tags == ["body: rock", "pop", "jazz", "happy", "mood: rock"]
    samples = sounds.beat(6, 16_000)
    found = tagger.analyse(sounds.save(tmp_path / "a.wav", samples, rate=16_000, channels=1))
    frames = whole(np.round(samples.clip(-1, 1) * 32767) / 32768)
    windows = [frames[i : i + 128] for i in range(0, len(frames) - 127, 64)]
    assert found.windows == len(windows)
    assert np.abs(found.embedding - np.mean([w.mean(axis=0) for w in windows], axis=0)).max() < 0.01
    assert found.scores[3] + found.scores[4] == pytest.approx(1, abs=1e-5)


def test_an_onnx_model_that_cannot_be_used_is_refused_with_a_reason(essentia: Path) -> None:
    (essentia / "effnet" / "mood.json").write_text("{}")
    with pytest.raises(ConfigError, match="classes"):
        Tagger.load("effnet", essentia)
    (essentia / "effnet" / "mood.json").write_text(json.dumps({"classes": ["one"]}))
    with pytest.raises(ConfigError, match="width"):
        Tagger.load("effnet", essentia)
    (essentia / "effnet" / "mood.onnx").write_bytes(b"rubbish")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Tagger.load("effnet", essentia)
    (essentia / "none").mkdir()
    with pytest.raises(ConfigError, match="found 0"):
        Tagger.load("none", essentia)
