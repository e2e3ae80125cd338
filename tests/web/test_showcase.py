"""The dashboard with the busy app: what an operator must find on it, and how it looks to everybody."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests import showcase
from tests.harness import Node, until
from tests.web.test_dashboard import browser, confirm, opened, page  # noqa: F401  fixtures

expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    flags = [part for pool in showcase.POOLS for part in ("--pool", pool)]
    made = Node(tmp_path_factory.mktemp("showcase") / "data", Path(showcase.__file__), *flags).start()
    yield made
    made.kill()


@pytest.fixture(scope="module")
def jobs(node: Node) -> dict[str, int]:
    return showcase.fill(node, 400)


def region(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name=name, exact=True)


def test_the_overview_says_what_fails_and_which_queue_nobody_serves(
    node: Node, jobs: dict[str, int], page: Page
) -> None:
    opened(page, node)
    health = region(page, "Health")
    expect(health).to_contain_text("something needs attention")
    expect(health).to_contain_text("wait in queue 'exports'")
    expect(region(page, "Queues").locator("tr", has_text="exports")).to_contain_text("no worker")
    health.get_by_role("link", name="12 jobs of send_mail failed with BOUNCED").click()
    expect(page.locator("tbody tr")).to_have_count(12)
    expect(page.get_by_role("button", name="Remove the filter code BOUNCED")).to_be_visible()


def test_incidents_are_few_until_somebody_asks_for_all(node: Node, jobs: dict[str, int], page: Page) -> None:
    opened(page, node)
    incidents = region(page, "Incidents")
    expect(incidents.locator("li")).to_have_count(8)
    incidents.get_by_role("button", name="Show all").click()
    until(lambda: incidents.locator("li").count() > 8, "all incidents")


def test_tabs_are_of_what_the_app_has(node: Node, page: Page) -> None:
    opened(page, node)
    every = ["Overview", "Jobs", "Schedules", "Models", "Sessions", "Workers"]
    expect(page.locator("nav a:visible")).to_have_text(every)
    page.reload()  # they are known before the node answers
    expect(page.locator("nav a:visible")).to_have_text(every)


def test_columns_of_all_pools_line_up_and_stay_where_they_are(node: Node, jobs: dict[str, int], page: Page) -> None:
    lefts = "els => new Set(els.map(el => el.getBoundingClientRect().left)).size"
    opened(page, node, "#/workers")
    expect(page.locator("tbody")).to_have_count(7)
    for column in (2, 3, 5, 8):
        assert page.locator(f"tr:not(.group) > :nth-child({column}):visible").evaluate_all(lefts) == 1
    opened(page, node, "#/jobs")
    expect(page.locator("tbody tr")).to_have_count(50)
    heads = "els => els.map(el => Math.round(el.getBoundingClientRect().left))"
    before = page.locator("thead th").evaluate_all(heads)
    long = node.wait_job(node.enqueue("import_feed", url="a long one " * 9))
    expect(page.locator(f"#job-{long['id']} .pill")).to_have_text("failed")
    assert page.locator("thead th").evaluate_all(heads) == before


def test_a_job_has_the_errors_of_all_its_runs_and_lists_the_last_one_in_words(
    node: Node, jobs: dict[str, int], page: Page
) -> None:
    opened(page, node, f"#/jobs/{jobs['long error']}")
    errors = region(page, "Errors")
    expect(errors.locator("details")).to_have_count(3)
    expect(errors.locator("details[open] .log")).to_contain_text("JSONDecodeError")
    errors.locator("summary", has_text="Attempt 1").click()
    expect(errors.locator("details[open] .log")).to_have_count(2)
    expect(page.locator(".events")).not_to_contain_text('{"')
    opened(page, node, "#/jobs?task=send_mail&status=queued")
    expect(page.locator(f"#job-{jobs['waits for its retry']}")).to_contain_text("too many connections")
    opened(page, node, "#/jobs?task=crashes")
    expect(page.locator(f"#job-{jobs['crash']}")).to_contain_text("crashed its worker 3 times")


def test_a_long_wait_does_not_squeeze_the_runs(node: Node, jobs: dict[str, int], page: Page) -> None:
    opened(page, node, f"#/jobs/{jobs['waits for its retry']}")
    run = page.locator("svg.timeline rect.t-soft")
    expect(run).to_have_count(1)
    # In one step: it is drawn anew each second.
    wide = "name => document.querySelector(name).getBoundingClientRect().width"
    assert page.evaluate(f"({wide})('rect.t-soft') / ({wide})('svg.timeline')") > 0.3


def test_chains_and_batches_lead_to_their_jobs(node: Node, jobs: dict[str, int], page: Page) -> None:
    opened(page, node, f"#/jobs/{jobs['broken chain']}")
    steps = region(page, "Related jobs").locator(".steps li")
    expect(steps.locator("strong, a")).to_have_text(["fetch", "check", "announce"])
    expect(steps.nth(2)).to_contain_text("will not run")
    steps.nth(1).get_by_role("link").click()
    expect(page.locator("#job-status")).to_have_text("failed")
    opened(page, node, f"#/jobs/{jobs['batch']}")
    batch = region(page, "Related jobs")
    expect(batch).to_contain_text("8 of 8")
    batch.get_by_role("link", name="#").click()
    expect(batch).to_contain_text("Follows batch")
    batch.get_by_role("link", name="8 jobs").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Jobs of batch")
    expect(page.locator("tbody tr")).to_have_count(8)


def test_artifacts_are_shown_and_nothing_of_them_is_run(node: Node, jobs: dict[str, int], page: Page) -> None:
    opened(page, node, f"#/jobs/{jobs['artifacts']}")
    files = region(page, "Artifacts")
    expect(files.locator("li")).to_have_count(8)
    until(lambda: files.get_by_alt_text("chart.png").evaluate("el => el.naturalWidth") == 640, "the picture")
    expect(files.locator("li", has_text="summary.txt").locator("pre")).to_contain_text("2026-11-01  October 2026")
    expect(files.locator("li", has_text="jingle.wav").locator("audio")).to_have_count(1)
    expect(files.locator("iframe, object, embed")).to_have_count(0)
    with page.expect_download() as download:
        files.get_by_role("link", name="report.html").last.click()
    assert download.value.suggested_filename == "report.html"
    assert page.evaluate("window.hacked") is None


def test_a_schedule_is_run_now_paused_and_resumed(node: Node, jobs: dict[str, int], page: Page) -> None:
    opened(page, node, "#/schedules")
    row = region(page, "Schedules").locator("tr", has_text="index")
    expect(row).to_contain_text("mon-fri")
    row.get_by_role("button", name="Run index now").click()
    confirm(page, "Run now")
    expect(page.locator("#live")).to_contain_text("stored job")
    row.get_by_role("button", name="Pause index").click()
    expect(row.locator(".pill", has_text="paused")).to_be_visible()
    row.get_by_role("button", name="Resume index").click()
    expect(row.locator(".pill", has_text="paused")).to_be_hidden()


def test_filters_and_search_survive_a_reload(node: Node, jobs: dict[str, int], page: Page) -> None:
    opened(page, node, "#/jobs")
    page.get_by_role("group", name="Status").get_by_role("button", name="failed").click()
    page.get_by_label("Queue").select_option("imports")
    expect(page).to_have_url(re.compile("status=failed&queue=imports"))  # the page is made anew
    page.keyboard.press("/")
    expect(page.get_by_label("Search")).to_be_focused()
    page.keyboard.type("eu-central")
    page.keyboard.press("Enter")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.reload()
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.get_by_role("searchbox")).to_have_value("eu-central")
    expect(page.get_by_role("button", name="failed")).to_have_attribute("aria-pressed", "true")


def test_the_api_is_tried_from_its_description(node: Node, jobs: dict[str, int], page: Page) -> None:
    page.goto(f"{node.url}/docs")
    post = page.locator("details.op", has=page.get_by_text("Enqueue a job", exact=True))
    post.locator("summary").click()
    body = post.get_by_label("Body, as JSON")
    expect(body).to_have_value(re.compile('"task": "'))
    body.fill('{"task": "thumbnail", "args": {"asset": 5}}')
    expect(post.get_by_label("As a command")).to_contain_text('-d \'{"task": "thumbnail", "args": {"asset": 5}}\'')
    post.get_by_role("button", name="Send POST").click()
    expect(post.get_by_label("Answer", exact=True)).to_contain_text('"task": "thumbnail"')
    one = page.locator("details.op", has=page.get_by_text("/api/v1/jobs/{job}", exact=True))
    one.locator("summary").click()
    one.get_by_role("textbox").first.fill(str(jobs["crash"]))
    one.get_by_role("button", name="Send GET").click()
    expect(one.get_by_label("Answer", exact=True)).to_contain_text('"crashes": 3')


# Every text with its contrast to what is behind it; too small by WCAG AA are those below 4.5, or 3 where the text is large.
CONTRAST = """() => {
  const canvas = Object.assign(document.createElement('canvas'), { width: 1, height: 1 }).getContext('2d', { willReadFrequently: true });
  const mixed = (colours) => { canvas.clearRect(0, 0, 1, 1); for (const one of colours) { canvas.fillStyle = one; canvas.fillRect(0, 0, 1, 1); } return [...canvas.getImageData(0, 0, 1, 1).data.slice(0, 3)]; };
  const light = (rgb) => { const [r, g, b] = rgb.map((v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const found = new Map();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const el = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !el.checkVisibility() || el.closest('.unseen, svg, :disabled, option, audio, noscript')) continue;
    const behind = [];
    for (let up = el; up; up = up.parentElement) behind.unshift(getComputedStyle(up).backgroundColor);
    const style = getComputedStyle(el);
    const [a, b] = [light(mixed(['white', ...behind, style.color])), light(mixed(['white', ...behind]))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.6 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) found.set(`${el.className} ${style.color} ${ratio.toFixed(2)}`, walk.currentNode.data.trim().slice(0, 40));
  }
  return [...found];
}"""


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
def test_every_page_fits_and_can_be_read(
    node: Node, jobs: dict[str, int], browser: Browser, scheme: Any, width: int
) -> None:
    context = browser.new_context(
        viewport={"width": width, "height": 844}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    where = ["#/", "#/workers", "#/workers/worker:clips:0", "#/jobs", "#/jobs?status=failed", "#/schedules", "#/calls"]
    where += ["#/sessions", *(f"#/jobs/{jobs[name]}" for name in ("crash", "artifacts", "chain", "batch", "running"))]
    for one in where:
        opened(page, node, one)
        expect(page.locator("main h1")).to_have_count(1)
        expect(page.locator("main").locator("tbody tr, dl, figure").locator("visible=true").first).to_be_visible()
        wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1], one
        assert page.evaluate(CONTRAST) == [], one
    context.close()
