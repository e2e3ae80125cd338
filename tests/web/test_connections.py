"""Clients that connect and do no more: they take neither the workers' files nor the node's patience."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
from uvicorn.server import ServerState

from ostler.web.connections import Connection
from tests.harness import APP, Node, until
from tests.sse import Stream


def connect(node: Node, data: bytes = b"") -> socket.socket:
    where = urlsplit(node.url)
    found = socket.create_connection((where.hostname, where.port), timeout=30)
    found.sendall(data)
    return found


def test_connections_that_say_nothing_do_not_keep_a_worker_from_being_started(make_node) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    pid = node.worker("worker:work:0")["pid"]
    resource.prlimit(node.front_pid, resource.RLIMIT_NOFILE, (200, hard))
    idle = [connect(node) for _ in range(300)]
    until(lambda: any(_closed(s) for s in idle), "the last of them to be refused")
    assert sum(not _closed(s) for s in idle) > 100
    os.kill(pid, signal.SIGKILL)
    until(lambda: "generation 2: starting -> healthy" in node.log(), "the worker to be back")
    assert "Too many open files" not in node.log()
    for connection in idle:
        connection.close()
    until(lambda: _answers(node), "the node to take requests again")


def _closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _answers(node: Node) -> bool:
    try:
        return node.get("/readyz")[0] == 200
    except OSError:
        return False


def test_requests_behind_a_stream_whose_client_has_gone_make_no_noise(make_node) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0")
    host = urlsplit(node.url).netloc
    request = f"GET /api/v1/events?topics=queue:status HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    several = [connect(node, request * 3) for _ in range(10)]
    for connection in several:
        assert connection.recv(15).startswith(b"HTTP/1.1 200")
        connection.close()
    with Stream(node.url, "queue:work:status").live() as stream:  # what is sent to them finds them gone
        job = node.enqueue("add", a=1)
        node.wait_job(job)
        stream.wait(lambda: stream.of("queue:work:status")["completed"] == 1, "the job")
    assert node.stop() == 0
    assert "Traceback" not in node.log()


def test_who_does_not_ask_in_time_is_sent_away_and_who_has_asked_is_not() -> None:
    class Hasty(Connection):
        head_patience = 0.05

    async def app(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await patient.wait()
        await send({"type": "http.response.body", "body": b"last"})

    patient = asyncio.Event()

    async def main() -> None:
        config = uvicorn.Config(app, http=Hasty, lifespan="off", log_level="error")
        config.load()
        state = ServerState()
        server = await asyncio.get_running_loop().create_server(
            lambda: Hasty(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        port = server.sockets[0].getsockname()[1]
        asks, asker = await asyncio.open_connection("127.0.0.1", port)
        asker.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asks.readuntil(b"first")
        for half in (b"", b"GET / HT"):
            silent, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(half)
            try:
                assert await asyncio.wait_for(silent.read(), 30) == b""
            except ConnectionResetError:
                pass
            writer.close()
        patient.set()  # far more than its patience has passed
        await asks.readuntil(b"last")
        asker.close()
        server.close()
        until_gone = asyncio.get_running_loop().time() + 30
        while state.connections and asyncio.get_running_loop().time() < until_gone:
            await asyncio.sleep(0.01)
        assert not state.connections

    asyncio.run(main())


def test_a_second_request_must_be_whole_in_time_too() -> None:
    class Hasty(Connection):
        head_patience = 0.05

    async def app(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def main() -> None:
        config = uvicorn.Config(app, http=Hasty, lifespan="off", log_level="error")
        config.load()
        server = await asyncio.get_running_loop().create_server(
            lambda: Hasty(config=config, server_state=ServerState(), app_state={}), "127.0.0.1", 0
        )
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"GET / HTTP/1.1\r\nX-Slow: ")
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()
        server.close()

    asyncio.run(main())
    assert Connection.unfinished == 0


def rss_mb(node: Node) -> float:
    return int(Path(f"/proc/{node.front_pid}/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def answer(connection: socket.socket) -> tuple[int, str]:
    """The status and error code of the answer on a raw connection."""
    got = b""
    while chunk := connection.recv(65536):
        got += chunk
    head, _, body = got.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def test_heads_beyond_the_limits_are_answered_and_cost_no_memory(make_node) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0")
    start = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
    endless = {
        b"GET /" + b"a" * 400_000: (414, "URL_TOO_LONG"),
        start + b"X-Long: " + b"a" * 400_000: (431, "HEAD_TOO_LARGE"),
        start + b"".join(b"X-%d: a\r\n" % n for n in range(40_000)): (431, "HEAD_TOO_LARGE"),
        start + b"X: 1\r\n" * 201 + b"\r\n": (431, "HEAD_TOO_LARGE"),
    }
    before = rss_mb(node)
    for head, expected in endless.items():
        with connect(node, head) as connection:
            assert answer(connection) == expected
    several = [connect(node) for _ in range(300)]
    for connection in several:
        with contextlib.suppress(OSError):
            connection.sendall(start + b"X-Long: " + b"a" * 400_000)
    assert node.get("/readyz")[0] == 200
    assert rss_mb(node) - before < 60, "120 MB were sent"
    for connection in several:
        connection.close()
    with connect(node, start + b"X: " + b"a" * 30_000 + b"\r\nConnection: close\r\n\r\n") as connection:
        assert connection.recv(15).startswith(b"HTTP/1.1 200")


def test_many_small_unfinished_heads_are_bounded_together_and_other_clients_are_served(make_node) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0")
    before = rss_mb(node)
    head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * 50_000
    several = [connect(node, head) for _ in range(800)]
    until(lambda: sum(_refused(s) for s in several) > 300, "the last of them to be refused")
    assert node.get("/readyz")[0] == 200
    assert rss_mb(node) - before < 60, "40 MB were sent, and each byte costs more than one"
    for connection in several:
        connection.close()


def _refused(connection: socket.socket) -> bool:
    """Whether it was answered, before any patience had ended."""
    connection.setblocking(False)
    try:
        return connection.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 503"
    except OSError:
        return False


def test_many_requests_at_once_on_one_connection_are_bounded(make_node) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0")
    before = rss_mb(node)
    several = [connect(node) for _ in range(20)]
    for connection in several:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.send(b"GET /healthz HTTP/1.1\r\n\r\n" * 20_000)
    assert node.get("/readyz")[0] == 200
    assert rss_mb(node) - before < 60
    for connection in several:
        connection.close()


def test_a_refused_body_is_answered_with_413_and_not_with_a_reset(make_node) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0")
    where = urlsplit(node.url)
    for keep in ("close", "keep-alive"):
        for _ in range(3):
            connection = http.client.HTTPConnection(where.hostname, where.port, timeout=30)
            connection.request("POST", "/api/v1/jobs", b"x" * 30_000_000, {"Connection": keep})
            got = connection.getresponse()
            assert (got.status, json.loads(got.read())["error"]["code"]) == (413, "PAYLOAD_TOO_LARGE")
            if keep == "keep-alive":
                connection.request("GET", "/healthz")
                assert connection.getresponse().status == 200
            connection.close()


def test_a_body_that_breaks_off_is_at_most_one_line_in_the_log(make_node) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0")
    lines = node.log().count("\n")
    with connect(node, b"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{") as connection:
        until(lambda: not _unread(node, connection), "the node to have read it")
    node.wait_job(node.enqueue("add", a=1))
    assert node.stop() == 0
    assert "Traceback" not in node.log()
    assert sum("/api/v1/jobs" in line for line in node.log().splitlines()[lines:]) <= 1


def _unread(node: Node, connection: socket.socket) -> int:
    """Bytes that the node has not taken from its end of the connection."""
    port = f"{connection.getsockname()[1]:04X}"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[2].endswith(f":{port}") and fields[3] == "01":
            return int(fields[4].partition(":")[2], 16)
    return 0


def test_a_node_that_may_open_too_few_files_says_so_at_its_start(make_node) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0", start=False)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    node.folder.mkdir()
    argv = ["prlimit", "--nofile=64:64", sys.executable, "-m", "ostler", "up", str(APP), "--data", str(node.folder)]
    done = subprocess.run([*argv, "--port", "0"], env=node.env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "may have 64 files open" in done.stderr
    assert "are needed" in done.stderr
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_a_body_that_stops_on_its_way_is_given_up_whether_it_was_answered_or_not() -> None:
    class Hasty(Connection):
        body_patience = drain_patience = 0.05

    async def app(scope, receive, send) -> None:
        if scope["path"] == "/reads":
            while (await receive())["more_body"]:
                pass
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body"})

    async def main() -> None:
        config = uvicorn.Config(app, http=Hasty, lifespan="off", log_level="critical")
        config.load()
        server = await asyncio.get_running_loop().create_server(
            lambda: Hasty(config=config, server_state=ServerState(), app_state={}), "127.0.0.1", 0
        )
        for path in ("/refuses", "/reads"):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n".encode())
            if path == "/refuses":
                await reader.readuntil(b"\r\n\r\n")
            writer.write(b"x")
            with contextlib.suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(), 30)
            writer.close()
        server.close()

    with contextlib.suppress(KeyError):  # the app of this test does not expect that its client goes
        asyncio.run(main())


def test_trailers_without_end_are_refused(make_node) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0")
    before = rss_mb(node)
    for name in (b"T: ", b"T"):
        sender = connect(node, b"POST /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + name)
        sent = 0
        with contextlib.suppress(OSError):
            for _ in range(1000):
                sent += sender.send(b"e" * 65536)
            while sender.recv(65536):
                pass
        sender.close()
        assert rss_mb(node) < before + 40
    assert node.get("/healthz")[0] == 200
    assert "the node was suspended" not in node.log()


def test_a_body_of_any_size_arrives_as_it_was_sent(node: Node) -> None:
    """It is parsed in pieces; their borders are where errors would be."""
    for size in (1, 7_900, 8_100, 8_192, 20_000, 65_400, 65_600, 131_072, 500_000):
        text = "".join(chr(97 + n % 26) for n in range(size))
        job = node.enqueue("other", say=text)
        assert node.job(job)["args"] == {"say": text}, size
