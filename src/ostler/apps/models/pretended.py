"""What `ostler demo models` runs: two of the tasks on a pretended GPU, which holds one of them. Standard library, Python 3.9.

The GPU is a file (OSTLER_FAKE_GPUS, see lifecycle/devices.py). The models are real and run on the CPU; a loaded one says in that file's
folder how much of the GPU it would have.
"""

from __future__ import annotations

import os
from pathlib import Path

from ostler import Ostler
from ostler.apps.models import embedding, light, ocr

TOTAL_MB, EACH_MB = 1000, 700
GPU = {
    "gpus": [{"uuid": "GPU-0", "name": "pretended", "total_mb": TOTAL_MB}],
    "folder": "used",
}

app = Ostler()
light(app)


class _OnGpu:
    """Takes its part of the pretended GPU when it is loaded; what a dead process had is free."""

    def load(self, model_id: str) -> None:
        super().load(model_id)  # type: ignore[misc]
        folder = Path(os.environ["OSTLER_FAKE_GPUS"]).parent / str(GPU["folder"])
        folder.mkdir(exist_ok=True)
        (folder / f"GPU-0.{os.getpid()}").write_text(str(EACH_MB))


@app.model("embedding", models=embedding.PACKAGED[:1], env="light", gpu_mb=EACH_MB, idle="10m")
class Embedding(_OnGpu, embedding.Embedding):
    pass


@app.model("ocr", models=ocr.PACKAGED, env="light", gpu_mb=EACH_MB, idle="10m")
class Ocr(_OnGpu, ocr.Ocr):
    pass
