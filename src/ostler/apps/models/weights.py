"""Where the files of models are: inside installed packages, or in directories under OSTLER_MODELS_DIR. Standard library, Python 3.9.

OSTLER_MODELS_DIR/
  embedding/e5-small/        the model id `e5-small` of the task `embedding`
  generation/org/chat:7b/    an id may have slashes: `org/chat:7b`
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from ostler import ConfigError

DIRECTORY = "OSTLER_MODELS_DIR"
_DEEPEST = 2  # directories of an id: owner and name
_LONGEST = 200  # characters of an id


def local(task: str, mark: str) -> list[str]:
    """The ids of a task's own models: directories with a file of that name in them."""
    root = _root(task)
    if root is None or not root.is_dir():
        return []
    levels = ["/".join(["*"] * (depth + 1)) for depth in range(_DEEPEST)]
    found = {file.parent for level in levels for file in root.glob(f"{level}/{mark}")}
    ids = [path.relative_to(root).as_posix() for path in found if path.resolve().is_relative_to(root.resolve())]
    return sorted(one for one in ids if one.isprintable() and len(one) <= _LONGEST)


def find(task: str, model_id: str) -> Path | None:
    """The directory of a task's own model; None where there is none of that id. An id never leads out of the directory."""
    root = _root(task)
    if root is None:
        return None
    path = (root / model_id).resolve()
    inside = path.is_relative_to(root.resolve()) and path != root.resolve()
    return path if inside and path.is_dir() else None


def offline() -> None:
    """No library looks for models on the network: they are here, or the error says that they are not."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def packaged(package: str, *parts: str) -> Path:
    """A directory inside an installed package, which is not imported; raises LookupError."""
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise LookupError(f"the package {package} is not installed in this environment")
    path = Path(places[0]).joinpath(*parts)
    if not path.exists():
        raise LookupError(f"the package {package} has no {'/'.join(parts)}; another version of it is wanted")
    return path


def _root(task: str) -> Path | None:
    named = os.environ.get(DIRECTORY)
    if not named:
        return None
    if not named.startswith("/"):  # a worker has another working directory
        raise ConfigError(f"{DIRECTORY} must be an absolute path, found {named!r}")
    return Path(named) / task
