"""`ostler events` and `ostler top` beside a real node, as a user runs them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.cli.test_cli import ostler, refused
from tests.harness import APP, FAST, Node, until


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    running = Node(tmp_path_factory.mktemp("live") / "data", APP, "--pool", "work=2", "--pool", "other=1").start()
    yield running
    running.stop()


class Follower:
    """An `ostler` that goes on, and what it has said so far."""

    def __init__(self, folder: Path, *args: str, stdout=None) -> None:
        self.out, self.err = folder / "out", folder / "err"
        clean = {k: v for k, v in os.environ.items() if not k.startswith("OSTLER_")}
        with self.out.open("wb") as out, self.err.open("wb") as err:
            argv = [sys.executable, "-m", "ostler", *args]
            self.process = subprocess.Popen(argv, stdout=stdout or out, stderr=err, env={**clean, **FAST})

    def events(self) -> list[dict]:
        return [json.loads(line) for line in self.out.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def wait_event(self, what: str, found) -> dict:
        return until(lambda: next(filter(found, self.events()), None), what)

    def wait_live(self, n: int = 1) -> dict:
        return until(lambda: [e for e in self.events() if e["type"] == "live"][n - 1 : n], "the state")[0]


@pytest.fixture
def follower(tmp_path: Path):
    started: list[Follower] = []

    def follow(*args: str, **more) -> Follower:
        folder = tmp_path / f"follower{len(started)}"
        folder.mkdir()
        started.append(Follower(folder, *args, **more))
        return started[-1]

    yield follow
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()


class Terminal:
    """A program at a terminal of its own; the last whole picture that it drew."""

    def __init__(self, *args: str, columns: int = 80, lines: int = 24) -> None:
        self.screen, self.side = pty.openpty()
        os.set_blocking(self.screen, False)
        self.resize(columns, lines)
        self.before, self.text = termios.tcgetattr(self.side), ""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("OSTLER_") and k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ostler", *args],
            stdin=self.side, stdout=self.side, stderr=self.side, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**clean, **FAST, "TERM": "xterm-256color"},
        )  # fmt: skip

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.screen, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read(self) -> str:
        with contextlib.suppress(BlockingIOError, OSError):
            while data := os.read(self.screen, 65_536):
                self.text += data.decode(errors="replace")
        return self.text

    def picture(self) -> list[str]:
        whole = self.read().split("\x1b[H")[-2:-1] or [""]
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", whole[0]).replace("\r", "").split("\n")

    def wait(self, text: str) -> str:
        return until(lambda: next((line for line in self.picture() if text in line), None), f"{text!r} on the screen")

    def press(self, keys: bytes) -> None:
        os.write(self.screen, keys)

    def ended(self) -> int:
        until(lambda: self.read() and self.process.poll() is not None, "the end")  # who does not read holds it up
        return self.process.returncode

    def is_restored(self) -> bool:
        self.read()
        return (
            self.text.rfind("\x1b[?1049l") > self.text.rfind("\x1b[?1049h")
            and self.text.rfind("\x1b[?25h") > self.text.rfind("\x1b[?25l")
            and termios.tcgetattr(self.side) == self.before
        )


@pytest.fixture
def terminal():
    started: list[Terminal] = []

    def start(*args: str, **size: int) -> Terminal:
        started.append(Terminal(*args, **size))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()
        os.close(one.screen)
        os.close(one.side)


def where(node: Node) -> tuple[str, str]:
    return "--data", str(node.folder)


# ---- events


def test_events_once_prints_the_state_in_words_and_ends(node: Node) -> None:
    done = ostler("events", "--once", *where(node))
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^\d\d:\d\d:\d\d worker:work:1 +healthy, pid \d+", done.stdout, re.MULTILINE)
    assert re.search(r" queue work +0 waiting, 0 running", done.stdout)
    assert " health               healthy" in done.stdout
    assert "\x1b" not in done.stdout


def test_events_as_json_are_one_envelope_per_line_with_its_id(node: Node) -> None:
    done = ostler("events", "--once", "--json", "--topics", "worker:*:status", *where(node))
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {e["topic"] for e in found[:-1]} == {f"worker:{w}:status" for w in ("work:0", "work:1", "other:0")}
    assert (found[-1]["topic"], found[-1]["type"]) == ("stream", "live")
    assert all(e["id"].startswith(found[-1]["stream"]["epoch"] + "-") for e in found)


def test_events_go_on_after_a_given_id(node: Node, follower) -> None:
    asked = ("events", "--json", "--topics", "queue:jobs,worker:*:status", *where(node))
    last = json.loads(ostler(*asked, "--once").stdout.splitlines()[-1])["id"]
    job = node.wait_job(node.enqueue("add", a=1))["id"]
    resumed = follower(*asked, "--last", last)
    resumed.wait_event(
        "the job's end", lambda e: e["topic"] == "queue:jobs" and e["job"]["id"] == job and e["job"]["status"] == "done"
    )
    assert not [e for e in resumed.events() if e["type"] == "resync"]
    unknown = ostler(*asked, "--once", "--last", "nonsense-1")
    assert [json.loads(line)["type"] for line in unknown.stdout.splitlines()][0] == "resync"


def test_what_changed_since_an_id_can_be_had_once(make_node) -> None:
    node = make_node("--pool", "work=1")
    asked = ("events", "--once", "--json", "--topics", "queue:jobs", *where(node))
    last = json.loads(ostler(*asked).stdout.splitlines()[-1])["id"]
    job = node.wait_job(node.enqueue("add", a=1))["id"]
    found = [json.loads(line) for line in ostler(*asked, "--last", last).stdout.splitlines()]
    assert [e["job"]["id"] for e in found[:-1]] == [job]
    assert found[-1]["type"] == "live"


def test_a_wrong_topic_is_refused_in_the_servers_words(node: Node) -> None:
    refused(
        ostler("events", "--topics", "queue:nope:what", *where(node)), "no topic 'queue:nope:what'", "worker:*:*:status"
    )


def test_live_commands_without_a_node_say_what_to_do(tmp_path: Path) -> None:
    for command in (("events",), ("events", "--once"), ("top",), ("top", "--once")):
        refused(ostler(*command, cwd=tmp_path), "no node is running", "ostler up")


def test_live_commands_need_the_token_where_there_is_one(make_node) -> None:
    node = make_node("--pool", "work=1", ready=False, OSTLER_TOKEN="s3cret")
    for command in ("events", "top"):
        refused(ostler(command, "--once", *where(node)), "OSTLER_TOKEN")
        assert "worker:work:0" in ostler(command, "--once", *where(node), OSTLER_TOKEN="s3cret").stdout


def test_changes_are_told_in_words_as_they_happen(node: Node, follower, tmp_path: Path) -> None:
    follow = follower("events", *where(node))
    until(lambda: "changes follow" in follow.out.read_text(), "the state")
    job = node.enqueue("steps", folder=str(tmp_path))
    until(lambda: f"job {job} steps" in follow.out.read_text(), "the job")
    (tmp_path / "10").touch()
    until(lambda: re.search(rf"job {job} steps +processing 10 % step 10", follow.out.read_text()), "its progress")
    worker = node.job(job)["worker"]
    os.kill(node.worker(worker)["pid"], signal.SIGKILL)
    until(lambda: re.search(rf"{worker} +healthy → \w+ \(killed by SIGKILL\)", follow.out.read_text()), "the death")
    until(lambda: f"incident             {worker} was killed by SIGKILL" in follow.out.read_text(), "the incident")
    for step in ("40", "75", "100"):
        (tmp_path / step).touch()
    until(lambda: re.search(rf"job {job} steps +(processing → )?done after", follow.out.read_text()), "the job's end")
    follow.process.send_signal(signal.SIGINT)
    assert follow.process.wait(30) == 130
    assert follow.err.read_text() == ""


def test_events_come_back_after_the_node_was_gone(make_node, follower) -> None:
    node = make_node("--pool", "work=1")
    follow = follower("events", "--json", *where(node))
    first = follow.wait_live()
    for n in (1, 2):
        node.kill()
        until(lambda: follow.err.read_text().count("lost the connection") == n, "the loss to be told")
        node.start()
        again = follow.wait_live(n + 1)
        assert again["stream"]["epoch"] != first["stream"]["epoch"]
        until(lambda: follow.err.read_text().count("the node is back") == n, "the return to be told")
    assert (
        follow.err.read_text().splitlines()
        == ["ostler: lost the connection to the node, retrying", "ostler: the node is back"] * 2
    )
    assert [e["stream"]["reason"] for e in follow.events() if e["type"] == "resync"] == [
        "the node was started anew"
    ] * 2
    job = node.wait_job(node.enqueue("add", a=1))["id"]
    follow.wait_event("a change", lambda e: e["topic"] == "queue:jobs" and e["job"]["id"] == job)


def test_a_node_that_stops_in_order_is_waited_for_too(make_node, follower) -> None:
    node = make_node("--pool", "work=1")
    follow = follower("events", "--json", *where(node))
    follow.wait_live()
    node.stop()
    until(lambda: "lost" in follow.err.read_text(), "the loss to be told")
    node.start()
    follow.wait_live(2)


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_closed_pipe_ends_events_quietly_even_when_nothing_happens(
    node: Node, follower, flags: tuple[str, ...]
) -> None:
    read, write = os.pipe()
    follow = follower("events", *flags, *where(node), stdout=write)
    os.close(write)
    assert os.read(read, 10)
    os.close(read)
    assert follow.process.wait(60) == 0
    assert follow.err.read_text() == ""


def test_a_closed_pipe_is_no_failure_of_a_listing(node: Node) -> None:
    node.enqueue("add", a=1)
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ostler", "jobs", *where(node)],
            stdout=write,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


# ---- top


def test_top_without_a_terminal_prints_the_state_once(node: Node, tmp_path: Path) -> None:
    job = node.enqueue("steps", folder=str(tmp_path))
    (tmp_path / "10").touch()
    until(lambda: node.job(job)["progress"] == 10, "progress")
    for flags in ((), ("--once",), ("--once", "--span", "24h")):
        done = ostler("top", *flags, *where(node))
        assert (done.returncode, done.stderr) == (0, ""), done
        assert done.stdout.startswith("● ")
        assert re.search(rf"^ *{job}  steps  work:\d .*━━━╌.* 10 %  step 10", done.stdout, re.MULTILINE)
        assert re.search(rf"worker:work:\d .* job {job} steps", done.stdout)
        assert re.search(r"^worker:other:0 +healthy +\d+ .* MB", done.stdout, re.MULTILINE)
        assert re.search(r"^work +0 +1 ", done.stdout, re.MULTILINE)
        assert "\x1b" not in done.stdout
    for step in ("40", "75", "100"):
        (tmp_path / step).touch()
    node.wait_job(job)
    until(lambda: re.search(r"[1-9]\d* done", ostler("top", "--once", *where(node)).stdout), "it to be counted")
    assert ostler("top", "--span", "3m", *where(node)).returncode == 2


def test_top_shows_what_happens_fits_the_terminal_and_restores_it(node: Node, terminal, tmp_path: Path) -> None:
    shown = terminal("top", *where(node))
    assert "q quits" in shown.wait("healthy")
    job = node.enqueue("steps", folder=str(tmp_path))
    shown.wait(f"job {job} steps")
    for percent in ("10", "40"):
        (tmp_path / percent).touch()
        assert "━" in shown.wait(f"{percent} %")
    assert (len(shown.picture()), {len(line) for line in shown.picture()}) == (24, {80})
    shown.resize(140, 40)
    until(lambda: (len(shown.picture()), {len(line) for line in shown.picture()}) == (40, {140}), "the new size")
    shown.resize(60, 15)
    until(lambda: (len(shown.picture()), {len(line) for line in shown.picture()}) == (15, {60}), "the new size")
    for step in ("75", "100"):
        (tmp_path / step).touch()
    until(lambda: not [line for line in shown.picture() if f"job {job} steps" in line], "the job to go")
    shown.press(b"x\x1b[Aq")
    assert shown.ended() == 0
    assert shown.is_restored()


@pytest.mark.parametrize(("how", "code"), [("key", 0), ("SIGTERM", 143)])
def test_top_restores_the_terminal_however_it_ends(node: Node, terminal, how: str, code: int) -> None:
    shown = terminal("top", *where(node))
    shown.wait("healthy")
    shown.press(b"\x03") if how == "key" else shown.process.send_signal(signal.SIGTERM)
    assert shown.ended() == code
    assert shown.is_restored()
    assert "Traceback" not in shown.text


def test_top_can_be_laid_aside_and_taken_up(node: Node, terminal) -> None:
    shown = terminal("top", *where(node))
    shown.wait("healthy")
    shown.press(b"\x1a")
    pid, status = os.waitpid(shown.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert shown.is_restored()
    shown.process.send_signal(signal.SIGCONT)
    until(lambda: shown.read().count("\x1b[?1049h") == 2, "the screen again")
    shown.press(b"q")
    assert shown.ended() == 0
    assert shown.is_restored()


def test_top_heals_when_the_node_is_back(make_node, terminal) -> None:
    node = make_node("--pool", "work=1")
    shown = terminal("top", *where(node))
    shown.wait(f"{node.worker('worker:work:0')['pid']}")
    node.kill()
    shown.wait("connection lost, retrying")
    node.start()
    shown.wait(f"{node.worker('worker:work:0')['pid']}")
    assert "healthy" in shown.picture()[0]
    job = node.wait_job(node.enqueue("gives_up"))["id"]
    shown.wait(f"job {job} (gives_up) failed")
    shown.press(b"q")
    assert shown.ended() == 0
    assert shown.is_restored()


def test_top_keeps_up_with_more_jobs_than_are_told(make_node, terminal, tmp_path: Path) -> None:
    node = make_node("--pool", "work=2")
    shown = terminal("top", *where(node), columns=140, lines=40)
    shown.wait("healthy")
    held = node.enqueue("wait_for", path=str(tmp_path / "go"))
    node.wait_running(held)
    status, _ = node.post("/api/v1/jobs/bulk", {"jobs": [{"task": "noop", "args": {}}] * 3000})
    assert status in (200, 201)
    until(lambda: re.search(r"3,0\d\d done", shown.picture()[1] + shown.picture()[2]), "all of them to be done")
    until(lambda: [line for line in shown.picture() if re.match(rf" *{held}  wait_for ", line)], "the running job")
    until(lambda: not [line for line in shown.picture() if re.match(r" *\d+  noop ", line)], "the others to be gone")
    (tmp_path / "go").touch()
    shown.wait("no running jobs")
