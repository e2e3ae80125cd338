"""The browsers of a worker: isolation, ends that say why, hangs, live views, another user, nothing left behind. No node here."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import av
import pytest
from playwright.async_api import Browser, Error, Page, Playwright, async_playwright

from ostler import ConfigError
from ostler.app import Ostler
from ostler.apps.browsers import declared, grid, installed, view
from ostler.apps.browsers.driver import BrowserFailed
from ostler.apps.browsers.given import Given
from ostler.apps.browsers.place import Place
from ostler.apps.browsers.pools import browsers
from ostler.lifecycle import family
from tests import users
from tests.apps.browser_stand import Stand, adapted, reachable, running, serving, until, url  # noqa: F401  a fixture

place = users.place

pytestmark = pytest.mark.skipif(installed.find("chromium") is None, reason="no Chromium on this machine")
_RED, _BLUE = "data:text/html,<body style='background:red'>", "data:text/html,<body style='background:blue'>"


def test_sessions_of_a_shared_browser_do_not_see_each_other_and_each_live_view_is_the_sessions_own() -> None:
    async def story(playwright: Playwright) -> None:
        async with serving("shared") as stand:
            assert (stand.endpoint.versions, stand.endpoint.product) == ([_version()], "Playwright")
            one, two = [await _client(playwright, stand, name) for name in ("one", "two")]
            red, blue = await one.new_page(), await two.new_page()
            await red.goto(_RED)
            await blue.goto(_BLUE)
            assert [len(one.contexts), len(two.contexts)] == [1, 1]
            # A page is painted after it has loaded. (The test has a time limit.)
            while [await _seen(stand, name) for name in ("one", "two")] != ["red", "blue"]:
                await asyncio.sleep(0.2)
            later = await one.new_page()  # the newest page is the one that is shown
            await later.goto(_BLUE)
            while await _seen(stand, "one") != "blue":
                await asyncio.sleep(0.2)
            await stand.code.probe()

    _run(story)


def test_the_live_view_shows_the_newest_page_in_whatever_order_the_browser_lists_them() -> None:
    class Listing:
        def __init__(self) -> None:
            self.ears: dict[str, Any] = {}
            self.pages = dict.fromkeys(("first", "second", "third"))
            self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def send(self, method: str, **params: Any) -> Any:
            if method == "Target.getTargets":
                listed = [("second", "own"), ("first", "own"), ("third", "other")]
                return {"targetInfos": [{"targetId": t, "type": "page", "browserContextId": c} for t, c in listed]}
            return {"sessionId": params.get("targetId")}

    async def main() -> None:
        cast = await view._newest(Listing(), {"own"}, None)
        assert cast is not None
        assert cast.target == "second"

    asyncio.run(main())


def test_a_shared_browser_that_dies_tells_its_clients_and_the_worker_says_that_it_is_lost() -> None:
    async def story(playwright: Playwright) -> None:
        async with serving("shared") as stand:
            page = await (await _client(playwright, stand, "one")).new_page()
            waiting = asyncio.create_task(_fails(page))
            os.kill(stand.code._browser.pid, signal.SIGKILL)
            assert "ostler: the browser died" in await waiting
            await stand.heard("lost", "the browser died (SIGKILL)")

    _run(story)


def test_a_driver_that_dies_takes_its_browser_along_and_the_worker_says_so() -> None:
    async def story(_: Playwright) -> None:
        async with serving("shared") as stand:
            os.kill(stand.code._driver._process.pid, signal.SIGKILL)
            await stand.heard("lost", "the browser's driver died (SIGKILL)")
            with pytest.raises(BrowserFailed):
                await stand.code.probe()
            await until(lambda: not running(stand.scratch), "the browser to end")

    _run(story)


def test_the_probe_asks_the_browser_itself_and_hangs_with_it() -> None:
    async def story(_: Playwright) -> None:
        async with serving("shared") as stand:
            await stand.code.probe()
            os.kill(stand.code._browser.pid, signal.SIGSTOP)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await stand.code.probe()

    _run(story)


@pytest.mark.parametrize("mode", ["dedicated", "sticky", "cdp"])
def test_a_browser_of_its_own_dies_or_hangs_alone_and_its_session_hears_why(mode: str) -> None:
    async def story(playwright: Playwright) -> None:
        async with serving(mode) as stand:
            spare = stand.code._spares[0]
            pages = {
                name: await (await _client(playwright, stand, name)).new_page() for name in ("one", "two", "three")
            }
            assert stand.code._held["one"] is spare  # it was ready before anybody asked
            failing = {name: asyncio.create_task(_fails(pages[name])) for name in ("one", "two")}
            os.kill(stand.code._held["one"].pid, signal.SIGKILL)
            await stand.heard("ended", "one", "the browser died (SIGKILL)")
            os.kill(stand.code._held["two"].pid, signal.SIGSTOP)
            await stand.heard("ended", "two", "the browser hangs: it did not answer for 1.4 s")
            said = [await failing[name] for name in ("one", "two")]
            if mode != "cdp":  # there the relay says it
                assert ["ostler: the browser died" in said[0], "ostler: the browser hangs" in said[1]] == [True, True]
            assert await pages["three"].evaluate("1 + 1") == 2
            assert [frame for frame in stand.said if frame[:2] == ("ended", "three")] == []
            await pages["three"].goto(_RED)
            assert await _seen(stand, "three") == "red"
            for name in pages:
                await stand.code.close(stand.session(name))
            assert stand.code._held == {}
            each = 1 if mode == "cdp" else 3
            await until(
                lambda: (stand.folders, len(stand.code._spares)) == (each, 1), "what is left to be the next one's"
            )

    _run(story)


def test_a_client_of_a_sticky_session_comes_back_to_its_page_and_of_a_dedicated_one_to_a_clean_browser() -> None:
    async def story(playwright: Playwright) -> None:
        for mode, found in (("sticky", [_RED]), ("dedicated", [])):
            async with serving(mode) as stand:
                endpoint = await stand.code.open(stand.session("one"))
                for again in (False, True):
                    client = await playwright.chromium.connect(url(endpoint))
                    if again:
                        assert [page.url for context in client.contexts for page in context.pages] == found
                    else:
                        await (await client.new_page()).goto(_RED)
                    await client.close()

    _run(story)


def test_a_client_that_leaves_while_its_browser_starts_leaves_it_to_the_next_one() -> None:
    async def story(_: Playwright) -> None:
        async with serving("dedicated", slots=2) as stand:
            await stand.code.open(stand.session("one"))
            leaving = asyncio.create_task(stand.code.open(stand.session("two")))
            await asyncio.sleep(0)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            await stand.code.open(stand.session("three"))
            assert stand.code._held.keys() == {"one", "three"}
            assert next(stand.code._numbers) == 2  # no third browser was started

    _run(story)


def test_a_browser_that_hangs_while_it_starts_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "_LATE", 0.3)

    async def story(_: Playwright) -> None:
        async with serving("dedicated", slots=4) as stand:
            code, go_on = stand.code, asyncio.Event()
            start = code._start

            async def hang(name: str) -> Any:
                await go_on.wait()
                return await start(name)

            monkeypatch.setattr(code, "_start", hang)
            await code.open(stand.session("one"))  # it has the spare, and the next one hangs
            await asyncio.sleep(0)
            monkeypatch.setattr(code, "_start", start)
            await code.open(stand.session("two"))
            assert code._late  # on a slow machine others, too
            await code.open(stand.session("three"))
            assert code._held.keys() == {"one", "two", "three"}
            go_on.set()
            await until(lambda: not code._late and code._spares, "the late one to be of use")

    _run(story)


@users.as_root
def test_where_the_node_is_root_browser_and_driver_are_another_users_with_the_sandbox_and_without_the_nodes_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(playwright: Playwright) -> None:
        monkeypatch.setenv("OSTLER_TOKEN", "secret")  # now: the test's own client is not one of the family
        monkeypatch.setenv("OSTLER_FAMILY", "token/worker:test:0/1")
        if not reachable():
            pytest.skip("no other user can get to the project")
        async with serving("shared") as stand:
            await (await _client(playwright, stand, "one")).new_page()
            found = family.members("token/worker:test:0/1", [])
            assert {_uid(pid) for pid in found} == {users.NOBODY}
            lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in found}
            assert not any(b"--no-sandbox" in line for line in lines.values())
            renderer = next(pid for pid, line in lines.items() if b"--type=renderer" in line)
            assert os.readlink(f"/proc/{renderer}/ns/user") != os.readlink("/proc/self/ns/user")
            assert all(b"secret" not in Path(f"/proc/{pid}/environ").read_bytes() for pid in found)

    _run(story)


_AS_ONESELF = """
import asyncio, os
from pathlib import Path
from tests.apps.browser_stand import serving

async def story():
    async with serving("shared") as stand:
        await stand.code.probe()
        line = Path(f"/proc/{stand.code._browser.pid}/cmdline").read_bytes()
        print(os.stat(f"/proc/{stand.code._browser.pid}").st_uid, b"--no-sandbox" in line)

asyncio.run(story())
"""


@users.as_root
def test_where_the_node_is_not_root_browsers_are_its_own_users_with_the_sandbox(place: Path) -> None:
    if not reachable():
        pytest.skip("no other user can get to the project")
    place.chmod(0o777)
    done = users.run(users.STRANGER, "-c", _AS_ONESELF, env={"TMPDIR": str(place)})
    assert done.stdout.split() == [str(users.STRANGER), "False"], done.stderr


def test_a_browser_whose_sandbox_does_not_work_is_explained_and_never_started_without_it(place: Path) -> None:
    if os.geteuid() == 0 and not reachable():
        pytest.skip("no other user can get to the project")
    fake = place / "chromium"
    fake.write_text('#!/bin/sh\necho "$@" >> /dev/stderr\necho "No usable sandbox! Update your kernel" >&2\nexit 1\n')
    fake.chmod(0o755)

    async def story(_: Playwright) -> None:
        for mode in ("shared", "cdp"):
            with pytest.raises(BrowserFailed, match="OSTLER_BROWSERS_SANDBOX=off") as raised:
                async with serving(mode, executable=fake):
                    pass
            assert "--no-sandbox" not in str(raised.value)

    _run(story)


def test_a_user_who_cannot_get_to_the_browser_is_named_with_what_to_do(tmp_path: Path) -> None:
    if os.geteuid() != 0 or not reachable():
        pytest.skip("needs root, and a project that others can get to")
    hidden = tmp_path / "hidden"
    hidden.mkdir(0o700)
    (hidden / "chromium").write_text("#!/bin/sh\n")

    async def story(_: Playwright) -> None:
        with pytest.raises(ConfigError, match="OSTLER_BROWSERS_USER"):
            async with serving("cdp", executable=hidden / "chromium"):
                pass

    _run(story)


def test_the_apps_pools_are_those_that_this_machine_can_have() -> None:
    found = declared(Given()).session_pools
    assert found["chromium"].options.versions == (_version(),)
    assert ("firefox" in found) == (installed.find("firefox") is not None)
    chosen = declared(Given(pools=("chromium-sticky",))).session_pools
    assert [*chosen] == ["chromium-sticky"]
    assert chosen["chromium-sticky"].options.sticky == 60
    with pytest.raises(ConfigError, match="known: chromium"):
        declared(Given(pools=("chrome",)))


def test_further_drivers_are_pools_of_their_own_behind_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "package.json").write_text('{"version": "1.58.2"}')
    app = Ostler()
    browsers(app, "grid", drivers={"1.58": tmp_path})
    found = {name: (spec.serves, spec.options.versions) for name, spec in app.session_pools.items()}
    assert found == {"grid": ("grid", (_version(),)), "grid-1.58": ("grid", ("1.58",))}
    with pytest.raises(ConfigError, match=r"is for clients of 1\.58, not of 1\.50"):
        browsers(Ostler(), "grid", drivers={"1.50": tmp_path})


def test_browsers_that_playwright_has_installed_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = json.loads((installed.driver().package / "browsers.json").read_text())["browsers"]
    revisions = {one["name"]: one["revision"] for one in listed}
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    assert installed.find("firefox") is None
    with pytest.raises(ConfigError, match="playwright install firefox"):
        installed.get("firefox")
    for folder, program in (
        (f"firefox-{revisions['firefox']}", "firefox/firefox"),
        (f"chromium-{revisions['chromium']}", "chrome-linux/chrome"),
    ):
        (tmp_path / folder / program).parent.mkdir(parents=True)
        (tmp_path / folder / program).touch(0o755)
        (tmp_path / folder / "INSTALLATION_COMPLETE").touch()
    assert installed.find("firefox") == installed.Browser("firefox", None, str(tmp_path))
    monkeypatch.setattr(installed, "_FULL", ())
    assert installed.get("chromium-full").path == str(
        tmp_path / f"chromium-{revisions['chromium']}" / "chrome-linux/chrome"
    )
    assert declared(Given()).session_pools.keys() >= {"chromium", "chromium-full", "firefox"}


@users.as_root
def test_the_user_of_browsers_is_a_name_a_number_or_one_of_a_range_for_each_worker(tmp_path: Path) -> None:
    def user(given: str, worker: str = "worker:chromium:0") -> int | None:
        (tmp_path / f"{given}{worker}").mkdir()
        return Place.make(tmp_path / f"{given}{worker}", worker, given).uid

    assert [user("nobody"), user("4321"), user("root")] == [users.NOBODY, 4321, None]
    several = {user("200000-200999", f"worker:chromium:{n}") for n in range(5)}
    assert len(several) == 5
    assert all(200_000 <= uid <= 200_999 for uid in several if uid is not None)
    with pytest.raises(ConfigError, match="no such user"):
        user("no-such-user")


@users.as_root
def test_root_has_browsers_without_a_sandbox_only_if_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(_: Playwright) -> None:
        monkeypatch.setenv("OSTLER_BROWSERS_USER", "root")
        monkeypatch.setenv("OSTLER_BROWSERS_SANDBOX", "on")
        with pytest.raises(ConfigError, match="does not work for root"):
            async with serving("cdp"):
                pass
        monkeypatch.setenv("OSTLER_BROWSERS_SANDBOX", "off")
        async with serving("cdp") as stand:
            assert b"--no-sandbox" in Path(f"/proc/{stand.code._spares[0].pid}/cmdline").read_bytes()

    _run(story)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"OSTLER_BROWSERS_SANDBOKS": "off"}, "did you mean OSTLER_BROWSERS_SANDBOX"),
        ({"OSTLER_BROWSERS_SANDBOX": "maybe"}, "must be on or off"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_what_is_known(variables: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Given.from_environment(variables)


def _run(story: Any) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60), async_playwright() as playwright:
            await story(playwright)

    asyncio.run(whole())


def _uid(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Uid:")).split()[1])


def _version() -> str:
    return installed.driver().serves


async def _client(playwright: Playwright, stand: Stand, name: str) -> Browser:
    """A session's client, as the relay would connect it."""
    opens = getattr(stand.code, "open", None)
    endpoint = await opens(stand.session(name)) if opens else stand.endpoint
    if endpoint.address.startswith("tcp:"):
        return await playwright.chromium.connect_over_cdp(url(endpoint))
    return await playwright.chromium.connect(url(endpoint), headers={"x-ostler-session": name})


async def _fails(page: Page) -> str:
    """What a client is told that waits for its page."""
    with pytest.raises(Error) as raised:
        await page.evaluate("new Promise(() => {})")
    return str(raised.value)


async def _seen(stand: Stand, session: str) -> str:
    """The colour that the live view of a session shows."""
    frames = stand.code.view(stand.session(session))
    try:
        picture = await anext(frames)
    finally:
        await frames.aclose()
    with av.open(io.BytesIO(picture), format="mjpeg") as found:
        red, _, blue = bytes(next(found.decode(video=0)).reformat(1, 1, "rgb24").planes[0])[:3]
    return "red" if red > 200 and blue < 50 else "blue" if blue > 200 and red < 50 else "other"
