"""One process, without a supervisor: the order in which its last words and its end are told."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

from ostler.lifecycle.process import Launch, Process
from tests.harness import gone, until

_CHILD = (
    "import os, signal\n"
    "fd = int(os.environ['OSTLER_CONTROL'].partition(':')[0])\n"
    'os.write(fd, b\'["done", 1]\\n["done", 2]\\n\')\n'
    "os.write(1, b'last words')\n"
    "os.kill(os.getpid(), signal.SIGKILL)\n"
)


def test_what_was_sent_before_the_death_is_told_before_the_death(tmp_path: Path) -> None:
    """The loop learns of the death first: nothing was read when `_reap` runs, yet the results come before the end."""

    async def main() -> list[object]:
        told: list[object] = []
        launch = Launch(
            [sys.executable, "-I", "-S", "-c", _CHILD], dict(os.environ), "t/w/1/", tmp_path / "log", beat=5.0
        )
        process = Process(
            launch,
            on_frame=told.append,
            on_line=told.append,
            on_labelled=lambda label, lines: None,
            on_printed=lambda: None,
            on_end=lambda ended: told.append(ended.signal),
            on_garbage=told.append,
        )
        until(lambda: gone(process.pid), "the child to be dead")  # the loop does not run meanwhile: it has read nothing
        assert told == []
        process._reap()
        return told

    assert asyncio.run(main()) == [["done", 1], ["done", 2], "last words", "SIGKILL"]


_TALKER = (
    "import os, signal, time\n"
    "fd = int(os.environ['OSTLER_CONTROL'].partition(':')[0])\n"
    "for n in range(300):\n"
    "    os.write(fd, b'[\"done\", %d]\\n' % n)\n"
    "    time.sleep(0.0001)\n"
    "os.kill(os.getpid(), signal.SIGKILL)\n"
)


def test_a_process_that_may_be_read_at_leisure_loses_no_frame_and_its_death_is_told(tmp_path: Path) -> None:
    async def main() -> tuple[list[object], int]:
        told: list[object] = []
        over = asyncio.get_running_loop().create_future()
        launch = Launch(
            [sys.executable, "-I", "-S", "-c", _TALKER], dict(os.environ), "t/w/1/", tmp_path / "log", beat=5.0
        )
        process = Process(
            launch,
            on_frame=told.append,
            on_line=told.append,
            on_labelled=lambda label, lines: None,
            on_printed=lambda: None,
            on_end=lambda ended: over.set_result(ended.signal),
            on_garbage=told.append,
            unhurried=lambda: True,
        )
        rests = 0
        look = process._look

        def counted() -> None:
            nonlocal rests
            rests += 1
            look()

        process._look = counted
        assert await asyncio.wait_for(over, 30) == "SIGKILL"
        return told, rests

    told, rests = asyncio.run(main())
    assert told == [["done", n] for n in range(300)]
    assert 0 < rests < 300


_HEIR = (
    "import os, socket\n"
    "from ostler.lifecycle.child import inherited\n"
    "listening = socket.socket(fileno=inherited('LISTEN'))\n"
    "print(listening.getsockname()[1], os.get_inheritable(listening.fileno()), 'OSTLER_FD_LISTEN' in os.environ)\n"
)


def test_a_worker_inherits_the_open_files_that_it_was_given_and_its_own_children_do_not(tmp_path: Path) -> None:
    async def main(number: int) -> list[object]:
        told: list[object] = []
        over = asyncio.get_running_loop().create_future()
        launch = Launch(
            [sys.executable, "-c", _HEIR], dict(os.environ), "t/w/1/", tmp_path / "log", descriptors={"LISTEN": number}
        )
        Process(
            launch,
            on_frame=told.append,
            on_line=told.append,
            on_labelled=lambda label, lines: None,
            on_printed=lambda: None,
            on_end=lambda ended: over.set_result(None),
            on_garbage=told.append,
        )
        await over
        return told

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert asyncio.run(main(listening.fileno())) == [f"{port} False False"]
        assert listening.fileno() >= 0


_LABELS = (
    "import json, os, socket, time\n"
    "channel = socket.socket(fileno=int(os.environ['OSTLER_CONTROL'].partition(':')[0]))\n"
    "mark = b'\\x1e' + json.loads(channel.recv(4096))[1].encode() + b' '\n"
    "for piece in (b'M1\\nM2\\n', b'two\\n', b'M3\\n4M4\\n', b'42\\n', b'M5\\n7\\n', b'half', b'M6\\n', b'six\\n', b'M7\\nM8\\n', b'8\\n'):\n"
    "    os.write(1, piece.replace(b'M', mark))\n"
    "    time.sleep(0.02)\n"
)


def test_each_line_belongs_to_the_label_before_it_also_where_labels_come_alone_or_behind_half_a_line(
    tmp_path: Path,
) -> None:
    async def main() -> list[tuple[str, bytes]]:
        told: list[tuple[str, bytes]] = []
        over = asyncio.get_running_loop().create_future()
        launch = Launch(
            [sys.executable, "-I", "-S", "-c", _LABELS], dict(os.environ), "t/w/1/", tmp_path / "log", beat=5.0
        )
        Process(
            launch,
            on_frame=lambda frame: None,
            on_line=lambda line: None,
            on_labelled=lambda label, lines: told.extend((label, line) for line in lines),
            on_printed=lambda: None,
            on_end=lambda ended: over.set_result(None),
            on_garbage=lambda why: None,
        )
        await asyncio.wait_for(over, 30)
        return told

    expected = [("2", b"two"), ("3", b"4"), ("4", b"42"), ("5", b"7"), ("5", b"half"), ("6", b"six"), ("8", b"8")]
    assert asyncio.run(main()) == expected
    assert (tmp_path / "log").read_bytes() == b"two\n4\n42\n7\nhalf\nsix\n8\n"
