"""Sessions from the client's socket to the worker and back, with a real node, real processes and real signals."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.harness import Node, family_of, gone, until

APP = Path(__file__).parent / "echo_app.py"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """One node for all that leave it as it was."""
    node = started(tmp_path_factory.mktemp("sessions") / "data")
    yield node
    node.stop()


def started(folder: Path) -> Node:
    node = Node(folder, APP, OSTLER_HEARTBEAT_INTERVAL="0.5").start(ready=False)
    try:
        for pool in ("echo", "short", "each", "program"):
            until(lambda pool=pool: ask(node, pool), f"{pool} to serve")
        node.wait_status("worker:door:0", "healthy")
    except BaseException:
        node.kill()
        raise
    return node


def ask(node: Node, pool: str) -> bool:
    """Whether a session can be had now."""
    try:
        with session(node, pool, "?wait=0.1") as client:
            client.send("are you there")
            return client.recv(timeout=5) == "are you there"
    except (InvalidStatus, OSError, ConnectionClosed, TimeoutError):
        return False


def session(node: Node, pool: str, rest: str = "", **how: Any) -> ClientConnection:
    url = f"{node.url.replace('http', 'ws')}/sessions/{pool}{rest}"
    return connect(url, open_timeout=30, compression=None, legacy=True, **how)


def say(client: ClientConnection, what: str) -> str:
    client.send(what)
    return str(client.recv(timeout=30))


def closed(client: ClientConnection) -> tuple[int | None, str]:
    """How the session was ended by the other side."""
    with pytest.raises(ConnectionClosed) as found:
        while True:
            client.recv(timeout=30)
    frame = found.value.rcvd
    return (frame.code, frame.reason) if frame else (None, "")


def refusal(node: Node, pool: str, rest: str = "") -> tuple[int, str]:
    with pytest.raises(InvalidStatus) as found:
        session(node, pool, rest)
    return found.value.response.status_code, (found.value.response.body or b"").decode()


def redirected(node: Node, path: str) -> str:
    """Where the client is sent."""
    host = node.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=30)
    key = {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version": "13"}
    connection.request("GET", path, headers={"Connection": "Upgrade", "Upgrade": "websocket", **key})
    answer = connection.getresponse()
    assert answer.status == 307, (answer.status, answer.read())
    connection.close()
    return answer.headers["location"]


def row(node: Node, id_: str, *, ended: bool = True) -> dict[str, Any]:
    """The session's row, once it has ended."""

    def look() -> dict[str, Any] | None:
        with node.open_store(read_only=True) as store:
            found = store.sessions.find(id_)
        return found if found and (not ended or found["ended_at"]) else None

    return until(look, f"the row of session {id_}")


def id_of(client: ClientConnection) -> str:
    assert client.response is not None
    return client.response.headers["x-ostler-session"]


def live_rows(node: Node) -> list[dict[str, Any]]:
    with node.open_store(read_only=True) as store:
        return store.sessions.list(state="live", limit=1000)[0]


# ---- as it should be


def test_a_session_is_relayed_and_its_row_tells_who_it_was_for_and_why_it_ended(node: Node) -> None:
    with session(node, "echo") as client:
        assert say(client, "hello") == "hello"
        assert say(client, "x" * 300_000) == "x" * 300_000
        found = row(node, id_of(client), ended=False)
        assert (found["pool"], found["owner"], found["ended_at"]) == ("echo", f"user:{os.geteuid()}", None)
        assert found["component"] in ("worker:echo:0", "worker:echo:1")
    found = row(node, id_of(client))
    assert found["reason"] == "client" and found["code"] == 1000
    assert found["bytes_in"] > 300_000 and found["bytes_out"] > 300_000


def test_close_codes_and_reasons_of_the_worker_reach_the_client(node: Node) -> None:
    client = session(node, "echo")
    client.send("bye")
    assert closed(client) == (4001, "as you wish")
    assert row(node, id_of(client))["reason"] == "worker"


def test_a_worker_that_opens_each_session_names_its_own_endpoint(node: Node) -> None:
    with session(node, "each", "/a/b?x=1&priority=3") as client:
        assert say(client, "path") == "/mine/a/b?x=1"
    status, body = refusal(node, "each", "/bad?wait=0.5")
    assert status == 503 and "NO_WORKER" in body
    assert ask(node, "each"), "the next one is served"


def test_any_program_can_serve_sessions(node: Node) -> None:
    with session(node, "program") as client:
        assert say(client, "hello") == "hello"


def test_the_freed_slot_goes_to_the_client_that_waits(node: Node) -> None:
    held = [session(node, "program") for _ in range(2)]
    got: list[str] = []

    def wait() -> None:
        with session(node, "program") as client:
            got.append(say(client, "mine"))

    waiting = threading.Thread(target=wait)
    waiting.start()
    status, body = refusal(node, "program", "?wait=0.2")
    assert status == 503 and "LINE_TIMEOUT" in body and not got
    held[0].close()
    waiting.join(30)
    assert got == ["mine"]
    held[1].close()


def test_a_redirected_client_talks_to_the_worker_itself_and_its_ticket_is_good_once(node: Node) -> None:
    door = redirected(node, "/sessions/door/a?x=1")
    with connect(door, legacy=True) as client:
        assert say(client, "path") == "/a?x=1"
        live = until(lambda: [r for r in live_rows(node) if r["pool"] == "door"], "its row")
        with pytest.raises(InvalidStatus) as second:
            connect(door, legacy=True)
        assert second.value.response.status_code == 403 and b"TICKET" in (second.value.response.body or b"")
        assert say(client, "still here") == "still here"
    ended = row(node, live[0]["id"])
    assert ended["reason"] == "client" and ended["bytes_in"] > 0


def test_a_pool_that_is_paused_takes_nobody_until_it_is_resumed(node: Node) -> None:
    assert node.post("/api/v1/pools/echo/pause")[0] == 200
    status, _ = refusal(node, "echo", "?wait=0.2")
    assert status == 503
    assert node.post("/api/v1/pools/echo/resume")[0] == 200
    until(lambda: ask(node, "echo"), "it to serve again")


def test_what_the_registry_has_lost_is_put_back_when_a_client_needs_it(node: Node) -> None:
    with contextlib.closing(sqlite3.connect(node.folder / "ostler.db", timeout=30)) as store:
        with store:
            assert store.execute("DELETE FROM session_workers WHERE pool = 'program'").rowcount == 1
        with session(node, "program", "?wait=5") as client:
            assert say(client, "hello") == "hello"
        assert store.execute("SELECT count(*) FROM session_workers WHERE pool = 'program'").fetchone() == (1,)


def test_a_pause_of_all_counts_for_sessions_and_one_is_over_also_for_a_pool_whose_worker_has_gone_meanwhile(
    node: Node,
) -> None:
    status, told = node.post("/api/v1/pools/plane/pause")
    assert (status, "cannot be paused" in told["error"]["message"]) == (409, True)
    assert node.post("/api/v1/workers/pause")[0] == 200
    assert "plane" not in node.get("/api/v1/health")[1]["paused"]
    assert refusal(node, "program", "?wait=0.2")[0] == 503
    assert node.post("/api/v1/workers/worker:program:0/drain")[0] == 200
    node.wait_status("worker:program:0", "stopped")
    assert node.post("/api/v1/workers/resume")[0] == 200
    until(lambda: ask(node, "program"), "it to serve again")


# ---- recycling


def test_workers_are_replaced_before_they_leave_and_nobody_is_refused(node: Node) -> None:
    pids = set()
    for _ in range(40):
        with session(node, "short") as client:
            pids.add(say(client, "pid"))
    assert len(pids) > 4, "every worker serves six at most"
    assert "did not stop" not in node.log()


def test_recycling_cuts_no_session_before_the_drain_limit_and_then_says_why(node: Node) -> None:
    held = session(node, "short")
    first = id_of(held)
    pid = say(held, "pid")
    worker = row(node, first, ended=False)["component"]
    assert node.post(f"/api/v1/workers/{worker}/restart")[0] in (200, 202)
    assert say(held, "still served") == "still served"
    assert closed(held) == (1001, "ostler: the worker leaves, and its drain limit of 0.5 s is over")
    assert row(node, first)["reason"] == "drained"
    until(lambda: gone(int(pid)), "the old worker to go")
    until(lambda: ask(node, "short"), "the pool to serve on")


# ---- ends of processes


def test_the_death_of_a_worker_is_told_to_its_clients_and_its_slots_are_free_again(node: Node) -> None:
    client = session(node, "echo")
    pid = int(say(client, "pid"))
    os.kill(pid, signal.SIGKILL)
    code, text = closed(client)
    assert code == 1011 and "SIGKILL" in text
    found = row(node, id_of(client))
    assert found["reason"] == "worker-lost" and "SIGKILL" in found["text"]
    until(lambda: ask(node, "echo"), "the pool to serve")


def test_a_worker_that_hangs_is_found_and_its_clients_are_told(node: Node) -> None:
    client = session(node, "each")
    pid = int(say(client, "pid"))
    scratch = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[6].decode()
    (Path(scratch) / "hang").touch()
    code, text = closed(client)
    assert code == 1011 and "probe" in text
    assert row(node, id_of(client))["reason"] == "worker-hung"
    until(lambda: gone(pid), "it to be killed")
    until(lambda: not Path(scratch).exists(), "its directory to be removed")
    until(lambda: ask(node, "each"), "its successor to serve")


def test_a_worker_that_cannot_be_reached_costs_nobody_a_connection(node: Node) -> None:
    with session(node, "echo") as client:
        pid = int(say(client, "pid"))
        scratch = Path(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[6].decode())
        (scratch / "private" / "s").rename(scratch / "private" / "away")  # it lives, and nobody reaches it
        for _ in range(6):
            with session(node, "echo") as other:
                assert int(say(other, "pid")) != pid
        assert say(client, "hello") == "hello"
    until(lambda: gone(pid), "it to be replaced")
    until(lambda: ask(node, "echo"), "the pool to serve")


def test_the_death_of_the_relay_ends_its_sessions_and_no_slot_is_lost(node: Node) -> None:
    clients = [session(node, "program") for _ in range(2)]
    ids = [id_of(client) for client in clients]
    until(lambda: len([r for r in live_rows(node) if r["id"] in ids]) == 2, "their rows")
    os.kill(int(node.worker("worker:plane:0")["pid"]), signal.SIGKILL)
    for client in clients:
        closed(client)
    for one in ids:
        assert row(node, one)["reason"] == "relay-lost"

    def both() -> bool:
        try:
            with session(node, "program", "?wait=0.1") as a, session(node, "program", "?wait=0.1") as b:
                return say(a, "1") == "1" and say(b, "2") == "2"
        except (InvalidStatus, OSError, ConnectionClosed):
            return False

    until(both, "both slots to be free")


def test_the_death_of_the_node_is_told_to_its_clients_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    node = started(tmp_path / "data")
    others = [session(node, "program") for _ in range(2)]  # all its slots
    refused: list[tuple[int, str]] = []
    waiting = threading.Thread(target=lambda: refused.append(refusal(node, "program")))
    waiting.start()
    until(lambda: any(pool["waiting"] for pool in node.get("/api/v1/capacity")[1]["pools"]), "one to wait in line")
    client = session(node, "each")
    pid = int(say(client, "pid"))
    others.append(connect(redirected(node, "/sessions/door"), legacy=True))
    scratch = Path(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[6].decode())
    assert scratch.exists()
    one = id_of(client)
    node.kill()
    for told in (client, *others):
        assert closed(told) == (1011, "ostler: the node died")
    waiting.join(30)
    assert refused[0][0] == 503 and "NO_WORKER" in refused[0][1]
    until(lambda: not family_of(node.folder), "its processes to be gone")
    until(lambda: not scratch.parent.parent.exists(), "its directories to be gone")
    node.start(ready=False)
    assert row(node, one)["reason"] == "node-lost"
    until(lambda: ask(node, "each"), "it to serve again")
    node.stop()
    assert not scratch.parent.parent.exists()
    assert not live_rows(node)
