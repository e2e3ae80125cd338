"""The settings of the browser grid: OSTLER_BROWSER and OSTLER_BROWSERS_*. docs/browsers.md has them all."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from ostler import ConfigError
from ostler.apps import variables

PREFIX = "OSTLER_BROWSERS_"
_USER = "nobody"
_ON, _OFF = ("on", "1", "true", "yes"), ("off", "0", "false", "no")


@dataclass(frozen=True, slots=True)
class Given:
    """Each is the variable OSTLER_BROWSERS_<NAME>."""

    pools: tuple[str, ...] = ()  # which of the app's pools to have; empty: all that can be had
    drivers: tuple[str, ...] = ()  # directories of further Playwright drivers
    user: str = _USER  # who the browsers run as, where the node is root: a name, a uid, or FIRST-LAST
    sandbox: bool = True
    args: tuple[str, ...] = ()  # for every browser

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Given:
        """As the environment sets them; raises ConfigError for what cannot be."""
        given = variables.given(cls, PREFIX, "browser grid", "docs/browsers.md", environ)
        return cls(
            pools=tuple(given.get("pools", "").replace(",", " ").split()),
            drivers=tuple(filter(None, given.get("drivers", "").split(os.pathsep))),
            user=given.get("user", _USER),
            sandbox=_switch("SANDBOX", given.get("sandbox", "on")),
            args=tuple(shlex.split(given.get("args", ""))),
        )


def _switch(name: str, text: str) -> bool:
    if text.lower() not in (*_ON, *_OFF):
        raise ConfigError(f"{PREFIX}{name} must be on or off, found {text!r}")
    return text.lower() in _ON
