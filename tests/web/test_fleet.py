"""Two nodes on one store: any of them shows both, and does what is asked of either."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ostler.live import remote
from ostler.store import Store, fleet
from tests.browser import PATIENCE, launched
from tests.cli.test_cli import ostler
from tests.harness import APP, Node, until
from tests.servers import Server, free_port
from tests.sse import Stream

PASSWORD = "sesame-9f3b"


class Pair:
    """n1 listens on loopback only, n2 advertises an address."""

    def __init__(self, folder: Path, server: Server) -> None:
        name = server.create_database()
        role = f"fleet_{name}"
        server.create_role(role, PASSWORD)
        server.sql(f'GRANT ALL ON DATABASE "{name}" TO "{role}"')
        self.store_url = server.url(name, user=role, password=PASSWORD, tcp=True)
        self.folder = folder
        pools = ("--pool", "work=1", "--pool", "other=1")
        port = free_port()
        self.n1 = Node(folder / "n1", APP, "--name", "n1", *pools, OSTLER_STORE=self.store_url)
        self.n2 = Node(folder / "n2", APP, "--name", "n2", "--port", str(port), *pools, OSTLER_STORE=self.store_url)
        self.n2.env["OSTLER_ADVERTISE"] = f"http://127.0.0.1:{port}"

    def open(self) -> Store:
        return Store.open(self.store_url, self.folder)

    def cli(self, *args: str, data: str = "nowhere") -> Any:
        """By default where no node runs: only the store is known there."""
        return ostler(*args, "--data", str(self.folder / data), OSTLER_STORE=self.store_url)

    def status(self, name: str) -> str:
        return str(self.n1.get(f"/api/v1/workers/{name}")[1]["status"])

    def wait(self, name: str, *wanted: str) -> None:
        until(lambda: self.status(name) in wanted, f"{name} to be {wanted}")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, postgres: Server) -> Iterator[Pair]:
    found = Pair(tmp_path_factory.mktemp("fleet"), postgres)
    try:
        found.n1.start()
        found.n2.start()
        for node in (found.n1, found.n2):
            until(lambda node=node: len(node.get("/api/v1/nodes")[1]["nodes"]) == 2, "both nodes to be known")
        yield found
    finally:
        for node in (found.n1, found.n2):
            if node.process is not None and node.process.poll() is None:
                node.kill()


def text_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as response:
        return str(response.read().decode())


def on_n2(pair: Pair, task: str, **args: Any) -> int:
    """Run a job on n2, by draining what n1 has for it."""
    assert pair.n1.post("/api/v1/workers/n1/worker:other:0/drain")[0] == 200
    pair.wait("n1/worker:other:0", "stopped")
    job = pair.n1.enqueue(task, **args)
    pair.n1.wait_job(job, "done")
    assert pair.n1.post("/api/v1/workers/n1/worker:other:0/restart")[0] == 200
    pair.wait("n1/worker:other:0", "healthy")
    return job


# ---- looking


def test_any_node_lists_all_nodes_and_workers(pair: Pair) -> None:
    for node in (pair.n1, pair.n2):
        found = {n["name"]: n for n in node.get("/api/v1/nodes")[1]["nodes"]}
        assert {n: (v["alive"], v["status"], sum(v["workers"].values())) for n, v in found.items()} == {
            "n1": (True, "healthy", 2),
            "n2": (True, "healthy", 2),
        }
        assert (found["n1"]["url"], found["n2"]["url"]) == (None, pair.n2.env["OSTLER_ADVERTISE"])
        workers = node.workers()
        assert {w["name"] for w in workers} == {f"{n}/worker:{p}:0" for n in ("n1", "n2") for p in ("work", "other")}
        assert all(w["heartbeat_age"] < 60 for w in workers)
        health = node.get("/api/v1/health")[1]
        assert (health["status"], health["workers"], len(health["nodes"])) == ("healthy", {"healthy": 4}, 2)


def test_the_command_line_shows_them_where_no_node_runs(pair: Pair) -> None:
    shown = pair.cli("nodes").stdout
    assert "loopback only" in shown and pair.n2.env["OSTLER_ADVERTISE"] in shown
    assert [n["name"] for n in json.loads(pair.cli("nodes", "--json").stdout)["nodes"]] == ["n1", "n2"]
    assert "n2/worker:work:0" in pair.cli("workers").stdout
    health = pair.cli("health")
    assert health.returncode == 0 and "node n2 is healthy" in health.stdout


def test_a_stream_of_one_node_tells_the_workers_of_the_other(pair: Pair) -> None:
    stream = Stream(pair.n1.url, "worker:*:status,system:nodes")

    def of(node: str) -> dict[str, Any]:
        found = [e["worker"] for e in stream.events if "worker" in e and e["worker"]["name"] == f"{node}/worker:work:0"]
        return found[-1] if found else {}

    stream.wait(lambda: of("n1") and of("n2"), "the workers of both")
    assert of("n1")["pid"] != of("n2")["pid"] and of("n2")["node"] == "n2"
    assert {e["node"]["name"] for e in stream.events if "node" in e} == {"n1", "n2"}
    generation = of("n2")["generation"]
    pair.n1.post("/api/v1/workers/n2/worker:work:0/restart")
    stream.wait(
        lambda: of("n2")["generation"] > generation and of("n2")["status"] == "healthy", "the restart on the other node"
    )
    stream.close()


def test_metrics_of_a_node_count_its_own_workers_once_and_tell_all(pair: Pair) -> None:
    text = text_of(f"{pair.n1.url}/metrics")
    assert re.findall(r'^ostler_workers\{node="(\w+)",pool="work"', text, re.MULTILINE) == ["n1"]
    assert set(re.findall(r'^ostler_fleet_workers\{node="(\w+)",pool="work"', text, re.MULTILINE)) == {"n1", "n2"}
    assert re.findall(r'^ostler_node_up\{node="n2"\} 1', text, re.MULTILINE)


# ---- asking


def test_a_name_that_several_nodes_have_is_refused_with_the_candidates(pair: Pair) -> None:
    status, answer = pair.n1.post("/api/v1/workers/worker:work:0/drain")
    assert status == 409
    assert "n1/worker:work:0, n2/worker:work:0" in answer["error"]["message"]
    assert pair.n1.get("/api/v1/workers/n9/worker:work:0")[0] == 404
    done = pair.cli("drain", "work:0")
    assert done.returncode == 2 and "n1/worker:work:0, n2/worker:work:0" in done.stderr


@pytest.mark.parametrize("asked", ["api", "store", "cli"])
def test_verbs_reach_the_worker_of_another_node(pair: Pair, asked: str) -> None:
    def ask(verb: str, target: str = "n2/worker:work:0") -> None:
        if asked == "api":
            status, answer = pair.n1.post(f"/api/v1/workers/{target}/{verb}")
            assert status in (200, 202), answer
        else:
            done = pair.cli(verb, target, data="n1" if asked == "cli" else "nowhere")
            assert done.returncode == 0, done.stderr

    before = _row(pair, "n2/worker:work:0")["generation"]
    ask("drain")
    pair.wait("n2/worker:work:0", "stopped")
    assert pair.status("n1/worker:work:0") == "healthy"
    ask("restart")
    pair.wait("n2/worker:work:0", "healthy")
    ask("kill")
    until(lambda: _row(pair, "n2/worker:work:0")["generation"] > before + 1, "the next process")
    pair.wait("n2/worker:work:0", "healthy")
    assert _row(pair, "n2/worker:work:0")["restart_count"] == 0
    os.kill(_row(pair, "n2/worker:work:0")["pid"], signal.SIGKILL)
    until(lambda: _row(pair, "n2/worker:work:0")["restart_count"] == 1, "the crash")
    pair.wait("n2/worker:work:0", "healthy")
    ask("reset")
    until(lambda: _row(pair, "n2/worker:work:0")["restart_count"] == 0, "the reset")
    if asked != "api":
        ask("drain", "n2/work")  # a pool of one node
        pair.wait("n2/worker:work:0", "stopped")
        ask("restart", "work")  # … and of all
        pair.wait("n2/worker:work:0", "healthy")
        pair.wait("n1/worker:work:0", "healthy")


def _row(pair: Pair, name: str) -> dict[str, Any]:
    return dict(pair.n1.get(f"/api/v1/workers/{name}")[1])


def test_the_other_nodes_refusal_comes_back_as_its_own(pair: Pair) -> None:
    pair.n1.post("/api/v1/workers/n2/worker:other:0/drain")
    pair.wait("n2/worker:other:0", "stopped")
    status, answer = pair.n1.post("/api/v1/workers/n2/worker:other:0/kill")
    assert status == 409 and "no process to kill" in answer["error"]["message"]
    done = pair.cli("kill", "n2/other:0")
    assert done.returncode == 2 and "no process to kill" in done.stderr
    pair.n1.post("/api/v1/workers/n2/worker:other:0/restart")
    pair.wait("n2/worker:other:0", "healthy")


def test_pause_holds_all_nodes_and_resume_starts_stopped_workers_everywhere(pair: Pair) -> None:
    assert pair.n1.post("/api/v1/pools/other/pause")[0] == 200
    until(lambda: _paused(pair.n2), "the other node to pause")
    pair.n1.post("/api/v1/workers/n2/worker:other:0/drain")
    pair.wait("n2/worker:other:0", "stopped")
    assert pair.cli("resume", "other").returncode == 0
    pair.wait("n2/worker:other:0", "healthy")
    until(lambda: not _paused(pair.n1) and not _paused(pair.n2), "both to go on")


def _paused(node: Node) -> bool:
    return next(bool(p["paused"]) for p in node.get("/api/v1/pools")[1]["pools"] if p["pool"] == "other")


def test_a_job_that_runs_on_another_node_is_cancelled_from_here(pair: Pair, tmp_path: Path) -> None:
    jobs = [pair.n1.enqueue("wait_for", path=str(tmp_path / "never")) for _ in range(2)]
    for job in jobs:
        pair.n1.wait_running(job)
    assert {pair.n1.job(job)["node"] for job in jobs} == {"n1", "n2"}
    for job in jobs:
        assert pair.n1.post(f"/api/v1/jobs/{job}/cancel")[0] == 200
    assert {pair.n1.wait_job(job)["status"] for job in jobs} == {"cancelled"}


def test_a_node_that_does_not_answer_is_told_as_such(pair: Pair) -> None:
    pair.n2.signal(signal.SIGSTOP)
    try:
        status, answer = pair.n1.post("/api/v1/workers/n2/worker:work:0/restart")
        assert (status, answer["message"]) == (202, "requested; node n2 has not answered yet")
        done = pair.cli("reset", "n2/worker:work:0")
        assert "requested; node n2 has not answered yet" in done.stdout
    finally:
        pair.n2.signal(signal.SIGCONT)
    with pair.open() as store:
        node = fleet.read(store).node("n2")["id"]
        until(lambda: not store.nodes.wishes(node), "the node to do it when it can")
    pair.wait("n2/worker:work:0", "healthy")


# ---- logs


def test_what_a_worker_and_a_job_of_another_node_print_is_read_there(pair: Pair) -> None:
    job = on_n2(pair, "other", say="hello from afar")
    assert "hello from afar" in text_of(f"{pair.n1.url}/api/v1/workers/n2/worker:other:0/logs")
    for path in (f"/api/v1/jobs/{job}/logs/follow", "/api/v1/workers/n2/worker:other:0/logs/follow"):
        stream = Stream(pair.n1.url, path=path)
        stream.wait(lambda stream=stream: any("hello from afar" in e.get("lines", ()) for e in stream.events), path)
        stream.close()
    assert "hello from afar" in pair.cli("logs", "n2/worker:other:0").stdout
    done = pair.cli("logs", "--job", str(job), data="n1")
    assert "hello from afar" in done.stdout and "node n2" in done.stderr


def test_a_log_that_is_followed_goes_on(pair: Pair) -> None:
    on_n2(pair, "other", say="the first line")
    stream = Stream(pair.n1.url, path="/api/v1/workers/n2/worker:other:0/logs/follow")
    stream.wait(lambda: any("the first line" in e.get("lines", ()) for e in stream.events), "the first line")
    on_n2(pair, "other", say="the second line")
    stream.wait(lambda: any("the second line" in e.get("lines", ()) for e in stream.events), "the second line")
    said = [line for e in stream.events for line in e.get("lines", ())]
    assert said.count("the first line") == 1 == said.count("the second line")
    stream.close()


def test_a_log_is_followed_across_a_restart_of_its_node(pair: Pair) -> None:
    on_n2(pair, "other", say="before the restart")
    stream = Stream(pair.n1.url, path="/api/v1/workers/n2/worker:other:0/logs/follow")
    stream.wait(lambda: any("before the restart" in e.get("lines", ()) for e in stream.events), "the first line")
    assert pair.n2.stop() == 0
    pair.n2.start()
    until(lambda: len(pair.n1.get("/api/v1/nodes")[1]["nodes"]) == 2, "both nodes to be known")
    on_n2(pair, "other", say="after the restart")
    stream.wait(lambda: any("after the restart" in e.get("lines", ()) for e in stream.events), "the line after it")
    stream.close()


def test_a_node_on_loopback_is_named_as_unreachable(pair: Pair) -> None:
    words = "node n1 listens on loopback only; set advertise"
    status, answer = pair.n2.get("/api/v1/workers/n1/worker:work:0/logs")
    assert status == 502 and words in answer["error"]["message"]
    stream = Stream(pair.n2.url, path="/api/v1/workers/n1/worker:work:0/logs/follow")
    stream.wait(lambda: any(words in e.get("error", "") for e in stream.events), "the reason")
    stream.close()
    done = pair.cli("logs", "n1/worker:work:0")
    assert done.returncode == 2 and words in done.stderr


def test_inner_routes_take_the_secret_of_the_store_and_no_other_route_does(pair: Pair) -> None:
    with pair.open() as store:
        secret, node = store.meta.get(remote.SECRET), fleet.read(store).node("n2")
    assert secret and len(secret) == 64
    asked = f"{remote.PATH}?node={node['id']}&subject=worker:work:0"
    as_node = {
        "Authorization": f"Bearer {secret}",
        "Forwarded": "for=1.2.3.4",
    }  # what our own user may do does not count
    as_stranger = {"Authorization": "Bearer wrong", "Forwarded": "for=1.2.3.4"}
    assert _status(pair.n2.url + asked, as_node) == 200
    assert _status(pair.n2.url + asked, {**as_node, "Host": "jobs.example.org"}) == 200
    assert _status(pair.n2.url + asked, as_stranger) == 401
    assert _status(pair.n2.url + "/api/v1/workers", as_node) == 401
    assert _status(pair.n2.url + asked, as_node, "POST") == 401
    assert _status(pair.n2.url + asked.replace(node["id"], "n9@1"), as_node) == 409
    assert _status(f"{pair.n2.url}{remote.PATH}?node={node['id']}&subject=worker:..:0%2F..%2Fx", as_node) == 422


def test_a_request_is_not_passed_on_twice(pair: Pair) -> None:
    url = f"{pair.n1.url}/api/v1/workers/n2/worker:work:0/logs"
    assert _status(url, {}) == 200
    assert _status(url, {remote.BY: "n9@1"}) == 409


def _status(url: str, headers: dict[str, str], method: str = "GET") -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers, method=method), timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_neither_password_nor_secret_is_shown_anywhere(pair: Pair) -> None:
    with pair.open() as store:
        secret = str(store.meta.get(remote.SECRET))
    said = [
        text_of(pair.n1.url + path)
        for path in ("/api/v1/info", "/api/v1/nodes", "/api/v1/workers", "/api/v1/health", "/metrics", "/openapi.json")
    ]
    said += [pair.n1.log(), pair.n2.log(), (pair.n1.folder / "node.json").read_text()]
    for args in (("nodes", "--json"), ("workers", "--json"), ("health", "--json"), ("doctor", "--json"), ("doctor",)):
        done = pair.cli(*args, data="n1")
        said += [done.stdout, done.stderr]
    wrong = ostler("nodes", OSTLER_STORE=pair.store_url.replace(PASSWORD, f"{PASSWORD}-wrong"))
    assert wrong.returncode == 2
    odd = ostler("nodes", OSTLER_STORE=pair.store_url.replace("127.0.0.1:", "127.0.0.1:x"))
    assert odd.returncode == 2
    said += [wrong.stderr, odd.stderr]
    for text in said:
        assert PASSWORD not in text and secret not in text
    assert json.loads(said[0])["store"].startswith("postgresql://127.0.0.1:")


# ---- the dashboard and the terminal


def test_the_dashboard_of_one_node_shows_both_and_commands_the_other(pair: Pair) -> None:
    with launched() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 800})
        page.set_default_timeout(PATIENCE)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{pair.n1.url}/#/nodes")
        page.locator("tbody tr").nth(1).wait_for()
        shown = page.locator("tbody").inner_text()
        assert "n1 this node" in " ".join(shown.split()) and "loopback only" in shown and "n2" in shown
        page.locator('nav a[data-page="workers"]').click()
        rows = page.locator('tbody[aria-label="Pool work"] tr:not(.group)')
        rows.nth(1).wait_for()
        assert [rows.nth(i).locator("td.node").inner_text() for i in range(2)] == ["n1", "n2"]
        rows.nth(1).locator("th a").click()
        page.get_by_role("heading", name="n2/worker:work:0").wait_for()
        page.get_by_role("button", name="Drain").click()
        page.get_by_role("dialog").get_by_role("button", name="Drain").click()
        pair.wait("n2/worker:work:0", "stopped")
        page.locator('#detail .pill[data-state="stopped"]').wait_for()
        page.get_by_role("button", name="Restart").click()
        page.get_by_role("dialog").get_by_role("button", name="Restart").click()
        page.locator('#detail .pill[data-state="healthy"]').wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways on a phone"
        page.goto(f"{pair.n2.url}/#/workers/n1/worker:work:0")
        page.get_by_text("node n1 listens on loopback only").wait_for()
        assert not errors


def test_top_and_events_tell_the_workers_of_both(pair: Pair) -> None:
    top = pair.cli("top", "--once", data="n1").stdout
    assert "2 of 2 nodes live" in top and "n1/worker:work:0" in top and "n2/worker:work:0" in top
    events = pair.cli("events", "--once", data="n1").stdout
    assert "n2/worker:work:0" in events and "node n2" in events


# ---- a node that dies (last: the pair is not whole afterwards)


def test_a_dead_node_degrades_the_health_until_it_is_forgotten(pair: Pair) -> None:
    pair.n2.kill()
    with pair.open() as store:
        node = fleet.read(store).node("n2")["id"]
        store.db._query(
            f"UPDATE ostler.nodes SET lease_ms = 1 WHERE id = '{node}'"
        )  # instead of waiting for half a minute
    found = until(lambda: _complaint(pair.n1), "the dead node to be missed")
    assert "ostler nodes --forget n2" in found
    stream = Stream(pair.n1.url, "worker:*:status,system:health")
    stream.wait(lambda: any("node n2 is dead" in str(e.get("health", "")) for e in stream.events), "the reason")
    stream.close()
    assert pair.cli("health").returncode == 1
    assert pair.n1.post("/api/v1/workers/n2/worker:work:0/drain")[0] == 404
    assert "dead" in pair.cli("nodes").stdout
    assert pair.cli("nodes", "--forget", "n1").returncode == 2
    until(lambda: pair.cli("nodes", "--forget", "n2").returncode == 0, "it to be forgotten")
    assert pair.n1.get("/api/v1/health")[1]["status"] == "healthy"
    assert pair.n1.workers()[0]["name"] == "worker:other:0"  # there is one node: its name is not needed


def _complaint(node: Node) -> str:
    errors = node.get("/api/v1/health")[1]["errors"]
    return next((e for e in errors if e.startswith("node n2 is dead")), "")
