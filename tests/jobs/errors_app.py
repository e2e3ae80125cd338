"""A job whose runs end in every way."""

from __future__ import annotations

import faulthandler
import os
import time
from pathlib import Path

from ostler import Cancel, Job, Ostler

app = Ostler()


@app.job(queue="work", attempts=3, timeout=5, backoff=(0.01, 0.01))
def unlucky(job: Job, gate: str) -> int:
    print(f"run {job.fence}, attempt {job.attempt}")
    match job.fence:
        case 1:
            try:
                {}["key"]  # type: ignore[index]  # noqa: B018
            except KeyError as error:
                raise ValueError("not found") from error
        case 2:
            faulthandler._sigsegv()  # type: ignore[attr-defined]  # noqa: SLF001
        case 3:
            hangs()
        case 4:
            Path(gate).touch()
            time.sleep(60)
    return job.attempt


def hangs() -> None:
    time.sleep(60)


@app.job(queue="work", attempts=1)
def long_story(job: Job) -> None:
    dig(400)


def dig(depth: int) -> None:
    if depth:
        # A message of its own for each frame, so that the traceback repeats nothing.
        (dig, down)[depth % 2](depth - 1)
    raise RuntimeError("at the bottom")


def down(depth: int) -> None:
    dig(depth)


@app.job(queue="work")
def unwanted(job: Job) -> None:
    raise Cancel("nobody wants it")


@app.job(queue="work")
def half(job: Job) -> int:
    job.progress(50)
    return os.getpid()
