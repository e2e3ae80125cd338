"""What an event says, in words: the object, and what is different from before. Pure."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from ostler.cli import show

State = Mapping[str, Any]
LEVELS = {"error": "bold red", "warning": "yellow"}


def clean(text: object) -> str:
    """One line without control characters: what users wrote moves no cursor."""
    return "".join(c if c.isprintable() else " " for c in str(text))


def clock(at: int) -> str:
    """The local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(at / 1000))


def key(body: State) -> str:
    """Which object an event is about."""
    match body:
        case {"incident": one}:
            return f"{body['topic']}#{one['node']}#{one['id']}"
        case {"worker": one}:
            return f"{body['topic']}#{one['node_id']}"
        case {"call": one}:
            return f"{body['topic']}#{one['node_id']}#{one['model']}"
        case {"session": one}:
            return f"{body['topic']}#{one['node_id']}"
        case {"node": one} | {"job": one}:
            return f"{body['topic']}#{one['id']}"
    return f"{body['topic']}#"


def line(body: State, before: State | None) -> Text:
    """An event in one line; `before` is the last one about the same object."""
    subject, said = _said(body, before)
    when = Text(f"{clock(body['timestamp'])} ", style="dim")
    return Text.assemble(when, Text(f"{clean(subject):<20} ", style="bold"), said)


def _said(body: State, before: State | None) -> tuple[str, Text]:
    match body:
        case {"topic": "stream", "type": "resync", "stream": {"reason": reason}}:
            return "stream", Text(f"{clean(reason)}: the whole state follows")
        case {"type": "resync", "topic": topic, "stream": {"reason": reason}}:
            return str(topic), Text(clean(reason))
        case {"type": "live", "stream": {"node": node}}:
            return "stream", Text(f"current state of {clean(node)}; changes follow")
        case {"worker": state}:
            return state["name"], worker(state, before and before["worker"])
        case {"node": state}:
            return f"node {state['label']}", of_node(state, before and before["node"])
        case {"job": state}:
            return f"job {state['id']} {state['task']}", job(state, before and before["job"])
        case {"queue": state}:
            return f"queue {state['queue']}" if state["queue"] else "all queues", Text(queue(state))
        case {"call": state}:
            return f"model {state['task']} {state['model']}", Text(model(state))
        case {"session": state}:
            return f"sessions {state['pool']}", Text(session_pool(state))
        case {"health": state}:
            return "health", health(state, before and before["health"])
        case {"incident": state}:
            return "incident", incident(state)
        case _:
            state = {k: v for k, v in body.items() if k not in ("topic", "type", "timestamp")}
            return str(body["topic"]), Text(clean(json.dumps(state)))


def _move(status: str, before: State | None) -> Text:
    """healthy → stopped"""
    if before is None or before["status"] == status:
        return show.state(status)
    return Text.assemble(show.state(before["status"]), " → ", show.state(status))


def worker(now: State, before: State | None) -> Text:
    was: State = before or {"paused": False, "current_job": None, "last_exit": None}
    changed = {name for name in now if was.get(name) != now[name]}
    parts = [Text("gone with its node")] if now.get("gone") else []
    if "status" in changed and not parts:
        why = now["last_exit"] if "last_exit" in changed and (before or now["status"] != "healthy") else None
        parts.append(Text.assemble(_move(now["status"], before), f" ({why['text']})" if why else ""))
    if "pid" in changed and now["pid"]:
        parts.append(Text(f"pid {now['pid']}"))
    if "paused" in changed:
        parts.append(Text("paused" if now["paused"] else "resumed"))
    if "current_job" in changed:
        parts.append(Text(f"running job {now['current_job']} {clean(now['task'])}" if now["current_job"] else "idle"))
    if "rss_mb" in changed and now["rss_mb"]:
        parts.append(Text(f"{now['rss_mb']:.0f} MB"))
    return Text(", ").join(parts or [show.state(now["status"])])


def of_node(now: State, before: State | None) -> Text:
    if now.get("gone"):
        return Text("gone")
    lives = now["alive"] or now["status"] in ("stopped", "dead")
    said = _move(now["status"] if lives else "silent", before)
    workers = ", ".join(f"{n} {status}" for status, n in sorted(now["workers"].items()))
    return said.append(f", workers: {workers or 'none'}")


def job(now: State, before: State | None) -> Text:
    status, error = now["status"], now["error"]
    said = _move(status, before)
    if status == "processing":
        if now["progress"] is not None:
            said.append(f" {now['progress']:.0f} % {clean(now['stage'] or '')}".rstrip())
        if now["worker"] and (before is None or before["worker"] != now["worker"]):
            said.append(f" on {now['worker']}")
    elif status == "done" and now["started_at"]:
        said.append(f" after {show.span((now['finished_at'] - now['started_at']) / 1000)}")
    elif error and status in ("failed", "queued"):
        said.append(clean(f" ({error['code']}: {error['message']})"))
    return said


def queue(now: State) -> str:
    parts = [f"{now['pending']:,} waiting", f"{now['running']:,} running", f"{now['completed']:,} done"]
    parts += [f"{now[name]:,} {name}" for name in ("scheduled", "failed") if now[name]]
    if now["eta"]:
        parts.append(f"empty in {show.span(now['eta'])}")
    return ", ".join(parts) + (" (paused)" if now["paused"] else "")


def model(now: State) -> str:
    parts = [now["state"], f"{now['in_flight']:,} in flight", f"{now['waiting']:,} waiting"]
    parts += [f"{now['memory_mb']:.0f} MB"] if now["memory_mb"] else []
    return ", ".join(parts) + (f" ({clean(now['reason'])})" if now["reason"] else "")


def session_pool(now: State) -> str:
    serving = sum(worker["serves"] for worker in now["workers"])
    parts = [
        f"{now['in_use']:,} in use",
        f"{now['free']:,} of {now['slots']:,} slots free",
        f"{now['waiting']:,} waiting",
    ]
    parts.append(f"{serving} of {len(now['workers'])} workers serving")
    return ", ".join(parts) + (" (paused)" if now["paused"] else "")


def health(now: State, before: State | None) -> Text:
    said = _move(now["status"], before)
    return said.append(clean(": " + "; ".join(now["errors"]))) if now["errors"] else said


def incident(now: State) -> Text:
    return Text(clean(now["text"]), style=LEVELS.get(now["level"], ""))
