"""Text in images, by RapidOCR on onnxruntime. Python 3.9."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ostler.apps.models import given, pictures, threads, weights

PACKAGED = ("rapidocr-ppocr-v4",)
MARK = "rec.onnx"  # in the directory of a model of your own, with det.onnx, and cls.onnx if lines may be upside down


class Ocr:
    """An image -> `{"text", "lines": [{"text", "score", "box"}], "width", "height"}`. `box` has four corners, from the top left on."""

    def load(self, model_id: str) -> None:
        from rapidocr_onnxruntime import RapidOCR  # noqa: PLC0415

        self._engine = RapidOCR(intra_op_num_threads=threads.count(), **_files(weights.find("ocr", model_id)))

    def infer(self, payload: Any) -> dict[str, Any]:
        picture, options = pictures.read(payload)
        least = given.number(options, "min_score", 0.5, 0, 1)
        lines = [line for line in self.lines(picture) if line["score"] >= least]
        text = "\n".join(line["text"] for line in lines)
        return {"text": text, "lines": lines, "width": picture.width, "height": picture.height}

    def lines(self, picture: Any) -> list[dict[str, Any]]:
        """The lines of text in a Pillow image, from top to bottom."""
        import numpy as np  # noqa: PLC0415

        found, _ = self._engine(np.asarray(picture)[:, :, ::-1])  # blue first, as OpenCV has it
        return [
            {"text": text, "score": round(float(score), 4), "box": [[round(float(v), 1) for v in at] for at in box]}
            for box, text, score in found or ()
        ]


def _files(folder: Path | None) -> dict[str, Any]:
    """What RapidOCR is told of a model of your own."""
    if folder is None:
        return {}
    told: dict[str, Any] = {"det_model_path": str(folder / "det.onnx"), "rec_model_path": str(folder / MARK)}
    if (folder / "cls.onnx").is_file():
        return {**told, "cls_model_path": str(folder / "cls.onnx")}
    return {**told, "use_cls": False}
