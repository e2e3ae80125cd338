"""A BERT encoder in numpy: sentence embeddings without torch. Python 3.9, with numpy and tokenizers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

_ROWS = 4096  # tokens that go through the layers at once
_KINDS = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I64": "<i8", "I32": "<i4", "BF16": "<u2"}


class Bert:
    """Any model of the type `bert` that is saved as safetensors with a tokenizer.json; pooling as its sentence-transformers files say."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer  # noqa: PLC0415

        config = json.loads((folder / "config.json").read_text())
        if config.get("model_type") != "bert" or config.get("hidden_act", "gelu") != "gelu":
            raise ValueError(
                f"{folder.name} is a {config.get('model_type')}; this environment runs models of the type bert alone"
            )
        self._heads, self._layers = config["num_attention_heads"], config["num_hidden_layers"]
        self._eps = config.get("layer_norm_eps", 1e-12)
        self._weights = _safetensors(folder / "model.safetensors")
        self.dimensions: int = config["hidden_size"]
        self._pools_first = _setting(folder / "1_Pooling" / "config.json", "pooling_mode_cls_token", default=False)
        self.longest = min(
            _setting(folder / "sentence_bert_config.json", "max_seq_length", default=256),
            config["max_position_embeddings"],
        )
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def tokens(self, texts: list[str]) -> list[list[int]]:
        """The token ids of each text, all of them."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch(texts)]

    def encode(self, rows: list[list[int]]) -> Any:
        """A unit vector for each row of token ids. Rows of about the same length are computed together."""
        found = np.empty((len(rows), self.dimensions), dtype=np.float32)
        order = sorted(range(len(rows)), key=lambda n: len(rows[n]))
        while order:
            width = len(rows[order[-1]])
            count = max(1, _ROWS // width)
            batch, order = order[-count:], order[:-count]
            found[batch] = self._encode([rows[n] for n in batch], width)
        return found

    def _encode(self, rows: list[list[int]], width: int) -> Any:
        ids, mask = np.zeros((len(rows), width), dtype=np.int64), np.zeros((len(rows), width), dtype=np.float32)
        for number, row in enumerate(rows):
            ids[number, : len(row)], mask[number, : len(row)] = row, 1
        weights = self._weights
        state = weights["embeddings.word_embeddings.weight"][ids]
        state = state + weights["embeddings.position_embeddings.weight"][:width]
        state = state + weights["embeddings.token_type_embeddings.weight"][0]
        state = self._norm(state, "embeddings.LayerNorm")
        hidden = (1 - mask)[:, None, None, :] * np.float32(-1e9)
        for layer in range(self._layers):
            state = self._layer(state, hidden, f"encoder.layer.{layer}")
        means = (state * mask[..., None]).sum(axis=1) / mask.sum(axis=1)[:, None]
        pooled = state[:, 0] if self._pools_first else means
        return pooled / np.maximum(np.linalg.norm(pooled, axis=1, keepdims=True), 1e-12)

    def _layer(self, state: Any, hidden: Any, name: str) -> Any:
        count, width, size = state.shape
        shape = (count, width, self._heads, size // self._heads)
        query, key, value = (
            self._linear(state, f"{name}.attention.self.{part}").reshape(shape).transpose(0, 2, 1, 3)
            for part in ("query", "key", "value")
        )
        scores = query @ key.transpose(0, 1, 3, 2) / np.float32(math.sqrt(shape[-1])) + hidden
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = (scores / scores.sum(axis=-1, keepdims=True)) @ value
        mixed = mixed.transpose(0, 2, 1, 3).reshape(count, width, size)
        state = self._norm(
            state + self._linear(mixed, f"{name}.attention.output.dense"), f"{name}.attention.output.LayerNorm"
        )
        inner = _gelu(self._linear(state, f"{name}.intermediate.dense"))
        return self._norm(state + self._linear(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm")

    def _linear(self, state: Any, name: str) -> Any:
        return state @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]

    def _norm(self, state: Any, name: str) -> Any:
        state = state - state.mean(axis=-1, keepdims=True)
        state = state / np.sqrt((state * state).mean(axis=-1, keepdims=True) + self._eps)
        return state * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]


def _gelu(x: Any) -> Any:
    """x times the share of the normal distribution below x; erf by Abramowitz and Stegun 7.1.26, right to 2e-7."""
    half = np.abs(x) * np.float32(math.sqrt(0.5))
    t = 1 / (1 + np.float32(0.3275911) * half)
    poly = np.zeros_like(t)
    for factor in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        poly = (poly + np.float32(factor)) * t
    erf = 1 - poly * np.exp(-half * half)
    return x * (1 + np.copysign(erf, x)) / 2


def _safetensors(path: Path) -> dict[str, Any]:
    """All tensors of a file, as float32, by their names without a prefix such as `bert.`."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    if not 0 < size <= len(data) - 8:
        raise ValueError(f"{path} is no safetensors file")
    found = {}
    for name, told in json.loads(data[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        start, end = (8 + size + offset for offset in told["data_offsets"])
        array = np.frombuffer(data[start:end], dtype=_KINDS[told["dtype"]]).reshape(told["shape"])
        if told["dtype"] == "BF16":
            array = (array.astype("<u4") << 16).view("<f4")
        found[name.removeprefix("bert.")] = np.ascontiguousarray(array, dtype=np.float32)
    return found


def _setting(file: Path, name: str, *, default: Any) -> Any:
    """A value of a JSON file that may be missing."""
    return json.loads(file.read_text()).get(name, default) if file.is_file() else default
