"""Cron: when a schedule fires next. Pure; daylight saving is cronsim's business, as in Debian's cron."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from ostler.errors import ConfigError


def check(spec: str, zone: str) -> None:
    """Raise ConfigError unless the expression and the time zone can be used."""
    try:
        ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ConfigError(f"{zone!r} is not a time zone; write a name such as UTC or Europe/Berlin") from None
    try:
        next(CronSim(spec, datetime.now(UTC)))
    except (CronSimError, StopIteration) as error:
        raise ConfigError(
            f"{spec!r} is not a cron expression ({error or 'it never fires'}); use five fields, such as */5 * * * *, or six with seconds first"
        ) from error


def following(spec: str, zone: str, now: int) -> int:
    """The first time (ms) after `now` (ms) that the expression names, in its time zone."""
    local = datetime.fromtimestamp(now / 1000, UTC).astimezone(ZoneInfo(zone))
    return int(next(CronSim(spec, local)).timestamp() * 1000)
