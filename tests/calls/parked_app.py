"""Models on a fake GPU whose memory is a file: parked by the (fake) driver, or by themselves."""

from __future__ import annotations

import os
from pathlib import Path

from ostler import Ostler

app = Ostler()
USED = Path(os.environ.get("TEST_GPU_USED", "."))


class OnDevice:
    """Takes 600 MB of GPU-0, and says so when they overlap."""

    def load(self, model_id: str) -> None:
        self.model_id = model_id
        self.take()

    def take(self) -> None:
        pids = (path.name.partition(".")[2] for path in USED.iterdir())
        others = [pid for pid in pids if Path(f"/proc/{pid}").exists()]  # of one that has ended it is free
        new = USED / f"new.{os.getpid()}.parked"
        new.write_text("600")
        new.rename(USED / f"GPU-0.{os.getpid()}")
        if others:
            raise RuntimeError(f"CUDA out of memory: {others}")

    def infer(self, payload: object) -> object:
        assert (USED / f"GPU-0.{os.getpid()}").exists(), "its device memory is not there"
        return [os.getpid(), self.model_id]


app.model("driver", models=["one", "two"], gpu_mb=600, idle=600, park=True)(type("Driver", (OnDevice,), {}))
app.model("brief", gpu_mb=600, idle=0.05, park=True)(type("Brief", (OnDevice,), {}))
app.model("ends", gpu_mb=600, idle=0.05, park=False)(type("Ends", (OnDevice,), {}))


@app.model("itself", models=["one", "two"], gpu_mb=600, idle=600, park=True)
class Itself(OnDevice):
    def park(self) -> None:
        (USED / f"GPU-0.{os.getpid()}").unlink()

    def wake(self) -> None:
        if (USED.parent / "refuse").exists():
            raise RuntimeError("it does not want to")
        self.take()
