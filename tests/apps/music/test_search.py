"""Finding tracks by tag, text and likeness, on both databases."""

from __future__ import annotations

import json

import pytest

import numpy as np

from sqlalchemy import insert, select, update

from ostler import BadArguments, NotFound, config
from ostler.apps.music import catalogue, playlists
from ostler.apps.music.search import Query, Search
from ostler.apps.music.opening import open_tables
from ostler.apps.music.tables import (
    calibrations,
    embeddings,
    libraries,
    models,
    scores,
    thresholds,
    tracks,
    words,
)
from tests.stores import store_of

TAGS = ["rock", "jazz", "folk"]


class Music:
    """Tables with tracks in them, and a search that is kept."""

    def __init__(self, tables) -> None:
        self.tables, self.at = tables, 1_000_000
        self.search = Search(tables, 0.2)
        with tables.write() as connection:
            tables.upsert(connection, models, [{"model": "m", "tags": json.dumps(TAGS), "used_at": 1}])

    def library(self, name: str) -> int:
        row = {"root": f"/{name}".encode(), "shown": f"/{name}", "name": name, "write_to": "database"}
        row |= {"ignore": "[]", "watch": False, "added_at": 1, "state": "ready"}
        with self.tables.write() as connection:
            return connection.execute(insert(libraries).values(**row)).inserted_primary_key[0]

    def track(self, library: int, path: str, values=None, vector=None, **facts) -> int:
        row = {"library": library, "path": path.encode(), "shown": path, "format": "mp3", "size": 1, "mtime_ns": 1}
        row |= {"inode": 1, "state": "new", "added_at": 1, **facts}
        row["words"] = words(path, *(facts.get(name) for name in ("title", "artist", "album")))
        with self.tables.write() as connection:
            made = connection.execute(insert(tracks).values(**row)).inserted_primary_key[0]
        if values is not None:
            self.tag(made, values, vector if vector is not None else values)
        return made

    def tag(self, track: int, values, vector) -> None:
        self.at += 100
        key = {"track": track, "model": "m", "at": self.at}
        with self.tables.write() as connection:
            tagged = {"state": "tagged", "tagged_at": self.at, "model": "m"}
            connection.execute(update(tracks).where(tracks.c.id == track).values(**tagged))
            self.tables.upsert(connection, scores, [{**key, "scores": np.array(values, "f4").tobytes()}])
            self.tables.upsert(connection, embeddings, [{**key, "vec": np.array(vector, "f4").tobytes()}])

    def state(self, track: int, state: str) -> None:
        with self.tables.write() as connection:
            connection.execute(update(tracks).where(tracks.c.id == track).values(state=state))

    def found(self, *tags, **query) -> list[str]:
        wanted = tuple((tag, None) if isinstance(tag, str) else tag for tag in tags)
        return [one["path"] for one in self.search.find(Query(tags=wanted, **query))]

    def like(self, track: int, limit: int = 10, library: int | None = None) -> list[str]:
        return [one["path"] for one in self.search.similar(track, limit, library)]


@pytest.fixture(params=["sqlite", "postgres"])
def music(request, tmp_path):
    with store_of(request) as url:
        opened = open_tables(config.load({"store": url, "data": str(tmp_path)}, environ={}))
        yield Music(opened)
        opened.close()


def test_tracks_are_found_by_their_tags_the_best_first(music):
    here = music.library("here")
    music.track(here, "rock.mp3", [0.6, 0.1, 0.0])
    music.track(here, "more rock.mp3", [0.9, 0.3, 0.0])
    music.track(here, "jazz.mp3", [0.1, 0.8, 0.3])
    music.track(here, "new.mp3")
    assert music.found("rock") == ["more rock.mp3", "rock.mp3"]
    assert music.found("rock", "jazz") == ["more rock.mp3"]
    assert music.found(("rock", 0.7)) == ["more rock.mp3"]
    assert music.found(("rock", 0.05)) == ["more rock.mp3", "rock.mp3", "jazz.mp3"]
    assert music.found("rock", without=("jazz",)) == ["rock.mp3"]
    assert music.found(("rock", 0.0), limit=1, after=1) == ["rock.mp3"]
    assert music.found() == ["jazz.mp3", "more rock.mp3", "new.mp3", "rock.mp3"]
    assert music.search.find(Query(tags=(("rock", None),)))[0]["scores"] == {"rock": 0.9}
    with pytest.raises(BadArguments, match="no tag 'polka'; there are: folk, jazz, rock"):
        music.found("polka")


def test_what_comes_changes_and_goes_is_seen_at_the_next_question(music):
    here, there = music.library("here"), music.library("there")
    first = music.track(here, "a.mp3", [0.9, 0.0, 0.0])
    music.track(there, "b.mp3", [0.8, 0.1, 0.0])
    assert music.found("rock") == ["a.mp3", "b.mp3"]
    third = music.track(here, "c.mp3", [0.7, 0.0, 0.2])
    assert music.found("rock") == ["a.mp3", "b.mp3", "c.mp3"] and music.like(first) == ["b.mp3", "c.mp3"]
    music.tag(first, [0.1, 0.9, 0.0], [0.1, 0.9, 0.0])
    assert music.found("rock") == ["b.mp3", "c.mp3"] and music.found("jazz") == ["a.mp3"]
    assert music.like(third)[-1] == "a.mp3"
    music.state(third, "gone")
    assert music.found("rock") == ["b.mp3"] and music.like(first) == ["b.mp3"]
    music.state(third, "tagged")
    assert music.found("rock", library=here) == ["c.mp3"] and music.like(first, library=here) == ["c.mp3"]
    catalogue.remove(music.tables, there)
    assert music.found("rock") == ["c.mp3"] and music.like(first) == ["c.mp3"]


def test_a_row_that_appears_late_with_an_earlier_time_is_seen(music):
    here = music.library("here")
    music.track(here, "a.mp3", [0.9, 0.0, 0.0])
    assert music.found("rock") == ["a.mp3"]
    music.at -= 30_000  # its transaction was begun before, and committed after
    music.track(here, "late.mp3", [0.5, 0.0, 0.0])
    assert music.found("rock") == ["a.mp3", "late.mp3"]


def test_a_tag_without_a_score_means_the_threshold_of_the_tracks_library(music):
    here, there = music.library("here"), music.library("there")
    music.track(here, "here.mp3", [0.3, 0.0, 0.0])
    music.track(there, "there.mp3", [0.3, 0.0, 0.0])
    with music.tables.write() as connection:
        made = connection.execute(insert(calibrations).values(library=there, model="m", at=1, files=100, job=1))
        row = {"calibration": made.inserted_primary_key[0], "tag": "rock", "value": 0.4, "method": "gap"}
        connection.execute(insert(thresholds).values(**row))
    assert music.found("rock") == ["here.mp3"]
    assert music.found("rock", library=there) == []
    (tag, *_) = music.search.distribution(there)["tags"]
    assert (tag["tag"], tag["threshold"], tag["tracks"], sum(tag["counts"])) == ("rock", 0.4, 0, 1)


def test_similar_tracks_are_those_whose_embeddings_point_the_same_way(music):
    here = music.library("here")
    own = music.track(here, "own.mp3", [0.5, 0.5, 0.0], [1, 0, 0])
    music.track(here, "far.mp3", [0.5, 0.5, 0.0], [0, 5, 0])
    music.track(here, "near.mp3", [0.5, 0.5, 0.0], [30, 1, 0])
    music.track(here, "opposite.mp3", [0.5, 0.5, 0.0], [-1, 0, 0])
    music.track(here, "silent.mp3", [0.5, 0.5, 0.0], [0, 0, 0])
    found = music.search.similar(own, 10)
    assert [one["path"] for one in found] == ["near.mp3", "far.mp3", "silent.mp3", "opposite.mp3"]
    assert [one["similarity"] for one in found] == [0.9994, 0.0, 0.0, -1.0]
    assert music.like(own, limit=1) == ["near.mp3"]
    new = music.track(here, "new.mp3")
    with pytest.raises(NotFound, match="not tagged yet"):
        music.like(new)
    with pytest.raises(NotFound, match="no track 999"):
        music.like(999)


def test_words_are_compared_without_case_and_whatever_way_accents_are_written(music):
    a = music.library("a")
    music.track(a, "1.mp3", title="BJ\u00d6RK 100%_\u00df")
    music.track(a, "Bjo\u0308rk/2.mp3")
    assert music.found(text="bj\u00f6rk") == music.found(text="Bjo\u0308RK") == ["1.mp3", "Bjo\u0308rk/2.mp3"]
    assert music.found(text="100%_SS") == ["1.mp3"] and music.found(text="100__ss") == []


def test_tracks_are_found_by_words_and_state(music):
    here = music.library("here")
    music.track(here, "a/one.mp3", [0.9, 0, 0], title="Über den Wolken", artist="R. Mey")
    music.track(here, "a/100%.mp3", [0.5, 0, 0], album="Live_in")
    music.track(here, "b.mp3", state="failed", reason="it is broken")
    assert music.found(text="WOLKEN mey") == ["a/one.mp3"]
    assert music.found(text="100%") == ["a/100%.mp3"] and music.found(text="0%m") == []
    assert music.found(text="e_i") == ["a/100%.mp3"] and music.found("rock", text="one") == ["a/one.mp3"]
    assert music.found(state="failed") == ["b.mp3"]


def test_a_look_at_the_tables_is_of_one_moment(music):
    track = music.track(music.library("a"), "1.mp3")
    with music.tables.read() as connection:
        asked = select(tracks.c.model).where(tracks.c.id == track)
        assert connection.execute(asked).scalar() is None
        music.tag(track, [0.1, 0.2, 0.3], [1, 2, 3])
        assert connection.execute(asked).scalar() is None
        assert connection.execute(select(scores.c.track).where(scores.c.track == track)).all() == []


def test_one_track_has_its_tags_scores_and_thresholds(music):
    here = music.library("here")
    track = music.track(here, "a.mp3", [0.3, 0.9, 0.1])
    found = music.search.one(track)
    assert found["tags"] == ["jazz", "rock"] and found["scores"] == {"rock": 0.3, "jazz": 0.9, "folk": 0.1}
    assert music.search.one(music.track(here, "new.mp3"))["tags"] == []


def test_playlists_have_paths_byte_by_byte(music):
    here = music.library("here")
    music.track(here, "a.mp3", [0.9, 0, 0], title="A\nB", artist="C", duration=61.6)
    with music.tables.write() as connection:
        odd = {"library": here, "format": "mp3", "size": 1, "mtime_ns": 1, "inode": 1, "state": "new", "added_at": 1}
        connection.execute(
            insert(tracks),
            [{**odd, "path": b"\xff.mp3", "shown": "\\xff.mp3"}, {**odd, "path": b"x\ny.mp3", "shown": "x"}],
        )
    found = catalogue.with_places(music.tables, music.search.find(Query()))
    assert playlists.m3u(found, relative=False) == (
        b"#EXTM3U\n#EXTINF:62,C - A B\n/here/a.mp3\n#EXTINF:-1,\\xff.mp3\n/here/\xff.mp3\n"
    )
    assert b"\na.mp3\n" in playlists.m3u(found, relative=True)
    found[0]["raw"] = b"#1.mp3"
    assert b"\n./#1.mp3\n" in playlists.m3u(found, relative=True), "it would be a comment"


def test_a_smart_playlist_searches_by_the_written_tags():
    made = json.loads(playlists.smart("rock", Query(tags=(("rock", 0.4),), without=("jazz",), text="live", limit=30)))
    assert made["all"][:2] == [{"contains": {"ostlertags": "rock"}}, {"notContains": {"ostlertags": "jazz"}}]
    assert made["limit"] == 30 and len(made["all"]) == 3
