"""Optional parts: whether they are installed, and the command that installs them. Standard library only."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ostler.errors import ConfigError

# The modules of each extra of pyproject.toml.
MODULES = {
    "storage": ("fsspec",),
    "postgres": ("psycopg",),
    "gpu": ("pynvml",),
    "redis": ("redis",),
    "browsers": ("playwright",),
    "clips": ("av", "imageio_ffmpeg", "python_multipart"),
    "music": ("av", "mutagen", "numpy", "sqlalchemy", "watchfiles"),
}


def command(extra: str) -> str:
    """The command that adds an extra to this installation: from the clone that it came from, or from an index."""
    flag, source = _source()
    return f"pip install {flag}'{source}[{extra}]'"


def require(extra: str, what: str, *modules: str) -> None:
    """Raise ConfigError, with that command, unless all modules of an extra (or only these) can be imported."""
    missing = [name for name in modules or MODULES[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{what} needs {', '.join(missing)} (not installed here): {command(extra)}")


def _source() -> tuple[str, str]:
    clone = Path(__file__).resolve().parents[2]
    if (clone / "pyproject.toml").is_file() and clone.joinpath("src", "ostler").is_dir():
        return "-e ", str(clone)
    from importlib import metadata  # noqa: PLC0415  workers do not need it

    try:
        about = json.loads(metadata.distribution("ostler").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return "", "ostler"
    url = urlsplit(about.get("url", ""))
    return ("", unquote(url.path)) if url.scheme == "file" and "dir_info" in about else ("", "ostler")
