"""The models that benchmarks/calls.py calls. The comparators serve the same no-op."""

from __future__ import annotations

import base64
import time

from ostler import Ostler

app = Ostler()


@app.model("noop", idle=-1)
class Noop:
    def load(self, model_id): ...

    def infer(self, payload):
        return payload


@app.model("work", idle=-1)
class Work:
    """Work that needs no CPU here, as on a GPU."""

    def load(self, model_id): ...

    def infer(self, payload):
        time.sleep(payload["seconds"])
        return payload


@app.model("audio", idle=-1)
class Audio:
    def load(self, model_id): ...

    def infer(self, payload):
        return len(payload.view if hasattr(payload, "view") else base64.b64decode(payload["audio"]))


@app.model("words", idle=-1)
class Words:
    def load(self, model_id): ...

    def infer(self, payload):
        time.sleep(0.02)
        for number in range(5):
            yield {"token": number}


@app.model("cold", idle=0)
class Cold:
    def load(self, model_id): ...

    def infer(self, payload):
        return payload


@app.model("loading", models=["sleeps", "burns"], idle=0)
class Loading:
    """`sleeps` loads as weights are read: it waits for the disk, and copies. `burns` keeps one CPU busy all the time."""

    def load(self, model_id):
        block, until = bytearray(1 << 20), time.monotonic() + 20.0
        while time.monotonic() < until:
            if model_id == "sleeps":
                time.sleep(0.01)
                bytes(block)
            yield 0.5 * time.monotonic() / until

    def infer(self, payload):
        return payload


@app.model("narrow", idle=-1, queue=1)
class Narrow:
    """5 ms of work, and one call may wait."""

    def load(self, model_id): ...

    def infer(self, payload):
        time.sleep(0.005)
        return payload


@app.job(queue="bench")
def nothing(job): ...
