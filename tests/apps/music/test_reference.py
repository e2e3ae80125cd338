"""The tagger beside the original code with TensorFlow, which runs as a job in an environment that Ostler builds. Only in `make test-models`."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ostler import config, envs
from ostler.app import load
from ostler.apps.music import weights, writing
from ostler.apps.music.tagger import Tagger
from tests.apps.model_envs import PLACE
from tests.apps.music import sounds
from tests.harness import Node

pytestmark = [pytest.mark.models, pytest.mark.timeout(1800)]  # the first test builds an environment of 1.5 GB
APP = "ostler.apps.music.reference"
MUSIC = "wesnoth-1.16-music"  # freely licensed orchestral music, in Debian; OSTLER_TEST_MUSIC names a directory with other ogg files


@pytest.fixture(scope="module")
def music() -> list[Path]:
    """Real music: downloaded once, not installed."""
    folder = Path(os.environ.get("OSTLER_TEST_MUSIC") or PLACE / "music")
    if not folder.is_dir():
        if not shutil.which("apt-get"):
            pytest.fail(
                f"there is no apt-get to download {MUSIC} with; OSTLER_TEST_MUSIC may name a directory with ogg files"
            )
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        subprocess.run(["apt-get", "download", "-qq", MUSIC], cwd=part, check=True, timeout=600)
        subprocess.run(["dpkg", "-x", *part.glob("*.deb"), part / "all"], check=True, timeout=600)
        shutil.move(next((part / "all").rglob("core/music")), folder)
        shutil.rmtree(part)
    return sorted(folder.glob("*.ogg"), key=lambda path: path.stat().st_size)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs the original over a file."""
    PLACE.mkdir(exist_ok=True)
    settings = config.load({"data": str(PLACE), "env_dir": str(PLACE / "envs")}, environ={})
    with (PLACE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        envs.build(settings, load(APP), "musicnn")
    node = Node(tmp_path_factory.mktemp("node"), APP, OSTLER_ENV_DIR=str(PLACE / "envs")).start()

    def analyse(path: Path, model: str) -> dict[str, Any]:
        found = node.wait_job(node.enqueue("analyse", path=str(path), model=model), patience=600)
        assert found["status"] == "done", found
        return found["result"]

    yield analyse
    node.kill()


@pytest.fixture(scope="module")
def models() -> Path:
    weights.fetch(PLACE / "models")
    return PLACE / "models"


def same(ours: Any, theirs: dict[str, Any]) -> None:
    assert (ours.tags, ours.windows) == (theirs["tags"], theirs["windows"])
    scores, vector = np.array(theirs["scores"]), np.array(theirs["embedding"])
    assert np.abs(ours.scores - scores).max() < 0.01
    order = np.argsort(-scores)
    assert ours.best(1)[0][0] == ours.tags[order[0]] or scores[order[0]] - scores[order[1]] < 0.01
    nearness = float(ours.embedding @ vector / np.linalg.norm(ours.embedding) / np.linalg.norm(vector))
    assert nearness > 0.999


@pytest.mark.parametrize("model", ["MSD_musicnn", "MTT_musicnn"])
def test_generated_sounds_have_the_scores_of_the_original(
    model: str, models: Path, reference: Any, tmp_path: Path
) -> None:
    tagger = Tagger.load(model, models)
    made = {"tone": sounds.tone(10), "noise": sounds.noise(10), "beat": sounds.beat(10)}
    for name, sound in made.items():
        path = sounds.save(tmp_path / f"{name}.wav", sound)
        same(tagger.analyse(path), reference(path, model))
    path = sounds.save(tmp_path / "low.flac", sounds.beat(7, 16_000), rate=16_000, channels=1)
    same(tagger.analyse(path), reference(path, model))


@pytest.mark.parametrize("model", ["MSD_musicnn", "MTT_musicnn"])
def test_real_music_has_the_scores_of_the_original(model: str, models: Path, reference: Any, music: list[Path]) -> None:
    tagger = Tagger.load(model, models)
    for path in music[: 5 if model == weights.DEFAULT else 2]:
        same(tagger.analyse(path), reference(path, model))


def test_orchestra_tones_and_noise_are_told_apart(models: Path, music: list[Path], tmp_path: Path) -> None:
    tagger = Tagger.load("", models)
    orchestra = np.mean([tagger.analyse(path).scores for path in music[4:10]], axis=0)
    noise = tagger.analyse(sounds.save(tmp_path / "noise.flac", sounds.noise(10))).scores
    tone = tagger.analyse(sounds.save(tmp_path / "tone.flac", sounds.tone(10))).scores
    tags = {tag: number for number, tag in enumerate(tagger.tags)}
    assert orchestra[tags["instrumental"]] > 2 * noise[tags["instrumental"]]
    assert noise[tags["electronic"]] > orchestra[tags["electronic"]] or noise[tags["metal"]] > orchestra[tags["metal"]]
    assert tone.argmax() == tags["ambient"]


def test_real_music_keeps_every_packet_when_it_is_tagged(music: list[Path], tmp_path: Path) -> None:
    for original in music[::8]:
        path = tmp_path / original.name
        shutil.copy2(original, path)
        sound = writing.packets(path)
        writing.write(path, {"tags": ["instrumental", "ambient"] * 200})  # more than a page of Ogg
        assert writing.packets(path) == sound
        assert len(writing.ours(path)["tags"]) == 400
        writing.write(path, {})
        assert (writing.packets(path), writing.ours(path)) == (sound, {})
