"""The original musicnn, with TensorFlow, in an environment of its own:  ostler env build musicnn --app ostler.apps.music.reference

What the tagger computes with numpy alone is measured against this: the tests compare scores and embeddings, benchmarks/music.py time and memory.
"""

from __future__ import annotations

from typing import Any

from ostler import Job, Ostler

app = Ostler()
app.env(
    "musicnn",
    python="3.11",
    # The newest TensorFlow that the code of 2019 runs with.
    requirements=["tensorflow-cpu==2.15.1", "librosa==0.10.2.post1", "soundfile==0.14.0", "numpy==1.26.4"],
    no_deps=["musicnn==0.1.0"],  # it asks for versions of 2019
)
app.pool("reference", workers=1)
_WINDOWS = 1000


@app.job("reference", env="musicnn", timeout=600)
def analyse(job: Job, path: str, model: str = "MSD_musicnn") -> dict[str, Any]:  # noqa: ARG001
    """Tags, mean scores and mean embedding of a file that libsndfile can read."""
    import os  # noqa: PLC0415

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from musicnn import configuration  # noqa: PLC0415

    # All windows at once: with more than one batch it gives the first window's embedding for all of them.
    configuration.BATCH_SIZE = _WINDOWS
    from musicnn.extractor import extractor  # noqa: PLC0415

    scores, tags, layers = extractor(path, model=model)
    return {
        "tags": list(tags),
        "scores": scores.mean(axis=0).tolist(),
        "embedding": layers["penultimate"].mean(axis=0).tolist(),
        "windows": len(scores),
    }
