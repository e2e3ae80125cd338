"""Programs of somebody else's as models, and models that take turns on a GPU or do not heed a cancel."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from ostler import Ostler

app = Ostler()
HERE = Path(__file__).parent
SERVER = [sys.executable, str(HERE / "some_server.py")]

app.server(
    "by_port", [*SERVER, "--port", "{port}", "--model", "{model}"], ready="http:/health", models=["one", "org/two:b"]
)
app.server("by_socket", [*SERVER, "--socket", "{socket}"], path="/v1/things", concurrency=4, idle=0.2)
app.server("garbage", [*SERVER, "--port", "{port}", "--garbage"], ready="tcp:")
app.server("nowhere", ["no-such-program-anywhere", "{port}"])
app.server("dies", [sys.executable, "-c", "import sys; print('no licence found'); sys.exit(3) # {port}"])


@app.model("filed", files=[str(HERE / "there-is-no-{model}.bin")])
class Filed:
    def load(self, model_id: str) -> None: ...

    def infer(self, payload: object) -> object:
        return payload


class Turn:
    """Notes when it begins and ends to load and to answer."""

    def load(self, model_id: str) -> None:
        self._note("load")

    def infer(self, payload: dict) -> object:
        self._note("call")
        return os.getpid()

    def _note(self, what: str) -> None:
        with open(os.environ["TURNS"], "a", encoding="ascii") as file:  # noqa: PTH123
            file.write(f"+ {what}\n")
            file.flush()
            time.sleep(0.02)
            file.write(f"- {what}\n")


app.model("first", gpu_mb=100)(type("First", (Turn,), {}))
app.model("second", gpu_mb=100, concurrency=2)(type("Second", (Turn,), {}))


@app.model("deaf", kill_on_cancel=True)
class Deaf:
    def load(self, model_id: str) -> None: ...

    def infer(self, payload: dict) -> object:
        Path(payload["begun"]).touch()
        while not Path(payload["go"]).exists():
            time.sleep(0.01)
        return os.getpid()


@app.model("kept", pinned=True)
class Kept:
    def load(self, model_id: str) -> None: ...

    def infer(self, payload: object) -> object:
        return os.getpid()


@app.model("early", preload=True, idle=600, workers=2)
class Early:
    def load(self, model_id: str) -> None: ...

    def infer(self, payload: object) -> object:
        return os.getpid()
