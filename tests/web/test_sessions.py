"""Sessions over HTTP and from the terminal, against a real node with real workers, the relay and real clients."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from click.testing import CliRunner
from fastapi import FastAPI
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from ostler.cli import cli
from ostler.errors import OstlerError, StoreBusy
from ostler.sessions.views import Views
from ostler.store import Store
from ostler.store.sessions import SessionRow
from ostler.web import errors, session_view, sessions
from tests.harness import Node, call, until
from tests.sse import Stream
from tests.web.session_pools import ODD, Pools
from tests.web.sessions_app import FRAMES

APP = Path(__file__).with_name("sessions_app.py")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Shared: each test leaves it without clients."""
    running = Node(tmp_path_factory.mktemp("sessions") / "data", APP).start()
    yield running
    running.kill()


def address(node: Node, pool: str, query: str = "") -> str:
    return f"{node.url.replace('http', 'ws')}/sessions/{pool}{query}"


@contextmanager
def joined(node: Node, pool: str = "seen", **more: Any) -> Iterator[tuple[ClientConnection, str]]:
    """A client, and the id of its session."""
    with connect(address(node, pool), open_timeout=60, close_timeout=60, **more) as client:
        client.send("hello")
        assert client.recv(60) == "hello"
        assert client.response is not None
        yield client, client.response.headers["x-ostler-session"]


def one(node: Node, session: str) -> dict[str, Any]:
    return dict(node.get(f"/api/v1/sessions/{session}")[1])


def wait_ended(node: Node, session: str) -> dict[str, Any]:
    return dict(
        until(lambda: (found := one(node, session)).get("state") == "ended" and found, f"{session} to be ended")
    )


def wait_empty(node: Node) -> None:
    until(lambda: node.get("/api/v1/sessions")[1]["live"] == 0, "nobody to be connected")


def pool_of(node: Node, name: str) -> dict[str, Any]:
    return next(p for p in node.get("/api/v1/capacity")[1]["pools"] if p["name"] == name)


# ---- looking


def test_a_session_is_listed_while_it_lives_and_afterwards_with_its_reason(node: Node) -> None:
    with joined(node, user_agent_header=ODD) as (_, session):
        (found,) = [s for s in node.get("/api/v1/sessions?state=live&pool=seen")[1]["sessions"] if s["id"] == session]
        assert {k: found[k] for k in ("pool", "serves", "worker", "agent", "reason", "ended_at", "views")} == {
            "pool": "seen", "serves": "seen", "worker": "worker:seen:0", "agent": ODD, "reason": None, "ended_at": None, "views": True,
        }  # fmt: skip
        # The relay tells both once a second.
        until(lambda: one(node, session)["bytes_in"] > 0, "bytes to be counted")
        until(lambda: one(node, session)["state"] == "live", "it to be live")
        assert one(node, session)["owner"].startswith("user:")
        assert node.get("/api/v1/sessions?state=live&pool=blind")[1] == {"sessions": [], "next": None, "live": 1}
        assert node.get("/api/v1/sessions?state=live&owner=token:x")[1]["sessions"] == []
    ended = wait_ended(node, session)
    assert (ended["reason"], ended["code"], ended["views"], ended["idle"]) == ("client", 1000, False, None)
    assert ended["ended_at"] >= ended["started_at"] and ended["bytes_out"] > 0
    assert session in [s["id"] for s in node.get("/api/v1/sessions?state=ended")[1]["sessions"]]


def test_pages_go_through_the_live_ones_and_then_the_ended_ones(node: Node) -> None:
    for _ in range(3):
        with joined(node) as (_, session):
            pass
        wait_ended(node, session)
    with joined(node), joined(node):
        whole = node.get("/api/v1/sessions?limit=1000")[1]["sessions"]
        assert [s["state"] == "ended" for s in whole[:3]] == [False, False, True] and len(whole) >= 5
        found, cursor = [], ""
        while True:
            status, page = node.get(f"/api/v1/sessions?limit=2{cursor}")
            assert status == 200 and len(page["sessions"]) <= 2
            found += page["sessions"]
            if page["next"] is None:
                break
            cursor = f"&before={page['next']}"
        assert [s["id"] for s in found] == [s["id"] for s in whole]
        first = node.get("/api/v1/sessions?state=live&limit=1")[1]
        second = node.get(f"/api/v1/sessions?state=live&limit=1&before={first['next']}")[1]
        assert [s["id"] for s in first["sessions"] + second["sessions"]] == [s["id"] for s in whole[:2]]
        assert second["next"] is None
    wait_empty(node)


def test_wrong_questions_are_answered_in_words(node: Node) -> None:
    for path, status, code in (
        ("/api/v1/sessions?before=x", 422, "BAD_ARGUMENTS"),
        ("/api/v1/sessions?limit=1001", 422, "BAD_INPUT"),
        ("/api/v1/sessions?state=gone", 422, "BAD_INPUT"),
        ("/api/v1/sessions/none", 404, "NOT_FOUND"),
        ("/api/v1/sessions/none/view", 404, "NOT_FOUND"),
        (f"/api/v1/sessions/{'x' * 201}", 422, "BAD_INPUT"),
    ):
        found, answer = node.get(path)
        assert (found, answer["error"]["code"]) == (status, code), path
    assert call(node.url, "DELETE", "/api/v1/sessions/none")[1]["error"]["message"].startswith(
        "there is no session 'none'"
    )


def test_capacity_shows_slots_workers_and_who_waits(node: Node) -> None:
    assert (pool_of(node, "blind")["slots"], pool_of(node, "blind")["workers"][0]["lifetime"]) == (1, 0)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(joined(node))
        full = pool_of(node, "seen")
        assert {k: full[k] for k in ("pools", "slots", "in_use", "free", "waiting", "paused")} == {
            "pools": ["seen"], "slots": 2, "in_use": 2, "free": 0, "waiting": 0, "paused": False,
        }  # fmt: skip
        (worker,) = full["workers"]
        assert (worker["component"], worker["status"], worker["serves"], worker["in_use"]) == (
            "worker:seen:0",
            "healthy",
            True,
            2,
        )
        got: list[str] = []

        def wait() -> None:
            try:
                with joined(node) as (_, session):
                    got.append(session)
            except InvalidStatus as error:
                got.append(f"{error.response.status_code} {error.response.body!r}")

        third = threading.Thread(target=wait)
        third.start()
        full = until(
            lambda: (found := pool_of(node, "seen"))["waiting"] == 1 and found["line"] and found, "a client to wait"
        )
        assert full["line"][0]["owner"].startswith("user:") and full["line"][0]["priority"] == 0
        assert node.get("/api/v1/health")[1]["sessions"]["seen"] == {"slots": 2, "in_use": 2, "free": 0, "waiting": 1}
    third.join(60)
    assert re.fullmatch("[0-9a-f]{20}", got[0]), f"{got}\n{node.log()[-2000:]}"
    assert wait_ended(node, got[0])["waited_ms"] > 0
    until(lambda: pool_of(node, "seen")["counts"]["admitted"] >= 3, "what was admitted to be counted")
    wait_empty(node)


# ---- ending


def test_an_operator_ends_a_session_and_its_client_is_told(node: Node) -> None:
    with joined(node) as (client, session):
        status, answer = call(node.url, "DELETE", f"/api/v1/sessions/{session}")
        assert (status, answer) == (202, {"ok": True, "action": "end", "session": session, "here": True})
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(60)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
        assert "ended by user:" in closed.value.rcvd.reason
    ended = wait_ended(node, session)
    assert (ended["reason"], ended["code"]) == ("killed", 1008)
    until(lambda: any(session in i["text"] for i in node.get("/api/v1/incidents")[1]["incidents"]), "the incident")
    status, answer = call(node.url, "DELETE", f"/api/v1/sessions/{session}")
    assert (status, answer["error"]["code"]) == (409, "CONFLICT")
    assert answer["error"]["message"] == f"session {session} has already ended: killed"


# ---- the live view


@contextmanager
def watching(node: Node, session: str) -> Iterator[http.client.HTTPResponse]:
    link = http.client.HTTPConnection(urlsplit(node.url).netloc, timeout=60)
    try:
        link.request("GET", f"/api/v1/sessions/{session}/view")
        yield link.getresponse()
    finally:
        link.close()


def test_a_view_shows_frames_while_the_session_lives_and_ends_with_it(node: Node) -> None:
    with joined(node) as (client, session):
        with watching(node, session) as answer:
            assert answer.status == 200
            assert answer.headers["content-type"] == "multipart/x-mixed-replace; boundary=ostler-frame"
            seen = b""
            while not all(frame in seen for frame in FRAMES):
                seen += answer.read1(65_536)
            client.close()
            while answer.read1(65_536):
                pass
        assert wait_ended(node, session)["reason"] == "client"
        status, said = node.get(f"/api/v1/sessions/{session}/view")
        assert (status, said["error"]["message"]) == (409, f"session {session} has ended: client")
    with joined(node, "blind") as (_, session):
        status, said = node.get(f"/api/v1/sessions/{session}/view")
        assert (status, said["error"]["code"]) == (409, "CONFLICT")
        assert "show no live view" in said["error"]["message"]
    wait_empty(node)


def test_viewers_are_bounded_and_one_that_leaves_makes_room(node: Node) -> None:
    with joined(node) as (_, session):
        with ExitStack() as stack:
            answers = [stack.enter_context(watching(node, session)) for _ in range(8)]  # what one worker serves
            assert [a.status for a in answers] == [200] * 8
            for answer in answers:
                assert answer.read1(10)
            with watching(node, session) as one_more:
                assert one_more.status == 409
                assert "too many watch" in json.loads(one_more.read())["error"]["message"]

        def again() -> bool:
            with watching(node, session) as answer:
                return answer.status == 200

        until(again, "a place to be free")
    wait_empty(node)


# ---- beside it


def test_metrics_and_events_follow_sessions(node: Node) -> None:
    with Stream(node.url, "session:*:status") as stream:
        stream.live()
        used = lambda: stream.of("session:blind:status")["in_use"]
        with joined(node, "blind") as (_, session):
            stream.wait(lambda: used() == 1, "the pool to be told")
            assert stream.of("session:blind:status")["workers"][0]["in_use"] == 1
        stream.wait(lambda: used() == 0, "the end to be told")
    wait_ended(node, session)
    for line in (
        r'ostler_sessions_total\{pool="blind",reason="client"\} [1-9]',
        r'ostler_sessions_slots\{pool="seen"\} 2\.0',
        r'ostler_sessions_live\{pool="blind"\} 0\.0',
        r'ostler_session_wait_seconds_count\{pool="blind"\} [1-9]',
        r'ostler_session_bytes_total\{direction="in",pool="blind"\} [1-9]',  # the relay tells them once a second
    ):
        until(lambda line=line: re.search(line, metrics(node)), line)


def metrics(node: Node) -> str:
    with urllib.request.urlopen(f"{node.url}/metrics", timeout=60) as answer:
        return str(answer.read(), "utf-8")


def test_the_description_of_the_api_has_all_of_it(node: Node) -> None:
    paths = node.get("/openapi.json")[1]["paths"]
    assert {m for m in paths["/api/v1/sessions/{session}"]} == {"get", "delete"}
    assert "multipart/x-mixed-replace" in paths["/api/v1/sessions/{session}/view"]["get"]["responses"]["200"]["content"]
    for path, schema in (("/api/v1/sessions", "SessionPage"), ("/api/v1/capacity", "CapacityView")):
        assert paths[path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith(schema)


# ---- the terminal


def ostler(folder: Path, *words: str) -> str:
    """What a command prints; its error, where it has one."""
    done = CliRunner().invoke(cli, [*words, "--data", str(folder)])
    said = done.exception if isinstance(done.exception, OstlerError) else ""
    assert said or done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return f"{done.output}{said}"


def test_the_terminal_lists_and_ends_sessions_and_shows_capacity(node: Node) -> None:
    with joined(node) as (_, earlier):
        pass
    wait_ended(node, earlier)
    with joined(node) as (client, session):
        shown = ostler(node.folder, "sessions")
        assert re.search(rf"{session}\s+(?:live|opening)\s+user:\d+.*worker:seen:0", shown), shown
        assert (
            json.loads(ostler(node.folder, "sessions", "list", "--state", "live", "--json"))["sessions"][0]["id"]
            == session
        )
        room = ostler(node.folder, "sessions", "capacity")
        assert "seen: 1 in use, 1 of 2 slots free, 0 waiting" in room and "■□" in room
        assert {p["name"] for p in json.loads(ostler(node.folder, "sessions", "capacity", "--json"))["pools"]} == {
            "seen",
            "blind",
        }
        assert ostler(node.folder, "sessions", "kill", session) == f"ended session {session}\n"
        with pytest.raises(ConnectionClosed):
            client.recv(60)
    wait_ended(node, session)
    said = ostler(node.folder, "sessions", "kill", session, "none")
    assert f"session {session} has already ended: killed" in said and "there is no session 'none'" in said
    assert "killed: ostler: the session was ended by user:" in ostler(
        node.folder, "sessions", "--state", "ended", "--pool", "seen"
    )
    assert "--before" in ostler(node.folder, "sessions", "--limit", "1")
    wait_empty(node)


def test_without_a_node_the_terminal_reads_the_store(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    with Store.open("", folder) as store:
        store.sessions.add([row("a1", 1000, 2000), row("a2", 3000, None)])
    assert "a2" in ostler(folder, "sessions") and "a1" in ostler(folder, "sessions")
    page = json.loads(ostler(folder, "sessions", "--state", "ended", "--json"))
    assert [(s["id"], s["state"], s["worker"]) for s in page["sessions"]] == [("a1", "ended", "worker:chromium:0")]
    page = json.loads(ostler(folder, "sessions", "--limit", "1", "--json"))
    assert "a1" in ostler(folder, "sessions", "--before", page["next"])
    assert "no node is running" in ostler(folder, "sessions", "capacity")


# ---- what a node alone cannot show: other nodes, and an app without sessions


def row(session: str, began: int, ended: int | None, node: str = "far@1", **more: Any) -> SessionRow:
    reason = "client" if ended else None
    known = SessionRow(session, "chromium", "chromium", node, "worker:chromium:0", 1, "token:a", 0, "10.0.0.9:1", "x", None, None,
                       1.5, began, ended, reason, None, 1000 if ended else None, 7, 9, ended or began)  # fmt: skip
    return known._replace(**more)


class Alone:
    """The routes, on a store in this thread and made-up pools."""

    def __init__(self, store: Store, pools: Pools | None) -> None:
        self.store, self.pools = store, pools
        self.supervisor = SimpleNamespace(member=SimpleNamespace(id="n@1"))
        self.metrics = SimpleNamespace(sessions=SimpleNamespace(sessions=None))
        self.sessions, self.reader = pools, self
        app = FastAPI()
        errors.install(app)
        app.include_router(sessions.router(self))  # type: ignore[arg-type]
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x")

    async def call(self, work: Any) -> Any:
        return work(self.store)

    def ask(self, method: str, path: str) -> tuple[int, Any]:
        async def main() -> tuple[int, Any]:
            answer = await self.client.request(method, path)
            return answer.status_code, answer.json()

        return asyncio.run(main())


class Far:
    """Another node on the registry."""

    def __init__(self, *rows: SessionRow) -> None:
        self.rows = rows
        self.is_away = False

    async def live(self) -> list[dict[str, Any]]:
        if self.is_away:
            raise StoreBusy("the registry is away")
        return [row._asdict() for row in self.rows]

    def workers(self) -> list[dict[str, Any]]:
        return [{"node": "far@1", "name": "far", "url": "http://far:8356", "pool": "chromium", "serves": "chromium", "component": "worker:chromium:0", "generation": 1,
                 "status": "available", "slots": 8, "in_use": 3, "free": 5, "served": 9, "lifetime": 50, "versions": ("1.65",)}]  # fmt: skip


def test_sessions_of_other_nodes_are_listed_and_ended_through_the_registry(sqlite_store: Store) -> None:
    sqlite_store.sessions.add([row("own-stale", 1, None, "n@1"), row("far-over", 5, 6)])
    pools = Pools()
    pools.neighbours = Far(row("far-live", 5_000_000_000_000, None))
    scene = Alone(sqlite_store, pools)
    found = scene.ask("GET", "/api/v1/sessions?limit=1000")[1]
    assert [s["id"] for s in found["sessions"]][0] == "far-live" and found["sessions"][-1]["id"] == "far-over"
    assert len(found["sessions"]) == 42 and found["live"] == 40  # what is stale in the store is not shown as live
    assert (found["sessions"][0]["node"], found["sessions"][0]["idle"]) == ("far@1", None)
    assert scene.ask("GET", "/api/v1/sessions/far-live")[1]["state"] == "live"
    (far,) = scene.ask("GET", "/api/v1/capacity")[1]["elsewhere"]
    assert (far["name"], far["free"], far["versions"]) == ("far", 5, ["1.65"])
    pools.neighbours.is_away = True
    assert len(scene.ask("GET", "/api/v1/sessions?state=live&limit=1000")[1]["sessions"]) == 40
    pools.neighbours.is_away = False
    pools.elsewhere.append("far-live")
    assert scene.ask("DELETE", "/api/v1/sessions/far-live") == (
        202,
        {"ok": True, "action": "end", "session": "far-live", "here": False},
    )
    pools.elsewhere.clear()
    status, answer = scene.ask("DELETE", "/api/v1/sessions/far-live")
    assert (status, "belongs to node far@1" in answer["error"]["message"]) == (409, True)
    assert "watch it there" in scene.ask("GET", "/api/v1/sessions/far-live/view")[1]["error"]["message"]


def test_what_clients_say_of_themselves_is_cut(sqlite_store: Store) -> None:
    sqlite_store.sessions.add([row("long", 5, 6, owner="o" * 900, agent="a" * 9000, text="t" * 900, client=None)])
    scene = Alone(sqlite_store, None)
    found = scene.ask("GET", "/api/v1/sessions/long")[1]
    assert (len(found["owner"]), len(found["agent"]), len(found["text"]), found["client"]) == (200, 300, 300, None)


def test_an_app_without_sessions_answers_with_none(sqlite_store: Store) -> None:
    scene = Alone(sqlite_store, None)
    assert scene.ask("GET", "/api/v1/sessions") == (200, {"sessions": [], "next": None, "live": 0})
    assert scene.ask("GET", "/api/v1/capacity") == (200, {"node": "n@1", "pools": [], "elsewhere": []})
    assert scene.ask("DELETE", "/api/v1/sessions/x")[0] == 404


def test_a_node_has_so_many_viewers_at_once_and_a_dead_worker_is_told(
    sqlite_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = Pools()
    pools.sockets["*"] = str(tmp_path / "nobody.sock")
    scene = Alone(sqlite_store, pools)
    path = f"/api/v1/sessions/{pools.sessions[3]['id']}/view"
    for _ in range(20):  # who is refused takes no place
        status, answer = scene.ask("GET", path)
        assert (status, answer["error"]["code"]) == (502, "NODE_UNREACHABLE")
    monkeypatch.setattr(session_view, "_MOST", 0)
    status, answer = scene.ask("GET", path)
    assert (status, answer["error"]["code"]) == (429, "TOO_MANY_VIEWERS")


def test_a_viewer_that_does_not_read_loses_its_place_to_one_that_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_view, "_MOST", 1)

    class Code:
        async def view(self, session: Any) -> Any:
            while True:
                yield b"x" * 100_000

    async def main() -> None:
        pools, served = Pools(), Views(Code(), {"a": SimpleNamespace(id="a")}, str(tmp_path / "a.sock"))
        pools.sockets["a"] = await served.start()
        pools.sessions[0]["id"] = "a"
        views, stuck = session_view.Views(), asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                stuck.set()
                await asyncio.Event().wait()

        async def receive() -> Any:
            await asyncio.Event().wait()

        first = await views.watch(pools, "a", pools.sockets["a"])
        watching = asyncio.ensure_future(first({"type": "http"}, receive, send))
        await stuck.wait()
        assert (await views.watch(pools, "a", pools.sockets["a"])).status_code == 429
        monkeypatch.setattr(session_view, "_STALLED", 0.0)
        second = await views.watch(pools, "a", pools.sockets["a"])
        assert second.status_code == 200
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert len(views._viewers) == 1  # the second's, who has not begun
        second._gone()
        assert not views._viewers
        while served._viewers:  # their worker notices
            await asyncio.sleep(0.01)
        await served.stop()

    asyncio.run(main())
