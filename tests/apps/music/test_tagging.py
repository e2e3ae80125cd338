"""What the job `tag` does with a track, on both databases: with a stand-in for the model that counts how often it is asked."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import types
from pathlib import Path

import pytest

import numpy as np

from sqlalchemy import select, update

from ostler import Cancel, Fail, NotFound, config
from ostler.apps.music import catalogue, outputs, tagging, writing
from ostler.apps.music.library import Scan
from ostler.apps.music.rules import Rules
from ostler.apps.music.opening import open_tables
from ostler.apps.music.tables import Tables, libraries, scores, tracks, written
from tests.apps.music.sounds import save
from tests.stores import store_of


class Model:
    """Scores made of the file's bytes."""

    name, tags = "stand-in", ["rock", "jazz", "folk"]

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.raises: BaseException | None = None

    def analyse(self, path, tick=None):
        self.asked.append(os.path.basename(os.fsdecode(path)))
        if tick is not None:
            tick(3.0)
        if self.raises:
            raise self.raises
        made = np.random.default_rng(len(Path(os.fsdecode(path)).read_bytes()))
        self.scores, self.embedding = made.random(3, dtype="f4"), made.random(4, dtype="f4")
        return self


class Job:
    """As much of a job as the tagging looks at."""

    id = 42

    def __init__(self, attempt: int = 1, crashes: int = 0) -> None:
        self.attempt, self.crashes, self.stages = attempt, crashes, []

    def check(self) -> None: ...

    def progress(self, percent, stage=None) -> None:
        self.stages.append(stage)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def tables(request, tmp_path_factory):
    with store_of(request) as url:
        opened = open_tables(config.load({"store": url, "data": str(tmp_path_factory.mktemp("music"))}, environ={}))
        yield opened
        opened.close()


class Library:
    def __init__(self, tables, root: Path, model: Model, **wishes) -> None:
        self.tables, self.root, self.model = tables, root, model
        root.mkdir()
        self.id = catalogue.add(tables, Rules(), str(root), {"name": str(root), **wishes})
        self.scans = 0

    def put(self, name: str, text: str) -> Path:
        (self.root / name).write_text(f"{self.root} {text}")  # the same content elsewhere would be known
        return self.root / name

    def scan(self) -> None:
        self.scans += 1

        def rewrite(tracks: list[int]) -> None:
            for track in tracks:
                outputs.apply(self.tables, track)

        Scan(self.tables, self.id, self.scans, lambda *_: None, lambda: None, rewrite).run()

    def row(self, name: str):
        with self.tables.read() as connection:
            return connection.execute(select(tracks).where(tracks.c.library == self.id, tracks.c.shown == name)).one()

    def scores(self, name: str) -> bytes:
        with self.tables.read() as connection:
            return connection.execute(select(scores.c.scores).where(scores.c.track == self.row(name).id)).scalar_one()

    def tag(self, name: str, attempt: int = 1, crashes: int = 0) -> dict:
        job = Job(attempt, crashes)
        row = self.row(name)
        return tagging.Tagging(self.tables, job, row.id, row.version, crashes=2, runs=3).run()


@pytest.fixture
def model(monkeypatch) -> Model:
    made = Model()
    monkeypatch.setattr(tagging, "_loaded", [made])
    return made


@pytest.fixture
def lib(tables, tmp_path, model) -> Library:
    return Library(tables, tmp_path / "lib", model)


def test_a_track_is_analysed_once_however_often_its_job_runs(lib, model):
    lib.put("a.mp3", "one")
    lib.scan()
    assert lib.tag("a.mp3")["how"] == "analysed"
    assert lib.tag("a.mp3")["how"] == "known"
    assert model.asked == ["a.mp3"]
    row = lib.row("a.mp3")
    assert (row.state, row.model, row.reason) == ("tagged", "stand-in", None) and row.sha256


def test_a_file_that_was_only_touched_is_not_analysed_again(lib, model):
    file = lib.put("a.mp3", "one")
    lib.scan()
    lib.tag("a.mp3")
    os.utime(file, (5, 5))
    lib.scan()
    assert lib.row("a.mp3").state == "new"
    assert lib.tag("a.mp3")["how"] == "known" and lib.row("a.mp3").state == "tagged"
    lib.put("a.mp3", "another")
    lib.scan()
    before = lib.scores("a.mp3")
    assert lib.tag("a.mp3")["how"] == "analysed" and lib.scores("a.mp3") != before
    assert len(model.asked) == 2


def test_a_copy_takes_its_scores_from_the_original(lib, model):
    file = lib.put("a.mp3", "the very same")
    lib.scan()
    lib.tag("a.mp3")
    shutil.copy(file, lib.root / "b.mp3")
    lib.scan()
    assert lib.tag("b.mp3")["how"] == f"as track {lib.row('a.mp3').id}"
    assert lib.scores("b.mp3") == lib.scores("a.mp3") and model.asked == ["a.mp3"]


@pytest.mark.parametrize(
    ("raises", "reason"),
    [
        (ValueError("odd header"), "it cannot be decoded: odd header"),
        (Fail("UNDECODABLE", "no sound in it"), "no sound in it"),
        (AssertionError(), "it cannot be decoded: AssertionError"),
    ],
)
def test_a_file_that_cannot_be_decoded_has_failed_with_the_reason(lib, model, raises, reason):
    lib.put("a.mp3", "one")
    lib.scan()
    model.raises = raises
    with pytest.raises(Fail) as failed:
        lib.tag("a.mp3")
    assert failed.value.code == "UNDECODABLE" and (lib.row("a.mp3").state, lib.row("a.mp3").reason) == (
        "failed",
        reason,
    )


def test_trouble_that_may_pass_is_tried_again_and_has_failed_after_the_last_run(lib, model):
    lib.put("a.mp3", "one")
    lib.scan()
    model.raises = OSError(errno.EIO, "Input/output error")
    with pytest.raises(OSError):
        lib.tag("a.mp3", attempt=1)
    assert lib.row("a.mp3").state == "new"
    with pytest.raises(Fail, match="input/output error"):
        lib.tag("a.mp3", attempt=3)
    assert (lib.row("a.mp3").state, lib.row("a.mp3").reason) == ("failed", "it cannot be read: input/output error")
    model.raises = None
    lib.tag("a.mp3", attempt=3)
    assert (lib.row("a.mp3").state, lib.row("a.mp3").reason) == ("tagged", None)


def test_the_last_run_of_a_job_that_crashed_twice_leaves_the_track_toxic_whatever_happens(lib, model):
    lib.put("a.mp3", "one")
    lib.scan()
    model.raises = SystemExit()  # as far as a test can die
    with pytest.raises(SystemExit):
        lib.tag("a.mp3", attempt=2, crashes=1)
    assert lib.row("a.mp3").state == "new"
    with pytest.raises(SystemExit):
        lib.tag("a.mp3", attempt=3, crashes=2)
    assert lib.row("a.mp3").state == "toxic" and lib.row("a.mp3").reason.startswith("3 workers died on it")
    model.raises = None
    lib.tag("a.mp3", attempt=3, crashes=2)
    assert lib.row("a.mp3").state == "tagged"


def test_a_file_that_is_gone_when_its_turn_comes_is_no_failure(lib):
    lib.put("b.mp3", "other")
    lib.put("a.mp3", "one").unlink()
    lib.put("a.mp3", "one")
    lib.scan()
    (lib.root / "a.mp3").unlink()
    with pytest.raises(Cancel, match="was deleted"):
        lib.tag("a.mp3")
    assert lib.row("a.mp3").state == "gone"
    with pytest.raises(Cancel, match="is gone"):
        lib.tag("a.mp3")


def test_tracks_of_a_library_that_is_unplugged_wait_for_the_next_scan(lib):
    lib.put("a.mp3", "one")
    lib.scan()
    catalogue.queue_tags(lib.tables, lib.id, lambda many, **_: [7 for _ in many])
    lib.root.rename(lib.root.parent / "unplugged")
    with pytest.raises(Cancel, match="is not there"):
        lib.tag("a.mp3")
    assert (lib.row("a.mp3").state, lib.row("a.mp3").job) == ("new", None)
    lib.root.mkdir()  # an empty mount point
    with pytest.raises(Cancel, match="is not there"):
        lib.tag("a.mp3")
    lib.root.rmdir()
    (lib.root.parent / "unplugged").rename(lib.root)
    lib.scan()
    assert catalogue.queue_tags(lib.tables, lib.id, lambda many, **_: [8 for _ in many]) == 1
    assert lib.tag("a.mp3")["how"] == "analysed"


def test_a_track_of_a_library_that_was_removed_is_cancelled(lib):
    lib.put("a.mp3", "one")
    lib.scan()
    track = lib.row("a.mp3").id
    catalogue.remove(lib.tables, lib.id)
    with pytest.raises(Cancel, match="not in a library"):
        tagging.Tagging(lib.tables, Job(), track, 0, crashes=2, runs=3).run()


# ---- where tags go


def test_sidecar_files_can_be_in_a_directory_of_their_own(tables, tmp_path, model, monkeypatch):
    monkeypatch.setenv("OSTLER_MUSIC_SIDECARS", str(tmp_path / "beside"))
    lib = Library(tables, tmp_path / "lib", model, write_to="sidecar")
    (lib.root / "a").mkdir()
    lib.put("a/1.mp3", "one")
    lib.scan()
    lib.tag("a/1.mp3")
    assert [str(p.relative_to(tmp_path)) for p in (tmp_path / "beside").rglob("*.json")] == [
        f"beside/{lib.id}/a/1.mp3.json"
    ]
    assert os.listdir(lib.root / "a") == ["1.mp3"]


def test_a_file_that_may_not_be_written_keeps_its_tags_in_the_database(tables, tmp_path, model, monkeypatch):
    lib = Library(tables, tmp_path / "lib", model, write_to="sidecar")
    lib.put("a.mp3", "one")
    lib.scan()

    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(outputs, "_write_sidecar", refuse)
        found = lib.tag("a.mp3")
    assert found["refusal"] == lib.row("a.mp3").reason == "its tags are in the database alone: read-only file system"
    assert lib.row("a.mp3").state == "tagged"
    outputs.apply(tables, lib.row("a.mp3").id)
    assert lib.row("a.mp3").reason is None and (lib.root / "a.mp3.ostler.json").exists()


def test_a_full_disk_is_tried_again_and_needs_no_second_analysis(tables, tmp_path, model, monkeypatch):
    lib = Library(tables, tmp_path / "lib", model, write_to="sidecar")
    lib.put("a.mp3", "one")
    lib.scan()

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(outputs, "_write_sidecar", refuse)
        with pytest.raises(OSError):
            lib.tag("a.mp3", attempt=3)
    row = lib.row("a.mp3")
    assert (row.state, row.reason) == ("tagged", "its tags could not be written: no space left on device")
    lib.tag("a.mp3")
    assert lib.row("a.mp3").reason is None and model.asked == ["a.mp3"]


def test_a_write_that_was_killed_before_it_was_recorded_does_not_take_our_tags_for_older_ones(
    tables, tmp_path, model, monkeypatch
):
    lib = Library(tables, tmp_path / "lib", model, write_to="file")
    file = save(lib.root / "a.flac")
    lib.scan()

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(outputs, "_keep", die)
        with pytest.raises(KeyboardInterrupt):
            lib.tag("a.flac")
    assert "model" in writing.ours(file)
    lib.tag("a.flac")
    with tables.write() as connection:
        connection.execute(update(libraries).where(libraries.c.id == lib.id).values(write_to="database"))
    outputs.apply(tables, lib.row("a.flac").id)
    assert writing.ours(file) == {}
    with tables.read() as connection:
        assert connection.execute(select(written).where(written.c.track == lib.row("a.flac").id)).all() == []


# ---- what others do meanwhile


def test_a_library_that_is_unplugged_while_a_file_is_read_fails_no_track(lib, model):
    lib.put("a.mp3", "one")
    lib.scan()
    lib.root.rename(lib.root.with_name("unplugged"))
    lib.root.mkdir()  # the mount point is left
    model.raises = OSError(errno.EIO, "Input/output error")
    with pytest.raises(Cancel, match="is not there"):
        lib.tag("a.mp3", attempt=3)
    assert (lib.row("a.mp3").state, lib.row("a.mp3").job) == ("new", None)


def test_a_file_that_changes_while_it_is_analysed_is_analysed_again(lib, model):
    file = lib.put("a.mp3", "one")
    lib.scan()
    whole = model.analyse
    model.analyse = lambda path, tick: (whole(path, tick), file.write_text("it has changed"))[0]
    with pytest.raises(OSError, match="changed while it was analysed"):
        lib.tag("a.mp3")
    assert lib.row("a.mp3").state == "new"
    model.analyse = whole
    lib.tag("a.mp3")
    assert lib.row("a.mp3").size == len("it has changed") and model.asked == ["a.mp3"] * 2


def test_a_slow_run_for_an_earlier_version_does_not_overwrite_a_later_one(lib, model):
    file = lib.put("a.mp3", "one")
    lib.scan()
    slow = tagging.Tagging(lib.tables, Job(attempt=3), lib.row("a.mp3").id, 0, crashes=2, runs=3)
    whole = model.analyse

    def overtaken(path, tick):
        model.analyse = whole
        found = types.SimpleNamespace(scores=np.ones(3, "f4"), embedding=np.ones(4, "f4"))
        file.write_text("another sound")
        lib.scan()
        lib.tag("a.mp3")
        return found

    model.analyse = overtaken
    with pytest.raises((Cancel, OSError)):
        slow.run()
    row = lib.row("a.mp3")
    assert (row.version, row.state, row.size) == (1, "tagged", len("another sound"))
    assert np.frombuffer(lib.scores("a.mp3"), "f4").max() < 1
    with pytest.raises(Cancel, match="has changed since"):
        slow.run()


@pytest.mark.parametrize("scores", [[np.nan, 0.1, 0.2], [np.inf, 0.1, 0.2]])
def test_scores_that_are_no_numbers_are_a_failure_and_not_stored(lib, model, scores):
    lib.put("a.mp3", "one")
    lib.scan()
    model.analyse = lambda *_, **__: types.SimpleNamespace(scores=np.array(scores, "f4"), embedding=np.ones(4, "f4"))
    with pytest.raises(Fail, match="not numbers"):
        lib.tag("a.mp3")
    assert lib.row("a.mp3").state == "failed"


def test_a_sparse_file_of_terabytes_is_refused_at_once(lib):
    with (lib.root / "a.wav").open("wb") as file:
        file.truncate(2 << 40)
    lib.scan()
    with pytest.raises(Fail, match="2048.0 GB"):
        lib.tag("a.wav")


def change(lib, **values) -> None:
    with lib.tables.write() as connection:
        connection.execute(update(libraries).where(libraries.c.id == lib.id).values(**values))


def test_an_undo_that_comes_while_tags_are_written_wins(tables, tmp_path, model, monkeypatch):
    lib = Library(tables, tmp_path / "lib", model, write_to="file")
    file = save(lib.root / "a.flac")
    lib.scan()
    put = outputs._put

    def undone_meanwhile(*args):
        put(*args)
        assert "model" in writing.ours(file)
        change(lib, write_to="database")

    monkeypatch.setattr(outputs, "_put", undone_meanwhile)
    lib.tag("a.flac")
    assert writing.ours(file) == {}


def test_a_library_that_is_removed_while_tags_are_written_ends_the_job(tables, tmp_path, model, monkeypatch):
    lib = Library(tables, tmp_path / "lib", model, write_to="sidecar")
    lib.put("a.mp3", "one")
    lib.scan()
    write = outputs._write_sidecar
    monkeypatch.setattr(outputs, "_write_sidecar", lambda *args: (write(*args), catalogue.remove(tables, lib.id)))
    assert lib.tag("a.mp3")["tags"] == []


def test_what_is_changed_right_after_our_write_is_seen_by_the_next_scan(tables, tmp_path, model, monkeypatch):
    lib = Library(tables, tmp_path / "lib", model, write_to="file")
    file = save(lib.root / "a.flac")
    lib.scan()
    write = writing.write
    monkeypatch.setattr(
        writing, "write", lambda path, tags: (write(path, tags), file.write_bytes(file.read_bytes() + b"more"))[0]
    )
    lib.tag("a.flac")
    lib.scan()
    assert (lib.row("a.flac").version, lib.row("a.flac").state) == (1, "new")


def test_undo_takes_our_tags_out_of_copies_too_and_leaves_what_others_had(tables, tmp_path, model):
    lib = Library(tables, tmp_path / "lib", model, write_to="file")
    file = save(lib.root / "a.flac")
    writing.write(file, {"mood": ["calm"]})
    lib.scan()
    lib.tag("a.flac")
    copy = Path(shutil.copy(file, lib.root / "b.flac"))
    lib.scan()
    assert lib.tag("b.flac")["how"].startswith("as track") and set(writing.ours(copy)) == {"tags", "model"}
    change(lib, write_to="database")
    for name in ("a.flac", "b.flac"):
        outputs.apply(tables, lib.row(name).id)
    assert writing.ours(file) == {"mood": ["calm"]} and writing.ours(copy) == {}


def test_a_sidecar_file_goes_with_its_track_and_is_taken_away_when_the_track_is_gone(tables, tmp_path, model):
    lib = Library(tables, tmp_path / "lib", model, write_to="sidecar")
    lib.put("a.mp3", "one")
    lib.scan()
    lib.tag("a.mp3")
    (lib.root / "a.mp3").rename(lib.root / "b.mp3")
    lib.scan()
    assert sorted(os.listdir(lib.root)) == ["b.mp3", "b.mp3.ostler.json"]
    (lib.root / "b.mp3").unlink()
    lib.put("c.mp3", "another")
    lib.scan()
    assert lib.row("b.mp3").state == "gone" and (lib.root / "b.mp3.ostler.json").exists()
    change(lib, write_to="database")
    for page in catalogue.pages(tables, lib.id):
        for track in page:
            outputs.apply(tables, track)
    assert os.listdir(lib.root) == ["c.mp3"]


def test_a_file_that_was_away_during_an_undo_loses_its_tags_when_it_is_back(tables, tmp_path, model):
    lib = Library(tables, tmp_path / "lib", model, write_to="file")
    file = save(lib.root / "a.flac")
    save(lib.root / "b.flac")
    lib.scan()
    lib.tag("a.flac")
    file.rename(tmp_path / "away.flac")
    lib.scan()
    change(lib, write_to="database")
    outputs.apply(tables, lib.row("a.flac").id)
    (tmp_path / "away.flac").rename(file)
    lib.scan()
    assert writing.ours(file) == {} and lib.row("a.flac").state == "tagged"


def test_two_writers_of_one_sidecar_file_do_not_mix(tables, tmp_path, model):
    """One of them has the file, the other is told to come again, and at no moment is it torn."""
    place = os.fsencode(tmp_path / "a.json")
    outputs._write_sidecar(place, {"tags": ["old"]})
    with writing._draft(place), pytest.raises(writing.Changed):
        outputs._write_sidecar(place, {"tags": ["new"]})
    assert json.loads(Path(os.fsdecode(place)).read_text()) == {"tags": ["old"]}
    assert os.listdir(tmp_path) == ["a.json"]


def test_words_in_files_that_no_database_takes_are_made_plain(tables, tmp_path, model):
    lib = Library(tables, tmp_path / "lib", model)
    save(lib.root / "a.flac", title="Bj\u00f6rk \0 \x1b[31m " + "long " * 1000)
    lib.scan()
    lib.tag("a.flac")
    row = lib.row("a.flac")
    assert row.title.startswith("Bj\u00f6rk [31m long") and len(row.title) <= 1000 and row.title.isprintable()


def test_with_roots_a_link_that_leads_out_of_them_is_neither_read_nor_sent(tables, tmp_path, model, monkeypatch):
    lib = Library(tables, tmp_path / "lib", model)
    file = lib.put("a.mp3", "one")
    lib.scan()
    (tmp_path / "secret.mp3").write_text("a secret")
    file.unlink()
    file.symlink_to(tmp_path / "secret.mp3")  # after the scan
    monkeypatch.setenv("OSTLER_MUSIC_ROOTS", str(lib.root))
    with pytest.raises(Fail, match="leads out"):
        lib.tag("a.mp3")
    with pytest.raises(NotFound, match="leads out"):
        catalogue.place(tables, lib.row("a.mp3").id)
    assert model.asked == []


@pytest.mark.parametrize("write_to", ["file", "sidecar"])
def test_a_run_that_dies_before_or_after_any_transaction_is_made_good_by_the_next_and_can_be_undone(
    tables, tmp_path, model, monkeypatch, write_to
):
    lib = Library(tables, tmp_path / "lib", model, write_to=write_to)
    original, whole = save(tmp_path / "original.flac"), Tables.write

    class Died(BaseException): ...

    def dying(left: int, after: bool):
        @contextlib.contextmanager
        def write(self):
            nonlocal left
            left -= 1
            if not left and not after:
                raise Died
            with whole(self) as connection:
                yield connection
            if not left:
                raise Died

        return write

    deaths = 0
    for number in range(1, 4):
        for after in (False, True):
            name = f"{number}{after}.flac"
            (lib.root / name).write_bytes(original.read_bytes() + b"\0" * (2 * number + after))
            lib.scan()
            with monkeypatch.context() as patch:
                patch.setattr(Tables, "write", dying(number, after))
                with contextlib.suppress(Died):
                    lib.tag(name)
                    continue
            deaths += 1
            lib.tag(name)
            assert (lib.row(name).state, lib.row(name).reason) == ("tagged", None)
            lib.scan()
            assert lib.row(name).state == "tagged", "our own write is no change"
    assert deaths >= 4
    written_to = lib.root.glob("*.flac" if write_to == "file" else "*.json")
    assert all(
        "model" in (writing.ours(one) if write_to == "file" else json.loads(one.read_text())) for one in written_to
    )
    change(lib, write_to="database")
    for page in catalogue.pages(tables, lib.id):
        for track in page:
            outputs.apply(tables, track)
    assert not any(writing.ours(one) for one in lib.root.glob("*.flac"))
    assert not [one for one in os.listdir(lib.root) if not one.endswith(".flac")]
