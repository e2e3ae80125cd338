"""Topics and patterns. Pure.

A pattern matches segment by segment; `*` stands for one segment. Two special cases: `worker:*:status` spans pool and number
(seed 001), and `*` alone is everything.
"""

from __future__ import annotations

import re

from ostler.errors import BadArguments

# Every topic that there is, as patterns. A model's has the name of its task: its id may be any text.
KNOWN = (
    "queue:status",
    "queue:jobs",
    "queue:*:status",
    "worker:*:*:status",
    "call:*:status",
    "session:*:status",
    "system:health",
    "system:incidents",
    "system:nodes",
)
_SEGMENT = re.compile(r"\*|[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_MOST = 100

Pattern = tuple[str, ...]


def parse(text: str) -> frozenset[Pattern]:
    """The patterns of a comma-separated list; empty means everything. Raises BadArguments for what can never match."""
    names = [name.strip() for name in text.split(",") if name.strip()] or ["*"]
    if len(names) > _MOST:
        raise BadArguments(f"{len(names)} topics are too many, at most {_MOST}; use wildcards, such as worker:*:status")
    patterns = set()
    for name in names:
        pattern = _pattern(name)
        if not all(map(_SEGMENT.fullmatch, pattern)) or not any(_overlap(pattern, tuple(k.split(":"))) for k in KNOWN):
            raise BadArguments(
                f"there is no topic {name[:100]!r}; there are: {', '.join(KNOWN)}, with * for any segment, and worker:*:status for all workers"
            )
        patterns.add(pattern)
    return frozenset(patterns)


def _pattern(name: str) -> Pattern:
    if name == "worker:*:status":
        return ("worker", "*", "*", "status")
    return tuple(name.split(":"))


def _overlap(pattern: Pattern, known: Pattern) -> bool:
    """Whether some topic could match both."""
    if pattern == ("*",):
        return True
    return len(pattern) == len(known) and all("*" in (a, b) or a == b for a, b in zip(pattern, known, strict=True))


def matches(patterns: frozenset[Pattern], topic: str) -> bool:
    """Whether one of the patterns matches the topic."""
    segments = tuple(topic.split(":"))
    return any(
        pattern == ("*",)
        or (len(pattern) == len(segments) and all(p in ("*", s) for p, s in zip(pattern, segments, strict=True)))
        for pattern in patterns
    )
