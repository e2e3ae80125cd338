"""The Sessions page in a real browser: a real node with made-up pools (five workers, forty sessions, a line of twelve)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from ostler.store import now_ms
from tests.harness import Node, gone, until
from tests.sessions.test_sessions import closed, say, session, started
from tests.web.session_pools import ODD
from tests.web.test_dashboard import browser, confirm, not_reloaded, opened, page  # noqa: F401  fixtures
from tests.web.test_sessions import row

expect.set_options(timeout=60_000)
PROGRAM = Path(__file__).with_name("session_pools.py")


class Made(Node):
    """A node with made-up session pools."""

    def command(self) -> list[str]:
        return [
            sys.executable,
            str(PROGRAM),
            "up",
            str(self.app),
            "--data",
            str(self.folder),
            "--port",
            "0",
            "--pool",
            "work=1",
        ]

    def act(self, verb: str) -> None:
        """Have its pools do something."""
        (self.folder / "act.new").write_text(verb)
        (self.folder / "act.new").rename(self.folder / "act")
        until(lambda: not (self.folder / "act").exists(), f"{verb} to be done")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("sessions") / "data"
    root = Path(__file__).resolve().parents[2]
    made = Made(folder, PYTHONPATH=f"{root}{':' + p if (p := Made(folder).env.get('PYTHONPATH')) else ''}").start()
    with made.open_store() as store:
        at = now_ms() - 60_000
        gone = [
            ("client", None, 1000),
            ("worker-hung", f"ostler: it hangs {ODD}", 1011),
            ("killed", "ostler: ended by user:0", 1008),
        ]
        store.sessions.add(
            [
                row(
                    f"old-{n}",
                    at - 1000 * n,
                    at - 500 * n,
                    reason=gone[n % 3][0],
                    text=gone[n % 3][1],
                    code=gone[n % 3][2],
                    owner=f"token:{n % 3}",
                )
                for n in range(40)
            ]
        )
    drawn = browser.new_page(viewport={"width": 320, "height": 200})
    drawn.set_content("<body style='background:#c33'>")
    (folder / "only.jpg").write_bytes(drawn.screenshot(type="jpeg"))
    drawn.close()
    yield made
    made.kill()


def region(page: Page, name: str):
    return page.get_by_role("region", name=name, exact=True)


def live_row(page: Page, session: str):
    return page.locator(f"[id='session-{session}']")


def some(node: Made, which: int = 10) -> str:
    """A session that nothing else in these tests is about."""
    return str(node.get("/api/v1/sessions?state=live&limit=100&pool=chromium")[1]["sessions"][which]["id"])


def test_pools_show_each_slot_each_worker_and_who_waits(node: Made, page: Page) -> None:
    opened(page, node, "#/sessions")
    pool = region(page, "Pool chromium")
    expect(pool.get_by_role("img", name=re.compile(r"chromium: \d+ of 32 slots in use"))).to_be_visible()
    first = pool.locator("tr", has_text="worker:chromium:2")
    expect(first.locator(".slot")).to_have_count(8)
    expect(first.locator(".s-used")).to_have_count(8)
    expect(first).to_contain_text("17 of 50")
    expect(first).to_contain_text("1.2 ms")
    expect(first).to_contain_text("292 MB")
    leaving = pool.locator("tr", has_text="worker:chromium:4")
    expect(leaving.locator(".pill")).to_have_text("draining")
    expect(leaving.locator(".s-leaving")).to_have_count(3)
    expect(leaving.locator(".s-closed")).to_have_count(5)
    expect(leaving.get_by_role("button", name="Drain worker:chromium:4")).to_be_disabled()
    expect(pool.locator(".line li")).to_have_count(12)
    expect(pool.locator(".line li").first).to_contain_text("priority 10")
    expect(region(page, "Pool terminal").locator(".slot.s-free")).to_have_count(5)
    page.goto(f"{node.url}/#/")
    expect(page.locator("a.figure", has_text="Sessions").locator(".muted")).to_have_text("12 waiting")
    expect(region(page, "Health")).to_contain_text("clients have waited more than 10 s for sessions chromium")


def test_a_session_is_ended_by_clicking_and_its_slot_is_free(node: Made, page: Page) -> None:
    session = some(node)
    opened(page, node, "#/sessions")
    region(page, "Live sessions").get_by_role("button", name="Show all").click()
    where = live_row(page, session)
    expect(where.locator(".pill")).to_have_text("live")
    before = node.get("/api/v1/capacity")[1]["pools"][0]["in_use"]
    where.get_by_role("button", name=f"End session {session}").click()
    page.keyboard.press("Escape")  # means no
    assert node.get(f"/api/v1/sessions/{session}")[0] == 200
    where.get_by_role("button", name=f"End session {session}").click()
    confirm(page, "End the session")
    expect(where).to_have_count(0)
    until(lambda: node.get("/api/v1/capacity")[1]["pools"][0]["in_use"] == before - 1, "the slot to be free")
    page.goto(f"{node.url}/#/")
    expect(region(page, "Incidents").get_by_role("link", name=f"session {session}")).to_be_visible()
    not_reloaded(page)


def test_what_happens_elsewhere_shows_by_itself(node: Made, page: Page) -> None:
    opened(page, node, "#/sessions")
    used = region(page, "Pool chromium").locator(".g-used strong")
    expect(used).to_have_text(re.compile(r"\d+"))
    before = int(used.inner_text())
    node.act("end_one")
    expect(used).to_have_text(str(before - 1))
    node.act("pause")
    expect(region(page, "Pool chromium").locator("h2 .pill")).to_have_text("paused")
    expect(region(page, "Pool chromium").get_by_role("button", name="Resume chromium")).to_be_visible()
    node.act("pause")
    expect(region(page, "Pool chromium").locator("h2 .pill")).to_be_hidden()
    not_reloaded(page)


def test_what_clients_say_is_shown_as_text(node: Made, page: Page) -> None:
    opened(page, node, "#/sessions")
    region(page, "Live sessions").get_by_role("button", name="Show all").click()
    odd = region(page, "Live sessions").locator("tr", has_text=ODD)
    expect(odd).to_have_count(1)
    expect(region(page, "Ended sessions").locator("tr", has_text=ODD).first).to_be_visible()
    odd.locator("th a").click()
    expect(region(page, "Session")).to_contain_text(ODD)
    assert page.evaluate("window.hacked") is None


def test_ended_sessions_have_a_reason_a_page_and_older_ones(node: Made, page: Page) -> None:
    opened(page, node, "#/sessions")
    ended = region(page, "Ended sessions")
    expect(ended.locator("tbody tr")).to_have_count(25)
    expect(ended.locator("tr", has_text="old-1").first.locator(".pill")).to_have_text("worker-hung")
    ended.get_by_role("button", name="Show older").click()
    expect(ended.locator("tbody tr")).to_have_count(40)
    expect(ended.get_by_role("button", name="Show older")).to_be_hidden()
    page.goto(f"{node.url}/#/sessions?owner=token:1")
    expect(ended.locator("tbody tr")).to_have_count(13)
    expect(region(page, "Live sessions")).to_contain_text("No live sessions match.")
    ended.locator("a", has_text="old-1").first.click()
    expect(region(page, "Session")).to_contain_text("it hangs")
    expect(region(page, "Session")).to_contain_text("1011")
    expect(region(page, "Live view")).to_be_hidden()
    page.goto(f"{node.url}/#/sessions/none")
    expect(page.get_by_role("alert").filter(has_text="there is no session 'none'")).to_be_visible()


def test_a_session_is_watched_also_one_that_shows_a_single_picture(node: Made, page: Page) -> None:
    session = some(node, 12)
    opened(page, node, "#/sessions")
    region(page, "Live sessions").get_by_role("button", name="Show all").click()
    live_row(page, session).get_by_role("link", name=f"Watch session {session}").click()
    picture = region(page, "Live view").locator("img")
    expect(picture).to_be_visible()
    assert picture.evaluate("el => el.naturalWidth") == 320
    region(page, "Session").get_by_role("button", name="End").click()
    confirm(page, "End the session")
    # Made-up pools write no row, so that it is gone for the page.
    expect(page.get_by_role("alert").filter(has_text="there is no session")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_pages_fit_a_phone_and_everything_has_a_name(node: Made, browser: Browser, scheme: str) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    page = context.new_page()
    for where in ("#/sessions", f"#/sessions/{some(node, 15)}", "#/sessions/old-1"):
        opened(page, node, where)
        expect(page.locator("main section").first).to_be_attached()
        expect(page.locator("main .pill:visible").first).to_be_visible()
        wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1], where
        nameless = page.evaluate(
            """() => [...document.querySelectorAll('button, a, input, select, img, div[role=img]')]
                 .filter(el => el.checkVisibility() && !(el.textContent.trim() || el.ariaLabel || el.alt !== undefined || el.labels?.length || el.title))
                 .map(el => el.outerHTML)"""
        )
        assert nameless == [], where
    context.close()


def test_a_worker_is_drained_and_another_killed_by_clicking_and_its_client_is_told(tmp_path: Path, page: Page) -> None:
    node = started(tmp_path / "data")
    try:
        opened(page, node, "#/sessions")
        region(page, "Pool program").get_by_role("button", name="Drain worker:program:0").click()
        confirm(page, "Drain")
        node.wait_status("worker:program:0", "stopped")
        with session(node, "each") as client:
            pid = int(say(client, "pid"))
            region(page, "Pool each").get_by_role("button", name="Kill worker:each:0").click()
            confirm(page, "Kill")
            assert closed(client)[0] == 1011
        until(lambda: gone(pid), "it to be gone")
        node.wait_status("worker:each:0", "healthy")
    finally:
        node.stop()
