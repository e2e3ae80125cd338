"""The options of a job, declared once: `task.options(…)`, `@app.job(…)`, the HTTP API and the CLI are made of this table.

Standard library alone: producers and workers check with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypedDict

from ostler import habits
from ostler.errors import BadArguments
from ostler.jobs.outcome import in_seconds


class Option(NamedTuple):
    """`kind` is int, float or str. Numbers lie between `least` and `most`; a text has that many bytes."""

    kind: type
    doc: str
    wanted: str
    least: float
    most: float


OPTIONS: dict[str, Option] = {
    "attempts": Option(int, "maximum number of attempts", "a whole number from 1 to 1000", 1, 1000),
    "timeout": Option(float, "how long a run may take before its worker is killed", "more than 0 seconds", 1e-9, 1e9),
    "priority": Option(int, "higher runs first", "a whole number from -1000000 to 1000000", -1_000_000, 1_000_000),
    "delay": Option(float, "how long to wait before it may run", "a number of seconds from 0", 0, 1e9),
    "run_at": Option(int, "not before this time", "milliseconds UTC as a whole number", 0, 10**14),
    "unique_key": Option(str, "at most one unfinished job of this task has this key", "text of 1 to 500 bytes", 1, 500),
    "unique_for": Option(float, "how long the unique key is held", "more than 0 seconds", 1e-3, 1e9),
    "limit_key": Option(str, "at most limit_max jobs with this key run at once", "text of 1 to 500 bytes", 1, 500),
    "limit_max": Option(
        int, "how many jobs with the same limit_key run at once", "a whole number from 1", 1, 1_000_000
    ),
}


class JobOptions(TypedDict, total=False):
    """The options of `task.options(…)`; None means not given. Times are seconds or a timedelta."""

    attempts: int | None
    """The maximum number of attempts."""
    timeout: float | timedelta | None
    """How long an attempt may take before its worker is killed."""
    priority: int | None
    """Higher runs first."""
    delay: float | timedelta | None
    """How long to wait before it may run."""
    run_at: datetime | int | None
    """Not before this time: a datetime with a time zone, or milliseconds UTC."""
    unique_key: str | None
    """At most one unfinished job of this task has this key."""
    unique_for: float | timedelta | None
    """Hold the unique key for this long, instead of until the job has ended."""
    limit_key: str | None
    """At most limit_max jobs with this key run at once."""
    limit_max: int | None
    """How many jobs with the same limit_key run at once."""
    connection: Any
    """A database connection; the job is stored in its transaction."""


def plain(whose: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as they are stored: datetimes as milliseconds UTC, timedeltas as seconds. Raises BadArguments."""
    return {name: _plain(whose, name, value) for name, value in options.items()}


def _plain(whose: str, name: str, value: Any) -> Any:
    if name != "run_at":
        return in_seconds(value)
    if not isinstance(value, datetime):
        return value
    if value.utcoffset() is None:
        raise BadArguments(
            f"{whose}: run_at {value.isoformat()} has no time zone; "
            "write datetime.now(timezone.utc) + …, or value.astimezone() for the time zone of this machine"
        )
    return round(value.timestamp() * 1000)


def check(whose: str, options: Mapping[str, Any]) -> None:
    """Raise BadArguments on an option that does not exist, or on a value that cannot be used. None is not given."""
    for name, value in options.items():
        option = OPTIONS.get(name)
        if option is None:
            hint = habits.option(name, value) or f"; known are: {', '.join(sorted(OPTIONS))}"
            raise BadArguments(f"{whose}: {name!r} is not an option{hint}")
        if value is not None and not _fits(option, value):
            raise BadArguments(f"{whose}: {name} must be {option.wanted}, found {value!r}{_hint(name, value)}")


def _fits(option: Option, value: Any) -> bool:
    if option.kind is str:
        return isinstance(value, str) and "\0" not in value and option.least <= _bytes(value) <= option.most
    kinds = int if option.kind is int else int | float
    if not isinstance(value, kinds) or isinstance(value, bool) or not option.least <= value <= option.most:
        return False
    return option is not OPTIONS["run_at"] or not _looks_like_seconds(value)


def _bytes(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:  # lone surrogates: no database takes them
        return 0


def _looks_like_seconds(value: Any) -> bool:
    """As seconds 1973 to 5138; as milliseconds no later than 1973."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 10**8 <= value < 10**11


def _hint(name: str, value: Any) -> str:
    if name == "run_at":
        if isinstance(value, str):
            return "; in Python, give a datetime with a time zone"
        return "; this looks like seconds: multiply by 1000" if _looks_like_seconds(value) else ""
    return duration_hint(value) if OPTIONS[name].kind is float else ""


_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def duration_hint(value: Any) -> str:
    """What to write instead of a text such as 5m."""
    if not isinstance(value, str):
        return ""
    number, unit = value[:-1].strip(), _UNITS.get(value[-1:])
    exact = f"{unit}={number}" if unit and number.isascii() and number.isdecimal() else "minutes=5"
    return f"; in Python, give seconds or timedelta({exact})"
