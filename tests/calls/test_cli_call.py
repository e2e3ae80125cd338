"""`ostler call`, run as a user runs it."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import Node, until

MODELS = Path(__file__).parent / "models.py"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory):
    found = Node(tmp_path_factory.mktemp("calls") / "node", MODELS).start()
    yield found
    found.kill()


def command(node: Node, *args: str) -> list[str]:
    return [sys.executable, "-m", "ostler", "call", *args, "--data", str(node.folder)]


def call(node: Node, *args: str, given: bytes = b"") -> tuple[int, bytes, str]:
    done = subprocess.run(command(node, *args), input=given, capture_output=True, timeout=100)
    return done.returncode, done.stdout, done.stderr.decode()


def answer(node: Node, *args: str, given: bytes = b"") -> bytes:
    code, out, error = call(node, *args, given=given)
    assert code == 0, error
    return out


def test_words_are_the_payload(node: Node) -> None:
    found = json.loads(answer(node, "echo", "a=1", "b=text", 'c=["x"]', "--model", "org/big:7b"))
    assert (found["payload"], found["model"]) == ({"a": 1, "b": "text", "c": ["x"]}, "org/big:7b")


def test_a_payload_is_any_json_from_the_command_or_the_input(node: Node) -> None:
    assert json.loads(answer(node, "echo", "--model", "echo", "--payload", "[1]"))["payload"] == [1]
    found = answer(node, "echo", "c=3", "--model", "echo", "--payload", "-", given=b'{"a": "b"}')
    assert json.loads(found)["payload"] == {"a": "b", "c": 3}


def test_the_whole_answer_is_printed_as_json(node: Node) -> None:
    found = json.loads(answer(node, "echo", "--model", "echo", "--json"))
    assert set(found) == {"result", "request_id", "processing_time_ms", "model"}
    found = json.loads(answer(node, "negative", "--file", "-", "--json", given=b"\x00"))
    assert found["result"] == {"bytes": 1, "content_type": "application/octet-stream"}


def test_a_file_is_sent_as_it_is_and_bytes_are_written_to_a_file_or_a_pipe(node: Node, tmp_path: Path) -> None:
    image, out = tmp_path / "a.png", tmp_path / "b.png"
    image.write_bytes(b"\x00\x0d\x0a\xff")
    assert answer(node, "negative", "--file", str(image)) == b"\xff\xf2\xf5\x00"
    assert answer(node, "negative", "--file", str(image), "--out", str(out)) == b""
    assert out.read_bytes() == b"\xff\xf2\xf5\x00"
    form = json.loads(answer(node, "negative", "language=en", "--file", str(image)))
    assert form == {"fields": {"language": "en"}, "files": {"file": ["a.png", "image/png", 4]}}


def test_a_stream_is_printed_as_it_comes(node: Node, tmp_path: Path) -> None:
    go = tmp_path / "go"
    asked = command(node, "words", "text=first wait last", f"go={go}")
    with subprocess.Popen(asked, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.read(5) == b"first"
        go.touch()
        assert running.stdout.read() == b"waitlast\n"
    assert running.returncode == 0


def test_bytes_are_not_written_to_a_terminal(node: Node) -> None:
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            command(node, "drip"), stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.PIPE, timeout=100
        )
    finally:
        os.close(theirs)
        os.close(ours)
    assert done.returncode == 2
    assert b"write it to a file with --out" in done.stderr


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("nothing",), 2, "there is no task 'nothing' to call"),
        (("echo", "--model", "other"), 2, "echo has no model 'other'"),
        (("echo", "word"), 2, "is not of the form key=value"),
        (("echo", "--payload", "{"), 2, "--payload is not JSON"),
        (("echo", "a=1", "--payload", '{"a": 2}'), 2, "given twice"),
        (("echo", "--file", "missing.png"), 2, "missing.png cannot be read"),
        (("echo", "--model", "echo", "--timeout", "soon"), 2, "timeout must be"),
        (("words", "text=boom"), 1, "RuntimeError: boom (MODEL_ERROR, request "),
        (("broken",), 1, "no such file: weights.bin"),
    ],
)
def test_what_goes_wrong_is_one_sentence_and_an_exit_code(
    node: Node, args: tuple[str, ...], code: int, words: str
) -> None:
    found, _, error = call(node, *args)
    assert found == code, error
    assert words in error
    assert error.strip().count("\n") == 0, error


def test_without_a_node_it_says_how_to_start_one(tmp_path: Path) -> None:
    code, _, error = call(Node(tmp_path), "echo")
    assert (code, "start one with 'ostler up'" in error) == (2, True)


def test_a_file_is_not_left_half_written(node: Node, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert call(node, "words", "text=one boom", "--out", str(out))[0] == 1
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_cancels_the_call(node: Node, tmp_path: Path) -> None:
    go, begun = tmp_path / "go", tmp_path / "begun"
    asked = command(node, "slow", f"go={go}", f"begun={begun}")
    with subprocess.Popen(asked, stderr=subprocess.PIPE) as running:
        until(begun.exists, "the call to begin")
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
    until(lambda: Path(f"{go}.cancelled").exists(), "the model to notice")
