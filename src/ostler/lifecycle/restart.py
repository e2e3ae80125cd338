"""Whether and when a worker that ended is started again. Pure: timestamps in, verdict out.

The n-th crash in a row waits min(2^(n-1), backoff_max) seconds. `limit` crashes within a sliding `window`, or
`lifetime` in all, and the worker is failed. The row ends after `healthy_after` seconds of health; the window ages
out by itself; the lifetime count ends only by a reset. An exit with code 0 that nobody asked for is no crash, until
`limit` of them fall within the window: then each further one counts as one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Limits:
    """The numbers of the policy, in seconds and counts."""

    limit: int = 5
    window: float = 300.0
    lifetime: int = 20
    backoff_max: float = 60.0


@dataclass(frozen=True, slots=True)
class History:
    """What is known of a slot's ends: crash and clean-exit times (ms), crashes in a row, crashes in all."""

    crashes: tuple[int, ...] = ()
    clean: tuple[int, ...] = ()
    streak: int = 0
    lifetime: int = 0


@dataclass(frozen=True, slots=True)
class Again:
    """Start again after `delay` seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start again; `why` names the limit that was reached."""

    why: str


Verdict = Again | GiveUp


def delay(streak: int, backoff_max: float) -> float:
    """Seconds before the restart that follows the `streak`-th crash in a row."""
    return float(min(2 ** min(streak - 1, 30), backoff_max))


def after_crash(history: History, now: int, limits: Limits) -> tuple[History, Verdict]:
    """Count a crash at `now` (ms) and decide."""
    crashes = _within((*history.crashes, now), now, limits.window)
    after = replace(history, crashes=crashes, streak=history.streak + 1, lifetime=history.lifetime + 1)
    if len(crashes) >= limits.limit:
        return after, GiveUp(f"{len(crashes)} crashes within {limits.window:g} s")
    if after.lifetime >= limits.lifetime:
        return after, GiveUp(f"{after.lifetime} crashes in its lifetime")
    return after, Again(delay(after.streak, limits.backoff_max))


def is_exit_loop(history: History, now: int, limits: Limits) -> bool:
    """Whether one more unasked clean exit at `now` is to be treated as a crash."""
    return len(_within(history.clean, now, limits.window)) >= limits.limit


def after_clean_exit(history: History, now: int, limits: Limits) -> History:
    """Remember an unasked exit with code 0."""
    return replace(history, clean=_within((*history.clean, now), now, limits.window))


def after_healthy(history: History) -> History:
    """It was healthy long enough: the row of crashes ends, the counts stay."""
    return replace(history, streak=0)


def _within(times: tuple[int, ...], now: int, window: float) -> tuple[int, ...]:
    # A time after `now` is from before the clock was set back: it tells nothing about this window.
    return tuple(t for t in times if now - window * 1000 < t <= now)
