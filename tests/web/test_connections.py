"""Clients that connect and do no more: they take neither the workers' files nor the node's patience."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from urllib.parse import urlsplit

import uvicorn
from uvicorn.server import ServerState

from ostler.web.connections import Connection
from tests.harness import Node, until
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
    resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (200, hard))
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
