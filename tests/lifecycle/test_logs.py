"""The log writer in trouble, and the reader's view of what is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ostler.lifecycle import logs

# Too many open files at the moment of the rotation, then room again.
_EMFILE = """
import os, resource, sys
from pathlib import Path
from ostler.lifecycle.logs import Writer

writer = Writer(Path(sys.argv[1]), 100)
writer.write(b"a" * 150 + b"\\n")
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(5)]
resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
for n in range(3):
    writer.write(b"lost\\n" * 2)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
writer.write(b"back\\n")
writer.write(b"again\\n")
"""


def test_a_log_that_cannot_be_opened_after_its_rotation_comes_back_and_says_what_was_lost(tmp_path: Path) -> None:
    path = tmp_path / "w-0.log"
    done = subprocess.run([sys.executable, "-c", _EMFILE, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Too many open files") == 1  # told once, not with each line
    assert path.read_text() == "[ostler: 6 lines could not be written here]\nback\nagain\n"
    assert logs.aside(path).read_text() == "a" * 150 + "\n"
    assert logs.last(path, 10)[0] == "a" * 150


def test_a_full_disk_costs_lines_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "w-0.log"
    path.symlink_to("/dev/full")
    writer = logs.Writer(path)
    writer.write(b"one\ntwo\n")
    writer.close()
    path.unlink()
    writer.write(b"three\n")
    writer.close()
    assert path.read_text() == "[ostler: 2 lines could not be written here]\nthree\n"


def test_the_reader_tells_whether_there_are_older_lines(tmp_path: Path) -> None:
    path = tmp_path / "w-0.log"
    writer = logs.Writer(path, 40)
    for n in range(20):
        writer.write(f"line {n:02d}\n".encode())
    writer.close()
    reader = logs.Reader(path)
    kept = reader.start(100)
    assert (kept[-1], reader.older) == ("line 19", False)
    assert len(kept) > len(path.read_text().splitlines())  # from both files
    assert (reader.start(3), reader.older) == (["line 17", "line 18", "line 19"], True)
    assert (reader.start(len(kept)), reader.older) == (kept, False)
    reader.close()
