"""How a command reaches things: the running node over HTTP, or the store itself when there is none."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from ostler.config import Settings
from ostler.errors import ConfigError, Conflict, InputError, NotFound, StoreBusy
from ostler.lifecycle import family
from ostler.store import Store, database_path


def node_url(settings: Settings) -> str | None:
    """Where the node of this data directory listens, or None when none runs."""
    path = database_path(settings.store, settings.data_dir).parent / "node.json"
    try:
        found = json.loads(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return str(found["url"]) if family.is_alive(found.get("pid"), found.get("started")) else None


def request(settings: Settings, method: str, path: str, body: Any = None) -> Any:
    """One request to the running node; its errors come back as ours."""
    url = node_url(settings)
    if url is None:
        raise ConfigError(
            f"no node runs on {settings.data_dir}; start one with 'ostler up', or name its directory with --data"
        )
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=60)
    headers = {"Authorization": f"Bearer {settings.token}"} if settings.token else {}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.loads(response.read() or b"null")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise StoreBusy(f"the node at {url} did not answer ({error}); try again, or look at its log") from error
    finally:
        connection.close()
    if response.status >= 400:
        refusal = answer["error"]
        if response.status == 401:
            raise ConfigError(f"the node at {url} asks for a token: set OSTLER_TOKEN")
        kind = {404: NotFound, 409: Conflict, 503: StoreBusy}.get(response.status, InputError)
        raise kind(refusal["message"])
    return answer


def open_store(settings: Settings) -> Store:
    """The store for reading; a clear error when there is none."""
    return Store.open(settings.store, settings.data_dir, read_only=True)


def writable_store(settings: Settings) -> Store:
    path = database_path(settings.store, settings.data_dir)
    if not path.exists():
        raise ConfigError(
            f"there is no store at {path}; start a node there with 'ostler up', or name another with --data"
        )
    return Store.open(settings.store, settings.data_dir, busy_timeout=settings.store_patience)
