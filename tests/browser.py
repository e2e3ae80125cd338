"""A real headless Chromium for the tests. Module-scoped where it is used: Playwright's loop must not outlive its tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

PATIENCE = 60_000  # ms


def binary() -> str | None:
    """The browser to use; None for Playwright's own. `make test` has seen to it that there is one."""
    known = (
        os.environ.get("OSTLER_BROWSER"),
        "/usr/lib/chromium/chromium-headless-shell",
        shutil.which("chromium"),
        shutil.which("google-chrome"),
    )
    return next((path for path in known if path and Path(path).exists()), None)


@contextmanager
def launched() -> Iterator[Browser]:
    # The sandbox cannot be had as root, and nothing but our own pages is opened.
    flags = [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary(), args=flags)
        try:
            yield browser
        finally:
            browser.close()
