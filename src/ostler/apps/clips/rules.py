"""What the clip service allows: its settings (OSTLER_CLIPS_*) and the one way in which it refuses."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostler import ConfigError, Fail
from ostler.apps import variables

PREFIX = "OSTLER_CLIPS_"
SHORTEST = 0.1  # seconds; less than that may hold no frame at all
ENDED = ("done", "failed", "cancelled")
_STATUS = {"INPUT_TOO_LARGE": 413}


class Refused(Fail):
    """What can never work. In a job it fails for good; in a route it is the answer, and nothing was stored."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.status = _STATUS.get(code, 422)


@dataclass(frozen=True, slots=True)
class Cut:
    """What is wanted: a piece of a source, in seconds."""

    source: str
    start: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.start

    def mark(self, mode: str) -> str:
        """What a clip says of its making (the mp4 tag "encoding tool"): which cut it is, and by copy or encode.

        A results store may outlive the database, and then numbers jobs from 1 again: a clip of another cut under the same
        key must not be taken for this one.
        """
        digest = hashlib.sha256(repr((self.source, self.start, self.end)).encode("utf-8", "backslashreplace"))
        return f"ostler clips {mode} {digest.hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings. Each is the variable OSTLER_CLIPS_<NAME>; docs/clips.md has them all."""

    roots: tuple[Path, ...] = ()
    max_seconds: float = 120
    max_input_mb: float = 1024
    max_input_seconds: float = 7200
    max_pixels: float = 36_000_000
    max_pixel_rate: float = 2_500_000_000
    max_memory_mb: float = 8192
    result_ttl: float = 72 * 3600
    upload_ttl: float = 24 * 3600
    http: bool = False
    http_private: bool = False
    http_timeout: float = 30
    ffmpeg: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Rules:
        """The rules as the environment sets them; raises ConfigError for what cannot be."""
        found = variables.given(cls, PREFIX, "clip service", "docs/clips.md", environ)
        return cls(**{name: _read(name, text) for name, text in found.items()})

    @property
    def max_bytes(self) -> int:
        return int(self.max_input_mb * 1024 * 1024)

    def check_cut(self, start: float, end: float) -> None:
        """Refuse numbers that no video could satisfy."""
        if not (math.isfinite(start) and math.isfinite(end)):
            raise Refused("VALIDATION", f"start ({start}) and end ({end}) must be numbers of seconds")
        if start < 0:
            raise Refused("VALIDATION", f"start is {start:g} s; a clip cannot begin before 0")
        if end <= start:
            raise Refused("VALIDATION", f"the clip would end at {end:g} s, not after its start at {start:g} s")
        if end - start < SHORTEST:
            raise Refused("VALIDATION", f"a clip of {end - start:g} s is too short; take at least {SHORTEST:g} s")
        if end - start > self.max_seconds:
            raise Refused(
                "VALIDATION",
                f"the clip would be {end - start:g} s long, more than the {self.max_seconds:g} s that "
                f"{PREFIX}MAX_SECONDS allows; cut it into shorter ones",
            )

    def check_pixels(self, width: int, height: int, source: str) -> None:
        """Refuse pictures over the limit: a small file can hold huge ones, and each takes memory when it is decoded."""
        if width * height > self.max_pixels:
            raise self.too_many_pixels(width, height, source)

    def too_many_pixels(self, width: int, height: int, source: str) -> Refused:
        return Refused(
            "INPUT_TOO_LARGE",
            f"{source} has pictures of {width} x {height} = {width * height / 1e6:.1f} million pixels, more than the "
            f"{self.max_pixels / 1e6:g} million that {PREFIX}MAX_PIXELS allows",
        )

    def check_pixel_rate(self, width: int, height: int, rate: float, source: str) -> None:
        """Refuse more pixels a second than the limit: they would keep a core busy for the whole timeout."""
        if width * height * rate > self.max_pixel_rate:
            raise Refused(
                "INPUT_TOO_LARGE",
                f"{source} has {width} x {height} pixels {rate:g} times a second, {width * height * rate / 1e6:.0f} million "
                f"a second, more than the {self.max_pixel_rate / 1e6:g} million that {PREFIX}MAX_PIXEL_RATE allows",
            )

    @property
    def decoder_pixels(self) -> int:
        """The limit that decoders get: they count the padding of the coded picture, too."""
        return int(self.max_pixels * 1.1) + 65_536

    def check_size(self, size: int, what: str) -> None:
        """Refuse an input over the limit; the sentence names both."""
        if size > self.max_bytes:
            raise Refused(
                "INPUT_TOO_LARGE",
                f"{what} has {size / 2**20:.1f} MB, more than the {self.max_input_mb:g} MB that {PREFIX}MAX_INPUT_MB allows",
            )


@contextlib.contextmanager
def limited_memory(rules: Rules, source: str) -> Iterator[None]:
    """Within it this process may have MAX_MEMORY_MB of data, and so may each process that it starts, by inheritance."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(rules.max_memory_mb * 2**20)
    soft = min(n for n in (limit, *before) if n != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, before[1]))
    try:
        yield
    except MemoryError:
        raise no_memory(rules, source) from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def no_memory(rules: Rules, source: str) -> Refused:
    """What a cut that needs more memory than it may have ends with."""
    return Refused(
        "INPUT_TOO_LARGE",
        f"{source} needs more than the {rules.max_memory_mb:g} MB of memory that {PREFIX}MAX_MEMORY_MB allows",
    )


def clip_key(job: int) -> str:
    """Where a job's clip is published: the same for every run of it."""
    return f"{job}/clip.mp4"


def _read(name: str, text: str) -> Any:
    variable = PREFIX + name.upper()
    if name == "ffmpeg":
        return text
    if name == "roots":
        return variables.roots(variable, text)
    if name in ("http", "http_private"):
        if text not in ("0", "1"):
            raise ConfigError(f"{variable} must be 1 or 0, found {text!r}")
        return text == "1"
    number = variables.number(variable, text)
    if not 0 <= number < math.inf or (number == 0 and not name.endswith("_ttl")):
        raise ConfigError(f"{variable} must be more than 0, found {text!r}")
    return number
