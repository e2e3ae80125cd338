"""What the music tagger can be told: its settings (OSTLER_MUSIC_*), each checked once. Standard library alone."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostler import ConfigError
from ostler.apps import variables

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
        found = variables.given(cls, PREFIX, "music tagger", "docs/music.md", environ)
        return cls(**{name: _read(name, text) for name, text in found.items()})

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
        return variables.roots(variable, text)
    number = variables.number(variable, text)
    if not 0 <= number < math.inf or (name == "threshold" and number > 1):
        raise ConfigError(f"{variable} is out of range, found {text!r}; docs/music.md says what is possible")
    return number
