"""Running Ostler's own programs in another environment, where Ostler is not installed."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ostler import private
from ostler.config import Settings
from ostler.envs.state import Declares, interpreter
from ostler.errors import EnvError

JOBS = (3, 11)  # what Ostler itself needs, and so a job


def command(settings: Settings, app: Declares, name: str, module: str, *args: str) -> list[str]:
    """The argv that runs a module of Ostler's in the environment as it is built now. Raises as `interpreter` does."""
    python = interpreter(settings, app, name, JOBS)
    start = _library(settings) / "ostler" / "envs" / "start.py"
    return [str(python), "-u", str(start), module, *args]


def variables(settings: Settings, name: str) -> dict[str, str]:
    """The variables to give to such a program: of the node's own environment, only Ostler gets in."""
    return {**isolated(name), "PYTHONPATH": str(_folder(settings))}


def isolated(name: str) -> dict[str, str]:
    """The variables to give to any program in the environment, so that nothing of the node's own gets in."""
    return {"PYTHONPATH": "", "PYTHONHOME": "", "PYTHONNOUSERSITE": "1", "VIRTUAL_ENV": "", "OSTLER_ENV": name}


def _folder(settings: Settings) -> Path:
    return settings.data_dir / "run" / "lib"


def _library(settings: Settings) -> Path:
    """A directory that holds nothing but `ostler`. The node's site-packages on the path would bring all other packages with it; a
    path entry, unlike an import hook, also reaches the processes that a job starts.
    """
    package = Path(__file__).resolve().parent.parent
    link = _folder(settings) / "ostler"
    try:
        with contextlib.suppress(OSError):
            if link.readlink() == package:
                return link.parent
        private.make(link.parent)
        fresh = link.with_name("ostler.new")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(package)
        fresh.replace(link)
    except OSError as error:
        raise EnvError(f"{link} cannot be made: {error.strerror}; jobs in another environment need it") from error
    return link.parent
