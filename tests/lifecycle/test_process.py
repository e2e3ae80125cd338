"""One process, without a supervisor: the order in which its last words and its end are told."""

from __future__ import annotations

import asyncio
import os
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
