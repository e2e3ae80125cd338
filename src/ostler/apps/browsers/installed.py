"""Which browsers and Playwright drivers this machine has. Nothing is started to find out."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from ostler import ConfigError, extras

BROWSER = "OSTLER_BROWSER"
KINDS = {"chromium": "chromium", "chromium-full": "chromium", "firefox": "firefox", "webkit": "webkit"}
_INSTALL = {
    "chromium": "install the package chromium-headless-shell or chromium, run `python -m playwright install chromium-headless-shell`, or name one with OSTLER_BROWSER",
    "chromium-full": "install the package chromium, or run `python -m playwright install chromium`",
    "firefox": "run `python -m playwright install firefox`",
    "webkit": "run `python -m playwright install webkit`",
}
_SHELL = "/usr/lib/chromium/chromium-headless-shell"
_PROGRAMS = ("chrome-headless-shell", "headless_shell", "chrome")
# Not the commands of these packages: those are shell scripts, which add flags of their own.
_FULL = ("/usr/lib/chromium/chromium", "/usr/lib64/chromium-browser/chromium-browser", "/opt/google/chrome/chrome")


@dataclass(frozen=True, slots=True)
class Driver:
    """A Playwright driver: its own Node, and the package that Node runs."""

    folder: Path
    version: str

    @property
    def node(self) -> Path:
        return self.folder / "node"

    @property
    def package(self) -> Path:
        return self.folder / "package"

    @property
    def serves(self) -> str:
        """The version of clients that it understands: 1.65.1 is for all of 1.65."""
        return ".".join(self.version.split(".")[:2])


@dataclass(frozen=True, slots=True)
class Browser:
    """A browser's program. Without a path it is one that Playwright has installed, in `store`, and finds by itself."""

    name: str
    path: str | None = None
    store: str | None = None

    @property
    def kind(self) -> str:
        """What Playwright calls it."""
        return KINDS[self.name]


def driver(folder: str | Path | None = None) -> Driver:
    """The driver of the installed Playwright, or the one in that directory; raises ConfigError."""
    if folder is None:
        found = importlib.util.find_spec("playwright")
        if found is None or not found.submodule_search_locations:
            raise ConfigError(
                f"browser pools need Playwright, which is not installed here: {extras.command('browsers')}"
            )
        folder = Path(found.submodule_search_locations[0]) / "driver"
    folder = Path(folder)
    try:
        version = json.loads((folder / "package" / "package.json").read_text(encoding="utf-8"))["version"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{folder} is no Playwright driver: a directory with node and package/package.json is needed, as in "
            f"site-packages/playwright/driver of an environment that has Playwright ({type(error).__name__}: {error})"
        ) from None
    return Driver(folder.absolute(), version)


def find(name: str) -> Browser | None:
    """The browser of that name (a key of KINDS), if there is one."""
    match name:
        case "chromium":
            if given := os.environ.get(BROWSER):
                if not os.access(given, os.X_OK):
                    raise ConfigError(f"{BROWSER} is {given}, which is no program that can be run")
                return Browser(name, given)
            return _first(name, _SHELL) or _of_playwright(name, "chromium-headless-shell") or _full(name)
        case "chromium-full":
            return _full(name)
        case _:
            return _of_playwright(name, name)


def get(name: str) -> Browser:
    """The same, where it must be there; raises ConfigError."""
    if name not in KINDS:
        raise ConfigError(f"{name!r} is no browser of the grid; known: {', '.join(KINDS)}")
    if (found := find(name)) is None:
        raise ConfigError(f"there is no {name} on this machine: {_INSTALL[name]}")
    return found


def _first(name: str, *paths: str | None) -> Browser | None:
    return next((Browser(name, path) for path in paths if path and os.access(path, os.X_OK)), None)


def _full(name: str) -> Browser | None:
    own = _first(name, *_FULL) or _of_playwright(name, "chromium")
    return own or _first(name, *map(shutil.which, ("google-chrome", "chromium", "chromium-browser")))


def _of_playwright(name: str, package: str) -> Browser | None:
    """One of `playwright install`: a directory named by package and revision, marked as complete."""
    store = os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright"
    try:
        listed = json.loads((driver().package / "browsers.json").read_text(encoding="utf-8"))["browsers"]
        revision = next(one["revision"] for one in listed if one["name"] == package)
    except (ConfigError, OSError, ValueError, LookupError, StopIteration):
        return None
    folder = Path(store) / f"{package.replace('-', '_')}-{revision}"
    if not (folder / "INSTALLATION_COMPLETE").exists():
        return None
    if KINDS[name] != "chromium":
        return Browser(name, None, str(store))
    # By its path, any driver can start it, and CDP needs none.
    return _first(name, *(str(path) for program in _PROGRAMS for path in folder.glob(f"*/{program}")))
