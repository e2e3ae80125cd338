"""The parts of the simulated power cut: the recorder misses no change, and a rebuilt file is what a power cut could leave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.powercut.rebuild import Cut, Disk, Image, Kept, Names
from tests.powercut.record import Change, Recorder, build

WRITES = """
import os, shutil, sys, threading
os.chdir(sys.argv[1])
os.makedirs("a/b")
with open("a/x", "w") as file:
    file.write("hello"); file.flush(); os.fsync(file.fileno()); file.write(" world")
with open("a/x", "a") as file:
    file.write("!")
os.rename("a/x", "a/b/y")
one = os.open("a/b/y", os.O_RDWR); two = os.dup(one)
os.pwrite(two, b"J", 0); os.writev(two, [b"12", b"34"]); os.rename("a/b/y", "a/z"); os.write(one, b"5"); os.ftruncate(one, 9)
if not (child := os.fork()):
    os.write(one, b"c"); os._exit(0)
os.waitpid(child, 0)
os.link("a/z", "a/l"); os.unlink("a/z"); os.truncate("a/l", 7); os.posix_fallocate(one, 0, 20)
shutil.copyfile("a/l", "copy")
folder = os.open("a", os.O_RDONLY)
os.write(os.open("inside", os.O_CREAT | os.O_WRONLY, dir_fd=folder), b"q" * 9000); os.fsync(folder)
os.makedirs("gone/deep"); open("gone/deep/f", "w").close(); shutil.rmtree("gone")
with open("copy", "w") as file:
    file.write("short")
def append(letter):
    file = os.open("lines", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    for _ in range(200):
        os.write(file, letter * 10)
threads = [threading.Thread(target=append, args=(letter,)) for letter in (b"a", b"b")]
child = os.fork()
for thread in threads: thread.start()
for thread in threads: thread.join()
if not child: os._exit(0)
os.waitpid(child, 0)
"""


def test_the_recorder_sees_every_kind_of_change(tmp_path: Path) -> None:
    root = tmp_path.resolve() / "disk"
    root.mkdir()
    recorder = Recorder(build(tmp_path), root, tmp_path / "log", 1 << 24)
    subprocess.run([sys.executable, "-c", WRITES, str(root)], env={**os.environ, **recorder.env}, check=True)
    files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert (files["a/l"][:7], len(files["lines"])) == (b"12345cw", 8000)
    for names in Names:
        assert rebuilt(recorder.changes(), names, Cut(Kept.ALL)) == files


def rebuilt(changes: list[Change], names: Names, cut: Cut) -> Image:
    disk = Disk(names)
    for change in changes:
        disk.take(change)
    return disk.image(cut)


def file(inode: int, name: str) -> Change:
    return Change("C", inode, 0, name.encode())


def write(inode: int, at: int, data: bytes) -> Change:
    return Change("W", inode, at, data)


def sync(inode: int) -> Change:
    return Change("F", inode, 0, b"")


ROOT = 99  # any inode that nothing else has


def test_what_was_synced_is_there_and_the_rest_is_lost() -> None:
    changes = [file(1, "a"), write(1, 0, b"kept"), sync(1), sync(ROOT), write(1, 0, b"LOST"), write(1, 4, b"more")]
    for names in Names:
        assert rebuilt(changes, names, Cut(Kept.NONE)) == {"a": b"kept"}
        assert rebuilt(changes, names, Cut(Kept.ALL)) == {"a": b"LOSTmore"}


def test_a_torn_write_is_cut_at_a_sector() -> None:
    changes = [file(1, "a"), sync(ROOT), write(1, 100, b"x" * 5000)]
    found = {rebuilt(changes, Names.POSIX, Cut(Kept.FIRST, 4096, seed))["a"] for seed in range(50)}
    assert found == {b"", bytes(100) + b"x" * 3996, bytes(100) + b"x" * 5000}
    lengths = {len(rebuilt(changes, Names.POSIX, Cut(Kept.FIRST, 512, seed))["a"]) for seed in range(200)}
    assert lengths == {0, *range(512, 5100, 512), 5100}


def test_writes_may_survive_out_of_order() -> None:
    changes = [file(1, "a"), sync(ROOT), write(1, 0, b"1" * 4096), write(1, 4096, b"2" * 4096)]
    found = {rebuilt(changes, Names.POSIX, Cut(Kept.SOME, 4096, seed))["a"] for seed in range(50)}
    assert bytes(4096) + b"2" * 4096 in found
    assert b"1" * 4096 in found


@pytest.mark.parametrize(("names", "kept"), [(Names.EXT4, {"b": b"new"}), (Names.POSIX, {}), (Names.POSIX_FILES, {})])
def test_a_name_is_safe_when_its_directory_was_synced(names: Names, kept: Image) -> None:
    moved = [file(1, "a"), write(1, 0, b"new"), sync(1), Change("R", 1, 0, b"a", "b")]
    later = [file(2, "c"), sync(2)]
    assert rebuilt([*moved, *later], names, Cut(Kept.NONE)) == (kept and {**kept, "c": b""})
    assert rebuilt([*moved, sync(ROOT)], names, Cut(Kept.NONE)) == {"b": b"new"}


def test_a_folder_is_safe_when_the_directory_above_was_synced() -> None:
    changes = [Change("D", 1, 0, b"d"), file(2, "d/a"), write(2, 0, b"x"), sync(2), sync(1)]
    assert rebuilt(changes, Names.POSIX, Cut(Kept.NONE)) == {}
    assert rebuilt(changes, Names.POSIX_FILES, Cut(Kept.NONE)) == {"d/a": b"x"}
    assert rebuilt([*changes, sync(ROOT)], Names.POSIX, Cut(Kept.NONE)) == {"d/a": b"x"}


def test_an_inode_that_is_used_again_is_another_file() -> None:
    changes = [
        file(1, "a"),
        write(1, 0, b"old"),
        sync(1),
        sync(ROOT),
        Change("U", 1, 0, b"a"),
        file(1, "b"),
        sync(ROOT),
    ]
    assert rebuilt(changes, Names.POSIX, Cut(Kept.NONE)) == {"b": b""}
