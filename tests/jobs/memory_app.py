"""Job pools that need GPU memory: each job takes as much of the fake GPU as its pool declares, and gives it back."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from pathlib import Path

from ostler import Job, Ostler

app = Ostler()
USED = Path(os.environ.get("TEST_GPU_USED", "."))


@contextmanager
def on_device(mb: float):
    """Hold memory of the fake GPU that CUDA would show this process; fails as a real one would when there is too little."""
    uuid = os.environ.get("CUDA_VISIBLE_DEVICES", "GPU-0")
    own = USED / f"{uuid}.{os.getpid()}"
    own.write_text(str(mb))
    try:
        used = sum(float(p.read_text() or 0) for p in USED.glob(f"{uuid}.*") if Path(f"/proc/{p.suffix[1:]}").exists())
        if used > 1000:
            raise MemoryError(f"{used:.0f} of 1000 MB on {uuid}")
        yield uuid
    finally:
        own.unlink()


def hold(job: Job, mb: float, seconds: float, path: str | None) -> str:
    with on_device(mb) as uuid:
        job.event("begun", {"pid": os.getpid()})
        until = time.monotonic() + seconds
        while time.monotonic() < until or (path and not Path(path).exists()):
            time.sleep(0.005)
    return uuid


@app.job(queue="left", gpu_mb=600, attempts=1)
def left(job: Job, seconds: float = 0.0, path: str | None = None) -> str:
    return hold(job, 600, seconds, path)


@app.job(queue="left", gpu_mb=100, attempts=1)
def small(job: Job) -> str:
    return hold(job, 100, 0.0, None)


@app.job(queue="right", gpu_mb=700, attempts=1)
def right(job: Job, seconds: float = 0.0, path: str | None = None) -> str:
    return hold(job, 700, seconds, path)


@app.job(queue="plain", attempts=1)
def plain(job: Job) -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


@app.job(queue="huge", gpu_mb=5000, attempts=1)
def huge(job: Job) -> None: ...


@app.job(queue="hungry", memory_mb=1500, attempts=1)
def hungry(job: Job) -> int:
    return os.getpid()
