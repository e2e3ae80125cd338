"""Tagging music: time and memory, beside the original musicnn with TensorFlow. One run prints one table.

    python benchmarks/music.py [--music FOLDER] [--tracks 12] [--original PYTHON] [--model MSD_musicnn] [--workers 2]

FOLDER has audio files; without it sounds of three minutes are generated. PYTHON is the interpreter of the environment that
`ostler env build musicnn --app ostler.apps.music.reference` builds; without it the original is left out. The model is fetched into ./.models.

Both sides keep one process with the code loaded, get the same tracks in turns, and are charged all CPU time of that process, threads included.
Loading is not counted: it is printed beside. The original builds its graph anew for each track, as its code does.

    tracks       medians of CPU seconds per track, and per minute of music
    shares       decoding (with resampling), spectrogram, network, writing the tags (wall time too: it waits for the disk)
    memory       peak resident set of the process
    workers      tracks a minute, all workers at once, by the clock
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OURS = r"""
import json, resource, sys, time
began = time.process_time()
from pathlib import Path
from ostler.apps.music import tagger as module, writing
tagger = module.Tagger.load(sys.argv[1], Path(sys.argv[2]))
spent = {}

def timed(name, function):
    def run(*arguments):
        at = time.process_time()
        try:
            return function(*arguments)
        finally:
            spent[name] = spent.get(name, 0) + time.process_time() - at
    return run

class Timed(type(tagger._model)):
    __call__ = timed("network", type(tagger._model).__call__)
tagger._model.__class__ = Timed
module.Spectrogram.push = timed("spectrogram", module.Spectrogram.push)
print(json.dumps({"loading": time.process_time() - began}), flush=True)
for line in sys.stdin:
    path, at, clock = line.rstrip("\n"), time.process_time(), time.monotonic()
    spent.clear()
    found = tagger.analyse(path)
    total = time.process_time() - at
    wrote, since = time.process_time(), time.monotonic()
    writing.write(path, {"tags": [tag for tag, _ in found.best(5)] + [str(time.time())]})
    spent.update(decoding=total - sum(spent.values()), writing=time.process_time() - wrote)
    said = {"cpu": total, "wall": time.monotonic() - clock, "writing_wall": time.monotonic() - since, "seconds": found.seconds}
    print(json.dumps({**said, "spent": spent, "best": found.best(1)[0][0], "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}), flush=True)
"""

ORIGINAL = r"""
import contextlib, io, json, os, resource, sys, time, warnings
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
warnings.simplefilter("ignore")
began = time.process_time()
from musicnn.extractor import extractor
out = sys.stdout
print(json.dumps({"loading": time.process_time() - began}), flush=True)
for line in sys.stdin:
    at, clock = time.process_time(), time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        scores, tags, _ = extractor(line.rstrip("\n"), model=sys.argv[1])
    mean = scores.mean(axis=0)
    said = {"cpu": time.process_time() - at, "wall": time.monotonic() - clock, "best": tags[int(mean.argmax())]}
    print(json.dumps({**said, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}), file=out, flush=True)
"""


class Side:
    """A process that analyses one file after another."""

    def __init__(self, python: str, code: str, *arguments: str) -> None:
        # The original must not find the packages of this environment.
        env = {k: v for k, v in os.environ.items() if python == sys.executable or k != "PYTHONPATH"}
        self.process = subprocess.Popen(
            [python, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
            text=True,
        )
        self.loading = self._answer()["loading"]

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a process ended with {self.process.wait()}: {self.process.args[0]}")
        return json.loads(line)

    def ask(self, path: Path) -> None:
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()

    def analyse(self, path: Path) -> dict:
        self.ask(path)
        return self._answer()

    def close(self) -> None:
        with self.process:
            self.process.stdin.close()


def generated(folder: Path, count: int) -> list[Path]:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.apps.music import sounds

    kinds = ["ogg", "mp3", "flac"]
    return [sounds.save(folder / f"{n}.{kinds[n % 3]}", sounds.beat(180)) for n in range(count)]


def tracks(arguments: argparse.Namespace, folder: Path) -> list[Path]:
    """Copies, because they are written to."""
    if not arguments.music:
        return generated(folder, arguments.tracks)
    found = sorted(p for p in Path(arguments.music).rglob("*") if p.suffix in (".ogg", ".flac", ".wav", ".mp3"))
    step = max(1, len(found) // arguments.tracks)
    return [Path(shutil.copy2(p, folder / p.name)) for p in found[::step][: arguments.tracks]]


def many(arguments: argparse.Namespace, models: str, files: list[Path]) -> float:
    """Tracks a minute with all workers at once."""
    sides = [Side(sys.executable, OURS, arguments.model, models) for _ in range(arguments.workers)]
    began = time.monotonic()
    for number, path in enumerate(files):
        sides[number % len(sides)].ask(path)
    for number, _ in enumerate(files):
        sides[number % len(sides)]._answer()
    took = time.monotonic() - began
    for side in sides:
        side.close()
    return 60 * len(files) / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--music")
    parser.add_argument("--tracks", type=int, default=12)
    parser.add_argument("--original", metavar="PYTHON")
    parser.add_argument("--model", default="MSD_musicnn")
    parser.add_argument("--workers", type=int, default=min(2, len(os.sched_getaffinity(0))))
    arguments = parser.parse_args()

    from ostler.apps.music import weights

    weights.fetch(Path(".models"))
    with tempfile.TemporaryDirectory(prefix="ostler-music-") as folder:
        files = tracks(arguments, Path(folder))
        ours = Side(sys.executable, OURS, arguments.model, ".models")
        original = Side(arguments.original, ORIGINAL, arguments.model) if arguments.original else None
        found, theirs = [], []
        for path in files:
            found.append(ours.analyse(path))
            if original:
                theirs.append(original.analyse(path))
        for side in filter(None, (ours, original)):
            side.close()
        show(found, theirs, ours, original)
        print(f"workers     {arguments.workers}: {many(arguments, '.models', files):.0f} tracks a minute by the clock")


def show(found: list[dict], theirs: list[dict], ours: Side, original: Side | None) -> None:
    seconds = sum(one["seconds"] for one in found)
    print(
        f"tracks      {len(found)}, {seconds / 60:.0f} minutes of music, median {statistics.median(o['seconds'] for o in found):.0f} s"
    )
    print(f"{'':12}{'CPU s/track':>12}{'CPU s/min':>12}{'tracks/CPU min':>16}{'peak MB':>9}{'loading CPU s':>15}")
    for name, results, side in (("ostler", found, ours), ("original", theirs, original)):
        if results:
            cpu = [one["cpu"] for one in results]
            each = f"{statistics.median(cpu):12.2f}{sum(cpu) / seconds * 60:12.3f}{60 * len(cpu) / sum(cpu):16.1f}"
            print(f"{name:12}{each}{max(o['peak'] for o in results):9.0f}{side.loading:15.2f}")
    if theirs:
        ratios = sorted(b["cpu"] / a["cpu"] for a, b in zip(found, theirs, strict=True))
        memory = max(o["peak"] for o in found) / max(o["peak"] for o in theirs)
        same = sum(a["best"] == b["best"] for a, b in zip(found, theirs, strict=True))
        print(
            f"ratio       {statistics.median(ratios):.1f} x the tracks per CPU second ({ratios[0]:.1f} to {ratios[-1]:.1f}), {memory:.2f} of the memory"
        )
        print(f"best tag    the same for {same} of {len(found)}")
    total = {
        name: sum(one["spent"][name] for one in found) for name in ("decoding", "spectrogram", "network", "writing")
    }
    print("shares      " + ", ".join(f"{name} {value / sum(total.values()):.0%}" for name, value in total.items()))
    print(f"writing     {1000 * statistics.median(o['writing_wall'] for o in found):.0f} ms a file by the clock")


if __name__ == "__main__":
    main()
