"""Device memory on its way back: of a worker that has gone, or was parked, until a reading shows it as free."""

from __future__ import annotations

import logging
from typing import NamedTuple

from ostler.lifecycle.admission import Resident
from ostler.lifecycle.readings import GpuReadings

log = logging.getLogger("ostler.lifecycle")

_BACK = 5.0  # seconds that it gets to show as free


class Left(NamedTuple):
    """What one worker has left. `at` (monotonic) is when, `free_before` what the device had free then."""

    owner: str
    device: str
    mb: float
    free_before: float
    session: int | None
    at: float

    def is_back(self, found: GpuReadings) -> bool:
        """Whether it is free, or is waited for no longer."""
        reading = found.readings.get(self.device)
        if reading is None:
            return True
        if found.at < self.at:
            return False
        told = found.sessions.get(self.device)
        if reading.free_mb >= self.free_before + 0.9 * self.mb or (told is not None and self.session not in told):
            return True
        late = found.at - self.at >= _BACK
        if late:
            log.warning(
                "%s has ended, but %.0f MB of %s are not free after %g s", self.owner, self.mb, self.device, _BACK
            )
        return late

    def resident(self) -> Resident:
        """As admission sees it."""
        return Resident(f"{self.owner} (left)", self.device, gpu_mb=self.mb, leaving=True)
