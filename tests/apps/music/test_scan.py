"""Scans of a library: what becomes of its rows, on both databases. Files are small and are no music, which a scan does not look at."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest


from sqlalchemy import inspect, select, text, update

from ostler import BadArguments, Cancelled, ConfigError, Conflict, config
from ostler.apps.music import catalogue, library, watching
from ostler.apps.music.library import Away, Scan
from ostler.apps.music.moves import content
from ostler.apps.music.rules import IGNORED, Rules
from ostler.apps.music.opening import open_tables
from ostler.apps.music.tables import Tables, embeddings, scores, tracks
from ostler.apps.music.walk import File, Problem, Walk, ignoring, signed
from tests.stores import store_of


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def tables(request, tmp_path_factory):
    with store_of(request) as url:
        opened = open_tables(config.load({"store": url, "data": str(tmp_path_factory.mktemp("music"))}, environ={}))
        yield opened
        opened.close()


class Library:
    """A directory and its rows."""

    def __init__(self, tables: Tables, root: Path) -> None:
        self.tables, self.root, self.jobs = tables, root, 0
        root.mkdir()
        self.id = catalogue.add(tables, Rules(), str(root), {"name": str(root)})

    def put(self, path: str | bytes, text: str = "sound") -> Path:
        file = self.root / os.fsdecode(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def scan(self, job: int | None = None, tick=lambda *_: None, queue=lambda: None) -> dict:
        self.jobs += 1
        return Scan(self.tables, self.id, job or self.jobs * 1000, tick, queue).run().result()

    def found(self, job: int | None = None) -> dict:
        """What a scan found, without zeros."""
        return {name: count for name, count in self.scan(job).items() if count and name != "seen"}

    def rows(self) -> dict[str, tuple[int, str]]:
        with self.tables.read() as connection:
            asked = select(tracks).where(tracks.c.library == self.id).order_by(tracks.c.path)
            return {row.shown: (row.id, row.state) for row in connection.execute(asked)}

    def version(self, path: str) -> int:
        with self.tables.read() as connection:
            own = (tracks.c.library == self.id) & (tracks.c.shown == path)
            return connection.execute(select(tracks.c.version).where(own)).scalar_one()

    def states(self) -> dict[str, str]:
        return {path: state for path, (_, state) in self.rows().items()}

    def shown(self) -> dict:
        return catalogue.listing(self.tables, 0, self.id)[0]

    def tagged(self) -> None:
        """As if all were tagged."""
        with self.tables.write() as connection:
            for row in connection.execute(select(tracks).where(tracks.c.library == self.id)).all():
                path = os.path.join(os.fsencode(self.root), row.path)
                values = {"state": "tagged", "sha256": content(path), "tagged_at": 1, "model": "m"}
                connection.execute(update(tracks).where(tracks.c.id == row.id).values(**values))
                key = {"track": row.id, "model": "m", "at": 1}
                self.tables.upsert(connection, scores, [{**key, "scores": b"1234"}])
                self.tables.upsert(connection, embeddings, [{**key, "vec": b"1234"}])


@pytest.fixture
def lib(tables, tmp_path) -> Library:
    return Library(tables, tmp_path / "lib")


def walked(root: Path, *ignored: str) -> list[File | Problem]:
    return list(Walk(os.fsencode(root), ignoring(ignored)))


def paths(root: Path, *ignored: str) -> list[bytes]:
    return [item.path for item in walked(root, *ignored)]


# ---- the walk


def test_files_come_in_the_byte_order_of_their_paths(tmp_path):
    names = [
        b"a/b.mp3",
        b"a.mp3",
        b"a-b.mp3",
        b"a0.mp3",
        b"a/b/c.mp3",
        b"a/b.flac/x.mp3",
        b"\xff\xfe.ogg",
        b"\xc3\xa4.wav",
        b"Z.OPUS",
        b"a b/1.m4a",
    ]
    for name in names:
        file = os.path.join(os.fsencode(tmp_path), name)
        os.makedirs(os.path.dirname(file), exist_ok=True)
        open(file, "wb").close()
    found = paths(tmp_path)
    assert found == sorted(names)
    assert paths(tmp_path / "a") == sorted(name[2:] for name in names if name.startswith(b"a/"))


def test_only_the_six_formats_are_taken_whatever_their_case(tmp_path):
    for name in ("a.mp3", "b.FLAC", "c.ogg", "d.opus", "e.M4a", "f.wav", "g.txt", "h", "i.mp3.part", "j.jpg"):
        (tmp_path / name).touch()
    assert [item.format for item in walked(tmp_path)] == ["mp3", "flac", "ogg", "opus", "m4a", "wav"]


def test_loops_of_links_end_and_links_within_the_library_are_no_second_track(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "a").mkdir(parents=True)
    (outside / "deep").mkdir(parents=True)
    (root / "a" / "x.mp3").touch()
    (outside / "deep" / "y.mp3").touch()
    (root / "a" / "up").symlink_to(root)
    (root / "itself").symlink_to(root / "itself")
    (root / "itself.mp3").symlink_to(root / "itself.mp3")
    (root / "same.mp3").symlink_to(root / "a" / "x.mp3")
    (root / "out").symlink_to(outside)
    (root / "out2").symlink_to(outside)
    (outside / "deep" / "back").symlink_to(outside)
    (outside / "home").symlink_to(root)
    (outside / "above").symlink_to(tmp_path)
    (root / "other.mp3").symlink_to(outside / "deep" / "y.mp3")
    (root / "nowhere.mp3").symlink_to(tmp_path / "nothing.mp3")
    found = {item.path: getattr(item, "reason", "") for item in walked(root)}
    assert found == {
        b"a/x.mp3": "",
        b"nowhere.mp3": "no such file or directory",
        b"other.mp3": "",
        b"out/deep/y.mp3": "",
    }


def test_what_is_no_regular_file_is_a_problem_and_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe.mp3")
    assert walked(tmp_path) == [Problem(b"pipe.mp3", "it is not a regular file")]


def test_a_path_too_long_for_the_system_is_a_problem(tmp_path):
    """A tree can be deeper than a path can be long."""
    depth, name = 20, "d" * 250
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("x.mp3", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    (found,) = walked(tmp_path)
    assert found.reason == "file name too long" and found.path.endswith(b"/")


@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("*.wav", [b"a/one.mp3", b"a/skip/two.mp3", b"skip.mp3"]),
        ("skip", [b"a/b.wav", b"a/one.mp3", b"skip.mp3"]),
        ("skip.mp3/", [b"a/b.wav", b"a/one.mp3", b"a/skip/two.mp3", b"skip.mp3"]),
        ("a/skip", [b"a/b.wav", b"a/one.mp3", b"skip.mp3"]),
        ("/a/", [b"skip.mp3"]),
        ("a/*", [b"skip.mp3"]),
        ("on?.mp3", [b"a/b.wav", b"a/skip/two.mp3", b"skip.mp3"]),
    ],
)
def test_ignore_patterns(tmp_path, pattern, left):
    for name in ("a/one.mp3", "a/b.wav", "a/skip/two.mp3", "skip.mp3"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert paths(tmp_path, pattern) == left


def test_hidden_files_and_what_storage_boxes_leave_behind_are_ignored_by_default(tmp_path):
    for name in (".a.mp3.ostler-x.part", "@eaDir/b.mp3", "#recycle/c.mp3", ".git/d.mp3", ".e.mp3", "f.mp3"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert paths(tmp_path, *IGNORED) == [b"f.mp3"]


def test_the_share_that_is_done_grows_to_one(tmp_path):
    for n in range(5):
        for m in range(n):
            file = tmp_path / f"d{n}" / f"{m}.mp3"
            file.parent.mkdir(exist_ok=True)
            file.touch()
    (tmp_path / "empty").mkdir()
    walk = Walk(os.fsencode(tmp_path), ignoring(()))
    shares = [walk.done for _ in walk]
    assert shares == sorted(shares) and walk.done == pytest.approx(1)


# ---- rows


def test_a_rescan_touches_only_what_is_new_changed_or_gone(lib):
    lib.put("a/1.mp3")
    lib.put("a/2.mp3")
    lib.put("b.flac", "noise")
    assert lib.found() == {"new": 3}
    lib.tagged()
    assert lib.found() == {}
    lib.put("a/2.mp3", "another sound")
    (lib.root / "b.flac").unlink()
    lib.put("c.ogg", "voice")
    assert lib.found() == {"new": 1, "changed": 1, "gone": 1}
    assert lib.states() == {"a/1.mp3": "tagged", "a/2.mp3": "new", "b.flac": "gone", "c.ogg": "new"}


def test_a_file_that_comes_back_as_it_was_has_its_state_again(lib):
    file = lib.put("a.mp3")
    lib.put("b.mp3")
    lib.scan()
    lib.tagged()
    away = lib.root.parent / "a.mp3"
    file.rename(away)
    assert lib.found() == {"gone": 1}
    away.rename(file)
    assert lib.found() == {"back": 1}
    assert lib.states() == {"a.mp3": "tagged", "b.mp3": "tagged"}


@pytest.mark.parametrize(("old", "new"), [("a/x.mp3", "z/y.mp3"), ("z/x.mp3", "a/y.mp3")])
def test_a_file_that_was_moved_keeps_its_row(lib, old, new):
    file = lib.put(old, "the same")
    lib.put("m.mp3")
    lib.scan()
    lib.tagged()
    kept = lib.rows()[old][0]
    (lib.root / new).parent.mkdir(exist_ok=True)
    file.rename(lib.root / new)
    assert lib.found() == {"moved": 1}
    assert lib.rows()[new] == (kept, "tagged") and old not in lib.rows()
    assert lib.found() == {}


@pytest.mark.parametrize(("old", "new"), [("a/x.mp3", "z/y.mp3"), ("z/x.mp3", "a/y.mp3")])
def test_a_file_that_was_copied_and_deleted_keeps_its_row_by_its_content(lib, old, new):
    file = lib.put(old, "the same")
    lib.put("m.mp3", "no match")
    lib.scan()
    lib.tagged()
    kept = lib.rows()[old][0]
    other = lib.put(new, "the same")
    file.unlink()
    os.utime(other, (1, 1))
    lib.put("n.mp3", "not same")  # of the same size
    assert lib.found() == {"moved": 1, "new": 1}
    assert lib.rows()[new] == (kept, "tagged")


def test_a_copy_is_a_track_of_its_own(lib):
    file = lib.put("a.mp3", "the same")
    lib.scan()
    lib.tagged()
    shutil.copy2(file, lib.root / "b.mp3")
    os.link(file, lib.root / "c.mp3")
    assert lib.found() == {"new": 2}
    assert lib.states() == {"a.mp3": "tagged", "b.mp3": "new", "c.mp3": "new"}


def test_a_whole_directory_that_was_renamed_keeps_its_rows(lib):
    for n in range(30):
        lib.put(f"old/{n:02}.mp3", f"sound {n}")
    lib.put("other.mp3")
    lib.scan()
    lib.tagged()
    before = sorted(number for number, _ in lib.rows().values())
    (lib.root / "old").rename(lib.root / "a new name")
    assert lib.found() == {"moved": 30}
    assert sorted(number for number, _ in lib.rows().values()) == before
    assert set(lib.states().values()) == {"tagged"}


def test_two_files_that_swap_their_names_are_both_looked_at_again(lib):
    one, two = lib.put("1.mp3", "first"), lib.put("2.mp3", "the second")
    lib.scan()
    lib.tagged()
    one.rename(lib.root / "x")
    two.rename(one)
    (lib.root / "x").rename(two)
    assert lib.found() == {"changed": 2}


def test_names_that_are_no_utf8_are_kept_byte_by_byte(lib):
    name = b"caf\xe9/\xff\xfe.mp3"
    lib.put(name)
    assert lib.found() == {"new": 1}
    with lib.tables.read() as connection:
        row = connection.execute(select(tracks).where(tracks.c.library == lib.id)).one()
    assert (row.path, row.shown) == (name, "caf\\xe9/\\xff\\xfe.mp3")
    assert lib.found() == {}
    os.rename(os.path.join(os.fsencode(lib.root), name), os.path.join(os.fsencode(lib.root), b"\x80.mp3"))
    assert lib.found() == {"moved": 1}


def test_other_ignore_patterns_take_tracks_out_and_bring_them_back(lib):
    lib.put("drafts/a.mp3")
    lib.put("b.mp3")
    lib.scan()
    lib.tagged()
    catalogue.change(lib.tables, lib.id, {"ignore": ["drafts/"]})
    assert lib.shown()["due"]
    lib.scan()
    assert lib.states() == {"b.mp3": "tagged", "drafts/a.mp3": "gone"}
    catalogue.change(lib.tables, lib.id, {"ignore": []})
    lib.scan()
    assert lib.states() == {"b.mp3": "tagged", "drafts/a.mp3": "tagged"}


# ---- what goes wrong


def test_a_library_that_is_not_there_loses_nothing(lib):
    lib.put("a.mp3")
    lib.scan()
    lib.tagged()
    hidden = lib.root.parent / "hidden"
    lib.root.rename(hidden)
    with pytest.raises(Away, match="is it mounted"):
        lib.scan()
    assert lib.states() == {"a.mp3": "tagged"} and lib.shown()["state"] == "away"
    assert "cannot be read" in lib.shown()["reason"]
    lib.root.mkdir()  # an empty mount point
    (lib.root / "lost+found").mkdir()
    with pytest.raises(Away, match="has no music in it, but 1 tracks are known"):
        lib.scan()
    assert lib.states() == {"a.mp3": "tagged"}
    shutil.rmtree(lib.root)
    hidden.rename(lib.root)
    assert lib.found() == {}
    assert lib.shown()["state"] == "ready" and lib.shown()["reason"] is None


def test_a_large_library_that_is_unplugged_before_the_scan_loses_nothing(lib, monkeypatch):
    monkeypatch.setattr(library, "AT_ONCE", 5)
    for n in range(40):
        lib.put(f"{n:03}.mp3")
    lib.scan()
    for file in lib.root.iterdir():
        file.unlink()
    with pytest.raises(Away):
        lib.scan()
    assert set(lib.states().values()) == {"new"}


def test_a_library_that_is_unplugged_during_the_scan_loses_nothing(lib, monkeypatch):
    monkeypatch.setattr(library, "AT_ONCE", 5)
    monkeypatch.setattr(library, "_SECONDS", 0)
    for n in range(40):
        lib.put(f"d{n:03}/a.mp3")
    lib.scan()
    lib.tagged()
    ticks = []

    def unplug(done, found) -> None:
        ticks.append(found.seen)
        if len(ticks) == 3:
            lib.root.rename(lib.root.parent / "unplugged")
            lib.root.mkdir()

    with pytest.raises(Away):
        lib.scan(tick=unplug)
    assert set(lib.states().values()) == {"tagged"} and lib.shown()["state"] == "away"


def test_a_directory_that_cannot_be_read_is_recorded_and_its_tracks_stay(lib, monkeypatch):
    for name in ("a/1.mp3", "locked/2.mp3", "locked/deep/3.mp3", "z.mp3"):
        lib.put(name)
    lib.scan()
    real = os.scandir

    def scandir(path):
        if path.endswith(b"/locked"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        assert lib.found() == {"problems": 1}
        assert catalogue.problems_of(lib.tables, lib.id, 10) == [{"path": "locked/", "reason": "permission denied"}]
        assert set(lib.states().values()) == {"new"}
    assert lib.found() == {}
    assert catalogue.problems_of(lib.tables, lib.id, 10) == []


def test_a_scan_that_was_killed_goes_on_where_it_was(lib, monkeypatch):
    monkeypatch.setattr(library, "AT_ONCE", 10)
    for n in range(100):
        lib.put(f"{n // 10}/{n:03}.mp3")

    class Killed(BaseException):
        pass

    def tick(done, found) -> None:
        if found.seen >= 50:
            raise Killed

    with pytest.raises(Killed):
        lib.scan(job=7, tick=tick)
    assert lib.shown()["scan"]["files"] == 50 and len(lib.rows()) == 50
    assert lib.scan(job=7) == {**lib.scan(job=8), "new": 50, "resumed": True}
    assert len(lib.rows()) == 100 and lib.shown()["scan"] is None


def test_a_directory_that_cannot_be_read_keeps_its_tracks_when_a_killed_scan_goes_on(lib, monkeypatch):
    for name in ("a.mp3", "locked/1.mp3", "locked/2.mp3", "z.mp3"):
        lib.put(name)
    lib.scan()
    real = os.scandir
    monkeypatch.setattr(library, "_SECONDS", 0)

    def scandir(path):
        if path.endswith(b"/locked"):
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    def tick(done, found) -> None:
        if found.problems:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(KeyboardInterrupt):
        lib.scan(job=7, tick=tick)
    assert lib.scan(job=7)["resumed"]
    assert set(lib.states().values()) == {"new"}


def test_another_job_does_not_go_on_with_a_scan_that_was_given_up(lib, monkeypatch):
    monkeypatch.setattr(library, "AT_ONCE", 2)
    for n in range(10):
        lib.put(f"{n}.mp3")

    def tick(done, found) -> None:
        if found.seen >= 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lib.scan(job=7, tick=tick)
    (lib.root / "0.mp3").unlink()
    assert lib.scan(job=8)["gone"] == 1


def test_a_scan_that_was_cancelled_is_over_and_the_next_one_begins_anew(lib, monkeypatch):
    monkeypatch.setattr(library, "AT_ONCE", 2)
    for n in range(10):
        lib.put(f"{n}.mp3")

    def tick(done, found) -> None:
        raise Cancelled("enough")

    with pytest.raises(Cancelled):
        lib.scan(tick=tick)
    shown = lib.shown()
    assert (shown["state"], shown["scan"], shown["due"], shown["reason"]) == (
        "ready",
        None,
        False,
        "the last scan was cancelled",
    )
    assert lib.scan()["seen"] == 10 and lib.shown()["reason"] is None


def test_what_changes_during_a_scan_is_due_after_it(lib):
    lib.put("a.mp3")
    lib.scan(tick=lambda *_: catalogue.want_scan(lib.tables, lib.id))
    assert lib.shown()["due"]
    lib.scan()
    assert not lib.shown()["due"]


def test_a_library_that_is_removed_during_a_scan_ends_it(lib, monkeypatch):
    monkeypatch.setattr(library, "AT_ONCE", 1)
    lib.put("a.mp3")
    lib.put("b.mp3")

    def tick(done, found) -> None:
        if found.seen == 1:
            catalogue.remove(lib.tables, lib.id)

    with pytest.raises(LookupError, match="removed during the scan"):
        lib.scan(tick=tick)
    with lib.tables.read() as connection:
        assert connection.execute(select(tracks).where(tracks.c.library == lib.id)).all() == []


# ---- libraries


def test_a_directory_is_one_library_and_not_inside_another(lib, tmp_path):
    inner = lib.root / "inner"
    inner.mkdir()
    for path in (lib.root, inner, tmp_path):
        with pytest.raises(Conflict, match="inside"):
            catalogue.add(lib.tables, Rules(), str(path), {"name": "other"})
    beside = tmp_path / "lib2"
    beside.mkdir()
    with pytest.raises(Conflict, match="already named"):
        catalogue.add(lib.tables, Rules(), str(beside), {"name": str(lib.root)})
    assert catalogue.add(lib.tables, Rules(), str(beside), {"name": f"{beside}"}) > lib.id


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ({"write_to": "tape"}, "write_to"),
        ({"watch": 1}, "watch"),
        ({"ignore": "*.tmp"}, "ignore"),
        ({"ignore": ["/"]}, "ignore"),
        ({"ignore": ["x"] * 1000}, "200"),
        ({"name": ""}, "name"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_cannot_be_said_of_a_library_is_refused(lib, wishes, said):
    with pytest.raises(BadArguments, match=said):
        catalogue.change(lib.tables, lib.id, wishes)


def test_only_directories_below_the_roots_can_be_libraries(tables, tmp_path):
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    allowed.mkdir()
    other.mkdir()
    rules = Rules.from_environment({"OSTLER_MUSIC_ROOTS": str(allowed)})
    (allowed / "way out").symlink_to(other)
    for path, why in ((other, "below"), (allowed / "way out", "below"), (allowed / "nothing", "not a directory")):
        with pytest.raises(catalogue.Refused, match=why):
            catalogue.add(tables, rules, str(path), {"name": str(path)})
    with pytest.raises(catalogue.Refused, match="absolute"):
        catalogue.add(tables, rules, "allowed", {})
    assert catalogue.add(tables, rules, str(allowed), {"name": str(allowed)})


def test_jobs_are_stored_for_new_tracks_once_and_again_when_they_changed(lib):
    for n in range(7):
        lib.put(f"{n}.mp3")
    lib.scan()
    stored: list[dict] = []

    def enqueue(many, connection=None):
        assert (connection is not None) == lib.tables.beside_jobs
        many = list(many)
        stored.extend(many)
        return range(1, len(many) + 1)

    assert catalogue.queue_tags(lib.tables, lib.id, enqueue) == 7
    assert catalogue.queue_tags(lib.tables, lib.id, enqueue) == 0
    lib.put("3.mp3", "changed it is")
    lib.scan()
    assert catalogue.queue_tags(lib.tables, lib.id, enqueue) == 1
    assert [one["version"] for one in stored if one["track"] == lib.rows()["3.mp3"][0]] == [0, 1]


def test_tables_that_many_processes_open_at_once_are_made_once(tmp_path):
    code = "from ostler import config; from ostler.apps.music.opening import open_tables; open_tables(config.load({'data': 'd'}, environ={}))"
    started = [subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path) for _ in range(4)]
    assert [process.wait(60) for process in started] == [0] * 4


# ---- only what has changed


def look(lib: Library, *changed: str | bytes) -> dict:
    """A scan of what a watcher saw; what it found, without zeros."""
    catalogue.want_scan(lib.tables, lib.id, [os.fsencode(path) for path in changed])
    return {name: count for name, count in lib.scan().items() if count}


def test_only_what_has_changed_is_looked_at(lib):
    for n in range(5):
        lib.put(f"a/{n}.mp3")
        lib.put(f"b/{n}.mp3")
    lib.scan()
    whole = lib.shown()["scanned_at"]
    lib.put("a/1.mp3", "changed")
    lib.put("a/new/9.mp3", "new")
    (lib.root / "a/2.mp3").unlink()
    lib.put("b/1.mp3", "changed too, but nobody said so")
    assert look(lib, "a/1.mp3", "a/new", "a/2.mp3") == {"seen": 2, "new": 1, "changed": 1, "gone": 1, "partial": True}
    assert (lib.shown()["scanned_at"], lib.shown()["due"]) == (whole, False)
    assert lib.found() == {"changed": 1}  # a scan that nobody asked for looks at all


def test_a_move_of_files_and_directories_is_seen_from_its_two_paths(lib):
    for n in range(3):
        lib.put(f"a/{n}.mp3", f"sound {n}")
    lib.put("b/7.mp3", "another")
    lib.scan()
    lib.tagged()
    before = lib.rows()
    (lib.root / "a").rename(lib.root / "c")
    (lib.root / "b/7.mp3").rename(lib.root / "b/8.mp3")
    assert look(lib, "a", "c", "b/7.mp3", "b/8.mp3") == {"seen": 4, "moved": 4, "partial": True}
    assert [lib.rows()[f"c/{n}.mp3"] for n in range(3)] == [before[f"a/{n}.mp3"] for n in range(3)]


@pytest.mark.parametrize("why", ["all of it is asked for", "a link", "nothing is left", "it was never scanned"])
def test_when_in_doubt_the_whole_library_is_looked_at(lib, why, tmp_path):
    lib.put("a/1.mp3")
    if why != "it was never scanned":
        lib.scan()
    if why == "a link":
        (tmp_path / "other").mkdir()
        (tmp_path / "other/x.mp3").write_text("x")
        (lib.root / "link").symlink_to(tmp_path / "other")
        assert look(lib, "link/x.mp3") == {"seen": 2, "new": 1}
    elif why == "nothing is left":
        (lib.root / "a/1.mp3").unlink()
        with pytest.raises(Away, match="is it mounted"):
            look(lib, "a/1.mp3")
        assert lib.states() == {"a/1.mp3": "new"}
    elif why == "it was never scanned":
        assert look(lib, "b") == {"seen": 1, "new": 1}
    else:
        assert look(lib, "a", "") == {"seen": 1}


def test_what_is_ignored_is_not_looked_at_when_it_changes(lib):
    lib.put("a/1.mp3")
    lib.scan()
    lib.put("@eaDir/x/1.mp3")
    lib.put("a/.2.mp3")
    assert look(lib, "@eaDir/x", "a/.2.mp3", "a/cover.jpg", "never/was") == {"partial": True}


def test_a_scan_of_changes_that_was_killed_begins_again(lib, monkeypatch):
    for n in range(30):
        lib.put(f"a/{n:02}.mp3")
    lib.put("b/1.mp3")
    lib.scan()
    for n in range(30):
        lib.put(f"a/{n:02}.mp3", "changed")
    catalogue.want_scan(lib.tables, lib.id, [b"a"])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(library, "AT_ONCE", 5)
        left = iter([None, None])
        lib.scan(7, queue=lambda: next(left, die) and die())
    done = lib.scan(7)
    assert done["partial"] and done["resumed"] and done["seen"] == 30
    assert {path: lib.version(path) for path in ("a/00.mp3", "a/29.mp3", "b/1.mp3")} == {
        "a/00.mp3": 1,
        "a/29.mp3": 1,
        "b/1.mp3": 0,
    }


def die() -> None:
    raise KeyboardInterrupt


def test_a_job_that_lost_its_scan_to_another_one_writes_nothing_more(lib):
    for n in range(10):
        lib.put(f"{n}.mp3")
    late = Scan(lib.tables, lib.id, 1, lambda *_: None, lambda: None)
    begin = late._begin
    late._begin = lambda: (begin(), lib.scan(2))[0]
    with pytest.raises(LookupError, match="another job"):
        late.run()
    assert len(lib.states()) == 10 and lib.shown()["state"] == "ready"


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("/music/a/b.mp3", b"a/b.mp3"),
        ("/music", b""),
        ("/elsewhere/b.mp3", b""),
        ("/music/a/\ufffd.mp3", b"a"),
        ("/music/\ufffd/b.mp3", b""),
        ("/music/a/.ostler-1234.part", None),
        ("/music/a/b.mp3.ostler.json", None),
    ],
)
def test_what_a_watcher_sees_is_a_path_in_the_library(name, path):
    assert watching.within(b"/music", name) == path


def test_many_changes_become_few_paths():
    assert watching.fewer({b"a/1", b"a/2", b"a", b"ab/c"}) == {b"a", b"ab/c"}
    assert watching.fewer({b"a/b/%d" % n for n in range(100)} | {b"c/1"}) == {b"a/b", b"c/1"}
    assert watching.fewer({b"%d" % n for n in range(100)}) == {b""}
    assert watching.fewer({b"", b"a"}) == {b""} and watching.fewer(set()) == set()
    watcher = watching.Watcher.__new__(watching.Watcher)
    watcher._lock, watcher._changed = threading.Lock(), set()
    watcher._saw(b"%d/%d" % (n, n) for n in range(50_000))
    assert watcher.changed() == {b""} and watcher.changed() == set()


# ---- hostile libraries


def test_dates_and_names_that_no_database_expects_do_not_stop_a_scan(lib):
    for n, seconds in enumerate((-(2**40), 2**33, 2**36)):
        with contextlib.suppress(OSError, OverflowError):  # what a file system takes
            os.utime(lib.put(f"{n}.mp3"), (seconds, seconds))
    for name in (
        b"\xff\xfe.mp3",
        b"new\nline.mp3",
        b"\x1b[31mred.mp3",
        b"' OR 1=1 --.mp3",
        b"%s%n.mp3",
        b"a" * 251 + b".mp3",
    ):
        lib.put(name)
    assert lib.scan()["new"] == 9 and lib.found() == {}
    assert {"\\xff\\xfe.mp3", "new\\nline.mp3", "\\x1b[31mred.mp3"} <= set(lib.states())


def test_a_time_of_any_year_is_64_bits_and_always_the_same():
    assert [signed(n) for n in (0, -1, 2**63 - 1, 2**63, 2**64 - 1, 2**62 * 10**9, -(2**90))] == [
        *(0, -1, 2**63 - 1, -(2**63), -1),
        *(0, 0),
    ]


def test_a_link_to_another_library_is_left_out(tables, tmp_path):
    first, second = Library(tables, tmp_path / "first"), Library(tables, tmp_path / "second")
    second.put("x/1.mp3")
    (first.root / "link").symlink_to(second.root / "x")
    (first.root / "one.mp3").symlink_to(second.root / "x/1.mp3")
    first.put("2.mp3")
    first.scan()
    assert list(first.states()) == ["2.mp3"]


def test_with_roots_links_that_lead_out_of_them_are_problems(lib, tmp_path, monkeypatch):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/key.mp3").write_text("secret")
    (lib.root / "link").symlink_to(tmp_path / "secret")
    (lib.root / "key.mp3").symlink_to(tmp_path / "secret/key.mp3")
    lib.put("1.mp3")
    monkeypatch.setenv("OSTLER_MUSIC_ROOTS", str(lib.root))
    lib.scan()
    assert list(lib.states()) == ["1.mp3"]
    found = catalogue.problems_of(lib.tables, lib.id, 10)
    assert [(one["path"], "leads out of" in one["reason"]) for one in found] == [("key.mp3", True), ("link/", True)]


# ---- tables of an earlier version


def columns(tables: Tables) -> dict[str, list[str]]:
    with tables.read() as connection:
        there, schema = inspect(connection), "music" if tables.beside_jobs else None
        names = sorted(there.get_table_names(schema))
        return {name: sorted(one["name"] for one in there.get_columns(name, schema)) for name in names}


@pytest.fixture(params=["sqlite", "postgres"])
def settings(request, tmp_path):
    with store_of(request) as url:
        yield config.load({"store": url, "data": str(tmp_path / "data")}, environ={})


def test_tables_of_an_earlier_version_are_brought_up_to_date_and_those_of_a_later_one_refused(settings, tmp_path):
    old = open_tables(settings)
    wanted = columns(old)
    lib = Library(old, tmp_path / "lib")
    lib.put("BJ\u00d6RK.mp3")
    lib.scan()
    place = "music." if old.beside_jobs else ""
    with old.write() as connection:  # as they were before there were versions
        for table in ("version", "changes"):
            connection.execute(text(f"DROP TABLE {place}{table}"))
        for column in ("tracks DROP COLUMN words", "written DROP COLUMN place"):
            connection.execute(text(f"ALTER TABLE {place}{column}"))
    old.close()
    new = open_tables(settings)
    assert columns(new) == wanted
    with new.read() as connection:
        assert connection.execute(select(tracks.c.words)).scalars().all() == ["bj\u00f6rk.mp3"]
    with new.write() as connection:
        connection.execute(text(f"INSERT INTO {place}version VALUES (99)"))
    new.close()
    with pytest.raises(ConfigError, match="later Ostler"):
        open_tables(settings)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_hundred_thousand_files_take_little_memory(tables, tmp_path):
    import resource

    memory = Path("/dev/shm")
    lib = Library(tables, Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else tmp_path)) / "lib")
    for n in range(10_000):
        folder = lib.root / f"artist {n // 10:04}" / f"album {n:05}"
        folder.mkdir(parents=True)
        for m in range(10):
            (folder / f"{m}.mp3").touch()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert lib.scan()["new"] == 100_000
    began = time.monotonic()
    assert lib.found() == {}
    assert time.monotonic() - began < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB
    shutil.rmtree(lib.root.parent)
