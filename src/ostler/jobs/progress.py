"""Progress without noise (seed 002, R8). Pure; standard library alone."""

from __future__ import annotations

_STEP = 1.0
_QUIET = 0.5


class Throttle:
    """Lets a report through when it is at least 1 % further, or different and 0.5 s later, or the first 100. Never goes back."""

    def __init__(self) -> None:
        self._shown: float | None = None
        self._stage: str | None = None
        self._at = 0.0

    def admit(self, percent: float, stage: str | None, now: float) -> float | None:
        """The value to report, or None when this one is to be kept quiet."""
        percent = min(100.0, max(0.0, float(percent)))
        if self._shown is not None:
            percent = max(percent, self._shown)
            changed = percent != self._shown or (stage is not None and stage != self._stage)
            reached = percent >= 100.0 > self._shown
            if not (
                percent >= self._shown + _STEP
                or reached
                or (changed and self._shown < 100.0 and now >= self._at + _QUIET)
            ):
                return None
        self._shown, self._stage, self._at = percent, stage or self._stage, now
        return percent
