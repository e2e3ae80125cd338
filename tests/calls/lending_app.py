"""Models whose callers are lent to them, and that make it hard."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ostler import Ostler

app = Ostler()


def wait_for(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.005)


@app.model("odd", timeout=60)
class Odd:
    """Does what it is told, and never looks whether its call was cancelled."""

    def load(self, model_id: str) -> None: ...

    def infer(self, payload: object) -> object:
        if not isinstance(payload, dict):
            return {"payload": payload, "pid": os.getpid()}
        if "bytes" in payload:
            return "x" * payload["bytes"]
        if "fork" in payload:
            if (pid := os.fork()) == 0:
                wait_for(payload["fork"])
                os._exit(0)
            return pid
        Path(payload["begun"]).touch()
        wait_for(payload["go"])
        return os.getpid()
