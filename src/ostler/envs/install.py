"""What installs an environment, and the commands that it takes: uv, or venv and pip. Standard library alone."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from ostler.config import EnvSettings
from ostler.envs.state import asked_version
from ostler.errors import EnvError


@dataclass(frozen=True, slots=True)
class Installer:
    name: str
    program: str | None = None  # None: pip, in the environment itself

    def commands(self, described: EnvSettings, target: Path) -> list[list[str]]:
        """What to run, one after another."""
        python, places = str(target / "bin" / "python"), _places(described)
        if self.program is not None:
            make = [self.program, "venv", "--python", described.python or sys.executable, str(target)]
            install = [self.program, "pip", "install", "--python", python, "--compile-bytecode"]
        else:
            make = [_base(described.python), "-m", "venv", str(target)]
            install = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        steps = [make]
        if described.requirements:
            steps.append([*install, *places, *_lines(described.requirements)])
        if described.no_deps:
            steps.append([*install, *places, "--no-deps", *_lines(described.no_deps)])
        return steps


def find(wanted: str | None) -> Installer:
    if wanted == "pip":
        return Installer("pip")
    beside = Path(sys.executable).with_name("uv")
    found = shutil.which("uv") or (str(beside) if os.access(beside, os.X_OK) else None)
    if found:
        return Installer("uv", found)
    if wanted == "uv":
        raise EnvError("uv is not installed here; install it (pip install uv), or build with --installer pip")
    return Installer("pip")


def _places(described: EnvSettings) -> list[str]:
    """Where packages and their versions come from, as arguments: pip and uv take the same."""
    found: list[str] = []
    if described.index:
        found += ["--index-url", described.index]
    for url in described.extra_index or ():
        found += ["--extra-index-url", url]
    if described.constraints:
        found += ["-c", _existing(described.constraints, "constraints")]
    return found


def _lines(lines: str | tuple[str, ...]) -> list[str]:
    """What is installed, as arguments: a file, or lines as in such a file."""
    if isinstance(lines, str):
        return ["-r", _existing(lines, "requirements")]
    found: list[str] = []
    for line in lines:
        if not line.startswith("#"):
            found += shlex.split(line) if line.startswith("-") else [line]
    return found


def _existing(path: str, what: str) -> str:
    if not Path(path).is_file():
        raise EnvError(f"the {what} file {path} does not exist")
    return path


def _base(python: str | None) -> str:
    """The interpreter to make a virtual environment with; without uv it has to be there."""
    if python is None:
        return sys.executable
    if "/" in python:
        if asked_version(python) is None:
            raise EnvError(f"{python} is not an interpreter that runs; name another with python = …")
        return python
    short = ".".join(python.split(".")[:2])
    for candidate in (sys.executable, shutil.which(f"python{short}"), shutil.which("python3")):
        found = asked_version(candidate) if candidate else None
        if candidate and found and f"{found}.".startswith(f"{python}."):
            return candidate
    raise EnvError(
        f"Python {python} is not found here (python{short} on PATH); install it, name its path with python = …, or install uv, "
        "which downloads it"
    )
