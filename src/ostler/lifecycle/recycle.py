"""When a worker has done enough and a fresh one should take over. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecycleLimits:
    """0 means never. `warm` starts the replacement before the old one leaves."""

    count: int = 0
    age: float = 0.0
    rss_mb: float = 0.0
    warm: bool = False


def due(limits: RecycleLimits, *, served: int, age: float, rss_mb: float | None) -> str | None:
    """The reason to recycle now, or None."""
    if limits.count and served >= limits.count:
        return f"served {served} of {limits.count}"
    if limits.age and age >= limits.age:
        return f"is {age:.0f} s old, limit {limits.age:.0f} s"
    if limits.rss_mb and rss_mb is not None and rss_mb >= limits.rss_mb:
        return f"uses {rss_mb:.0f} MB, limit {limits.rss_mb:.0f} MB"
    return None
