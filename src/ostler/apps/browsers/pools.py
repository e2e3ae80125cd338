"""Declaring browser pools, for the app here and for your own:

from ostler import Ostler
from ostler.apps.browsers.pools import browsers

app = Ostler()
browsers(app, "agents", mode="sticky", slots=3, sticky=120)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ostler import ConfigError, Ostler
from ostler.apps.browsers import installed
from ostler.apps.browsers.driver import PRODUCT
from ostler.apps.browsers.given import Given
from ostler.apps.browsers.grid import Dedicated, Launch, Shared

MODES = ("shared", "dedicated", "sticky", "cdp")
_STICKY = 60.0  # seconds that a client has to come back
# MB, by the proportional share of each process: a worker with its driver, a browser, and a session in it.
_WORKER, _DRIVER, _IDLE, _SESSION = 25, 95, {"chromium": 57}, {"chromium": 18}
_IDLE_ELSE, _SESSION_ELSE = 110, 60


def browsers(
    app: Ostler,
    name: str,
    *,
    browser: str = "chromium",
    mode: str = "shared",
    executable: str | Path | None = None,
    args: Sequence[str] = (),
    drivers: Mapping[str, str | Path] | None = None,
    **options: Any,
) -> None:
    """Declare a pool of browsers; raises ConfigError where there is no such browser.

    `browser` is chromium (the headless shell where there is one), chromium-full, firefox or webkit; `executable` is another program
    for it. `drivers` are further Playwright drivers by the version of clients that they serve (`{"1.58": "/venv/.../playwright/driver"}`):
    each is a pool of its own, NAME-VERSION, behind the same public name. `options` are those of `app.sessions`.
    """
    if mode not in MODES:
        raise ConfigError(f"browsers {name!r}: mode must be one of {', '.join(MODES)}, found {mode!r}")
    given = Given.from_environment()
    program = installed.Browser(browser, str(executable)) if executable else installed.get(browser)
    options.setdefault("memory_mb", _memory(browser, mode, options.get("slots", 5)))
    if mode == "sticky":
        options.setdefault("sticky", _STICKY)
    if mode == "cdp":
        _declare(app, name, Launch(program, None, given, args=tuple(args)), mode, options)
        return
    found = {name: installed.driver()}
    for version, folder in (drivers or {}).items():
        other = installed.driver(folder)
        if other.serves != version:
            raise ConfigError(
                f"browsers {name!r}: the driver {folder} is for clients of {other.serves}, not of {version}"
            )
        found[f"{name}-{version}"] = other
    for pool, driver in found.items():
        launch = Launch(program, driver, given, keeps=mode == "sticky", args=tuple(args))
        own = {**options, "versions": [driver.serves], "product": PRODUCT}
        _declare(app, pool, launch, mode, own if pool == name else {**own, "serves": options.get("serves") or name})


def _declare(app: Ostler, pool: str, launch: Launch, mode: str, options: dict[str, Any]) -> None:
    kind = Shared if mode == "shared" else Dedicated
    app.sessions(pool, **options)(type(kind.__name__, (kind,), {"launch": launch, "__module__": kind.__module__}))


def _memory(browser: str, mode: str, slots: int) -> float:
    """What a worker with all its slots in use needs, about, while each session has one small page."""
    idle, session = _IDLE.get(browser, _IDLE_ELSE), _SESSION.get(browser, _SESSION_ELSE)
    if mode == "shared":
        return _WORKER + _DRIVER + idle + slots * session
    return _WORKER + (0 if mode == "cdp" else _DRIVER) + (slots + 1) * (idle + session)
