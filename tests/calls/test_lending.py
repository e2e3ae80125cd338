"""Connections that are lent to a model's worker: nobody can tell, whatever happens meanwhile. Real nodes, real signals."""

from __future__ import annotations

import array
import asyncio
import fcntl
import json
import mmap
import os
import random
import signal
import socket
import termios
import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest

from ostler.calls.guests import ANSWERS, CELL, CELLS, READS, RESTS
from ostler.plane.leases import Leases
from ostler.plane.lending import Lender
from ostler.plane.loans import Loan
from ostler.plane.plan import Refuse
from tests.calls.test_calls import answer, state
from tests.harness import Node, call, until

MODELS = Path(__file__).parent / "models.py"
CALLS = "/api/v1/calls/"


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    node = Node(tmp_path_factory.mktemp("lending") / "data", MODELS).start()
    yield node
    node.stop()


@pytest.fixture(autouse=True)
def _closed():
    """Whatever a test has opened."""
    yield
    while Connection.opened:
        Connection.opened.pop().close()


class Connection:
    """A client that keeps its connection, and says the same again and again."""

    opened: ClassVar[list[socket.socket]] = []

    def __init__(self, node: Node, **headers: str) -> None:
        url = urlsplit(node.url)
        self.socket = socket.create_connection((url.hostname, url.port), timeout=60)
        self.opened.append(self.socket)
        self._headers, self._data, self.calls = headers, b"", 0

    def bytes(self, task: str, payload: Any, model: str | None = None, method: str = "POST") -> bytes:
        body = json.dumps({"model": model or task, "payload": payload}).encode()
        lines = [f"{method} {CALLS}{task} HTTP/1.1", "host: localhost", f"content-length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in self._headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + body

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self) -> tuple[int, Any]:
        while b"\r\n\r\n" not in self._data:
            self._read()
        head, _, rest = self._data.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().lower().split("\r\n")[1:])
        while len(rest) < int(fields["content-length"]):
            self._read()
            rest = self._data.partition(b"\r\n\r\n")[2]
        body, self._data = rest[: int(fields["content-length"])], rest[int(fields["content-length"]) :]
        return int(head.split()[1]), json.loads(body)

    def _read(self) -> None:
        data = self.socket.recv(1 << 20)
        if not data:
            raise EOFError(self._data)
        self._data += data

    def call(self, task: str, payload: Any = None, model: str | None = None) -> dict[str, Any]:
        self.send(self.bytes(task, payload, model))
        status, body = self.answer()
        assert status == 200, body
        assert isinstance(body, dict)
        self.calls += 1
        return body

    def lent(self, task: str, payload: Any = None, model: str | None = None) -> dict[str, Any]:
        """Call until the worker itself answers: its ids have a number."""
        return until(
            lambda: (found := self.call(task, payload, model)) and "-" in found["request_id"] and found, "the loan"
        )


def counted(node: Node) -> float:
    """Calls of echo that went well."""
    with urllib.request.urlopen(f"{node.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    found = [x for x in lines if x.startswith("ostler_calls_total{") and 'model="echo"' in x and 'outcome="done"' in x]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_who_repeats_a_call_is_answered_by_the_worker_and_every_call_is_counted(node: Node) -> None:
    client = Connection(node)
    before = counted(node)
    first = client.lent("echo", {"n": 0})
    number = int(first["request_id"].partition("-")[2])
    for n in range(120):  # of 200 in one report all are logged
        found = client.call("echo", {"n": n, "more": "x" * n})  # bodies of every length
        assert found["result"]["payload"]["n"] == n and found["model"] == "echo"
    until(lambda: counted(node) - before == client.calls, "all of them to be counted")
    loan, _, last = found["request_id"].partition("-")
    if loan == first["request_id"].partition("-")[0]:  # it did not rest in between
        assert int(last) == number + 120

    def logged() -> Any:
        rows = node.get("/api/v1/calls?task=echo&limit=500")[1]["calls"]
        return next((row for row in rows if row["request"] == found["request_id"]), None)

    row = until(logged, "its row in the call log")
    assert (row["outcome"], row["status"], row["model"]) == ("done", 200, "echo")
    assert row["bytes_in"] > 120 and row["bytes_out"] > 120 and row["worker"] == "worker:echo:0"


def test_whatever_else_it_asks_is_answered_by_who_should(node: Node) -> None:
    answer(node, "echo", 1, model="org/big:7b")
    client = Connection(node)
    for _ in range(5):
        client.lent("echo", 1, "echo")
        assert client.call("echo", 2, "org/big:7b")["result"]["model"] == "org/big:7b"
        client.lent("echo", 3, "echo")
        client.send(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert client.answer()[0] == 200
        client.lent("echo", 3, "echo")
        client.send(client.bytes("echo", 4, "nobody"))
        assert client.answer()[1]["error"]["code"] == "UNKNOWN_MODEL"


def test_requests_may_come_in_pieces_together_or_large(node: Node) -> None:
    client = Connection(node)
    for cut in (1, 40, 75, 90, 110):
        client.lent("echo", 1)
        data = client.bytes("echo", "in pieces")
        client.send(data[:cut])
        until(lambda: not _unread(client), "the first piece to be read")
        client.send(data[cut:])
        assert client.answer()[1]["result"]["payload"] == "in pieces", cut
    client.lent("echo", 1)
    client.send(b"".join(client.bytes("echo", n) for n in range(40)))
    assert [client.answer()[1]["result"]["payload"] for _ in range(40)] == [*range(40)]
    for size in (60_000, 200_000, 262_144, 3_000_000):
        client.lent("echo", 1)
        assert client.call("echo", "y" * size)["result"]["payload"] == "y" * size


def _unread(client: Connection) -> bool:
    """Whether the kernel still has bytes for whoever reads the other end."""
    left = array.array("i", [0])
    fcntl.ioctl(client.socket, termios.TIOCOUTQ, left)
    return left[0] > 0


def test_others_who_come_meanwhile_have_their_turn(node: Node, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    go, over = {"go": str(tmp_path / "go")}, threading.Event()
    client = Connection(node)
    client.lent("slow", go)

    def hammer() -> None:
        while not over.is_set():
            client.call("slow", go)

    thread = threading.Thread(target=hammer)
    thread.start()
    try:  # it never pauses
        assert [answer(node, "slow", go) > 0 for _ in range(3)] == [True] * 3
    finally:
        over.set()
        thread.join()
    until(lambda: state(node, "slow:slow")["in_flight"] == 0, "its place to be free")


@pytest.mark.parametrize("at", ["call", "rest"])
def test_a_worker_that_is_killed_is_told_in_a_call_and_not_noticed_between_two(
    node: Node, tmp_path: Path, at: str
) -> None:
    (tmp_path / "go").touch()
    client = Connection(node)
    client.lent("slow", {"go": str(tmp_path / "go")})
    pid = node.worker("worker:slow:0")["pid"]
    if at == "call":
        client.send(client.bytes("slow", {"begun": str(tmp_path / "begun"), "go": str(tmp_path / "never")}))
        until((tmp_path / "begun").exists, "the call to begin")
    os.kill(pid, signal.SIGKILL)
    if at == "call":
        status, body = client.answer()
        assert (status, body["error"]["code"]) == (502, "WORKER_DIED")
        with pytest.raises(EOFError):
            client.answer()
        client = Connection(node)
    assert client.call("slow", {"go": str(tmp_path / "go")})["result"] != pid


def test_calls_around_the_moments_when_guests_and_models_leave_are_each_run_once(node: Node, tmp_path: Path) -> None:
    marks = tmp_path / "marks"

    def fire(who: int) -> None:
        client, chance = Connection(node), random.Random(who)
        for n in range(60):
            name = f"{who}-{n}"
            assert client.call("fleeting", {"marks": str(marks), "n": name})["result"] == name
            if chance.random() < 0.25:  # a guest is tired after 50 ms, and the model is idle 20 ms later
                time.sleep(chance.choice((0.02, 0.05, 0.055, 0.07, 0.075)))

    with ThreadPoolExecutor(4) as clients:
        list(clients.map(fire, range(4)))
    ran = Counter(marks.read_text().split())
    assert len(ran) == 240 and set(ran.values()) == {1}


def _in_a_lent_call(node: Node, folder: Path) -> Connection:
    """A client whose call the worker took itself, and which does not end."""
    (folder / "go").touch()
    client = Connection(node)
    client.lent("slow", {"go": str(folder / "go")})
    client.send(client.bytes("slow", {"begun": str(folder / "begun"), "go": str(folder / "never")}))
    until((folder / "begun").exists, "the call to begin")
    return client


def test_an_operator_sees_and_cancels_a_call_that_the_worker_took_itself(node: Node, tmp_path: Path) -> None:
    client = _in_a_lent_call(node, tmp_path)
    shown = node.get(f"{CALLS}running")[1]["calls"]
    (row,) = [row for row in shown if row["task"] == "slow"]
    assert (row["state"], row["model"], row["replica"]) == ("running", "slow", 0) and row["running_ms"] >= 0
    assert call(node.url, "DELETE", f"{CALLS}{row['request']}")[0] == 202
    status, body = client.answer()
    assert (status, body["error"]["code"]) == (499, "CANCELLED")
    until((tmp_path / "never.cancelled").exists, "the model to see it")
    assert answer(node, "slow", {"go": str(tmp_path / "go")}) > 0


def test_a_client_that_leaves_in_its_call_has_it_cancelled(node: Node, tmp_path: Path) -> None:
    client = _in_a_lent_call(node, tmp_path)
    client.socket.close()
    until((tmp_path / "never.cancelled").exists, "the model to see it")
    until(lambda: state(node, "slow:slow")["in_flight"] == 0, "its place to be free")
    assert answer(node, "slow", {"go": str(tmp_path / "go")}) > 0


@pytest.mark.parametrize("header", ["authorization: Bearer x", "x-request-id: mine", "x-ostler-priority: 3"])
def test_what_the_plane_must_see_is_not_lent(node: Node, header: str) -> None:
    name, _, value = header.partition(": ")
    client = Connection(node, **{name.replace("-", "_"): value})
    assert not any("-" in client.call("echo", n)["request_id"] for n in range(30))


def test_programs_beside_the_node_are_lent_to_by_their_key_and_not_by_the_nodes_token(node: Node) -> None:
    data = node.folder
    key = (data / "run" / "key").read_text().strip()
    assert "-" in Connection(node, authorization=f"Bearer {key}").lent("echo", 1)["request_id"]
    client = Connection(node, authorization=f"Bearer {(data / 'token').read_text().strip()}")
    assert not any("-" in client.call("echo", n)["request_id"] for n in range(30))


def test_a_worker_that_is_told_to_leave_gives_its_guests_back(node: Node) -> None:
    client = Connection(node)
    pid = client.lent("echo", 1)["result"]["pid"]
    status = node.post(
        "/api/v1/models/unload", {"task": "echo", "model": "echo"}, **{"content-type": "application/json"}
    )[0]
    assert status == 200
    assert until(lambda: (new := client.call("echo", 1)["result"]["pid"]) != pid and new, "another worker") > 0


def test_a_plane_that_dies_ends_its_loans(make_node: Any) -> None:
    node = make_node(app=MODELS)
    client = Connection(node)
    pid = client.lent("echo", 1)["result"]["pid"]
    os.kill(node.worker("worker:plane:0")["pid"], signal.SIGKILL)
    with pytest.raises((EOFError, ConnectionError)):
        until(lambda: client.call("echo", 1) and False, "the connection to end")
    until(lambda: _tolerant(node) == pid, "the same worker to serve others")


class Lent:
    """A worker with three guests, which have been in their calls for so many seconds; 0: they rest."""

    def __init__(self, *since: float) -> None:
        self.killed: list[tuple[Any, str, float]] = []
        self.recalled: list[int] = []
        leases = Leases(lambda *_: None)
        leases.up(("task", "model"), 0, 1, None, 0.0)
        self.line = leases.lines["task", "model"]
        self.place = self.line.places[0]
        self.lender = Lender(SimpleNamespace(kill_for=self._kill, leases=leases))  # type: ignore[arg-type]
        cells = mmap.mmap(-1, CELLS * CELL.size)
        self.channel: Any = SimpleNamespace(cells=cells, place=self.place, loans={}, waits=0, send=self._send)
        self.lender._channels[self.place] = self.channel
        for cell, seconds in enumerate(since):
            self.channel.loans[cell] = Loan(self.channel, cell, SimpleNamespace(file=-1), 300.0, cell)  # type: ignore[arg-type]
            CELL.pack_into(cells, cell * CELL.size, READS, time.monotonic() - seconds if seconds else 0.0, 7, 0)
        self.place.guests = len(since)

    def _kill(self, place: Any, name: str, timeout: float) -> Refuse:
        self.killed.append((place, name, timeout))
        return Refuse(504, "DEADLINE", "")

    def _send(self, frame: list[Any]) -> None:
        self.recalled.append(frame[1])


def test_an_answer_that_was_written_in_full_is_known_to_be_when_its_worker_dies() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        here, _ = listener.accept()
    with here, there:
        here.sendall(b"an answer of the plane's own")
        channel: Any = SimpleNamespace(cells=mmap.mmap(-1, CELL.size))
        loan = Loan(channel, 0, SimpleNamespace(file=here.fileno()), 300.0, 1)  # type: ignore[arg-type]
        CELL.pack_into(channel.cells, 0, ANSWERS, 1.0, 1, 100_000)
        here.sendall(b"x" * 40_000)
        assert not loan.is_answered()
        here.sendall(b"x" * 60_000)
        assert loan.is_answered()
        CELL.pack_into(channel.cells, 0, ANSWERS, 1.0, 2, 0)
        assert not loan.is_answered(), "of a stream nobody knows how long it is"


def test_where_calls_wait_in_line_all_the_time_the_guests_come_back_and_stay_for_longer_each_time() -> None:
    async def look() -> None:
        lent = Lent(0.0, 0.0, 0.0)
        now = asyncio.get_running_loop().time
        for _ in range(10):
            lent.lender._watch()
        assert lent.recalled == [], "nobody waits"
        waiting: Any = type("Waiting", (), {"priority": 0})()
        lent.place.held = 1
        for seconds in (1.0, 2.0, 4.0):
            lent.recalled.clear()
            for loan in lent.channel.loans.values():
                loan.is_recalled = False  # it was back meanwhile
            assert lent.lender._calls.leases.ask(("task", "model"), lent.line.terms, waiting, now()) is None
            lent.lender._watch()
            assert lent.recalled == [], "it may be a moment's"
            for _ in range(3):
                lent.lender._watch()
            assert lent.recalled == [0, 1, 2]
            assert lent.line.apart == seconds and lent.line.apart_until > now() + seconds / 2
            lent.lender._calls.leases.leave(waiting)
            lent.line.apart_until = now() - 0.1  # that time is over
            lent.lender._watch()

    asyncio.run(look())


@pytest.mark.parametrize(("state", "began", "counted"), [(RESTS, 0.0, [4, 5]), (READS, 0.0, [4, 5]), (READS, 1.0, [4])])
def test_answers_that_a_dead_worker_had_no_time_to_tell_of_are_counted(
    state: int, began: float, counted: list[int]
) -> None:
    async def look() -> None:
        lent = Lent(0.0)
        told: list[int] = []
        calls: Any = lent.lender._calls
        calls.count = lambda place, n: None
        calls.look_if_empty = calls.death_of = lambda *_: None
        calls.records = SimpleNamespace(
            lent=lambda place, loan, rows: told.extend(row[0] for row in rows), lent_lost=lambda *_: None
        )
        loan = lent.channel.loans[0]
        loan.client.take_back = loan.client.end_loan = lambda _: None
        loan.served = 3
        CELL.pack_into(lent.channel.cells, 0, state, began, 5, 0)
        lent.lender.lost(loan)
        assert told == counted

    asyncio.run(look())


def test_a_call_that_has_had_all_its_time_is_ended_with_its_worker_and_no_other() -> None:
    async def look() -> None:
        lent = Lent(0.0, 200.0, 301.0)
        lender, place, channel, killed = lent.lender, lent.place, lent.channel, lent.killed
        lender._watch()
        lender._watch()  # once is enough
        assert killed == [(place, f"{2:016x}-7", 300.0)]
        assert channel.loans[2].verdict.code == "DEADLINE"
        assert [channel.loans[n].holds for n in range(3)] == [False, True, True] and place.held == 2, (
            "long ones hold places"
        )

    asyncio.run(look())


def _tolerant(node: Node) -> Any:
    try:
        return Connection(node).call("echo", 1)["result"]["pid"]
    except (OSError, EOFError):
        return None
