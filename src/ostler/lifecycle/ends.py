"""Why a worker ended, and whether that counts against it. Pure."""

from __future__ import annotations

from ostler.lifecycle.child import REASONS
from ostler.lifecycle.process import Ended
from ostler.lifecycle.restart import History, Limits, is_exit_loop
from ostler.lifecycle.state import Status
from ostler.lifecycle.worker import Exit, Worker

# The codes of seed 001 that are no process's exit code: unknown, heartbeat timeout, invalid heartbeat.
_SEED_CODE = {"spawn": -1, "unknown": -1, "silence": -2, "unwell": -2, "protocol": -3}


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
