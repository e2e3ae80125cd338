"""How a command reaches things: the running node over HTTP, or the store itself when there is none."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from ostler import private
from ostler.calls.address import node_url
from ostler.config import Settings
from ostler.errors import ConfigError, Conflict, InputError, NotFound, OstlerError, StoreBusy, Unreachable
from ostler.store import Store, fleet
from ostler.store.database import is_postgres, place, shown
from ostler.store.fleet import Fleet


def is_running(settings: Settings, found: Fleet) -> bool:
    """Whether any node of the store runs. A store in a file has the node of its data directory alone."""
    return node_url(settings) is not None or (is_postgres(settings.store) and bool(found.living))


@contextlib.contextmanager
def nodes_by_store(settings: Settings) -> Iterator[tuple[Store, Fleet]]:
    """The store, to ask nodes elsewhere through it; raises NoNode when none would do what is asked."""
    if not is_postgres(settings.store):
        raise no_node(settings)
    with writable_store(settings) as opened:
        found = fleet.read(opened)
        if not found.living:
            raise no_node(settings)
        yield opened, found


class NoNode(ConfigError):
    """No node runs on the data directory."""


def no_node(settings: Settings) -> NoNode:
    if is_postgres(settings.store):
        return NoNode(
            f"no node is running in {settings.data_dir} or elsewhere on {shown(settings.store)}; start one with 'ostler up'"
        )
    return NoNode(
        f"no node is running in {settings.data_dir}; start one with 'ostler up', or name its data directory with --data"
    )


def tell_no_node(settings: Settings, opened: Store) -> None:
    """One line on stderr when no node runs on the store: what is queued there waits."""
    if not (opened.nodes.alive() if opened.db.shared else node_url(settings)):
        where = place(settings.store, settings.data_dir)
        told = f"ostler: no node is running {where}; start one with 'ostler up', or name another data directory with --data"
        print(told, file=sys.stderr)


@contextlib.contextmanager
def reply(
    settings: Settings, method: str, path: str, body: Any = None, *, patience: float = 60
) -> Iterator[http.client.HTTPResponse]:
    """The running node's reply, still to be read; its errors, and those of reading it, come back as ours."""
    url = node_url(settings)
    if url is None:
        raise no_node(settings)
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=patience)
    token = settings.token or private.read_token(settings.data_dir)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        if response.status >= 400:
            raise _refusal(url, response.status, json.loads(response.read()))
        yield response
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise StoreBusy(f"the node at {url} did not answer ({error}); try again, or check its log") from error
    finally:
        connection.close()


def _refusal(url: str, status: int, answer: Any) -> OstlerError:
    if status == 401:
        return ConfigError(
            f"the node at {url} requires a token: set OSTLER_TOKEN (run `ostler token` as the node's user to print it)"
        )
    return refusal(status, answer["error"]["message"])


def refusal(status: int, message: str) -> OstlerError:
    """The error that an answer of this status stands for."""
    kind = {404: NotFound, 409: Conflict, 502: Unreachable, 503: StoreBusy}.get(status, InputError)
    return kind(message)


def request(settings: Settings, method: str, path: str, body: Any = None) -> Any:
    """One request to the running node, and what it answers."""
    with reply(settings, method, path, body) as response:
        return json.loads(response.read() or b"null")


def open_store(settings: Settings) -> Store:
    """The store for reading; a clear error when there is none."""
    return Store.open(settings.store, settings.data_dir, read_only=True)


def writable_store(settings: Settings) -> Store:
    """The store for writing; a clear error when there is none."""
    return Store.open(settings.store, settings.data_dir, busy_timeout=settings.store_patience, create=False)


def everyone(settings: Settings) -> Fleet:
    """All nodes and workers: from the node that runs here, who may know more than we may read, or from the store."""
    if node_url(settings) is None:
        with open_store(settings) as opened:
            return fleet.read(opened)
    nodes, workers = (request(settings, "GET", f"/api/v1/{what}")[what] for what in ("nodes", "workers"))
    return Fleet(nodes, workers, 0)
