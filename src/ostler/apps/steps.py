"""The app of `ostler demo jobs`: a job that takes a while, and needs nothing but Python."""

from __future__ import annotations

import time

from ostler import Job, Ostler

app = Ostler()
app.pool("steps", workers=2)


@app.job(queue="steps")
def work(job: Job, steps: int) -> str:
    """Take a tenth of a second for each step, and report it."""
    for step in range(steps):
        job.progress(100 * step / steps, f"step {step + 1} of {steps}")
        time.sleep(0.1)
    return f"{steps} steps, run {job.attempt}"
