"""Artifacts and scratch: whole or not at all, never over a successor, never without bound."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ostler.errors import BadArguments
from ostler.jobs import results, scratch
from ostler.jobs.results import LocalResults, LostClaim
from tests.harness import until


@pytest.fixture(params=["local", "memory"])
def place(request, tmp_path: Path):
    return results.connect("" if request.param == "local" else f"memory://{tmp_path.name}", tmp_path)


def make(folder: Path, text: str = "content") -> Path:
    path = folder / "source"
    path.write_text(text)
    return path


def test_what_is_published_can_be_found_read_and_deleted(place, tmp_path: Path) -> None:
    published = place.put(make(tmp_path), "1/out.txt", fence=1)
    assert (published.size, published.key) == (7, "1/out.txt")
    assert place.find("1/out.txt") == published
    with place.open("1/out.txt") as file:
        assert file.read() == b"content"
    assert results.valid(place, "1/out.txt", tmp_path) == published
    place.delete("1/out.txt")
    assert place.find("1/out.txt") is None


def test_an_older_claim_cannot_publish_over_a_newer_one(place, tmp_path: Path) -> None:
    place.put(make(tmp_path, "new"), "1/out.txt", fence=2)
    with pytest.raises(LostClaim, match="newer claim"):
        place.put(make(tmp_path, "old"), "1/out.txt", fence=1)
    with place.open("1/out.txt") as file:
        assert file.read() == b"new"
    assert place.put(make(tmp_path, "newest"), "1/out.txt", fence=3).fence == 3


def test_what_was_damaged_or_does_not_pass_the_apps_check_is_not_valid(tmp_path: Path) -> None:
    place = LocalResults(tmp_path / "results")
    place.put(make(tmp_path), "1/out.txt", fence=1)

    def objects(path: Path) -> None:
        raise ValueError(path)

    assert results.valid(place, "1/out.txt", tmp_path, objects) is None
    place.path("1/out.txt").write_text("CONTENT")  # same size, other bytes
    assert place.find("1/out.txt") is not None
    assert results.valid(place, "1/out.txt", tmp_path) is None
    place.path("1/out.txt").write_text("cut off")
    place.path("1/out.txt").write_text("x")
    assert place.find("1/out.txt") is None


def test_a_publish_is_whole_or_not_at_all(tmp_path: Path) -> None:
    """A process that publishes a large file again and again is killed at random moments; nobody ever sees half of it."""
    source = tmp_path / "source"
    source.write_bytes(os.urandom(3_000_000))
    code = (
        "import sys, pathlib; from ostler.jobs.results import LocalResults\n"
        "place = LocalResults(pathlib.Path(sys.argv[1]))\n"
        "n = int(sys.argv[3])\n"
        "while True:\n    n += 1; place.put(pathlib.Path(sys.argv[2]), '1/clip', n)\n"
    )
    place = LocalResults(tmp_path / "results")
    for round_ in range(6):
        started = round_ * 10_000
        process = subprocess.Popen([sys.executable, "-c", code, str(place.root), str(source), str(started)])
        until(lambda: (found := place.find("1/clip")) is not None and found.fence > started + round_, "a publish")
        process.kill()
        process.wait()
        assert place.path("1/clip").stat().st_size == 3_000_000
        found = results.valid(place, "1/clip", tmp_path)
        assert found is not None
        assert found.fence > started


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/.", "a/.hidden", "a\0b", "a\\b", 5])
def test_keys_stay_inside(tmp_path: Path, key) -> None:
    with pytest.raises(BadArguments, match="not a usable key"):
        LocalResults(tmp_path).path(key)


def test_scratch_is_empty_and_private(tmp_path: Path) -> None:
    path = scratch.make(tmp_path, 7, 1)
    (path / "left").touch()
    assert oct(path.stat().st_mode & 0o777) == "0o700"
    assert list(scratch.make(tmp_path, 7, 1).iterdir()) == []


def test_scratch_of_a_success_is_kept_when_asked(tmp_path: Path, monkeypatch) -> None:
    path = scratch.make(tmp_path, 7, 1)
    monkeypatch.setenv("KEEP_SCRATCH_ON_SUCCESS", "1")
    scratch.settle(tmp_path, 7, 1, success=True)
    assert path.exists()
    monkeypatch.delenv("KEEP_SCRATCH_ON_SUCCESS")
    scratch.settle(tmp_path, 7, 1, success=True)
    assert not (tmp_path / "7").exists()


def test_scratch_is_swept_by_age_and_by_size_but_not_of_live_jobs(tmp_path: Path) -> None:
    now = time.time()
    for job, age in ((1, 9000), (2, 1300), (3, 1200), (4, 10), (5, 50_000)):
        path = scratch.make(tmp_path, job, 1)
        (path / "file").write_bytes(b"x" * 100)
        for p in (path, path.parent):
            os.utime(p, (now - age, now - age))
    (tmp_path / "not-a-job").mkdir()
    assert scratch.sweep(tmp_path, max_age=5000, max_bytes=10_000, live={5}, now=now) == (1, 100)
    assert scratch.sweep(tmp_path, max_age=5000, max_bytes=250, live={5}, now=now) == (1, 100)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "4", "5", "not-a-job"]
    assert scratch.sweep(tmp_path, max_age=5000, max_bytes=50, live={5}, now=now) == (
        1,
        100,
    )  # 4 is too young to go by size
    assert sorted(p.name for p in tmp_path.iterdir()) == ["4", "5", "not-a-job"]


def test_artifacts_of_another_store_are_neither_newer_nor_valid(place, tmp_path: Path) -> None:
    """The results may outlive the database, and then jobs are numbered from 1 again."""
    place.put(make(tmp_path, "old"), "1/out.txt", fence=9, origin="old store")
    assert results.valid(place, "1/out.txt", tmp_path, origin="new store") is None
    assert place.put(make(tmp_path, "new"), "1/out.txt", fence=1, origin="new store").fence == 1
    place.forget(1, "new store")
    assert place.find("1/out.txt") is not None  # not made by job 1
    place.put(make(tmp_path, "own"), "1/out.txt", fence=2, origin="new store", job=1)
    place.forget(1, "old store")
    assert place.find("1/out.txt") is not None
    place.forget(1, "new store")
    assert place.find("1/out.txt") is None


def test_fences_of_different_jobs_are_not_compared_and_notes_do_not_clash(place, tmp_path: Path) -> None:
    place.put(make(tmp_path, "a"), "by-hash/abc", fence=4, job=1)
    assert place.put(make(tmp_path, "b"), "by-hash/abc", fence=1, job=2).job == 2
    place.put(make(tmp_path, "data"), "5/data", fence=1)
    place.put(make(tmp_path, "json"), "5/data.json", fence=1)
    for key, text in (("5/data", b"data"), ("5/data.json", b"json")):
        with place.open(key) as file:
            assert file.read() == text


def test_after_a_publish_the_file_its_note_and_every_folder_above_are_synced(tmp_path: Path, monkeypatch) -> None:
    place = LocalResults(tmp_path / "data" / "results")
    done: list[tuple[str, str]] = []

    def fsync(descriptor: int) -> None:
        done.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def replace(self: Path, target: Path) -> None:
        os.replace(self, target)
        done.append(("move", str(target)))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    place.put(make(tmp_path), "7/a/out.txt", fence=1)
    folder = place.root / "7" / "a"
    moved = [n for n, (what, _) in enumerate(done) if what == "move"]
    assert [done[n][1] for n in moved] == [str(folder / ".out.txt.ostler"), str(folder / "out.txt")]
    before, after = [path for _, path in done[: moved[0]]], done[moved[-1] + 1 :]
    parents = [str(p) for p in (tmp_path, tmp_path / "data", place.root, place.root / "7")]
    assert set(parents) <= set(before)
    assert sum(".parts" in path for path in before) == 2  # the file and its note, before they get their names
    assert after == [("sync", str(folder))]
    done.clear()
    place.put(make(tmp_path), "8/out.txt", fence=1)  # a new folder in a root that is known
    assert ("sync", str(place.root)) in done
    assert ("sync", str(tmp_path / "data")) not in done


def test_a_note_of_a_claim_that_a_power_cut_took_back_is_replaced(place, tmp_path: Path) -> None:
    """The store decides: while it names this claim, no newer one exists."""
    place.put(make(tmp_path, "of a lost claim"), "1/out.txt", fence=15, job=1)
    with pytest.raises(LostClaim, match="newer claim"):
        place.put(make(tmp_path, "late"), "1/out.txt", fence=2, job=1, holds=lambda: False)
    assert place.put(make(tmp_path, "again"), "1/out.txt", fence=2, job=1, holds=lambda: True).fence == 2
    with place.open("1/out.txt") as file:
        assert file.read() == b"again"


def test_what_a_killed_publish_leaves_is_swept_by_age(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(1000))
    code = (
        "import os, sys, pathlib; from ostler.jobs import results\n"
        "results._locked = lambda folder: os.kill(os.getpid(), 9)\n"
        "results.LocalResults(pathlib.Path(sys.argv[1])).put(pathlib.Path(sys.argv[2]), '1/clip', 1)\n"
    )
    place = LocalResults(tmp_path / "results")
    assert place.sweep() == 0
    assert subprocess.run([sys.executable, "-c", code, str(place.root), str(source)]).returncode == -9
    left = [p for p in place.root.rglob("*") if p.is_file()]
    assert len(left) == 1
    assert place.sweep(max_age=3600) == 0
    assert place.sweep(max_age=3600, now=time.time() + 3601) == 1
    assert not left[0].exists()


def test_temporary_objects_elsewhere_are_swept_too(tmp_path: Path) -> None:
    place = results.connect(f"memory://{tmp_path.name}", tmp_path)
    assert place.sweep() == 0
    place.put(make(tmp_path), "1/out.txt", fence=1)
    place._fs.pipe_file(f"{place._parts}/left", b"half of it")
    assert (place.sweep(), place.sweep(now=time.time() + 90_000)) == (0, 1)
    assert place.find("1/out.txt") is not None


def test_deleting_leaves_no_empty_folders(tmp_path: Path) -> None:
    place = LocalResults(tmp_path / "results")
    place.put(make(tmp_path), "3/a/b/out.txt", fence=1, job=3)
    place.put(make(tmp_path), "4/out.txt", fence=1, job=4)
    place.forget(3)
    assert sorted(p.name for p in place.root.iterdir() if not p.name.startswith(".")) == ["4"]


def _dig(folder: Path, levels: int) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
        os.mkdir("deeper", dir_fd=descriptor)
        below = os.open("deeper", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)


def test_a_deep_scratch_is_swept_and_the_others_with_it(tmp_path: Path) -> None:
    for job in (1, 2, 3):
        _dig(scratch.make(tmp_path, job, 1), 3000 if job == 2 else 3)
    later = time.time() + 10_000
    assert scratch.sweep(tmp_path, max_age=5000, max_bytes=10**9, live=set(), now=later)[0] == 3
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_that_takes_too_long_leaves_the_rest_to_the_next(tmp_path: Path) -> None:
    for job in range(5):
        scratch.make(tmp_path, job, 1)
    limits = {"max_age": 5000, "max_bytes": 10**9, "live": set(), "now": time.time() + 10_000}
    assert scratch.sweep(tmp_path, patience=0, **limits) == (0, 0)
    assert scratch.sweep(tmp_path, **limits) == (5, 0)


_LOCKED = """
import os, pathlib, sys
from ostler.jobs import scratch
root = pathlib.Path(sys.argv[1])
if os.getuid() == 0:  # who may do anything
    os.setgid(65534)
    os.setuid(65534)
for job in (1, 2):
    path = scratch.make(root, job, 1)
    (path / "a" / "b" / "c").mkdir(parents=True)
    (path / "a" / "b" / "file").touch()
    (path / "link").symlink_to("/etc")
    for folder in (path / "a" / "b" / "c", path / "a" / "b", path / "a", path):
        folder.chmod(0)
scratch.settle(root, 1, 1, success=True)
scratch.make(root, 2, 1)
print(sorted(str(p.relative_to(root)) for p in root.rglob("*")))
"""


def test_a_scratch_that_a_job_has_locked_is_deleted() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        done = subprocess.run([sys.executable, "-c", _LOCKED, folder], capture_output=True, text=True)
        assert (done.stdout.strip(), done.stderr) == ("['2', '2/1']", "")


def test_what_cannot_be_deleted_is_told_and_fails_nothing(tmp_path: Path, monkeypatch, caplog) -> None:
    path = scratch.make(tmp_path, 1, 1)
    (path / "good").touch()
    (path / "stuck").touch()
    unlink = os.unlink

    def refuse(name, **more) -> None:
        if name == "stuck":
            raise PermissionError(1, "Operation not permitted")
        unlink(name, **more)

    monkeypatch.setattr(os, "unlink", refuse)
    scratch.settle(tmp_path, 1, 1, success=True)
    assert "job 1: its scratch could not be deleted: stuck: Operation not permitted" in caplog.text
    assert not (path / "good").exists()
    assert list(scratch.make(tmp_path, 1, 1).iterdir()) == []  # moved out of the way
    assert scratch.sweep(tmp_path, max_age=1, max_bytes=0, live=set(), now=time.time() + 9)[0] == 0
    monkeypatch.undo()
    assert scratch.sweep(tmp_path, max_age=1, max_bytes=0, live=set(), now=time.time() + 9)[0] == 1


def test_files_that_appear_while_a_scratch_is_deleted_are_deleted_too(tmp_path: Path, monkeypatch) -> None:
    path = scratch.make(tmp_path, 1, 1)
    (path / "folder").mkdir()
    rmdir = os.rmdir

    def late(name, **more) -> None:
        monkeypatch.setattr(os, "rmdir", rmdir)
        (path / name / "late").touch()
        rmdir(name, **more)

    monkeypatch.setattr(os, "rmdir", late)
    assert scratch.delete(path) is None
    assert not path.exists()
