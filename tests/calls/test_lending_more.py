"""Connections that are lent, and clients, models and operators that make it hard. Real nodes, real signals."""

from __future__ import annotations

import mmap
import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ostler.calls.current import Call
from ostler.calls.guests import CELL, CELLS, Channel, framed
from ostler.plane.loans import Loan
from tests.calls.test_calls import state
from tests.calls.test_lending import CALLS, Connection, _closed  # noqa: F401
from tests.harness import Node, call, until

APP = Path(__file__).parent / "lending_app.py"


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    node = Node(tmp_path_factory.mktemp("lending") / "data", APP).start()
    yield node
    node.stop()


def begin(client: Connection, folder: Path) -> None:
    """A call that lasts until there is a file `go`."""
    client.send(client.bytes("odd", {"begun": str(folder / "begun"), "go": str(folder / "go")}))
    until((folder / "begun").exists, "the call to begin")


def test_hundreds_of_requests_at_once_do_not_end_the_worker(node: Node) -> None:
    client = Connection(node)
    pid = client.lent("odd", 0)["result"]["pid"]
    client.send(b"".join(client.bytes("odd", n) for n in range(480)))
    found = []
    try:
        found += [client.answer() for _ in range(480)]
    except (EOFError, ConnectionError):
        pass  # it was given back with more than the plane takes at once
    else:
        assert [body["result"]["payload"] for _, body in found] == [*range(480)]
    assert Connection(node).call("odd", 0)["result"]["pid"] == pid


def test_a_client_that_does_not_read_its_answer_keeps_nobody_waiting(node: Node) -> None:
    client, size = Connection(node), 24_000_000  # more than the sockets take
    pid = client.lent("odd", 0)["result"]["pid"]
    client.send(client.bytes("odd", {"bytes": size}))
    assert client.socket.recv(1, socket.MSG_PEEK)
    asked = {"task": "odd", "model": "odd"}
    until(
        lambda: node.post("/api/v1/models/unload", asked, **{"content-type": "application/json"})[0] == 200,
        "its worker to be free",
    )
    assert Connection(node).call("odd", 0)["result"]["pid"] != pid
    status, body = client.answer()
    assert (status, len(body["result"])) == (200, size)
    assert client.call("odd", 1)["result"]["payload"] == 1, "and the connection is as good as ever"


def test_the_client_of_a_cancelled_call_goes_also_where_the_model_does_not_look(node: Node, tmp_path: Path) -> None:
    client = Connection(node)
    client.lent("odd", 0)
    begin(client, tmp_path)
    try:
        (row,) = node.get(f"{CALLS}running")[1]["calls"]
        assert call(node.url, "DELETE", f"{CALLS}{row['request']}")[0] == 202
        with pytest.raises((EOFError, ConnectionError)):
            client.answer()
    finally:
        (tmp_path / "go").touch()
    until(lambda: state(node, "odd:odd")["in_flight"] == 0, "its place to be free")


def test_a_worker_that_is_told_to_end_by_others_is_told_to_the_caller(node: Node, tmp_path: Path) -> None:
    client = Connection(node)
    pid = client.lent("odd", 0)["result"]["pid"]
    begin(client, tmp_path)
    os.kill(pid, signal.SIGTERM)
    (tmp_path / "go").touch()
    status, body = client.answer()
    assert (status, body["error"]["code"]) == (502, "WORKER_DIED")

    def logged() -> Any:
        rows = node.get("/api/v1/calls?task=odd&limit=500")[1]["calls"]
        return [row["code"] for row in rows if row["outcome"] == "died"]

    assert until(logged, "its row in the call log") == ["WORKER_DIED"]


def test_what_a_model_forks_keeps_no_connection_open(node: Node, tmp_path: Path) -> None:
    client = Connection(node)
    client.lent("odd", 0)
    client.call("odd", {"fork": str(tmp_path / "over")})
    try:
        last = client.bytes("odd", 1).replace(b"host: localhost", b"host: localhost\r\nconnection: close")
        client.send(last)
        assert client.answer()[0] == 200
        client.socket.settimeout(10)
        assert client.socket.recv(1) == b""
    finally:
        (tmp_path / "over").touch()


def test_a_call_that_follows_the_cancelled_one_is_not_cancelled_for_it() -> None:
    here, there = socket.socketpair()
    channel = Channel(there)
    guest: Any = SimpleNamespace(call=Call("loan-2", None, "", True, False), leaves=False)
    channel.guests[0] = guest
    with here, there:
        here.sendall(framed(["cancel", 0, "loan-1"]))
        assert channel.hear() == [None] and guest.leaves and not guest.call.cancelled
        here.sendall(framed(["cancel", 0, "loan-2"]))
        channel.hear()
        assert guest.call.cancelled


def test_a_guest_is_recalled_once_however_often_it_is_wanted() -> None:
    said: list[Any] = []
    channel: Any = SimpleNamespace(cells=mmap.mmap(-1, CELLS * CELL.size), send=said.append)
    loan = Loan(channel, 3, SimpleNamespace(file=-1), 300.0, 1)  # type: ignore[arg-type]
    for _ in range(1000):
        loan.recall()
    assert said == [["recall", 3]]
