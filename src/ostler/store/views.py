"""Jobs and workers as everybody outside the store sees them: one shape of each. The API's documentation is made of it, too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ostler.store.identity import name_of

CUT = 200  # characters of a text in a short view

# Field by field, with its type. In a short view `args` and `result` are JSON texts, cut off like the error's message.
JOB: dict[str, Any] = {
    "id": int,
    "task": str,
    "queue": str,
    "status": str,
    "args": dict[str, Any] | str,
    "priority": int,
    "attempt": int,
    "attempts": int,
    "crashes": int,
    "timeout": float | None,
    "progress": float | None,
    "stage": str | None,
    "result": Any,
    "error": dict[str, Any] | None,
    "last_error": str | None,
    "worker": str | None,
    "node": str | None,
    "node_id": str | None,
    "cancel_requested": bool,
    "run_at": int | None,
    "batch": int | None,
    "unique_key": str | None,
    "created_at": int,
    "started_at": int | None,
    "finished_at": int | None,
    "seq": int,
    "short": bool,
}

# How one run of a job failed. `attempt` is which one it was; a run that did not count has the number of the one after it. `node` is the
# node's name. `kind`: exception, timeout, crash (its worker died), lost (its node died) or cancelled. `traceback` is what the worker
# printed last, for a crash or a timeout. `duration_ms` is None where nobody knows.
RUN_ERROR: dict[str, Any] = {
    "attempt": int,
    "at": int,
    "worker": str | None,
    "node": str | None,
    "kind": str,
    "code": str,
    "message": str,
    "traceback": str | None,
    "duration_ms": int | None,
}

# A worker, likewise. `name` is what verbs take: `node/worker:pool:n` where more than one node lives. `last_heartbeat` is by the clock of
# its node, `heartbeat_age` (seconds) by the store's. `exit_text` says in words how its last process ended, or what
# a stopped one waits for.
WORKER: dict[str, Any] = {
    "name": str,
    "component": str,
    "node": str,
    "node_id": str,
    "pool": str,
    "status": str,
    "pid": int | None,
    "generation": int,
    "current_job": int | None,
    "last_heartbeat": int,
    "heartbeat_age": float,
    "restart_count": int,
    "last_restart": int | None,
    "exit_code": int | None,
    "exit_reason": str | None,
    "exit_text": str | None,
    "rss_mb": float | None,
    "started_at": int | None,
    "created_at": int,
    "metadata": dict[str, Any] | None,
}

# A node, likewise. `label` is what people and verbs call it: its name, or its id where two nodes that live share the name. `alive` and
# `heartbeat_age` (seconds) are by the store's clock, and its own clock is `skew_ms` ahead of that. `url` is where other nodes reach it,
# None: it listens on loopback only. `workers` counts them by status, `running` the jobs.
NODE: dict[str, Any] = {
    "id": str,
    "name": str,
    "label": str,
    "host": str | None,
    "status": str,
    "alive": bool,
    "pid": int | None,
    "url": str | None,
    "version": str | None,
    "lease_ms": int,
    "last_heartbeat": int,
    "heartbeat_age": float,
    "skew_ms": int,
    "started_at": int,
    "ended_at": int | None,
    "workers": dict[str, int],
    "running": int,
}

# A file that a job has published. `url` is a path of the API; `replaced_by` is the job that has published under the same key since, so that
# the key leads to that one's file now. `type` is guessed from the key's name.
ARTIFACT: dict[str, Any] = {
    "key": str,
    "size": int,
    "sha256": str,
    "type": str,
    "at": int,
    "url": str,
    "replaced_by": int | None,
}
_MADE = frozenset(
    {"attempt", "node", "node_id", "args", "result", "error", "last_error", "cancel_requested", "progress", "short"}
)


def job(row: Any) -> dict[str, Any]:
    """A job with all that it was given and gave back."""
    result = None if row["result"] is None else json.loads(row["result"])
    error = json.loads(row["error"]) if row["error"] else None
    return _view(row, args=json.loads(row["args"]), result=result, error=error, short=False)


def short_job(row: Any) -> dict[str, Any]:
    """A job of bounded size, for listings and for the live state (a row of the statement `short_jobs`)."""
    code, message = _decoded(row["code"]), _decoded(row["message"])
    error = None if code is None else {"code": cut(code), "message": cut(message)}
    return _view(row, args=cut(row["args"]), result=cut(row["result"]), error=error, short=True)


def _view(row: Any, **made: Any) -> dict[str, Any]:
    made["attempt"] = row["attempt"] - row["excused"]
    made["last_error"] = in_a_line(made["error"])
    # What is done is done in full, whatever it last reported of itself.
    made["progress"] = 100.0 if row["status"] == "done" and row["progress"] is not None else row["progress"]
    made["cancel_requested"] = bool(row["cancel"])
    made["node"], made["node_id"] = name_of(row["node"]), row["node"]
    return {name: made[name] if name in _MADE else row[name] for name in JOB}


def event(row: Any) -> dict[str, Any]:
    """One entry of a timeline."""
    data = json.loads(row["data"]) if row["data"] else None
    return {"seq": row["seq"], "at": row["at"], "name": row["name"], "data": data}


def run_error(row: Any) -> dict[str, Any]:
    """How one run failed."""
    kept = json.loads(row["data"])
    return {name: row[name] if name in ("at", "node") else kept.get(name) for name in RUN_ERROR}


def in_a_line(error: Mapping[str, Any] | None) -> str | None:
    """An error in one line of words, for listings."""
    lines = str((error or {}).get("message") or (error or {}).get("code") or "").split("\n")
    return cut(next((line.strip() for line in lines if line.strip()), None))


def cut(text: str | None) -> str | None:
    """The text, or the beginning of it and a sign."""
    return text if text is None or len(text) <= CUT else text[: CUT - 1] + "…"


def _decoded(data: bytes | str | None) -> str | None:
    return data.decode("utf-8", "replace") if isinstance(data, bytes) else data
