"""ffmpeg: which one, with which arguments, and how it is followed while it runs."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ostler import ConfigError, Job, extras
from ostler.apps.clips.probe import FORMATS, NEAR, Facts
from ostler.apps.clips.rules import PREFIX, Cut, Refused, Rules, no_memory

_VIDEO = ("h264", "hevc", "av1")
_AUDIO = ("aac", "mp3", None)
_TICK = 0.1  # how soon a cancel is noticed
_LEAVE = 2.0  # from SIGTERM to SIGKILL
_SLOW = 8  # frames a second; below that a piece is filled up, or its length would be off by whole frames
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGBUS)  # it would do so again
_PASSING = ("No space left on device", "Input/output error", "Resource temporarily unavailable")
_NO_MEMORY = ("Cannot allocate memory", "Could not allocate memory", "malloc of size", "get_buffer() failed")
_TOO_LARGE = re.compile(r"Picture size (\d+)x(\d+) exceeds specified max pixel count")
_LOG = 65_536  # bytes of ffmpeg's log that are looked at


def ffmpeg(rules: Rules) -> str:
    """The ffmpeg to use: the one that is set, else the system's, else the one of the package imageio-ffmpeg."""
    if rules.ffmpeg:
        return rules.ffmpeg
    if found := shutil.which("ffmpeg"):
        return found
    import imageio_ffmpeg  # type: ignore[import-untyped]  # noqa: PLC0415

    return str(imageio_ffmpeg.get_ffmpeg_exe())


def check_installed(rules: Rules) -> None:
    """Refuse to start a node that could not cut anything."""
    extras.require("clips", "the clip service", "av", "python_multipart")
    try:
        program = ffmpeg(rules)
    except (ImportError, RuntimeError):
        raise ConfigError(f"no ffmpeg is installed: install it, or {extras.command('clips')}") from None
    if shutil.which(program) is None:
        raise ConfigError(f"{PREFIX}FFMPEG: {program!r} cannot be run")


def modes(facts: Facts, wanted: Cut) -> tuple[str, ...]:
    """The ways to cut, the best first: a stream copy where the start is at a key frame and mp4 takes the codecs as they are."""
    fits = facts.video_codec in _VIDEO and facts.audio_codec in _AUDIO and facts.rate >= _SLOW
    at_key = facts.key is not None and abs(facts.key - wanted.start) <= NEAR
    return ("copy", "encode") if fits and at_key else ("encode",)


def command(rules: Rules, wanted: Cut, facts: Facts, mode: str, output: Path) -> list[str]:
    """The arguments of one cut."""
    # A hair after the key frame, or rounding would make ffmpeg go back to the one before.
    at = facts.key + 0.0005 if mode == "copy" and facts.key is not None else wanted.start
    before = ["-nostdin", "-hide_banner", "-y", "-loglevel", "error", "-progress", "pipe:1", "-stats_period", "0.2"]
    # The decoder has a limit of its own: pictures may grow in the middle of a video, and a header may lie.
    limits = ["-protocol_whitelist", "file", "-format_whitelist", FORMATS, "-max_pixels", str(rules.decoder_pixels)]
    streams = ["-map", f"0:{facts.video}", *(["-map", f"0:{facts.audio}"] if facts.audio is not None else [])]
    after = ["-map_chapters", "-1", "-metadata", f"encoding_tool={wanted.mark(mode)}", "-movflags", "+faststart"]
    return [
        *(ffmpeg(rules), *before, *limits, "-ss", f"{at:.6f}", "-t", f"{wanted.length:.6f}", "-i", str(facts.path)),
        *(*streams, *_codecs(wanted, facts, mode), *after, "-f", "mp4", str(output)),
    ]


def _codecs(wanted: Cut, facts: Facts, mode: str) -> list[str]:
    if mode == "copy":
        return ["-c", "copy", *(["-tag:v", "hvc1"] if facts.video_codec == "hevc" else [])]
    # ffmpeg turns the picture upright by itself; after that, x264 wants even sides.
    filters = "scale=max(2\\,trunc(iw/2)*2):max(2\\,trunc(ih/2)*2)"
    if facts.rate < _SLOW:
        filters += ",fps=25:start_time=0"
    video = ["-c:v", "libx264", "-preset", "veryfast", "-crf", "20", "-pix_fmt", "yuv420p", "-vf", filters]
    # The reading is limited already; this cuts what a filter or the last frame's duration adds.
    return [*video, "-c:a", "aac", "-b:a", "160k", "-t", f"{wanted.length:.6f}"]


def cut(job: Job, rules: Rules, wanted: Cut, facts: Facts, mode: str, output: Path) -> None:
    """Run ffmpeg to its end, with progress. A cancel ends it, and so does anything else that unwinds this call."""
    log = job.scratch / f"ffmpeg-{mode}.log"  # not a pipe: it cannot fill up and hold ffmpeg, and is kept on failure
    argv = command(rules, wanted, facts, mode, output)
    with log.open("wb") as errors:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
    try:
        for seconds in _follow(job, process):
            job.progress(2 + 94 * min(1.0, seconds / wanted.length), "cut")
        code = process.wait()
    finally:
        _end(process)
    if code != 0:
        raise _failure(code, log, rules, wanted, facts)


def _follow(job: Job, process: subprocess.Popen[bytes]) -> Iterator[float]:
    """How much of the clip is made, in seconds, until ffmpeg closes its output. Raises Cancelled."""
    assert process.stdout is not None
    pipe, partial = process.stdout.fileno(), b""
    while True:
        job.check()
        if not select.select([pipe], [], [], _TICK)[0]:
            continue
        data = os.read(pipe, 1 << 16)
        if not data:
            return
        *lines, partial = (partial + data).split(b"\n")
        for line in lines:
            if (seconds := made(line)) is not None:
                yield seconds


def made(line: bytes) -> float | None:
    """The seconds that a line of ffmpeg's progress tells of; None when it tells of something else."""
    name, _, value = line.partition(b"=")
    try:
        return max(0.0, int(value) / 1_000_000) if name == b"out_time_us" else None
    except ValueError:  # N/A, before the first frame
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """No ffmpeg outlives its run."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_LEAVE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _failure(code: int, log: Path, rules: Rules, wanted: Cut, facts: Facts) -> Exception:
    """What a failed ffmpeg means: the machine's trouble passes, the source's does not."""
    with log.open("rb") as file:
        written = file.read(_LOG).decode(errors="replace")
    if found := _TOO_LARGE.search(written):
        return rules.too_many_pixels(int(found[1]), int(found[2]), wanted.source)
    if any(words in written for words in _NO_MEMORY):
        return no_memory(rules, wanted.source)
    said = " / ".join(written.strip().splitlines()[-4:])[-800:] or f"exit code {code}"
    if -code in _CRASHES:
        name = signal.Signals(-code).name
        return Refused(
            "UNREADABLE_SOURCE",
            f"ffmpeg itself crashed ({name}) on {wanted.source}; try another ffmpeg with {PREFIX}FFMPEG=/path, or another file",
        )
    if code < 0:
        return RuntimeError(f"ffmpeg was ended by {signal.Signals(-code).name} while it cut {wanted.source}: {said}")
    if any(words in said for words in _PASSING):
        return OSError(f"ffmpeg could not work: {said}")
    if not facts.path.exists():
        return Refused("UNREADABLE_SOURCE", f"there is no file {wanted.source} any more; it was deleted or moved")
    return Refused("UNREADABLE_SOURCE", f"ffmpeg could not cut {wanted.source}; it says: {said}")
