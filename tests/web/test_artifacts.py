"""Artifacts over HTTP: ranges, hostile keys, nothing that runs, access, and what several publishes under one key come to."""

from __future__ import annotations

import hashlib
import http.client
import json
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ostler import private
from ostler.jobs.results import LocalResults
from ostler.store.identity import SECRET
from tests.browser import PATIENCE, launched
from tests.harness import Node, until

APP = Path(__file__).with_name("artifacts_app.py")
TEXT = "".join(chr(97 + n % 26) for n in range(1000))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    running = Node(tmp_path_factory.mktemp("artifacts") / "data", APP).start()
    yield running
    running.stop()


def fetch(node: Node, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """The path goes out as it is written."""
    parts = urllib.parse.urlsplit(node.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    try:
        connection.putrequest(method, path)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def run(node: Node, task: str, **args: Any) -> int:
    job = node.enqueue(task, **args)
    assert node.wait_job(job)["status"] == "done"
    return job


def listed(node: Node, job: int, query: str = "") -> dict[str, Any]:
    status, found = node.get(f"/api/v1/jobs/{job}/artifacts{query}")
    assert status == 200, found
    return dict(found)


# ---- what a job has published


def test_a_job_shows_what_it_has_published_under_any_key(node: Node) -> None:
    job = run(node, "publish", key="reports/daily plän.txt", text="text")
    (found,) = listed(node, job)["artifacts"]
    url = "/api/v1/artifacts/reports/daily%20pl%C3%A4n.txt"
    digest = hashlib.sha256(b"text").hexdigest()
    assert found == {"key": "reports/daily plän.txt", "size": 4, "sha256": digest, "type": "text/plain", "at": found["at"],
                     "url": url, "replaced_by": None}  # fmt: skip
    assert node.job(job)["artifacts"] == [found]
    status, headers, body = fetch(node, found["url"])
    assert (status, body, headers["etag"]) == (200, b"text", f'"{digest}"')
    assert headers["content-disposition"] == "inline; filename*=UTF-8''daily%20pl%C3%A4n.txt"


def test_a_long_list_comes_in_pages_and_a_job_shows_its_beginning(node: Node) -> None:
    job = run(node, "publish_many", count=45)
    assert len(node.job(job)["artifacts"]) == 20
    keys, after = [], ""
    while after is not None:
        page = listed(node, job, f"?limit=20&after={after}")
        keys += [one["key"] for one in page["artifacts"]]
        after = page["next"]
    assert keys == [f"{job}/{n:04}.txt" for n in range(45)]
    assert node.get(f"/api/v1/jobs/{job}/artifacts?limit=1001")[0] == 422


def test_a_job_that_published_twice_has_the_last_one(node: Node) -> None:
    job = run(node, "publish_twice", key="twice.txt")
    (found,) = listed(node, job)["artifacts"]
    assert found["sha256"] == hashlib.sha256(b"second").hexdigest()
    assert fetch(node, found["url"])[2] == b"second"


def test_what_a_failed_run_has_published_is_shown(node: Node) -> None:
    job = node.enqueue("publish_and_fail", key="failed.txt")
    assert node.wait_job(job)["status"] == "failed"
    (found,) = listed(node, job)["artifacts"]
    assert fetch(node, found["url"])[2] == b"of a failure"


def test_what_a_run_published_before_it_was_killed_is_shown(node: Node) -> None:
    job = run(node, "publish_and_die", key="killed.txt")
    (found,) = listed(node, job)["artifacts"]
    assert (found["key"], found["size"]) == ("killed.txt", 11)
    assert fetch(node, found["url"])[2] == b"of the dead"


def test_of_two_jobs_that_publish_under_one_key_the_older_one_says_who_replaced_it(node: Node) -> None:
    jobs = [run(node, "publish", key="shared/latest.txt", text=text) for text in ("old", "new")]
    old, new = (listed(node, job)["artifacts"][0] for job in jobs)
    assert (old["replaced_by"], new["replaced_by"]) == (jobs[1], None)
    assert fetch(node, old["url"])[2] == b"new"
    assert fetch(node, old["url"])[1]["etag"] == f'"{new["sha256"]}"'


# ---- ranges


@pytest.fixture(scope="module")
def letters(node: Node) -> str:
    run(node, "publish", key="letters.txt", text=TEXT)
    return "/api/v1/artifacts/letters.txt"


@pytest.mark.parametrize(
    ("wanted", "first", "last"),
    [("bytes=0-0", 0, 0), ("bytes=10-19", 10, 19), ("bytes=-7", 993, 999), ("bytes=990-", 990, 999), ("bytes=5-99999999", 5, 999),
     (f"bytes=-{'9' * 5000}", 0, 999), (f"bytes={'0' * 3000}7-{'9' * 3000}", 7, 999)],
)  # fmt: skip
def test_a_range_is_answered_with_its_bytes(node: Node, letters: str, wanted: str, first: int, last: int) -> None:
    status, headers, body = fetch(node, letters, Range=wanted)
    assert (status, body.decode()) == (206, TEXT[first : last + 1])
    assert headers["content-range"] == f"bytes {first}-{last}/1000"
    assert headers["content-length"] == str(last - first + 1)


@pytest.mark.parametrize("wanted", ["bytes=0-1,5-6", "bytes=19-10", "lines=0-1", "bytes=a-b", "bytes=-", "nonsense"])
def test_several_ranges_and_those_that_cannot_be_understood_get_the_whole_file(
    node: Node, letters: str, wanted: str
) -> None:
    status, headers, body = fetch(node, letters, Range=wanted)
    assert (status, len(body), headers["content-length"], headers["accept-ranges"]) == (200, 1000, "1000", "bytes")


@pytest.mark.parametrize("wanted", ["bytes=1000-", "bytes=-0", f"bytes={'9' * 5000}-"])
def test_a_range_past_the_end_is_416_with_the_size(node: Node, letters: str, wanted: str) -> None:
    status, headers, body = fetch(node, letters, Range=wanted)
    assert (status, headers["content-range"]) == (416, "bytes */1000")
    assert json.loads(body)["error"]["code"] == "RANGE"


def test_tags_say_whether_a_client_has_it_and_whether_a_range_fits(node: Node, letters: str) -> None:
    _, headers, _ = fetch(node, letters)
    tag = headers["etag"]
    for given in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        status, told, body = fetch(node, letters, If_None_Match=given)
        assert (status, body, told["etag"]) == (304, b"", tag)
    assert fetch(node, letters, If_None_Match='"other"')[0] == 200
    assert fetch(node, letters, Range="bytes=0-1", If_Range=tag)[::2] == (206, b"ab")
    assert len(fetch(node, letters, Range="bytes=0-1", If_Range='"other"')[2]) == 1000
    assert len(fetch(node, letters, Range="bytes=0-1", If_Range=headers["last-modified"])[2]) == 1000


def test_head_tells_all_but_the_bytes(node: Node, letters: str) -> None:
    status, headers, body = fetch(node, letters, "HEAD", Range="bytes=0-1")
    assert (status, headers["content-length"], body) == (200, "1000", b"")
    assert headers == {**fetch(node, letters)[1], "date": headers["date"]}


def test_an_empty_file_is_served(node: Node) -> None:
    run(node, "publish", key="empty.txt", text="")
    assert fetch(node, "/api/v1/artifacts/empty.txt")[::2] == (200, b"")
    assert fetch(node, "/api/v1/artifacts/empty.txt", Range="bytes=-5")[0] == 416


# ---- keys


@pytest.mark.parametrize(
    "path",
    ["../node.json", "..%2fnode.json", "%2e%2e/node.json", "%2e%2e%2fnode.json", "x/../../node.json", "x//y", "/etc/passwd", "%2fetc%2fpasswd",
     "letters.txt%00", "%00", "a%5cb", ".letters.txt.ostler", "%2eletters.txt.ostler", ".parts", ".parts/x", "x/.y", "", "%ff%fe", "x" * 300, "y/" * 600,
     "%252e%252e/node.json", "letters.txt/", "letters.txt/.", "%ed%a0%80"],
)  # fmt: skip
def test_a_hostile_key_reads_nothing(node: Node, letters: str, path: str) -> None:
    status, headers, body = fetch(node, f"/api/v1/artifacts/{path}")
    assert status in (404, 422), body[:200]
    assert headers["content-type"] == "application/json"
    assert "message" in json.loads(body)["error"]


def test_files_in_the_results_that_nobody_published_are_not_served(node: Node) -> None:
    (node.folder / "results" / "stray.txt").write_text("not published")
    (node.folder / "results" / "link.txt").symlink_to(node.folder / "node.json")
    for name in ("stray.txt", "link.txt"):
        assert fetch(node, f"/api/v1/artifacts/{name}")[0] == 404


@pytest.mark.parametrize("key", ["../x", "a/../x", "/x", ".x", "a//b", "x\0y", "x" * 300, "é" * 200, "\ud800"])
def test_a_job_cannot_publish_under_such_a_key(node: Node, key: str) -> None:
    job = node.enqueue("publish", key=key)
    found = node.wait_job(job)
    assert (found["status"], found["artifacts"]) == ("failed", [])
    assert found["error"]["message"].startswith("BadArguments: ")
    assert "not a usable key" in found["error"]["message"]


# ---- what a browser may do with it


@pytest.mark.parametrize(
    ("name", "kind", "how"),
    [("a.html", "application/octet-stream", "attachment"), ("a.HTM", "application/octet-stream", "attachment"),
     ("a.xhtml", "application/octet-stream", "attachment"), ("a.xml", "application/octet-stream", "attachment"),
     ("a.svg", "image/svg+xml", "attachment"), ("a.js", "application/octet-stream", "attachment"),
     ("a.mjs", "application/octet-stream", "attachment"), ("a.css", "application/octet-stream", "attachment"),
     ("a.svgz", "application/octet-stream", "attachment"), ("a.zip", "application/octet-stream", "attachment"),
     ("a", "application/octet-stream", "attachment"), ("a.png", "image/png", "inline"), ("a.mp4", "video/mp4", "inline"),
     ("a.flac", "audio/flac", "inline"), ("a.csv", "text/plain; charset=utf-8", "inline"), ("a.md", "text/plain; charset=utf-8", "inline"),
     ("a.json", "application/json", "inline"), ("a.pdf", "application/pdf", "inline")],
)  # fmt: skip
def test_only_what_cannot_act_is_shown(node: Node, name: str, kind: str, how: str) -> None:
    run(node, "publish", key=f"kinds/{name}", text="<script>alert(1)</script>")
    _, headers, _ = fetch(node, f"/api/v1/artifacts/kinds/{name}")
    assert (headers["content-type"], headers["content-disposition"].partition(";")[0]) == (kind, how)
    assert headers["x-content-type-options"] == "nosniff"
    if name != "a.pdf":
        assert headers["content-security-policy"].startswith("sandbox; default-src 'none'")
    _, headers, _ = fetch(node, f"/api/v1/artifacts/kinds/{name}?download=1")
    assert headers["content-disposition"] == f"attachment; filename*=UTF-8''{name}"


ATTACK = "<script>parent.window.name = 'hit'; document.title = 'hit'</script>"
SVG = f'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9" onload="document.title = \'hit\'">{ATTACK}</svg>'


def test_in_a_browser_nothing_that_was_published_runs_as_a_page_of_the_node(node: Node) -> None:
    """Opened, framed, shown as an image, and loaded as a script, from a page of the node's own."""
    for key, text in {"x/a.html": ATTACK, "x/a.svg": SVG, "x/a.js": "window.name = 'hit'", "x/a.txt": ATTACK}.items():
        run(node, "publish", key=key, text=text)
    look = """async () => {
        const at = "/api/v1/artifacts/x/a.", made = [];
        for (const [tag, ending] of [["iframe", "html"], ["iframe", "svg"], ["iframe", "txt"], ["script", "js"], ["script", "txt"], ["img", "svg"]]) {
            const one = document.createElement(tag);
            made.push(new Promise((done) => { one.onload = () => done("load"); one.onerror = () => done("error"); setTimeout(done, 2000, "neither"); }));
            one.src = at + ending;
            document.body.append(one);
        }
        return [...await Promise.all(made), window.name, document.title];
    }"""
    with launched() as browser:
        page = browser.new_page()
        # A page without a policy: what protects here is the artifact's own answer.
        page.route("**/bare", lambda route: route.fulfill(body="<title>bare</title>", content_type="text/html"))
        page.goto(f"{node.url}/bare", timeout=PATIENCE)
        *loaded, name, title = page.evaluate(look)
        assert (name, title) == ("", "bare")
        assert loaded[3:] == ["error", "error", "load"]  # no script; an image, which runs none of its own
        page.goto(f"{node.url}/api/v1/artifacts/x/a.txt", timeout=PATIENCE)
        assert page.title() != "hit" and "<script>" in page.inner_text("body")


# ---- access


def test_without_the_token_nothing_is_told_or_read(node: Node, letters: str) -> None:
    """Requests that come through a proxy are not those of the node's own user."""
    proxied = {"X_Forwarded_For": "10.0.0.1"}
    inner = "/api/v1/inner/artifacts/letters.txt?node=x&sha256=x"
    for path in (letters, "/api/v1/artifacts/nothing.txt", "/api/v1/jobs/1/artifacts", inner):
        for given in ({}, {"Authorization": "Bearer wrong"}):
            assert fetch(node, path, **proxied, **given)[0] == 401, path
    token = f"Bearer {private.read_token(node.folder)}"
    assert fetch(node, letters, **proxied, Authorization=token)[0] == 200
    assert fetch(node, letters, **proxied, Authorization=token, Origin="https://elsewhere.example")[0] == 403
    with node.open_store() as store:
        secret = f"Bearer {store.meta.get(SECRET)}"  # what nodes know each other by opens the inner route alone
    assert fetch(node, letters, **proxied, Authorization=secret)[0] == 401
    assert fetch(node, inner, **proxied, Authorization=secret)[0] == 409


# ---- a file that goes while it is read, and one that is large


def test_a_file_that_retention_deletes_while_it_is_streamed_is_read_to_its_end(node: Node) -> None:
    job = run(node, "publish_large", key="large.bin", megabytes=40)
    with node.open_store() as store:
        origin = store.meta.get("store_id")
    parts = urllib.parse.urlsplit(node.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    connection.request("GET", "/api/v1/artifacts/large.bin")
    answer = connection.getresponse()
    body = answer.read(1_000_000)
    assert LocalResults(node.folder / "results").remove("large.bin", job, origin or "")  # as upkeep does
    assert fetch(node, "/api/v1/artifacts/large.bin")[0] == 404
    while piece := answer.read(1_000_000):
        body += piece
    connection.close()
    assert len(body) == 40_000_000
    assert [body[n * 1_000_000] for n in range(40)] == [*range(40)]


def test_clients_that_do_not_read_hold_up_nobody(node: Node) -> None:
    """More clients than there are threads to read files have begun a large file and left it; others are answered all the same."""
    run(node, "publish_large", key="slow.bin", megabytes=40)
    parts = urllib.parse.urlsplit(node.url)
    waiting = []
    for _ in range(60):
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        connection.request("GET", "/api/v1/artifacts/slow.bin")
        waiting.append((connection, connection.getresponse()))
    assert len(fetch(node, "/api/v1/artifacts/slow.bin")[2]) == 40_000_000
    assert node.get("/api/v1/info")[0] == 200
    for connection, answer in waiting:
        answer.close()
        connection.close()


def open_files(node: Node) -> list[str]:
    found = []
    for path in Path(f"/proc/{node.pid}/fd").iterdir():
        try:
            found.append(str(path.readlink()))
        except OSError:
            continue
    return [name for name in found if "/results/" in name]


def test_no_file_stays_open(node: Node) -> None:
    run(node, "publish_large", key="left.bin", megabytes=40)
    parts = urllib.parse.urlsplit(node.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    connection.request("GET", "/api/v1/artifacts/left.bin")
    connection.getresponse().read(1000)
    assert open_files(node)
    connection.close()
    tag = fetch(node, "/api/v1/artifacts/left.bin", "HEAD")[1]["etag"]
    assert fetch(node, "/api/v1/artifacts/left.bin", If_None_Match=tag)[0] == 304
    assert fetch(node, "/api/v1/artifacts/left.bin", Range="bytes=99999999999-")[0] == 416
    until(lambda: not open_files(node), "the files to be closed")
