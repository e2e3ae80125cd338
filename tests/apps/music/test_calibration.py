"""Thresholds from a library's own scores: the method, and what the tables make of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import numpy as np

from sqlalchemy import insert, select, update

from ostler import Conflict, Fail, config
from ostler.apps.music import calibration, outputs
from ostler.apps.music.calibration import HIGHEST, LOWEST, limits
from ostler.apps.music.opening import open_tables
from ostler.apps.music.tables import calibrations, libraries, models, scores, tracks
from tests.stores import store_of

TAGS = ["rock", "choral", "noise"]


def spread(rng, centre: float, count: int, width: float = 0.3):
    """Scores around a centre, as a sigmoid gives them."""
    logit = np.log(centre / (1 - centre)) + rng.normal(0, width, count)
    return 1 / (1 + np.exp(-logit))


def one(values) -> tuple[float, str]:
    (found,) = limits(np.asarray(values, "float32").reshape(-1, 1))
    return found.value, found.method


@pytest.fixture
def rng():
    return np.random.default_rng(8)


# ---- the method


def test_two_groups_are_parted_in_the_gap_between_them(rng):
    value, method = one(np.concatenate([spread(rng, 0.05, 150), spread(rng, 0.6, 50)]))
    assert method == "gap" and 0.1 <= value < 0.4


def test_a_small_group_is_found_too(rng):
    low, high = spread(rng, 0.02, 190, 0.2), spread(rng, 0.5, 10, 0.2)
    value, method = one(np.concatenate([low, high]))
    assert method in ("gap", "lowest") and low.max() < value < high.min()


def test_scores_without_a_gap_give_the_tag_to_a_tenth_of_the_tracks(rng):
    values = spread(rng, 0.25, 1000, 0.5)
    value, method = one(values)
    assert method == "share" and (values >= value).mean() == pytest.approx(0.1, abs=0.01)


def test_a_tag_that_no_track_has_is_given_to_none(rng):
    values = spread(rng, 0.01, 500)
    assert one(values) == (LOWEST, "lowest") and (values < LOWEST).all()


def test_a_library_that_is_all_rock_keeps_its_tag(rng):
    values = spread(rng, 0.8, 500, 0.2)
    assert one(values) == (HIGHEST, "highest") and (values > HIGHEST).all()


def test_scores_that_are_all_the_same_do_no_harm():
    assert one([0.3] * 200) == (0.3, "share")
    assert one([0.0] * 200) == (LOWEST, "lowest")
    assert one([1.0] * 200) == (HIGHEST, "highest")
    assert one([0.0] * 100 + [1.0] * 100) == (0.5, "gap")


def test_the_order_of_the_tracks_does_not_matter(rng):
    values = np.concatenate([spread(rng, 0.05, 90), spread(rng, 0.5, 30)])
    assert one(values) == one(rng.permutation(values))


def test_each_tag_has_a_threshold_of_its_own(rng):
    columns = [np.concatenate([spread(rng, 0.05, 100), spread(rng, high, 100)]) for high in (0.25, 0.7)]
    first, second = limits(np.stack(columns, axis=1).astype("float32"))
    assert first.value < second.value


# ---- the library


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def tables(request, tmp_path_factory):
    with store_of(request) as url:
        opened = open_tables(config.load({"store": url, "data": str(tmp_path_factory.mktemp("music"))}, environ={}))
        yield opened
        opened.close()


@pytest.fixture
def library(tables, tmp_path: Path, rng) -> int:
    """120 tracks: a third is rock, none is choral."""
    with tables.write() as connection:
        row = {"root": str(tmp_path).encode(), "shown": str(tmp_path), "name": str(tmp_path), "write_to": "database"}
        row |= {"ignore": "[]", "watch": False, "added_at": 1, "state": "ready"}
        number = connection.execute(insert(libraries).values(**row)).inserted_primary_key[0]
        tables.upsert(connection, models, [{"model": "m", "tags": json.dumps(TAGS), "used_at": 1}])
    columns = [
        np.concatenate([spread(rng, 0.05, 80), spread(rng, 0.4, 40)]),
        spread(rng, 0.02, 120),
        spread(rng, 0.3, 120),
    ]
    add(tables, number, np.stack(columns, axis=1))
    return number


def add(tables, library: int, values) -> None:
    with tables.write() as connection:
        for n, row in enumerate(values):
            facts = {
                "format": "mp3",
                "size": 1,
                "mtime_ns": 1,
                "inode": n,
                "state": "tagged",
                "added_at": 1,
                "tagged_at": n + 1,
                "model": "m",
            }
            place = {"library": library, "path": f"{n}.mp3".encode(), "shown": f"{n}.mp3"}
            made = connection.execute(insert(tracks).values(**facts, **place)).inserted_primary_key[0]
            data = row.astype("float32").tobytes()
            connection.execute(insert(scores).values(track=made, model="m", at=n, scores=data))


class Job:
    """Calibrate as the job does, and see which tracks are to be written."""

    numbers = iter(range(1, 10_000))

    def __init__(self, tables) -> None:
        self.tables, self.id, self.written = tables, next(self.numbers), []

    def run(self, library: int, *, dry_run: bool = False, fewest: int = 100) -> dict:
        self.written = []
        return calibration.calibrate(
            self.tables, library, self.id, dry_run=dry_run, fewest=fewest, default=0.2, write=self.written.extend
        )


def in_force(tables, library: int) -> dict[str, float]:
    with tables.read() as connection:
        return outputs.in_force(connection, library, "m")[1]


def test_a_calibration_is_stored_and_has_changed_tracks_written(tables, library):
    job = Job(tables)
    found = job.run(library)
    by_tag = {one["tag"]: one for one in found["tags"]}
    assert by_tag["rock"]["method"] == "gap" and by_tag["rock"]["tracks_after"] == 40
    assert (by_tag["choral"]["after"], by_tag["choral"]["tracks_after"]) == (LOWEST, 0)
    assert by_tag["noise"]["tracks_before"] > by_tag["noise"]["tracks_after"] == 12
    assert in_force(tables, library) == {tag: one["after"] for tag, one in by_tag.items()}
    assert len(job.written) == found["changed"] > 0


def test_a_dry_run_changes_nothing_and_says_what_would_change(tables, library):
    job = Job(tables)
    found = job.run(library, dry_run=True)
    assert found["calibration"] is None and found["changed"] > 0
    assert (job.written, in_force(tables, library), calibration.listing(tables, library)) == ([], {}, [])
    assert Job(tables).run(library)["tags"] == found["tags"]


def test_the_last_calibration_can_be_undone_and_then_the_one_before(tables, library):
    Job(tables).run(library)
    first = in_force(tables, library)
    with tables.write() as connection:
        half = (np.zeros(3) + 0.15).astype("float32").tobytes()
        own = select(tracks.c.id).where(tracks.c.library == library, tracks.c.inode < 60)
        connection.execute(update(scores).where(scores.c.track.in_(own)).values(scores=half))
    Job(tables).run(library)
    assert in_force(tables, library) != first
    calibration.undo_last(tables, library)
    assert in_force(tables, library) == first
    calibration.undo_last(tables, library)
    assert in_force(tables, library) == {}
    with pytest.raises(Conflict, match="no calibration"):
        calibration.undo_last(tables, library)


def test_a_job_that_was_killed_after_it_stored_its_calibration_goes_on_with_it(tables, library):
    job = Job(tables)

    def die(_tracks) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibration.calibrate(tables, library, job.id, dry_run=False, fewest=100, default=0.2, write=die)
    stored = in_force(tables, library)
    found = job.run(library)
    assert in_force(tables, library) == stored and len(calibration.listing(tables, library)) == 1
    assert len(job.written) == found["changed"] > 0


def test_a_library_with_too_few_tracks_is_refused(tables, library):
    with tables.write() as connection:
        gone = update(tracks).where(tracks.c.library == library, tracks.c.inode < 30).values(state="gone")
        connection.execute(gone)
    with pytest.raises(Fail, match="has 90 tagged tracks; a calibration needs 100"):
        Job(tables).run(library)
    assert Job(tables).run(library, fewest=90)["files"] == 90


def test_a_library_without_tagged_tracks_is_refused(tables, tmp_path):
    with tables.write() as connection:
        row = {
            "root": b"/none" + str(tmp_path).encode(),
            "shown": "x",
            "name": f"none {tmp_path}",
            "write_to": "database",
        }
        row |= {"ignore": "[]", "watch": False, "added_at": 1, "state": "ready"}
        number = connection.execute(insert(libraries).values(**row)).inserted_primary_key[0]
    with pytest.raises(Fail, match="no tagged tracks"):
        Job(tables).run(number)


def test_tags_are_chosen_by_threshold_the_highest_score_first():
    assert outputs.chosen(["a", "b", "c", "d"], [0.3, 0.9, 0.1, 0.2], {"a": 0.25, "c": 0.1}, 0.2) == [
        "b",
        "a",
        "d",
        "c",
    ]
    assert outputs.chosen(["a"], [0.19], {}, 0.2) == []
