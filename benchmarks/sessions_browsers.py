"""The parts of benchmarks/sessions.py that use Playwright and a browser."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

from calls import free_port, line, ms, over, p50, p99, running, shown, turns
from sessions_node import HERE, Node, family_cpu, rss_mb, tenth

FULL = "/usr/lib/chromium/chromium"
PAGE = "data:text/html,<title>small</title><h1>a small page</h1>"


def chromium(**options: object) -> dict:
    return {"kind": "chromium", "workers": 1, "slots": 20, "lifetime": 0, **options}


def own(node: Node, pool: str) -> str:
    """The worker's own socket, for Playwright."""
    return f"ws+unix://{node.path(pool)}:/"


def direct(node: Node, pool: str) -> str:
    """The same browser on TCP, without the node (sessions_serve.js): as clients reach Playwright's own server."""
    return f"ws://127.0.0.1:{Path(node.path(pool) + '.port').read_text()}/"


def roundtrip(quick: bool) -> None:
    from playwright.sync_api import sync_playwright

    pools = {"chromium": chromium(), "door": chromium(redirect=True)}
    count, rounds = (25, 24) if quick else (25, 120)
    raw: dict[str, list[float]] = {}
    with Node(pools) as node, contextlib.ExitStack() as stack, sync_playwright() as playwright:
        urls = {"direct": direct(node, "chromium"), "relay": node.ws("chromium")}
        urls["its own socket"] = own(node, "chromium")
        for name, program in (("copies bytes", "calls_relay.py"), ("websockets", "sessions_relay.py")):
            port = free_port()
            stack.enter_context(running([str(HERE / program), node.path("chromium"), str(port)], port))
            urls[name] = f"ws://127.0.0.1:{port}/"
        urls["redirect"] = node.ws("door")

        def side(name: str, url: str):
            page = playwright.chromium.connect(url).new_page()
            page.goto(PAGE)
            [page.evaluate("1") for _ in range(100)]

            def measure() -> float:
                found = []
                for _ in range(count):
                    start = time.perf_counter()
                    page.evaluate("1")
                    found.append(time.perf_counter() - start)
                raw.setdefault(name, []).extend(found)
                return p50(found)

            return measure

        sides = {name: side(name, url) for name, url in urls.items()}
        # In two groups: with many sides each is used so seldom that all of them are slower, and those with more processes most.
        found = turns({name: sides[name] for name in ("direct", "relay", "its own socket", "copies bytes")}, rounds)
        of = ", ".join(f"{name} {ms(p50(v))} (best {ms(min(v))})" for name, v in found.items())
        of = f"{tenth(raw, 'relay', 'direct')}; {of}"
        line("page.evaluate through the relay, over direct", shown(over(found, "relay", "direct")), "<= 1.10", of)
        line("  through the relay, over its own socket", shown(over(found, "relay", "its own socket")), "")
        found |= turns({name: sides[name] for name in ("websockets", "redirect")}, rounds)
        for name in ("its own socket", "copies bytes", "websockets", "redirect"):
            line(f"  {name}, over direct", shown(over(found, name, "direct")), "", tenth(raw, name, "direct"))


def connect(node: Node, name: str, quick: bool) -> None:
    """One after another as fast as they come, so that each begins while the last one is still being cleared away; and with a pause."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        urls = {
            "direct": direct(node, "chromium"),
            "node": node.ws("chromium"),
            "its own socket": own(node, "chromium"),
        }
        for pause, how in ((0.03, "with a pause of 30 ms"), (0.0, "without a pause")):
            raw: dict[str, list[float]] = {}

            def side(which: str, url: str, pause: float = pause, raw: dict[str, list[float]] = raw) -> float:
                found = []
                for _ in range(5):
                    start = time.perf_counter()
                    browser = playwright.chromium.connect(url)
                    found.append(time.perf_counter() - start)
                    browser.close()
                    time.sleep(pause)
                raw.setdefault(which, []).extend(found)
                return p50(found)

            [side(which, url) for which, url in urls.items()]
            raw.clear()
            found = turns({which: lambda w=which, u=u: side(w, u) for which, u in urls.items()}, 24 if quick else 60)
            of = ", ".join(f"{which} {ms(p50(v))} (best {ms(min(v))})" for which, v in found.items())
            of = f"{tenth(raw, 'node', 'direct')}; {of}; over its own socket {shown(over(found, 'node', 'its own socket'))}"
            line(
                f"{name}: Playwright's connect through the node, over direct, {how}",
                shown(over(found, "node", "direct")),
                "<= 1.6",
                of,
            )


async def _session(browser) -> None:
    try:
        context = await browser.new_context()
        page = await context.new_page()
        await page.goto(PAGE)
        assert await page.title() == "small"
    finally:
        await browser.close()


def short(quick: bool) -> None:
    asyncio.run(_short(quick))


async def _short(quick: bool) -> None:
    from playwright.async_api import async_playwright

    from ostler.apps.browsers import installed

    program = installed.get("chromium").path
    with Node({"chromium": chromium()}) as node:
        async with async_playwright() as playwright:
            ways = {
                "direct": lambda: playwright.chromium.connect(direct(node, "chromium")),
                "grid": lambda: playwright.chromium.connect(node.ws("chromium")),
                "a browser each": lambda: playwright.chromium.launch(executable_path=program),
            }

            async def rate(begin, count: int) -> float:
                left = iter(range(count))

                async def client() -> None:
                    for _ in left:
                        await _session(await begin())

                start = time.perf_counter()
                await asyncio.gather(*(client() for _ in range(4)))
                return count / (time.perf_counter() - start)

            found, spent = {name: [] for name in ways}, {name: [] for name in ways}
            roots, each = (os.getpid(), node.process.pid), 16
            for name, begin in ways.items():
                await rate(begin, 4)
            for number in range(6 if quick else 16):
                for name in list(ways) if number % 2 else list(ways)[::-1]:
                    before = family_cpu(*roots)
                    found[name].append(await rate(ways[name], each))
                    await asyncio.sleep(0.2)  # what is ended is gone
                    spent[name].append((family_cpu(*roots) - before) / each)
    of = ", ".join(f"{name} {p50(v):.1f}/s" for name, v in found.items())
    line("short sessions a second, four at once, over direct", shown(over(found, "grid", "direct")), ">= 0.95", of)
    line("  over a browser for each session", shown(over(found, "grid", "a browser each")), ">= 2.5")
    of = ", ".join(f"{name} {ms(p50(v))}" for name, v in spent.items())
    line("  CPU of such a session, client and all, over direct", shown(over(spent, "grid", "direct")), "", of)
    line("  CPU of a browser each, over the grid", shown(over(spent, "a browser each", "grid")), "")


def memory(quick: bool) -> None:
    from playwright.sync_api import sync_playwright

    from ostler.lifecycle.family import pss_mb

    pools = {"shell": chromium()}
    if Path(FULL).exists():
        pools["full"] = chromium(browser="chromium-full", executable=FULL)
    else:
        print("a full Chromium is not installed (the package chromium), and --chromium names none: no memory beside it")
    each: dict[str, list[float]] = {}
    idle: dict[str, float] = {}
    with Node(pools) as node, sync_playwright() as playwright:
        for pool in pools:
            pid = node.pid(f"worker:{pool}:0")
            first = playwright.chromium.connect(node.ws(pool))
            first.new_page().goto(PAGE)
            time.sleep(2)
            idle[pool] = pss_mb(pid)
            each[pool] = []
            for _ in range(2 if quick else 3):
                before, opened = pss_mb(pid), []
                for _ in range(5):
                    opened.append(playwright.chromium.connect(node.ws(pool)))
                    opened[-1].new_page().goto(PAGE)
                time.sleep(2)
                each[pool].append((pss_mb(pid) - before) / 5)
                for browser in opened:
                    browser.close()
                time.sleep(2)
            first.close()
    of = ", ".join(
        f"{pool} {p50(v):.1f} MB ({min(v):.1f} to {max(v):.1f}), worker with one session {idle[pool]:.0f} MB"
        for pool, v in each.items()
    )
    ratio = f"{p50(each['shell']) / p50(each['full']):.2f}" if "full" in each else "-"
    line("memory of an open session: headless shell over full Chromium", ratio, "<= 0.40", of)


def broken(quick: bool) -> None:
    """A browser is killed, or hangs, while its client waits for an answer."""
    from playwright.sync_api import Error, sync_playwright

    for what, number, rounds, target in (
        ("SIGKILL of a browser", signal.SIGKILL, 3 if quick else 10, ""),
        ("SIGSTOP of a browser", signal.SIGSTOP, 2 if quick else 8, "<= 3 s"),
    ):
        found, texts = [], set()
        with Node({"chromium": chromium()}) as node, sync_playwright() as playwright:
            for _ in range(rounds):
                node.wait_for("chromium")
                page = playwright.chromium.connect(node.ws("chromium")).new_page()
                browser = main_browser(node.pid("worker:chromium:0"))
                start = time.perf_counter()
                os.kill(browser, number)
                try:
                    while True:
                        page.evaluate("1")
                except Error as error:
                    texts.add(str(error).splitlines()[0][:120])
                found.append(time.perf_counter() - start)
        line(
            f"{what} → error of its client",
            f"p50 {ms(p50(found))}, longest {ms(max(found))}",
            target,
            "; ".join(sorted(texts)),
        )


def main_browser(worker: int) -> int:
    """The browser's first process below a worker."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = []
    for pid in parents:
        up = pid
        while up in parents and up != worker:
            up = parents[up]
        with contextlib.suppress(OSError):
            argv = Path(f"/proc/{pid}/cmdline").read_bytes()
            if up == worker and b"chromium" in argv.split(b"\0")[0] and b"--type=" not in argv:
                found.append(pid)
    return min(found)


def held(quick: bool) -> None:
    asyncio.run(_held(*((20, 8) if quick else (150, 60))))


async def _held(count: int, seconds: int) -> None:
    from playwright.async_api import Error, async_playwright

    from ostler.lifecycle.family import pss_mb

    errors, took = [], []
    with Node({"chromium": chromium(workers=3, slots=(count + 2) // 3)}) as node:
        plane = node.plane
        before = rss_mb(plane)
        async with async_playwright() as playwright:
            pages = []
            for _ in range(count):
                browser = await playwright.chromium.connect(node.ws("chromium"))
                pages.append(await browser.new_page())
                await pages[-1].goto(PAGE)
            with_all = rss_mb(plane)
            until = time.monotonic() + seconds

            async def use(page, delay: float) -> None:
                await asyncio.sleep(delay)
                while (now := time.monotonic()) < until:
                    try:
                        start = time.perf_counter()
                        await page.evaluate("1")
                        took.append(time.perf_counter() - start)
                    except Error as error:
                        errors.append(str(error))
                        return
                    await asyncio.sleep(max(0.0, now + 1 - time.monotonic()))

            await asyncio.gather(*(use(page, n / count) for n, page in enumerate(pages)))
            browsers = sum(pss_mb(node.pid(f"worker:chromium:{n}")) for n in range(3))
            after = rss_mb(plane)
            for page in pages:
                await page.context.browser.close()
    of = (
        f"{len(took)} answers, p50 {ms(p50(took))}, p99 {ms(p99(took))}; plane {before:.1f} MB without, {with_all:.1f} with them, {after:.1f} at the end; "
        f"browsers {browsers:.0f} MB ({browsers / count:.1f} each)"
    )
    line(f"{count} sessions of Chromium, an evaluate each second for {seconds} s: errors", str(len(errors)), "0", of)
