"""What the music tagger can be told: its settings (OSTLER_MUSIC_*), each checked once. Standard library alone."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ostler import ConfigError

PREFIX = "OSTLER_MUSIC_"
FORMATS = ("mp3", "flac", "ogg", "opus", "m4a", "wav")
IGNORED = (".*", "@eaDir", "#recycle", "lost+found")
WRITE_TO = ("file", "sidecar", "database")
STATES = ("new", "tagged", "failed", "toxic", "gone")


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings. Each is the variable OSTLER_MUSIC_<NAME>; docs/music.md has them all."""

    roots: tuple[Path, ...] = ()
    model: str = ""
    models: str = ""
    threshold: float = 0.2
    calibration_files: float = 100
    settle: float = 2
    rescan: float = 86_400
    sidecars: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Rules:
        """The rules as the environment sets them; raises ConfigError for what cannot be."""
        known = [PREFIX + f.name.upper() for f in fields(cls)]
        for name in (n for n in environ if n.startswith(PREFIX) and n not in known):
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else "docs/music.md lists the known ones"
            raise ConfigError(f"environment variable {name} is no setting of the music tagger; {hint}")
        given = {f.name: environ[PREFIX + f.name.upper()] for f in fields(cls) if environ.get(PREFIX + f.name.upper())}
        return cls(**{name: _read(name, text) for name, text in given.items()})

    def models_in(self, data: Path) -> Path:
        """The directory of models."""
        return Path(self.models) if self.models else data / "models" / "music"


def sizes(cores: int) -> dict[str, int]:
    """How many workers the pools have on a machine with so many cores: 2, 10 and 5, and fewer on a small one."""
    return {"tag": min(2, cores), "library": min(10, 5 * cores), "calibration": min(5, 2 * cores)}


def _read(name: str, text: str) -> Any:
    variable = PREFIX + name.upper()
    if name in ("model", "models", "sidecars"):
        return text
    if name == "roots":
        return tuple(_root(Path(part), variable) for part in text.split(os.pathsep) if part)
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(f"{variable} must be a number, found {text!r}") from None
    if not 0 <= number < math.inf or (name == "threshold" and number > 1):
        raise ConfigError(f"{variable} is out of range, found {text!r}; docs/music.md says what is possible")
    return number


def _root(path: Path, variable: str) -> Path:
    if not path.is_absolute():
        raise ConfigError(f"{variable}: {str(path)!r} is not an absolute path")
    return Path(os.path.realpath(path))
