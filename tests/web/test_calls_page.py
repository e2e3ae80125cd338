"""The Calls page in a real browser, against a real node with real models."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.calls.test_calls import Asking, ask
from tests.harness import Node, until
from tests.web.calling import ODD, png, wav
from tests.web.test_dashboard import browser, opened, page  # noqa: F401  fixtures

APP = Path(__file__).with_name("calling.py")
expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory):
    """Shared by tests that leave it as it was."""
    running = Node(tmp_path_factory.mktemp("calls") / "data", APP).start()
    yield running
    running.kill()


def region(page: Page, name: str):
    return page.get_by_role("region", name=name, exact=True)


def call(page: Page, payload: str) -> None:
    form = region(page, "Try it")
    form.get_by_label("Payload, as JSON").fill(payload)
    form.get_by_role("button", name="Call", exact=True).click()


def test_models_show_their_state_memory_and_reason_as_it_changes(node: Node, page: Page, tmp_path: Path) -> None:
    opened(page, node, "#/calls")
    models = region(page, "Models")
    slow = models.locator("tr", has_text="slow")
    expect(slow.locator(".pill")).to_have_text(re.compile("idle|ready"))
    go = tmp_path / "go"
    asking = Asking(node, "slow", {"go": str(go)})
    expect(slow.locator(".pill")).to_have_text("busy")
    expect(slow.locator("td").nth(1)).to_have_text("1")
    go.touch()
    assert asking.result()[0] == 200
    expect(slow.locator(".pill")).to_have_text("ready")
    assert ask(node, "apart", 1)[0] == 503
    expect(models.locator("tr", has_text="apart")).to_contain_text("ostler env build never")
    memory = region(page, "Memory")
    expect(memory.get_by_role("img", name=re.compile("Host: .* used .* reserved .* headroom"))).to_be_visible()
    expect(memory).to_contain_text("worker:slow:0")
    environments = region(page, "Environments")
    expect(environments.locator("tr", has_text="never").locator(".pill")).to_have_text("not built")
    expect(environments).to_contain_text("ostler env build never")


def test_a_call_under_way_is_cancelled_by_clicking(node: Node, page: Page, tmp_path: Path) -> None:
    opened(page, node, "#/calls")
    asking = Asking(node, "slow", {"go": str(tmp_path / "never")}, headers={"x-request-id": "by-hand"})
    row = region(page, "Running calls").locator("tr", has_text="by-hand")
    expect(row.locator(".pill")).to_have_text("running")
    row.get_by_role("button", name="Cancel call by-hand").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel the call").click()
    assert asking.result()[0] == 499
    expect(row).to_have_count(0)
    logged = region(page, "Call log").locator("tr", has_text="by-hand")
    expect(logged.locator(".pill")).to_have_text("cancelled")
    expect(logged).to_contain_text("CANCELLED")


def test_the_form_shows_json_text_streams_images_and_audio_and_says_what_is_wrong(
    node: Node, page: Page, tmp_path: Path
) -> None:
    opened(page, node, "#/calls/echo/plain?try=1")
    answer = region(page, "Try it").locator(".answer")
    complaint = region(page, "Try it").get_by_role("alert")
    call(page, '{"a": [1, "<b>"]}')
    expect(answer).to_contain_text('"<b>"')
    call(page, "{")
    expect(complaint).to_contain_text("not JSON")
    page.get_by_label("Image, audio or other file").check()
    for name, kind, data, tag in (("a.png", "image/png", png(), "img"), ("a.wav", "audio/wav", wav(), "audio")):
        page.get_by_label("File, sent unchanged").set_input_files({"name": name, "mimeType": kind, "buffer": data})
        expect(region(page, "Try it").locator(f".preview {tag}")).to_be_visible()
        page.get_by_role("button", name="Call", exact=True).click()
        expect(answer).to_contain_text(f'"size": {len(data)}')
        expect(answer).to_contain_text(kind)
    page.get_by_label("Text", exact=True).check()
    page.get_by_label("Payload, as text").fill("just text")
    page.get_by_role("button", name="Call", exact=True).click()
    expect(answer).to_contain_text("just text")
    page.goto(f"{node.url}/#/calls/words/words")
    call(page, '"the quick brown fox"')
    expect(answer).to_have_text("the quick brown fox ")
    call(page, '"the boom"')
    expect(complaint).to_have_text(re.compile("it broke|the response was cut off"))
    expect(page.get_by_role("log")).to_contain_text("RuntimeError: it broke")
    page.goto(f"{node.url}/#/calls/gives/gives")
    call(page, '"image"')
    expect(answer.locator("img")).to_be_visible()
    assert page.evaluate("document.querySelector('.answer img').naturalWidth") == 8
    call(page, '"audio"')
    expect(answer.locator("audio")).to_be_visible()
    page.goto(f"{node.url}/#/calls/slow/slow")
    call(page, f'{{"go": "{tmp_path / "never"}"}}')
    expect(region(page, "Running calls").locator(".pill")).to_have_text("running")
    page.get_by_role("button", name="Stop").click()
    expect(complaint).to_contain_text("the call was cancelled")
    until(lambda: node.get("/api/v1/calls/running")[1]["total"] == 0, "the call to be cancelled")


def test_an_id_is_shown_as_text_with_its_own_page_log_and_plots(node: Node, page: Page) -> None:
    assert ask(node, "echo", 1, model=ODD, headers={"x-request-id": "odd-one"})[0] == 200
    assert ask(node, "echo", 1, model="plain")[0] == 200
    opened(page, node, "#/calls")
    region(page, "Models").get_by_role("link", name=f"echo · {ODD}", exact=True).click()
    expect(page.locator("h1")).to_contain_text(ODD)
    expect(page.get_by_role("log")).to_contain_text(f"loaded {ODD}")
    rows = region(page, "Call log").locator("tbody tr")
    expect(rows.first).to_contain_text("odd-one")
    expect(rows.filter(has_text="plain")).to_have_count(0)
    expect(page.get_by_role("img", name=re.compile("Calls. Newest.*done [1-9]"))).to_be_visible()
    page.goto(f"{node.url}/#/calls?model={quote(ODD)}&task=echo&outcome=done")
    expect(rows.first).to_contain_text(ODD)
    region(page, "Call log").get_by_role("button", name="died").click()
    expect(region(page, "Call log")).to_contain_text("No calls match.")
    assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_pages_fit_a_phone_and_everything_has_a_name(node: Node, browser: Browser, scheme: str) -> None:
    ask(node, "echo", 1, model=ODD)
    context = browser.new_context(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    page = context.new_page()
    for where in ("#/calls", f"#/calls/echo/{quote(ODD, safe='')}"):
        opened(page, node, where)
        expect(region(page, "Call log").locator("tbody tr").first).to_be_visible()
        wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1], where
        nameless = page.evaluate(
            """() => [...document.querySelectorAll('button, a, input, select, textarea, svg[role=img], div[role=img]')]
                 .filter(el => el.checkVisibility() && !(el.textContent.trim() || el.ariaLabel || el.labels?.length || el.title))
                 .map(el => el.outerHTML)"""
        )
        assert nameless == [], where
    context.close()
