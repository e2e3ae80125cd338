"""A declared command: any program that is kept running as a worker. It is checked when it is declared."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ostler.errors import ConfigError
from ostler.lifecycle import probe
from ostler.names import pool_name


@dataclass(frozen=True, slots=True)
class Command:
    """Any program, kept running as a worker."""

    name: str
    argv: tuple[str, ...]
    ready: str | None
    drain_signal: int
    env: dict[str, str]
    cwd: str | None


def declare(
    name: str,
    argv: Sequence[str],
    ready: str | None,
    *,
    drain_signal: str,
    env: Mapping[str, str] | None,
    cwd: str | None,
) -> Command:
    """See `Ostler.command`. Raises ConfigError."""
    probe.parse(ready)
    if not argv or isinstance(argv, str) or not all(isinstance(a, str) for a in argv):
        raise ConfigError(f"command {name!r}: argv must be a list of strings, found {argv!r}")
    pool_name(name)
    try:
        number = signal.Signals[drain_signal].value
    except KeyError:
        raise ConfigError(f"command {name!r}: {drain_signal!r} is not a signal; use a name such as SIGTERM") from None
    return Command(name, tuple(argv), ready, number, dict(env or {}), cwd)
