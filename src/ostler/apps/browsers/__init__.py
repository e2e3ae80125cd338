"""The browser grid (seed 004), as a user of Ostler writes it:  ostler up ostler.apps.browsers

Clients of Playwright connect to ws://NODE/sessions/chromium and have a browser that is already warm; what speaks CDP connects to
http://NODE/sessions/chromium-cdp. pools.py declares such pools in an app of your own, with other modes, sizes and limits.
"""

from __future__ import annotations

from ostler import ConfigError, Ostler
from ostler.apps.browsers import installed
from ostler.apps.browsers.given import PREFIX, Given
from ostler.apps.browsers.pools import browsers

# name of the pool: browser, mode
POOLS = {
    "chromium": ("chromium", "shared"),
    "chromium-cdp": ("chromium", "cdp"),
    "chromium-full": ("chromium-full", "shared"),
    "firefox": ("firefox", "shared"),
    "webkit": ("webkit", "shared"),
    # not unless they are asked for
    "chromium-dedicated": ("chromium", "dedicated"),
    "chromium-sticky": ("chromium", "sticky"),
}
_ALWAYS = ("chromium",)
_IF_FOUND = ("chromium-cdp", "chromium-full", "firefox", "webkit")


def declared(given: Given) -> Ostler:
    """The app; raises ConfigError where what is asked for cannot be had."""
    app = Ostler()
    if unknown := set(given.pools) - POOLS.keys():
        raise ConfigError(f"{PREFIX}POOLS names {min(unknown)!r}; known: {', '.join(POOLS)}")
    further = {other.serves: other.folder for other in map(installed.driver, given.drivers)}
    for name in given.pools or (*_ALWAYS, *_IF_FOUND):
        browser, mode = POOLS[name]
        found = installed.find(browser)
        if not given.pools and name in _IF_FOUND and (found is None or (mode == "cdp" and not found.path)):
            continue
        browsers(app, name, browser=browser, mode=mode, drivers=None if mode == "cdp" else further)
    return app


def __getattr__(name: str) -> Ostler:
    """`app`, when a node or a worker asks for it: who imports pools.py alone needs none of these browsers."""
    if name != "app":
        raise AttributeError(name)
    return globals().setdefault("app", declared(Given.from_environment()))  # type: ignore[no-any-return]
