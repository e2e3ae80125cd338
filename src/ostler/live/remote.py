"""Logs of workers and jobs, wherever they are: read from a file here, or asked of the node that has it.

A node is asked over HTTP at the address that it advertises, with a secret that all nodes of a store share. It answers for its own
files alone and asks nobody else. Answers are bounded in bytes and time. Standard library alone.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from ostler.errors import BadArguments, NotFound, Unreachable
from ostler.jobs.logs import JobLogs
from ostler.lifecycle.logs import Reader, worker_log
from ostler.store import identity
from ostler.store.fleet import Fleet
from ostler.store.store import Store

SECRET = identity.SECRET
PATH = "/api/v1/inner/log"
BY = "Ostler-Forwarded-By"
"""The header that names who asks on behalf of somebody else. Such a request is never passed on."""
_BYTES = 512 * 1024  # of lines in one answer
_ANSWER = 4 * _BYTES  # of an answer as JSON
_PATIENCE = 5.0  # seconds


class Tail(NamedTuple):
    """Lines of a log, and where reading goes on."""

    lines: list[str]
    place: str
    lost: bool = False  # some lines since the last place could not be had
    older: bool = False  # there are lines before these


def path_of(data: Path, subject: str) -> Path:
    """The log file of `worker:{pool}:{n}` or `job:{id}` in a data directory."""
    kind, _, rest = subject.partition(":")
    pool, _, number = rest.rpartition(":")
    if kind == "job" and rest.isascii() and rest.isdigit():
        return JobLogs(data).path(int(rest))
    if kind == "worker" and pool and number.isascii() and number.isdigit() and "/" not in pool:
        return worker_log(data, pool, number)
    raise BadArguments(f"{subject!r} has no log; name worker:POOL:N or job:ID")


def read(path: Path, lines: int, place: str | None) -> Tail:
    """The last lines of a log here; or, with the place of an earlier answer, those that came after it. The newest, if they are many."""
    reader = Reader(path)
    try:
        found = reader.start(lines, place or None)
        kept, size = len(found), 0
        while kept and size <= _BYTES:
            kept -= 1
            size += len(found[kept].encode()) + 1
        if size > _BYTES:
            found = found[kept + 1 :]
            reader.lost, reader.older = bool(place), True
        return Tail(found, reader.place, bool(place) and reader.lost, reader.older)
    finally:
        reader.close()


def ask(node: Mapping[str, Any], secret: str, by: str, subject: str, lines: int, place: str | None) -> Tail:
    """The same of another node; raises Unreachable with what to do."""
    if not node["url"]:
        raise Unreachable(
            f"node {node['label']} listens on loopback only; set advertise (and host) there, or look on its host {node['host']}"
        )
    asked = {"node": node["id"], "subject": subject, "lines": lines} | ({"last": place} if place else {})
    status, body = _request(node, f"{PATH}?{urlencode(asked)}", {"Authorization": f"Bearer {secret}", BY: by})
    try:
        answer = json.loads(body)
        if status == 404:
            raise NotFound(answer["error"]["message"])
        if status != 200:
            raise Unreachable(f"node {node['label']} at {node['url']} refused: {answer['error']['message']}")
        return Tail(**{name: answer[name] for name in Tail._fields})
    except (ValueError, TypeError, KeyError) as error:
        raise Unreachable(f"what answers at {node['url']} is not node {node['label']} (HTTP {status})") from error


def _request(node: Mapping[str, Any], path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    parts = urlsplit(node["url"])
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        connection = kind(parts.hostname or "", parts.port, timeout=_PATIENCE)
        try:
            connection.request("GET", f"{parts.path.rstrip('/')}{path}", headers=headers)
            response = connection.getresponse()
            return response.status, response.read(_ANSWER)
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unreachable(
            f"node {node['label']} cannot be reached at {node['url']} ({error}); check its advertise setting and the network"
        ) from error


def holder(store: Store, fleet: Fleet, job: int) -> dict[str, Any] | None:
    """The node that has the log of a job: the one that ran it last, or one that uses its data directory now. None: nobody ran it yet.

    Raises Unreachable when that node is gone.
    """
    ran = store.jobs.ran_on(job)
    if ran is None:
        return None
    rows = {node["id"]: node for node in store.nodes.all()}
    home = rows[ran]["home"] if ran in rows else None
    found = [n for n in fleet.living if n["id"] == ran] or [n for n in fleet.living if home and n["home"] == home]
    if found:
        return found[0]
    if not fleet.living:
        return None  # whatever is here
    raise Unreachable(
        f"job {job} last ran on node {fleet.label(ran)}, which does not run now; its output is in the data directory of that node"
    )
