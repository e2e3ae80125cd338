"""Topics: what a pattern matches, and that what can never match is refused in words."""

from __future__ import annotations

import pytest

from ostler.errors import BadArguments
from ostler.live import topics

EVERY = (
    "queue:status",
    "queue:jobs",
    "queue:tag:status",
    "worker:tag:0:status",
    "call:whisper:status",
    "session:chromium:status",
    "system:health",
    "system:incidents",
)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", EVERY),
        ("*", EVERY),
        (" , ", EVERY),
        ("queue:status", ("queue:status",)),
        ("queue:jobs", ("queue:jobs",)),
        ("queue:*:status", ("queue:tag:status",)),
        ("queue:tag:*", ("queue:tag:status",)),
        ("queue:*", ("queue:status", "queue:jobs")),
        ("worker:*:status", ("worker:tag:0:status",)),
        ("worker:tag:*:status", ("worker:tag:0:status",)),
        ("worker:*:0:status", ("worker:tag:0:status",)),
        ("worker:tag:0:status", ("worker:tag:0:status",)),
        ("worker:tag:1:status", ()),
        ("worker:library:*:status", ()),
        ("queue:library:status", ()),
        ("system:*", ("system:health", "system:incidents")),
        ("*:*", ("queue:status", "queue:jobs", "system:health", "system:incidents")),
        ("system:health, queue:jobs,system:health", ("queue:jobs", "system:health")),
    ],
)
def test_a_list_of_patterns_matches_what_it_says(text: str, wanted: tuple[str, ...]) -> None:
    patterns = topics.parse(text)
    assert tuple(t for t in EVERY if topics.matches(patterns, t)) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "queue",
        "worker:*",
        "worker:tag:status",
        "worker:tag:0:1:status",
        "queue:tag:jobs",
        "queue::status",
        "queue:tag status:status",
        "queue:t*:status",
        "queue:status:",
        "queue:jobs,system:wealth",
        "système:health",
        "queue:" + "x" * 64 + ":status",
        "*:*:*:*:*",
        "**",
    ],
)
def test_what_can_never_match_is_refused_with_the_topics_there_are(text: str) -> None:
    with pytest.raises(BadArguments, match="there is no topic .*; there are: queue:status, queue:jobs"):
        topics.parse(text)


def test_thousands_of_patterns_are_refused_before_any_is_looked_at() -> None:
    assert len(topics.parse(",".join(f"worker:p{n}:*:status" for n in range(100)))) == 100
    with pytest.raises(BadArguments, match="5000 topics are too many, at most 100; use wildcards"):
        topics.parse(",".join(f"nonsense{n}" for n in range(5000)))


def test_a_long_name_does_not_come_back_whole() -> None:
    with pytest.raises(BadArguments) as refused:
        topics.parse("x" * 100_000)
    assert len(str(refused.value)) < 500
