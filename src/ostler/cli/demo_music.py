"""`ostler demo music`: a small library is scanned, tagged, calibrated and searched, and a worker is killed in the middle."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostler.cli import client, show
from ostler.config import Settings
from ostler.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

TARGET = "ostler.apps.music"
_RATE, _SECONDS, _OF_EACH = 16_000, 9, 7
_PACKAGED = ("/usr/share/games/wesnoth", "/usr/share/sounds")  # what a system may have already
_PATIENCE = 300.0
_FILES = 20  # a calibration of so small a library shows the method, no more


def prepare(folder: Path) -> dict[str, str]:
    """Fetch the model if need be, and make the sounds; the variables for the node."""
    from ostler.apps.music import weights  # noqa: PLC0415

    models = Path(os.environ.get("OSTLER_MUSIC_MODELS") or folder.absolute().with_name(f"{folder.name}-models"))
    if not (models / f"{weights.DEFAULT}.npz").exists():
        print(f"fetching the model (29 MB) into {models}; this is done once …")
        weights.fetch(models)
    library = folder / "music"
    library.mkdir()
    made = [_save(library / f"{name}.wav", sound) for name, sound in _sounds()]
    found = _packaged(library)
    (library / "a text.mp3").write_text("this is no music\n" * 100)
    packaged = f" and {found} pieces of music that this system has" if found else ""
    print(f"a library of {len(made)} generated sounds of {_SECONDS} s{packaged}, and a text file that is named .mp3")
    return {"OSTLER_MUSIC_MODELS": str(models), "OSTLER_MUSIC_CALIBRATION_FILES": str(_FILES)}


def _sounds() -> Iterator[tuple[str, np.ndarray]]:
    """Tones, noise and drums, each a little different."""
    import numpy as np  # noqa: PLC0415

    random = np.random.default_rng(1)
    time_ = np.arange(_RATE * _SECONDS) / _RATE
    for n in range(_OF_EACH):
        root = 110 * 2 ** (n / 5)
        chord = np.sum([np.sin(2 * np.pi * root * step * time_) for step in (1, 1.26, 1.5, 2)], axis=0)
        yield f"chord {n + 1}", chord / 4
        noise = random.standard_normal(len(time_))
        yield f"noise {n + 1}", np.convolve(noise, np.ones(1 + 4 * n) / (1 + 4 * n) ** 0.5, "same") / 4
        beat = (time_ * (1.6 + 0.2 * n)) % 1
        drum = np.exp(-beat * 18) * np.sin(2 * np.pi * 60 * time_) + np.exp(-((beat + 0.5) % 1) * 40) * noise * 0.3
        yield f"drums {n + 1}", drum


def _save(path: Path, sound: np.ndarray) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_RATE)
        file.writeframes((sound.clip(-1, 1) * 32_000).astype("<i2").tobytes())
    return path


def _packaged(library: Path) -> int:
    """A few pieces of music that are on this system anyway."""
    there = [
        path for place in _PACKAGED for path in sorted(Path(place).rglob("*.ogg")) if path.stat().st_size > 200_000
    ]
    for path in there[:6]:
        shutil.copy(path, library / f"packaged {path.name}")
    return len(there[:6])


def run(known: Settings, folder: Path) -> None:
    """Scan, tag with a kill, calibrate, search."""
    made = client.request(
        known, "POST", "/api/v1/libraries", {"path": str((folder / "music").absolute()), "write_to": "file"}
    )
    print(f"\nlibrary {made['id']}: job {made['job']} scans it, and each file becomes a job for the pool tag")
    _tagged(known, made["id"])
    found = _tracks(known, f"library={made['id']}&limit=1000")
    rows = []
    for track in found:
        one = client.request(known, "GET", f"/api/v1/tracks/{track['id']}")
        best = sorted(one["scores"].items(), key=lambda score: -score[1])[:4]
        rows.append(
            (
                track["path"],
                show.state(track["state"]),
                ", ".join(f"{tag} {score:.2f}" for tag, score in best) or track["reason"],
            )
        )
    show.table(("file", "state", "highest scores"), rows, "no tracks")
    _calibrated(known, made["id"])
    print("\nTracks with the tag electronic (ostler music search electronic):")
    fits = _tracks(known, "tag=electronic&limit=5")
    show.table(("file", ">score"), [(one["path"], f"{one['scores']['electronic']:.2f}") for one in fits], "none")
    chord = next(track for track in found if track["path"] == "chord 3.wav")
    print(f"\nTracks that sound like {chord['path']} (ostler music similar {chord['id']}):")
    alike = client.request(known, "GET", f"/api/v1/tracks/{chord['id']}/similar?limit=5")["tracks"]
    show.table(("file", ">similarity"), [(one["path"], f"{one['similarity']:.3f}") for one in alike], "nothing")
    print("\nYour own music: ostler up ostler.apps.music, then ostler music add DIR. The page is /music on the node.")


def _tagged(known: Settings, library: int) -> None:
    """Follow the library until nothing is left to be tagged; kill one worker on the way."""
    deadline, killed = time.monotonic() + _PATIENCE, 0
    while time.monotonic() < deadline:
        one = client.request(known, "GET", f"/api/v1/libraries/{library}")
        if one["scanned_at"] and not one["tagging"]["left"]:
            if killed:
                job = client.request(known, "GET", f"/api/v1/jobs/{killed}")
                print(f"--> job {killed} was run again and is {job['status']} (crashes: {job['crashes']})")
            print(
                f"{one['counts']['tagged']} tagged, {one['counts']['failed']} failed, {one['counts']['toxic']} toxic\n"
            )
            return
        killed = killed or (_kill(known) if one["counts"]["tagged"] >= 3 else 0)
        time.sleep(0.1)
    raise ConfigError("the tracks were not tagged in time; see node.log")


def _kill(known: Settings) -> int:
    """Kill a worker in the middle of a job; which job that was."""
    for worker in client.request(known, "GET", "/api/v1/workers")["workers"]:
        if worker["component"].startswith("worker:tag:") and worker["current_job"] and worker["pid"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker["pid"], signal.SIGKILL)
                print(
                    f"--> kill -9 {worker['pid']}: {worker['component']} dies in the middle of job {worker['current_job']}"
                )
                return int(worker["current_job"])
    return 0


def _calibrated(known: Settings, library: int) -> None:
    job = client.request(known, "POST", f"/api/v1/libraries/{library}/calibrate")["job"]
    found = client.request(known, "GET", f"/api/v1/jobs/{job}?wait=60")
    result = found["result"]
    if not result:
        raise ConfigError(f"the calibration (job {job}) is {found['status']}: {found['error']}")
    print(f"\nThresholds from the scores of {result['files']} tracks; {result['changed']} get different tags:")
    used = sorted((one for one in result["tags"] if one["tracks_after"]), key=lambda one: -one["tracks_after"])[:8]
    rows = [
        (one["tag"], f"{one['before']:.2f}", f"{one['after']:.2f}", one["method"], one["tracks_after"]) for one in used
    ]
    show.table(("tag", ">before", ">after", "by", ">tracks"), rows, "no track has a tag")
    print("gap: between two groups of scores; share: the highest tenth; lowest: no threshold is below 0.1")


def _tracks(known: Settings, query: str) -> list[dict[str, Any]]:
    return list(client.request(known, "GET", f"/api/v1/tracks?{query}")["tracks"])
