"""A model that finds the most important sentences of a text."""

import re
from collections import Counter

from reader import app


@app.model("highlights", idle=300, timeout=60)
class Highlights:
    """A sentence is important when its words occur often. A real model would read its weights in `load`."""

    def load(self, model_id: str) -> None:
        self.word = re.compile(r"[a-z]{4,}")

    def infer(self, payload: dict[str, str]) -> list[str]:
        sentences = re.split(r"(?<=[.!?])\s+", payload["text"])
        words = [set(self.word.findall(sentence.lower())) for sentence in sentences]
        counts = Counter(word for found in words for word in found)
        scores = [sum(counts[word] for word in found) / (len(found) + 5) for found in words]
        best = sorted(range(len(sentences)), key=lambda n: scores[n], reverse=True)[:3]
        return [sentences[n] for n in sorted(best)]
