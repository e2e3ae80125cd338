"""Tiny videos made by the real ffmpeg, and ways to hold an ffmpeg in the middle of its work."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import imageio_ffmpeg

from ostler.lifecycle import family

FFMPEG = imageio_ffmpeg.get_ffmpeg_exe()
H264 = ("-c:v", "libx264", "-preset", "ultrafast", "-g", "50", "-keyint_min", "50", "-sc_threshold", "0")


def video(
    path: Path, *codecs: str, seconds: float = 6, size: str = "160x120", rate: str = "25", sound: bool = True
) -> Path:
    """testsrc2 and sine; with H264 a key frame each 2 s."""
    inputs = ["-f", "lavfi", "-i", f"testsrc2=s={size}:r={rate}:d={seconds}"]
    inputs += ["-f", "lavfi", "-i", f"sine=d={seconds}"] if sound else []
    return ffmpeg(*inputs, *codecs, to=path)


def ffmpeg(*args: str | Path, to: Path) -> Path:
    subprocess.run([FFMPEG, "-nostdin", "-y", "-loglevel", "error", *map(str, args), str(to)], check=True)
    return to


def slow_ffmpeg(folder: Path) -> dict[str, str]:
    """The environment of a node whose `ffmpeg` is the real one, reading at a tenth of real time until `folder/go` exists.

    A test can so do what it wants in the middle of a cut, without any race against the end of it.
    """
    folder.mkdir()
    script = folder / "ffmpeg"
    script.write_text(f'#!/bin/sh\n[ -e "{folder}/go" ] && exec "{FFMPEG}" "$@"\nexec "{FFMPEG}" -readrate 0.1 "$@"\n')
    script.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def ffmpeg_of(worker: int) -> int | None:
    """The pid of the ffmpeg that a worker runs."""
    for process in family.processes():
        if process.parent == worker and not process.zombie:
            try:
                argv = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if argv[0] == FFMPEG.encode():
                return process.pid
    return None
