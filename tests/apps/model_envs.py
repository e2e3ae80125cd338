"""The environments of the AI task server, built once for all tests, and samples for its tasks. They stay in .venv-models."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import zlib
from pathlib import Path

from ostler import config, envs
from ostler.app import load
from tests.harness import ROOT

APP = "ostler.apps.models"
PLACE = Path(os.environ.get("OSTLER_TEST_MODEL_ENVS") or ROOT.parent / ".venv-models")

# Run in the environment `light`, which has what draws pictures and reads sounds.
_SAMPLES = """
import io, sys
from pathlib import Path
import numpy as np
from PIL import Image, ImageDraw, ImageFont
import soundfile

to, assets = Path(sys.argv[1]), Path(sys.argv[2])
picture = Image.new("RGB", (400, 300), "white")
ImageDraw.Draw(picture).text((40, 60), "Hello GPU\\nworker 42", fill="black", font=ImageFont.load_default(56))
picture.save(to / "text.png")
picture.save(to / "text.jpg", quality=90)
clear = Image.new("RGBA", (400, 300), (0, 0, 0, 0))
ImageDraw.Draw(clear).text((40, 60), "Hello GPU\\nworker 42", fill="black", font=ImageFont.load_default(56))
clear.save(to / "clear.png")

tale, rate = soundfile.read(assets / "two_cities.wav", dtype="float32")
short = tale[: 13 * rate : rate // 16000]
tale = tale[: 7 * rate]
other, _ = soundfile.read(assets / "beckett.wav", dtype="float32")
soundfile.write(to / "tale.wav", tale, rate, subtype="PCM_24")
soundfile.write(to / "tale.flac", tale, rate)
soundfile.write(to / "stereo.wav", np.stack([tale, tale], 1), rate, subtype="FLOAT")
soundfile.write(to / "two.wav", np.concatenate([short, other]), 16000)
soundfile.write(to / "silence.wav", np.zeros(32000, dtype="float32"), 16000)
soundfile.write(to / "nan.wav", np.full(32000, np.nan, dtype="float32"), 16000, subtype="FLOAT")
"""


def built(*names: str) -> Path:
    """The directory of the environments, when these are ready; another process of the tests may build them, too."""
    PLACE.mkdir(exist_ok=True)
    settings = config.load({"data": str(PLACE), "env_dir": str(PLACE / "envs")}, environ={})
    app = load(APP)
    with (PLACE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in names:
            envs.build(settings, app, name)
    return PLACE / "envs"


def python(name: str) -> Path:
    return PLACE / "envs" / name / "bin" / "python"


def package(env: str, name: str) -> Path:
    """Where a package is in an environment."""
    return next((PLACE / "envs" / env / "lib").glob(f"python3*/site-packages/{name}"))


def samples(folder: Path) -> Path:
    """Pictures and recordings, good and bad."""
    folder.mkdir(parents=True)
    assets = package("light", "moonshine_voice") / "assets"
    subprocess.run([python("light"), "-c", _SAMPLES, folder, assets], check=True, env={})
    (folder / "bomb.png").write_bytes(png(30_000, 30_000))
    whole = (folder / "text.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "cut.jpg").write_bytes((folder / "text.jpg").read_bytes()[:3000])
    sound = (folder / "tale.flac").read_bytes()
    (folder / "cut.flac").write_bytes(sound[: len(sound) // 2])
    (folder / "cut.wav").write_bytes((folder / "two.wav").read_bytes()[:20_000])
    return folder


def png(width: int, height: int) -> bytes:
    """A whole PNG of one colour: a few kilobytes for any size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    pack, row = zlib.compressobj(9), bytes(1 + (width + 7) // 8)
    data = b"".join([*(pack.compress(row) for _ in range(height)), pack.flush()])
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
