"""The dashboard in a real browser, against a real node with real workers."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser import PATIENCE, launched
from tests.harness import Node, until

expect.set_options(timeout=PATIENCE)

PAGES = (
    "#/",
    "#/workers",
    "#/workers/worker:work:0",
    "#/jobs",
    "#/jobs?status=failed",
    "#/jobs/1",
    "#/schedules",
    "#/calls",
    "#/sessions",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as found:
        yield found


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that fails the test when a script fails, or when it asks any other host for anything."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(PATIENCE)
    shown = context.new_page()
    problems: list[str] = []
    shown.on("pageerror", lambda error: problems.append(str(error)))
    shown.on("console", lambda said: problems.append(said.text) if "Content Security" in said.text else None)
    shown.on(
        "request",
        lambda r: (
            problems.append(r.url)
            if not r.url.startswith(("http://127.0.0.1:", "data:", "blob:http://127.0.0.1:"))
            else None
        ),
    )
    yield shown
    context.close()
    assert problems == []


def opened(page: Page, node: Node, where: str = "#/") -> Page:
    page.goto(f"{node.url}/{where}")
    expect(page.locator("#connection")).to_have_text("live")
    page.evaluate("window.untouched = true")  # a reload would forget it
    return page


def not_reloaded(page: Page) -> None:
    assert page.evaluate("window.untouched") is True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def confirm(page: Page, verb: str) -> None:
    page.locator("dialog").get_by_role("button", name=verb, exact=True).click()


# ---- what is seen


def test_a_job_enqueued_elsewhere_appears_progresses_and_finishes(node: Node, page: Page, tmp_path: Path) -> None:
    opened(page, node, "#/jobs")
    job = node.enqueue("steps", folder=str(tmp_path))
    row = page.locator(f"#job-{job}")
    expect(row.locator(".pill")).to_have_text("processing")
    for pct in (10, 40, 75):
        (tmp_path / str(pct)).touch()
        expect(row.get_by_role("progressbar")).to_have_attribute("aria-valuenow", str(pct))
    (tmp_path / "100").touch()
    expect(row.locator(".pill")).to_have_text("done")
    not_reloaded(page)


def test_the_overview_shows_what_runs_and_what_is_done(node: Node, page: Page, tmp_path: Path) -> None:
    opened(page, node)
    expect(page.get_by_role("region", name="Health")).to_contain_text("Everything is running normally")
    job = node.enqueue("steps", folder=str(tmp_path))
    running = page.get_by_role("region", name="Running jobs")
    expect(running).to_contain_text(f"#{job}")
    (tmp_path / "10").touch()
    (tmp_path / "40").touch()
    expect(running.get_by_role("progressbar")).to_have_attribute("aria-valuenow", "40")
    (tmp_path / "75").touch()
    (tmp_path / "100").touch()
    expect(running).to_contain_text("No job is running.")
    expect(page.locator("a.figure", has_text="Done").locator("strong")).to_have_text("1")
    # The plot moves with the work: its newest bucket comes with the queue's state.
    expect(page.locator("svg.plot rect.c-done")).to_have_count(1)
    not_reloaded(page)


def test_a_killed_worker_is_seen_to_crash_and_come_back(make_node, page: Page, tmp_path: Path) -> None:
    node = make_node("--pool", "work=1", OSTLER_BACKOFF_MAX="5")
    os.kill(
        node.worker("worker:work:0")["pid"], signal.SIGKILL
    )  # so the next restart waits for two seconds: long enough to be seen
    node.wait_worker("worker:work:0", "to be back", lambda w: (w["generation"], w["status"]) == (2, "healthy"))
    job = node.enqueue("wait_for", path=str(tmp_path / "go"))
    pid = node.wait_running(job)["pid"]
    opened(page, node, "#/workers")
    row = page.locator("[id='worker:work:0']")
    expect(row).to_contain_text(str(pid))
    expect(row).to_contain_text(f"#{job} wait_for")
    shown = row.locator(".pill")
    # Every state that is shown, however briefly: a busy machine looks at the page only now and then.
    shown.evaluate(
        "el => { window.seen = []; new MutationObserver(() => seen.push(el.textContent)).observe(el, { childList: true, characterData: true, subtree: true }); }"
    )
    os.kill(pid, signal.SIGKILL)
    expect(row).to_contain_text("killed by SIGKILL")
    expect(row).not_to_contain_text(str(pid))
    expect(shown).to_have_text("healthy")
    assert page.evaluate("seen")[0] == "crashed"
    page.get_by_role("link", name="Overview").click()
    said = page.get_by_role("region", name="Incidents")
    expect(said).to_contain_text(f"worker:work:0 was killed by SIGKILL; restarted after")
    expect(said).to_contain_text(f"job {job} requeued")
    (tmp_path / "go").touch()
    not_reloaded(page)


def test_a_job_shows_its_timeline_error_arguments_and_output(node: Node, page: Page) -> None:
    job = node.wait_job(node.enqueue("fails", times=9))["id"]
    opened(page, node, f"#/jobs/{job}")
    expect(page.locator("#job-status")).to_have_text("failed")
    expect(page.locator(".events li strong")).to_have_text(
        ["created", *["processing", "requeued:retry"] * 2, "processing", "failed"]
    )
    assert page.locator("svg.timeline rect:not(.t-gap)").count() == 6  # three waits, three runs
    expect(page.locator("main")).to_contain_text("RETRIES_EXHAUSTED")
    expect(page.get_by_role("region", name="Errors").locator(".log").first).to_contain_text("Traceback")
    expect(page.locator(".json").first).to_contain_text('"times": 9')
    page.get_by_role("button", name="Retry").click()
    confirm(page, "Retry job")
    expect(page.locator(".events li strong", has_text="retried")).to_have_count(1)
    not_reloaded(page)


def test_logs_are_followed_as_they_come(node: Node, page: Page, tmp_path: Path) -> None:
    job = node.enqueue("steps", folder=str(tmp_path))
    worker = node.wait_running(job)["component"]
    opened(page, node, f"#/jobs/{job}")
    expect(page.get_by_text("nothing printed yet")).to_be_visible()
    (tmp_path / "10").touch()
    expect(page.get_by_role("log")).to_have_text("reached 10\n")
    page.goto(f"{node.url}/#/workers/{worker}")
    expect(page.get_by_role("log")).to_contain_text("reached 10")
    (tmp_path / "40").touch()
    expect(page.get_by_role("log")).to_contain_text("reached 40")
    for pct in ("75", "100"):
        (tmp_path / pct).touch()


def test_very_many_lines_at_once_do_not_end_a_tail(node: Node, page: Page) -> None:
    opened(page, node, "#/workers/worker:other:0")
    expect(page.get_by_text("nothing printed yet")).to_be_visible()
    node.wait_job(node.enqueue("other", say="a\n" * 300_000))
    node.wait_job(node.enqueue("other", say="the last line"))
    expect(page.get_by_role("log")).to_contain_text("a\na\nthe last line")


def test_a_tab_that_nobody_sees_gives_its_connections_back_and_misses_nothing(
    node: Node, page: Page, tmp_path: Path
) -> None:
    page.clock.install()
    page.add_init_script(
        "window.sources = []; window.EventSource = class extends EventSource { constructor(where) { super(where); sources.push(this); } }"
    )
    job = node.enqueue("steps", folder=str(tmp_path))
    node.wait_running(job)
    (tmp_path / "10").touch()
    opened(page, node, f"#/jobs/{job}")
    expect(page.get_by_role("log")).to_have_text("reached 10\n")
    turn = "hidden => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true }); document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(turn, True)
    page.clock.fast_forward(21_000)
    closed = "sources.length > 1 && sources.every((one) => one.readyState === EventSource.CLOSED)"
    until(lambda: page.evaluate(closed), "the page to give its connections back")
    (tmp_path / "40").touch()
    until(lambda: node.job(job)["progress"] == 40, "the next step")
    expect(page.get_by_role("log")).to_have_text("reached 10\n")
    page.evaluate(turn, False)
    expect(page.get_by_role("log")).to_have_text("reached 10\nreached 40\n")
    for pct in ("75", "100"):
        (tmp_path / pct).touch()


def test_a_lost_connection_is_shown_and_heals_by_itself(make_node, page: Page) -> None:
    node = make_node("--pool", "work=1", "--port", str(free_port()))
    opened(page, node, "#/jobs")
    first = node.enqueue("add", a=1)
    expect(page.locator(f"#job-{first} .pill")).to_have_text("done")
    node.kill()
    expect(page.locator("#connection")).to_have_text("no connection")
    expect(page.locator("#lost")).to_contain_text("is not responding")
    node.start()
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator("#lost")).to_be_hidden()
    second = node.enqueue("add", a=2)
    expect(page.locator(f"#job-{second} .pill")).to_have_text("done")
    not_reloaded(page)


# ---- what is done


def test_a_queue_is_paused_and_resumed_by_clicking(node: Node, page: Page) -> None:
    opened(page, node)
    row = page.get_by_role("region", name="Queues").locator("tr", has_text="work")
    row.get_by_role("button", name="Pause queue work").click()
    expect(row.locator(".pill")).to_have_text("paused")
    assert [p["paused"] for p in node.get("/api/v1/pools")[1]["pools"] if p["pool"] == "work"] == [True]
    job = node.enqueue("add", a=1)
    expect(row.locator("td").first).to_have_text("1")
    row.get_by_role("button", name="Resume queue work").click()
    expect(row.locator(".pill")).to_be_hidden()
    node.wait_job(job, "done")


def test_a_job_that_waits_says_why_on_its_page(node: Node, page: Page) -> None:
    node.post("/api/v1/pools/work/pause")
    try:
        job = node.enqueue("add", a=1)
        opened(page, node, f"#/jobs/{job}")
        why = page.get_by_role("region", name="Job", exact=True).locator("p", has_text="Waiting:")
        expect(why).to_be_visible()
        expect(why).to_have_text("Waiting: pool work is paused; to resume: ostler resume work")
    finally:
        node.post("/api/v1/pools/work/resume")
    expect(page.locator("#job-status")).to_have_text("done")
    expect(why).to_be_hidden()
    opened(page, node, f"#/jobs/{node.enqueue('add', a=1, options={'delay': 3600})}")
    expect(why).to_contain_text("Waiting: it is scheduled to run in")


def test_a_running_job_is_cancelled_by_clicking(node: Node, page: Page) -> None:
    job = node.enqueue("listens")
    node.wait_running(job)
    opened(page, node, f"#/jobs/{job}")
    page.get_by_role("button", name="Cancel", exact=True).click()
    expect(page.locator("dialog").get_by_role("button", name="Keep it running")).to_be_focused()
    page.keyboard.press("Escape")  # means no
    assert node.job(job)["status"] == "processing"
    page.get_by_role("button", name="Cancel", exact=True).click()
    confirm(page, "Cancel job")
    expect(page.locator("#job-status")).to_have_text("cancelled")
    assert node.job(job)["status"] == "cancelled"
    not_reloaded(page)


def test_a_worker_is_drained_restarted_and_killed_by_clicking(make_node, page: Page) -> None:
    node = make_node("--pool", "work=1")
    opened(page, node, "#/workers/worker:work:0")
    detail = page.get_by_role("region", name="worker:work:0")
    for verb, becomes in (("Drain", "stopped"), ("Restart", "healthy")):
        detail.get_by_role("button", name=verb).click()
        confirm(page, verb)
        expect(detail.locator("h2 .pill")).to_have_text(becomes)
    generation = node.worker("worker:work:0")["generation"]
    detail.get_by_role("button", name="Kill").click()
    confirm(page, "Kill")
    node.wait_worker(
        "worker:work:0", "to come back", lambda w: w["generation"] > generation and w["status"] == "healthy"
    )
    expect(detail.locator("tbody tr").first).to_contain_text("killed")
    expect(detail.locator("tbody tr").first).to_contain_text("killed by an operator")


def failing(node: Node) -> list[tuple[str, int]]:
    told = node.get("/api/v1/health")[1]
    assert told["status"] == "healthy"
    return [(one["task"], one["count"]) for one in told["failing"]]


def test_some_jobs_are_selected_and_retried_then_all_that_match(node: Node, page: Page) -> None:
    failed = [node.wait_job(node.enqueue("gives_up"))["id"] for _ in range(3)]
    opened(page, node)
    health = page.get_by_role("region", name="Health")
    expect(health).to_contain_text("Healthy, but some jobs failed in the last hour")
    health.get_by_role("link", name="3 jobs of gives_up failed").click()
    until(lambda: ("gives_up", 3) in failing(node), "health to name them, too")
    expect(page.locator("tbody tr")).to_have_count(3)
    page.get_by_role("button", name="Remove the filter code").click()
    page.get_by_role("checkbox", name=f"Select job {failed[0]}").check()
    bulk = page.get_by_role("group", name="Selected jobs")
    expect(bulk).to_contain_text("1 selected")
    bulk.get_by_role("button", name="Retry").click()
    confirm(page, "Retry")
    until(lambda: "retried" in node.events(failed[0]), "the chosen one to be retried")
    assert "retried" not in node.events(failed[1])
    page.get_by_role("button", name="Retry all matching").click()
    confirm(page, "Retry all matching")
    until(lambda: all("retried" in node.events(job) for job in failed), "all to be retried")
    expect(page.locator("tbody tr")).to_have_count(3)


def test_all_that_were_chosen_are_retried_however_they_ended(node: Node, page: Page) -> None:
    failed = node.wait_job(node.enqueue("gives_up"))["id"]
    done = node.wait_job(node.enqueue("add", a=1))["id"]
    opened(page, node, "#/jobs")
    for job in (failed, done):
        page.get_by_role("checkbox", name=f"Select job {job}").check()
    page.get_by_role("group", name="Selected jobs").get_by_role("button", name="Retry").click()
    confirm(page, "Retry")
    expect(page.locator("#live")).to_have_text("2 retried")
    until(lambda: all("retried" in node.events(job) for job in (failed, done)), "both to be retried")


def test_one_that_fails_again_comes_back_to_its_place_among_many(node: Node, page: Page) -> None:
    jobs = [node.enqueue("gives_up") for _ in range(55)]
    for job in jobs:
        node.wait_job(job)
    opened(page, node, "#/jobs?status=failed")
    expect(page.locator("tbody tr")).to_have_count(50)
    # After the snapshot it is listed once more, which would show it anyway.
    listed = "performance.getEntriesByType('resource').filter((one) => one.name.includes('/api/v1/jobs?')).length"
    until(lambda: page.evaluate(listed) > 1, "the second list")
    again = page.locator(f"#job-{jobs[-10]}")
    node.post("/api/v1/workers/pause")
    node.post(f"/api/v1/jobs/{jobs[-10]}/retry")
    expect(again).to_have_count(0)
    node.post("/api/v1/workers/resume")
    expect(again).to_be_visible()


def test_jobs_are_filtered_and_searched(node: Node, page: Page) -> None:
    found = node.wait_job(node.enqueue("returns", what="a needle in here"))["id"]
    other = node.wait_job(node.enqueue("add", a=1))["id"]
    opened(page, node, "#/jobs")
    expect(page.locator("tbody tr")).to_have_count(2)
    page.keyboard.press("/")
    page.keyboard.type("needle")
    page.keyboard.press("Enter")
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator(f"#job-{found}")).to_be_visible()
    page.goto(f"{node.url}/#/jobs?task=add")
    expect(page.locator(f"#job-{other}")).to_be_visible()
    expect(page.locator(f"#job-{found}")).to_have_count(0)
    page.get_by_role("group", name="Status").get_by_role("button", name="failed").click()
    expect(page.locator("main")).to_contain_text("No jobs match.")


def test_a_job_is_stored_from_the_page_and_a_mistake_is_said_where_it_was_made(node: Node, page: Page) -> None:
    opened(page, node, "#/jobs")
    page.get_by_role("button", name="New job").click()
    form = page.locator("dialog")
    expect(form).to_be_visible()
    page.goto(f"{node.url}/#/workers")
    expect(form).to_have_count(0)
    page.goto(f"{node.url}/#/jobs")
    page.get_by_role("button", name="New job").click()
    form.get_by_label("Task").select_option("add")
    expect(form).to_contain_text("add(a: int, b: int = 1)")
    form.get_by_label("Arguments").fill('{"a": "seven"}')
    form.get_by_role("button", name="Enqueue").click()
    expect(form.get_by_role("alert")).to_contain_text("a")
    assert node.get("/api/v1/jobs")[1]["jobs"] == []
    form.get_by_label("Arguments").fill('{"a": 7}')
    form.get_by_role("button", name="Enqueue").click()
    expect(page.locator("#job-status")).to_have_text("done")
    expect(page.locator(".json").last).to_have_text("8")


# ---- for everybody


def test_what_users_wrote_is_shown_as_text(node: Node, page: Page) -> None:
    evil = "<img src=x onerror='window.hacked=1'>"
    job = node.wait_job(node.enqueue("returns", what=evil))["id"]
    opened(page, node, "#/jobs")
    expect(page.locator(f"#job-{job}")).to_contain_text(evil)
    page.goto(f"{node.url}/#/jobs/{job}")
    expect(page.locator(".json").first).to_contain_text(evil)
    assert page.evaluate("window.hacked") is None
    opened(page, node, "#/jobs")
    job = node.wait_job(node.enqueue("returns", what="ä \\u00e4 ☃\n"))["id"]  # this one comes by the stream
    expect(page.locator(f"#job-{job}")).to_contain_text(r'''"ä \\u00e4 ☃\n"''')


def test_an_app_of_jobs_alone_has_no_tabs_for_other_things(node: Node, page: Page) -> None:
    opened(page, node)
    expect(page.locator("nav a:visible")).to_have_text(["Overview", "Jobs", "Workers"])
    page.goto(f"{node.url}/#/sessions")  # a page that is looked at has its tab
    expect(page.locator("nav a[aria-current]:visible")).to_have_text("Sessions")


def test_an_address_that_leads_nowhere_is_said_to(node: Node, page: Page) -> None:
    opened(page, node, "#/jobs")
    for name in ("constructor", "__proto__", "nothing"):
        page.goto(f"{node.url}/#/{name}")
        expect(page.locator("main")).to_contain_text("There is no such page.")
    page.goto(f"{node.url}/#/workers/100%")
    expect(page.locator("main")).to_contain_text("There is no worker 100%")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_fits_a_phone(node: Node, browser: Browser, scheme: str) -> None:
    node.wait_job(node.enqueue("fails", times=9))
    context = browser.new_context(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    page = context.new_page()
    for where in PAGES:
        opened(page, node, where)
        expect(page.locator("main h1")).to_have_count(1)
        wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1], where
    context.close()


def test_every_page_can_be_read_by_a_screen_reader_and_used_by_keyboard(node: Node, page: Page) -> None:
    node.wait_job(node.enqueue("fails", times=9))
    for where in PAGES:
        opened(page, node, where)
        nameless = page.evaluate(
            """() => [...document.querySelectorAll('button, a, input, select, textarea, [role=progressbar], svg[role=img]')]
                 .filter(el => el.checkVisibility() && !(el.textContent.trim() || el.ariaLabel || el.labels?.length || el.title))
                 .map(el => el.outerHTML)"""
        )
        assert nameless == [], where
        assert page.locator("nav a[aria-current=page]").count() == 1
    opened(page, node)
    page.reload()
    expect(page.locator("#connection")).to_have_text("live")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    plot = page.get_by_role("img", name=re.compile("Throughput.*failed 1"))  # it has been read and drawn
    plot.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".tip").first).to_contain_text("failed: 1")


def test_the_api_is_described_without_another_host(node: Node, page: Page) -> None:
    page.goto(f"{node.url}/docs")
    part = page.locator("details", has=page.get_by_text("/api/v1/jobs/{job}/cancel", exact=True))
    part.locator("summary").click()
    expect(part.get_by_role("row").filter(has_text="cancel_requested")).to_be_visible()


def test_the_theme_is_kept(node: Node, page: Page) -> None:
    opened(page, node)
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Change between light and dark").click()
    after = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert after != before
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == after


def test_a_node_that_hangs_is_not_shown_as_live(make_node, page: Page) -> None:
    node = make_node("--pool", "work=1", OSTLER_EVENT_KEEPALIVE="0.2")
    opened(page, node)
    node.process.send_signal(signal.SIGSTOP)  # its connections stay open
    try:
        expect(page.locator("#connection")).to_have_text("no connection")
    finally:
        node.process.send_signal(signal.SIGCONT)
    expect(page.locator("#connection")).to_have_text("live")


def test_a_node_with_a_token_asks_for_it(make_node, page: Page) -> None:
    node = make_node("--pool", "work=1", ready=False, OSTLER_TOKEN='open; sesame,"é')
    page.goto(node.url)
    page.get_by_label("This node's token").fill("guess")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("not this node's token")
    page.get_by_label("This node's token").fill('open; sesame,"é')
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.get_by_role("region", name="Health")).to_contain_text("Everything is running normally")


def test_a_token_that_is_no_longer_the_nodes_is_asked_for_again(make_node, page: Page) -> None:
    node = make_node("--pool", "work=1", "--port", str(free_port()), ready=False, OSTLER_TOKEN="old")
    page.goto(f"{node.url}/?token=old")
    expect(page.locator("#connection")).to_have_text("live")
    page.goto(f"{node.url}/#/workers")
    node.kill()
    node.env["OSTLER_TOKEN"] = "new"
    node.start(ready=False)
    expect(page.get_by_label("This node's token")).to_be_visible()
