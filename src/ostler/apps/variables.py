"""How an app reads its settings: each field of a dataclass is an environment variable, and one that no field has is refused."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ostler import ConfigError


def given(settings: type[Any], prefix: str, app: str, page: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The texts that the environment has for the fields, without empty ones. Raises ConfigError for a name that is close to none."""
    names = {prefix + field.name.upper(): field.name for field in fields(settings)}
    for name in (n for n in environ if n.startswith(prefix) and n not in names):
        close = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {close[0]}?" if close else f"{page} lists the known ones"
        raise ConfigError(f"environment variable {name} is no setting of the {app}; {hint}")
    return {field: environ[name] for name, field in names.items() if environ.get(name)}


def number(variable: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{variable} must be a number, found {text!r}") from None


def roots(variable: str, text: str) -> tuple[Path, ...]:
    """Absolute directories, as they really are."""
    found = [Path(part) for part in text.split(os.pathsep) if part]
    for path in found:
        if not path.is_absolute():
            raise ConfigError(f"{variable}: {str(path)!r} is not an absolute path")
    return tuple(Path(os.path.realpath(path)) for path in found)
