"""Models that say on which node they run."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ostler import InputError, Ostler

app = Ostler()


class Where:
    def load(self, model_id: str) -> None: ...

    def infer(self, payload: object) -> object:
        if isinstance(payload, dict) and "fail" in payload:
            raise InputError("as you wish")
        if isinstance(payload, dict) and "begun" in payload:
            Path(payload["begun"]).touch()
            time.sleep(60)
        return os.environ["WHICH"]


app.model("where", idle=600)(type("One", (Where,), {}))
app.model("pids", idle=600, concurrency=2)(type("Two", (Where,), {}))
app.model("large", idle=600, gpu_mb=700)(type("Three", (Where,), {}))
