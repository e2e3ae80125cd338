"""A node behind the data plane: who asks is known, nobody is refused while the plane is replaced, and they live and die together."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import stat
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests import users
from tests.harness import Node, call, gone, until
from tests.sse import Stream
from tests.users import NOBODY, as_root, place

_ = place


@pytest.fixture
def planed(make_node):
    """Start a node behind the plane."""

    def make(*flags: str, ready: bool = True, **more: object) -> Node:
        node = make_node("--pool", "work=1", "--pool", "other=0", *flags, start=False, **more)
        node.behind_plane = True
        return node.start(ready=ready)

    return make


def plane_of(node: Node) -> int:
    return int(node.worker("worker:plane:0")["pid"] or 0)


def test_a_node_behind_the_plane_serves_as_any_other(planed) -> None:
    node = planed()
    assert node.wait_job(node.enqueue("add", a=1, b=2))["status"] == "done"
    with Stream(node.url, "queue:work:status").live() as stream:
        node.wait_job(node.enqueue("add", a=1))
        stream.wait(lambda: stream.of("queue:work:status")["completed"] == 2, "the job")
    assert call(node.url, "GET", "/nowhere")[0] == 404
    assert call(node.url, "POST", "/api/v1/jobs", b"x" * 3_000_000)[0] == 413
    assert node.stop() == 0
    assert "Traceback" not in node.log()


def test_the_nodes_own_socket_is_for_its_user_alone_and_a_stale_one_is_replaced(planed) -> None:
    node = planed()
    run = node.folder / "run"
    found = (run / "node.sock").stat()
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert (stat.S_IMODE(found.st_mode), stat.S_ISSOCK(found.st_mode)) == (0o600, True)
    node.kill()
    assert (run / "node.sock").exists()
    node.start()
    assert node.get("/api/v1/info")[0] == 200
    assert node.stop() == 0
    assert not (run / "node.sock").exists()


def test_a_data_directory_may_have_a_longer_path_than_a_socket(planed, tmp_path) -> None:
    node = planed(folder=tmp_path / ("long" * 30))
    assert node.get("/api/v1/info")[0] == 200


@as_root
def test_other_users_need_the_token_and_nobody_can_say_that_he_is_somebody_else(planed, place) -> None:
    node = planed(folder=place / "data")
    info = f"{node.url}/api/v1/info"
    token = (node.folder / "token").read_text().strip()
    assert users.status(0, info) == 200
    assert users.status(NOBODY, info) == 401
    assert users.status(NOBODY, info, Authorization=f"Bearer {token}") == 200
    for forged in ({"x-ostler-peer": "0"}, {"X-Ostler-Peer": "0", "X-Ostler-Client": "127.0.0.1:1"}):
        assert users.status(NOBODY, info, **forged) == 401
    assert users.status(0, info, **{"X-Forwarded-For": "203.0.113.9"}) == 401, (
        "a proxy of root speaks for somebody else"
    )
    dropped = {"X-Forwarded-For": "203.0.113.9", "Connection": "close, x-forwarded-for"}
    assert users.status(0, info, **dropped) == 401
    code = f"import socket; socket.socket(socket.AF_UNIX).connect({str(node.folder / 'run' / 'node.sock')!r})"
    assert users.run(NOBODY, "-c", code).returncode != 0


@as_root
def test_a_node_without_the_plane_believes_no_header_of_it(make_node, place) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0", folder=place / "data")
    node_info = f"{node.url}/api/v1/info"
    assert users.status(NOBODY, node_info, **{"x-ostler-peer": "0"}) == 401


def test_several_users_on_one_kept_connection_are_told_apart(planed, monkeypatch) -> None:
    """The plane uses one connection for many clients: each request says for whom it is."""
    node = planed()
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(30)
        monkeypatch.chdir(node.folder / "run")
        raw.connect("node.sock")
        head = "GET /api/v1/info HTTP/1.1\r\nhost: localhost\r\nx-ostler-client: 127.0.0.1:5\r\n"
        for peer, expected in (("0", 200), ("-", 401), (str(os.geteuid()), 200), ("", 401), ("65533", 401)):
            raw.sendall(f"{head}x-ostler-peer: {peer}\r\n\r\n".encode())
            answer = http.client.HTTPResponse(raw)
            answer.begin()
            answer.read()
            assert answer.status == expected, peer


def test_nobody_is_refused_while_the_plane_is_replaced(planed) -> None:
    node = planed()
    first = plane_of(node)
    os.kill(first, signal.SIGKILL)
    until(lambda: gone(first), "the plane to be gone")
    for _ in range(20):  # they wait in the line of the socket, which the node has open
        assert node.get("/api/v1/info")[0] == 200
    second = until(lambda: plane_of(node), "the second one")
    assert second != first
    assert node.post("/api/v1/workers/worker:plane:0/restart")[0] == 200
    until(lambda: plane_of(node) not in (first, second, 0), "the third one")
    assert gone(second)
    assert node.get("/api/v1/info")[0] == 200


def test_sigkill_of_the_node_ends_the_plane(planed) -> None:
    node = planed()
    plane = plane_of(node)
    where = urlsplit(node.url)
    with socket.create_connection((where.hostname, where.port)):
        node.kill()
        until(lambda: gone(plane), "the plane to be gone", 5)


def test_the_plane_serves_until_the_last_job_is_done(planed, tmp_path) -> None:
    node = planed()
    job = node.enqueue("wait_for", path=str(tmp_path / "go"))
    node.wait_running(job)
    node.signal(signal.SIGTERM)
    until(lambda: "worker:work:0 generation 1: healthy -> draining" in node.log(), "the drain")
    assert node.job(job)["status"] == "processing", "the API answers while jobs finish"
    (tmp_path / "go").touch()
    assert node.wait() == 0
    assert "worker:plane:0 generation 1: stopping -> stopped (stopped)" in node.log()


def test_limits_of_heads_hold_at_the_plane(planed) -> None:
    node = planed()
    start = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
    where = urlsplit(node.url)
    for head, expected in (
        (b"GET /" + b"a" * 400_000, (414, "URL_TOO_LONG")),
        (start + b"X-Long: " + b"a" * 400_000, (431, "HEAD_TOO_LARGE")),
        (start + b"X: 1\r\n" * 201 + b"\r\n", (431, "HEAD_TOO_LARGE")),
    ):
        with socket.create_connection((where.hostname, where.port), timeout=30) as connection:
            connection.sendall(head)
            got = b""
            while chunk := connection.recv(65536):
                got += chunk
            top, _, body = got.partition(b"\r\n\r\n")
            assert (int(top.split()[1]), json.loads(body)["error"]["code"]) == expected
    memory = Path(f"/proc/{plane_of(node)}/status").read_text()
    assert int(memory.partition("VmRSS:")[2].split()[0]) < 80_000
