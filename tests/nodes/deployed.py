"""An app in versions, as a rolling deploy has them side by side. `DEPLOYED` names what this one declares, apart from `stays`."""

from __future__ import annotations

import os

from ostler import Job, Ostler

app = Ostler()
declared = os.environ.get("DEPLOYED", "").split()


@app.job(queue="work")
def stays(job: Job, n: int) -> int:
    return n


if "goes" in declared:

    @app.job(queue="work")
    def goes(job: Job, n: int) -> int:
        return n


if "comes" in declared:

    @app.job(queue="work")
    def comes(job: Job, n: int) -> int:
        return n


if "nightly" in declared:
    app.cron("nightly", "0 0 * * *", stays.s(n=0))

if "hourly" in declared:
    app.cron("hourly", "0 * * * *", stays.s(n=1))
