"""Why a worker ended, whether that counts against it, and how that is said. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from ostler.lifecycle.child import REASONS
from ostler.lifecycle.process import Ended
from ostler.lifecycle.restart import History, Limits, is_exit_loop
from ostler.lifecycle.state import Status
from ostler.lifecycle.worker import Exit, Worker
from ostler.store.fleet import is_idle
from ostler.store.views import WORKER

# The codes of seed 001 that are no process's exit code: unknown, heartbeat timeout, invalid heartbeat.
_SEED_CODE = {"spawn": -1, "unknown": -1, "silence": -2, "unwell": -2, "protocol": -3}


# reason -> (in a table, in a sentence that begins with the worker's name)
_WORDS = {
    "oom": (
        "killed by SIGKILL, probably out of memory",
        "was killed by SIGKILL, probably out of memory (the kernel counted an out-of-memory kill)",
    ),
    "silence": ("missed heartbeats", "missed its heartbeats and was killed"),
    "unwell": ("failed health check", "failed its health check and was killed"),
    "startup-deadline": ("not ready in time", "was not ready in time and was killed"),
    "killed": ("killed by an operator", "was killed by an operator"),
    "job-timeout": ("job timed out", "was killed because its job timed out"),
    "cancelled": ("job was cancelled", "was killed because its job was cancelled"),
    "call-deadline": ("call took too long", "was killed because a call took too long"),
    "call-cancelled": ("call was cancelled", "was killed because a cancelled call did not end"),
    "unreachable": ("broke its connections", "broke its connections and was killed"),
    "hung": ("hung", "did not answer its probe and was killed"),
    "lost": ("what it served died", "was killed because what it served had died"),
    "parked": ("ended while parked", "was ended while it was parked"),
    "not-woken": ("could not be woken", "could not be woken and was killed"),
    "shutdown": ("killed at shutdown", "was killed because it did not stop in time"),
    "protocol": ("broke the protocol", "broke the protocol and was killed"),
    "spawn": ("could not be started", "could not be started"),
    "app-load": ("could not load the app", "could not load the app"),
    "model-load": ("could not load its model", "could not load its model"),
    "exit-loop": ("exited too often", "exited by itself too often"),
    "unknown": ("exit status unknown", "exited; status unknown"),
    "stopped": ("stopped as asked", "stopped as asked"),
}
_FAULTS = {"SIGSEGV": " (fault in native code)", "SIGBUS": " (fault in native code)", "SIGABRT": " (it aborted itself)"}


def words(reason: str, code: int | None, signal: str | None, *, long: bool = False) -> str:
    """How a worker ended: the one wording for the log, the API, the CLI and the dashboard.

    Short for tables ("killed by SIGKILL"), long for sentences ("was killed by SIGKILL").
    """
    if reason in _WORDS:
        return _WORDS[reason][long]
    if signal:
        return f"{'was ' if long else ''}killed by {signal}{_FAULTS.get(signal, '')}"
    if reason == "exit":
        return f"exited with code {code}" if long else f"exit code {code}"
    return f"{'ended: ' if long else ''}{reason.replace('-', ' ')}"


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A worker's health row as the API and the CLI show it."""
    known = row["metadata"] or {}
    text = words(row["exit_reason"], row["exit_code"], known.get("signal")) if row["exit_reason"] else None
    if row["status"] == Status.STOPPED and known.get("waiting_for"):
        text = known["waiting_for"]
    elif is_idle(row["status"], row.get("key")) and row["exit_reason"] in (None, "stopped"):
        text = "idle; the next call starts it"
    return {key: text if key == "exit_text" else row[key] for key in WORKER}


def exits(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Exit records as the API and the CLI show them."""
    return [{**row, "text": words(row["reason"], row["code"], row["signal"])} for row in rows]


def judge(worker: Worker, ended: Ended, history: History, now: int, limits: Limits, *, memory_ran_out: bool) -> Exit:
    """The reason and the kind of an end: asked, clean or crash."""
    if worker.killing is not None:
        return Exit(worker.killing, "asked" if worker.on_purpose else "crash", ended.code, ended.signal)
    if worker.parting is not None:
        return Exit(worker.parting, "asked", ended.code, ended.signal)
    if worker.status is Status.STOPPING:
        return Exit("stopped", "asked", ended.code, ended.signal)
    if not ended.known:
        return Exit("unknown", "crash", ended.code, None)
    if ended.code == 0:
        return (
            Exit("exit-loop", "crash", 0, None)
            if is_exit_loop(history, now, limits)
            else Exit("exit", "clean", 0, None)
        )
    if ended.signal:
        return Exit(
            "oom" if ended.signal == "SIGKILL" and memory_ran_out else "signal", "crash", ended.code, ended.signal
        )
    return Exit(REASONS.get(ended.code, "exit"), "crash", ended.code, None)


def recorded_code(end: Exit) -> int:
    """What the health row's `exit_code` says."""
    return _SEED_CODE.get(end.reason, end.code)


# Exits whose reason a worker prints itself. What one that was killed had printed last says nothing about the kill.
_OWN_REASONS = frozenset({"exit", "exit-loop", "app-load", "model-load", "spawn", "startup-deadline", "unknown"})


def last_words(log: list[str], reason: str) -> str | None:
    """The line that says why it exited: of a fault's stack, which has the most recent call first, that call; else the last one, where
    the worker exited by itself.
    """
    lines = [line.strip()[:160] for line in log if line.strip()]
    for before, line in reversed([*itertools.pairwise(lines)]):
        if before.endswith("(most recent call first):"):
            return line
    return lines[-1] if lines and reason in _OWN_REASONS else None


def told(reason: str, code: int | None, signal: str | None, log: list[str]) -> str:
    """How a worker ended, in a sentence that begins with its name, with the line in which it said why, if there is one."""
    line = last_words(log, reason)
    return words(reason, code, signal, long=True) + (f" ({line})" if line else "")
