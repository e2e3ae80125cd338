"""Where a node is, and what proves that one may use it: for the command line and for calls from any program. Standard library alone."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from urllib.parse import urlsplit

from ostler import private
from ostler.config import Settings
from ostler.errors import ConfigError
from ostler.lifecycle import family

KEY = "key"  # in the run directory: who has it may call models, and do nothing else
GIVEN = "OSTLER_CALLS"  # where the node of a worker takes calls


def has_own_token(settings: Settings) -> bool:
    """Whether the running node uses the token in its data directory, and not one of its settings."""
    try:
        return bool(json.loads(_file(settings).read_text(encoding="ascii")).get("own_token", True))
    except (OSError, ValueError):
        return True


def node_url(settings: Settings) -> str | None:
    """Where the node of this data directory listens, or None when none runs."""
    path = _file(settings)
    try:
        found = json.loads(path.read_text(encoding="ascii"))
    except PermissionError:
        if settings.token:  # who has it need not see the directory
            return f"http://{settings.host}:{settings.port}"
        private.check(path, write=False)
        raise
    except (OSError, ValueError):
        return None
    return str(found["url"]) if family.is_alive(found.get("pid"), found.get("started")) else None


def is_node(settings: Settings) -> bool:
    """Whether this process is the node of the data directory, as in a route of the app's own."""
    try:
        return bool(json.loads(_file(settings).read_text(encoding="ascii")).get("pid") == os.getpid())
    except (OSError, ValueError):
        return False


def _file(settings: Settings) -> Path:
    from ostler.store.database import home  # noqa: PLC0415  only who asks for a node loads the store

    return home(settings.store, settings.data_dir) / "node.json"


def called_url(settings: Settings) -> str | None:
    """Where calls go: the node that the settings name, else that of this worker or of the data directory. Raises ConfigError."""
    if not settings.url:
        return os.environ.get(GIVEN) or node_url(settings)
    try:
        parts = urlsplit(settings.url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        fits = False
    if not fits:
        raise ConfigError(f"url must be the URL of a node such as http://10.0.0.7:8356, found {settings.url!r}")
    return settings.url.rstrip("/")


def credential(settings: Settings) -> str:
    """What is sent with a call: the token, or what the data directory has. A node elsewhere is not told secrets of this one."""
    if settings.token or settings.url:
        return settings.token
    return _read_key(settings.data_dir) or private.read_token(settings.data_dir)


def _read_key(data: Path) -> str:
    try:
        return (data / "run" / KEY).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def new_key(run: Path) -> str:
    """A key for the workers of this start of the node. Who can read it could read the node's memory, too."""
    made = secrets.token_urlsafe(32)
    path = run / KEY
    path.unlink(missing_ok=True)
    with private.open(path, "x", encoding="ascii") as file:
        file.write(made + "\n")
    return made
