"""Environments for tests: tiny packages made by hand, so that a build takes a moment and needs no network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from ostler.envs import install

UV = install.find(None).program


def wheel(folder: Path, name: str = "tinypack", version: str = "1.0", code: str | None = None, needs: str = "") -> Path:
    """A wheel with one module in it, which knows its version; `needs` is what it says that it needs."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": code or f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + (f"Requires-Dist: {needs}\n" if needs else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


def offline(folder: Path, *requirements: str) -> list[str]:
    """Requirement lines that are found in the folder alone."""
    return ["--no-index", f"--find-links {folder}", *requirements]


def asked(python: Path | str, code: str) -> str:
    """What an interpreter prints."""
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run([python, "-c", code], env=clean, capture_output=True, text=True, check=True).stdout.strip()


def other_python(low: tuple[int, int], below: tuple[int, int]) -> str | None:
    """An interpreter of this machine from version `low` and below `below`; None when there is none."""
    minors = range(low[1], below[1])
    for minor in minors:
        for found in (
            shutil.which(f"python3.{minor}"),
            *map(str, Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")),
        ):
            if found and subprocess.run([found, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
                return found
    return None


class Quick(install.Installer):
    """Stands in for pip, which takes seconds: an empty virtual environment, and the newest wheel of `--find-links` unpacked."""

    def commands(self, described, target):
        source = next(Path(line.split()[1]) for line in described.requirements if line.startswith("--find-links"))
        site = target / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
        unpack = [sys.executable, "-m", "zipfile", "-e", str(max(source.iterdir())), str(site)]
        return [[sys.executable, "-m", "venv", "--without-pip", str(target)], unpack]


OSTLER = [sys.executable, "-m", "ostler"]
