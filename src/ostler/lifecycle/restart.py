"""Whether and when a worker that ended is started again, and whether a crash is its fault. Pure: timestamps in, verdict out.

The n-th counted crash in a row waits min(2^(n-1), backoff_max) seconds. `limit` counted crashes within a sliding `window`,
or `lifetime` in all, and the worker is failed. The streak ends after `healthy_after` seconds of health, or when the worker
finishes an item; that also clears the window. The lifetime count ends only by a reset. An exit with code 0 that nobody
asked for is no crash, until `limit` of them fall within the window: then each further one counts as one.

Blame: a crash without an item in hand counts for the worker. Each finished item sets the pool's credit to 20. An item's
first crash takes one credit, and counts for the worker only when none is left. Its further crashes are charged to the item
alone. A pool without credit in which `limit` items that took none have crashed since the last one finished is doubtful: there
every crash counts for the worker, and the tenant condemns no item. So bad input cannot stop a pool, and a broken environment, in
which nothing finishes, turns no queue toxic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CREDIT = 20
UNCOUNTED_DELAY = 1.0  # seconds before the restart after a crash that does not count


@dataclass(frozen=True, slots=True)
class Limits:
    """The numbers of the policy, in seconds and counts."""

    limit: int = 5
    window: float = 300.0
    lifetime: int = 20
    backoff_max: float = 60.0


@dataclass(frozen=True, slots=True)
class History:
    """What is known of a slot's exits: counted crash and clean-exit times (ms), crash streak, crashes in all."""

    crashes: tuple[int, ...] = ()
    clean: tuple[int, ...] = ()
    streak: int = 0
    lifetime: int = 0

    @property
    def marked(self) -> bool:
        """Whether a finished item has something to forgive."""
        return bool(self.crashes or self.streak)


@dataclass(frozen=True, slots=True)
class Again:
    """Start again after `delay` seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start again; `why` names the limit that was reached."""

    why: str


Verdict = Again | GiveUp


def blame(item: str | None, first: bool, credit: int, *, doubtful: bool = False) -> tuple[bool, int]:
    """Whether a crash counts for the worker, and the pool's credit after it. `first`: the item's first crash."""
    if item is None or doubtful:
        return True, credit
    if not first:
        return False, credit
    return credit <= 0, max(0, credit - 1)


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


def after_uncounted_crash(limits: Limits) -> Again:
    """A crash that is charged to an item: the history stays as it is."""
    return Again(min(UNCOUNTED_DELAY, limits.backoff_max))


def is_exit_loop(history: History, now: int, limits: Limits) -> bool:
    """Whether one more unasked clean exit at `now` is to be treated as a crash."""
    return len(_within(history.clean, now, limits.window)) >= limits.limit


def after_clean_exit(history: History, now: int, limits: Limits) -> History:
    """Remember an unasked exit with code 0."""
    return replace(history, clean=_within((*history.clean, now), now, limits.window))


def after_healthy(history: History) -> History:
    """It was healthy long enough: the crash streak ends, the counts stay."""
    return replace(history, streak=0)


def after_finished(history: History) -> History:
    """It finished an item: the crash streak ends and the window is clear; the lifetime count stays."""
    return replace(history, crashes=(), streak=0)


def _within(times: tuple[int, ...], now: int, window: float) -> tuple[int, ...]:
    # A time after `now` is from before the clock was set back: it tells nothing about this window.
    return tuple(t for t in times if now - window * 1000 < t <= now)
