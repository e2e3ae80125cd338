"""Finding tracks: by tag and score, by text, and by likeness. Works from matrices that are kept in memory and brought up to date at each question.

100,000 tracks are 80 MB of embeddings and 20 MB of scores. No database extension is needed: one product of a matrix and a vector answers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Before numpy is loaded: a question takes milliseconds on one core, and the node has others to serve.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Table, and_, or_, select

from ostler import BadArguments, NotFound
from ostler.apps.music import outputs
from ostler.apps.music.tables import AT_ONCE, Tables, as_dict, embeddings, libraries, models, scores, tracks, words

Floats = NDArray[np.float32]

_PAGE = 5_000
_OVERLAP = 60_000  # ms: how late a row may appear whose time is earlier than one that was read
MOST = 1_000  # tracks in one answer


class Known(NamedTuple):
    """Tracks, the libraries that they are in, and a row of numbers for each."""

    ids: NDArray[np.int64]
    homes: NDArray[np.int64]
    rows: Floats


class Matrix:
    """A row of numbers for each track, from one column of one table, as one model gave them. For any thread.

    `fresh` reads what was written since the last time: rows have the time of their writing, and the last minute is read again, because a
    transaction may be committed later than one with a later time.
    """

    def __init__(self, tables: Tables, table: Table, column: str, model: str, *, unit: bool) -> None:
        self._tables, self._table, self._column, self._model = tables, table, table.c[column], model
        self._unit = unit  # each row of length 1, so that a product is a cosine
        self._lock = threading.Lock()
        self._place: dict[int, int] = {}
        self._known = Known(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, 0), np.float32))
        self._read = 0

    def fresh(self) -> Known:
        """As it is now. What is returned stays as it is: an update makes other arrays, or adds behind their end."""
        with self._lock:
            newest = self._read
            after = (newest - _OVERLAP, 0)
            with self._tables.read() as connection:
                while page := self._page(connection, after):
                    self._take(page)
                    after = (page[-1].at, page[-1].track)
                    newest = max(newest, page[-1].at)
            self._read = newest
            known, count = self._known, len(self._place)
            return Known(known.ids[:count], known.homes[:count], known.rows[:count])

    def _page(self, connection: Connection, after: tuple[int, int]) -> Sequence[Any]:
        table, (at, track) = self._table.c, after
        later = or_(table.at > at, and_(table.at == at, table.track > track))
        asked = select(table.track, table.at, self._column.label("data"), tracks.c.library)
        asked = asked.join(tracks, tracks.c.id == table.track).where(table.model == self._model, later)
        return connection.execute(asked.order_by(table.at, table.track).limit(_PAGE)).all()

    def _take(self, page: Sequence[Any]) -> None:
        rows = np.frombuffer(b"".join(row.data for row in page), np.float32).reshape(len(page), -1)
        if self._unit:
            lengths = np.linalg.norm(rows, axis=1, keepdims=True)
            rows = (rows / np.where(lengths > 0, lengths, 1)).astype(np.float32)
        old = [n for n, row in enumerate(page) if row.track in self._place]
        new = [n for n, row in enumerate(page) if row.track not in self._place]
        if old:
            places = [self._place[page[n].track] for n in old]
            if not np.array_equal(self._known.rows[places], rows[old]):
                # Whoever computes with it now keeps the old one.
                self._known = self._known._replace(rows=self._known.rows.copy())
                self._known.rows[places] = rows[old]
        if new:
            first = len(self._place)
            self._grow(first + len(new), rows.shape[1])
            here = slice(first, first + len(new))
            self._known.ids[here] = [page[n].track for n in new]
            self._known.homes[here] = [page[n].library for n in new]
            self._known.rows[here] = rows[new]
            self._place.update((page[n].track, first + place) for place, n in enumerate(new))

    def _grow(self, count: int, wide: int) -> None:
        known, held = self._known, len(self._place)
        if count <= len(known.ids):
            return
        room = max(1024, count + count // 4)
        larger = Known(np.empty(room, np.int64), np.empty(room, np.int64), np.empty((room, wide), np.float32))
        if held:
            larger.ids[:held], larger.homes[:held], larger.rows[:held] = (part[:held] for part in known)
        self._known = larger

    def row(self, track: int) -> Floats | None:
        """A track's row, as of the last `fresh`."""
        place = self._place.get(track)
        return None if place is None else self._known.rows[place]


@dataclass(frozen=True)
class Query:
    """What is wanted: all tags with at least their score (None: the threshold of the track's library), and words of the file's own data."""

    tags: tuple[tuple[str, float | None], ...] = ()
    without: tuple[str, ...] = ()
    library: int | None = None
    state: str | None = None
    text: str = ""
    limit: int = 50
    after: int = 0  # how many to leave out: the answers before this page


@dataclass
class Search:
    """Searches one node's tracks. For any thread; it may take a fraction of a second, so not for the event loop."""

    tables: Tables
    threshold: float
    _matrices: dict[tuple[str, str], Matrix] = field(default_factory=dict)
    _making: threading.Lock = field(default_factory=threading.Lock)

    # ---- by likeness

    def similar(self, track: int, limit: int, library: int | None = None) -> list[dict[str, Any]]:
        """The tracks whose embeddings point most nearly the same way, the nearest first, with their cosine. Raises NotFound."""
        with self.tables.read() as connection:
            found = connection.execute(select(tracks.c.model).where(tracks.c.id == track)).first()
        if found is None:
            raise NotFound(f"there is no track {track}")
        if found.model is None:
            raise NotFound(f"track {track} is not tagged yet, so nothing can be said to be similar to it")
        matrix = self._matrix(embeddings, "vec", found.model)
        known = matrix.fresh()
        own = matrix.row(track)
        if own is None:
            raise NotFound(f"track {track} has no embedding of {found.model}; tag it again: ostler music retry")
        likeness = known.rows @ own
        likeness[~self._there(known, library) | (known.ids == track)] = -2.0  # less than any cosine
        nearest = [n for n in _largest(likeness, limit) if likeness[n] > -2.0]
        by_id = {int(known.ids[n]): round(float(likeness[n]), 4) for n in nearest}
        return [{**one, "similarity": by_id[one["id"]]} for one in self._present(list(by_id))]

    # ---- by tag and text

    def find(self, query: Query) -> list[dict[str, Any]]:
        """The tracks that a query wants: with tags, those that fit best first; else in the order of their paths."""
        if not query.tags and not query.without:
            return self._listed(query)
        model = self._model(query.library)
        if model is None:
            return []
        known = self._matrix(scores, "scores", model).fresh()
        fits = self._there(known, query.library)
        with self.tables.read() as connection:
            place = _places(outputs.names(connection, model), [*(tag for tag, _ in query.tags), *query.without])
            limits = {int(n): outputs.in_force(connection, int(n), model)[1] for n in np.unique(known.homes)}
            if query.text or query.state:
                some = connection.execute(select(tracks.c.id).where(*_conditions(query))).scalars().all()
                fits &= np.isin(known.ids, np.array(some, np.int64))
        points = np.zeros(len(known.ids), np.float32)
        for tag, least in query.tags:
            column = known.rows[:, place[tag]]
            fits &= column >= (self._bounds(known.homes, limits, tag) if least is None else least)
            points += column
        for tag in query.without:
            fits &= known.rows[:, place[tag]] < self._bounds(known.homes, limits, tag)
        points[~fits] = -1.0
        best = _largest(points, min(int(fits.sum()), query.after + query.limit))[query.after :]
        chosen = {int(known.ids[n]): n for n in best}
        return [
            {
                **one,
                "scores": {tag: round(float(known.rows[chosen[one["id"]], place[tag]]), 4) for tag, _ in query.tags},
            }
            for one in self._present(list(chosen))
        ]

    def _there(self, known: Known, library: int | None) -> NDArray[np.bool_]:
        """Which of the tracks are there: not gone, and in a library that was not removed."""
        with self.tables.read() as connection:
            homes = connection.execute(select(libraries.c.id)).scalars().all() if library is None else [library]
            left = and_(tracks.c.library.in_(homes), tracks.c.state == "gone")
            gone = connection.execute(select(tracks.c.id).where(left)).scalars().all()
        return np.isin(known.homes, homes) & ~np.isin(known.ids, np.array(gone, np.int64))

    def _bounds(self, home: NDArray[Any], limits: dict[int, dict[str, float]], tag: str) -> Floats:
        """The threshold of a tag for each track, by its library."""
        bounds = np.full(len(home), self.threshold, np.float32)
        for library, found in limits.items():
            bounds[home == library] = found.get(tag, self.threshold)
        return bounds

    def _listed(self, query: Query) -> list[dict[str, Any]]:
        asked = _joined().where(*_conditions(query)).order_by(tracks.c.library, tracks.c.path)
        with self.tables.read() as connection:
            return self._shown(connection, connection.execute(asked.limit(query.limit).offset(query.after)).all())

    # ---- rows

    def one(self, track: int) -> dict[str, Any]:
        """A track with its tags, all its scores and thresholds. Raises NotFound."""
        with self.tables.read() as connection:
            row = connection.execute(_joined().where(tracks.c.id == track)).first()
            if row is None:
                raise NotFound(f"there is no track {track}")
            found = _shown(row) | {"scores": {}, "thresholds": {}, "tags": []}
            if row.model is None:
                return found
            names = outputs.names(connection, row.model)
            _, limits = outputs.in_force(connection, row.library, row.model)
            own = and_(scores.c.track == track, scores.c.model == row.model)
            blob = connection.execute(select(scores.c.scores).where(own)).scalar()
        if blob is None:
            return found
        values = outputs.floats(blob)
        found["scores"] = {name: round(value, 4) for name, value in zip(names, values, strict=True)}
        found["thresholds"] = {name: limits.get(name, self.threshold) for name in names}
        found["tags"] = outputs.chosen(names, values, limits, self.threshold)
        return found

    def distribution(self, library: int, bins: int = 50) -> dict[str, Any]:
        """How a library's scores are spread, tag by tag, with the thresholds: what a plot needs."""
        model = self._model(library)
        if model is None:
            return {"model": None, "files": 0, "bins": bins, "tags": []}
        with self.tables.read() as connection:
            names = outputs.names(connection, model)
            calibration, limits = outputs.in_force(connection, library, model)
        known = self._matrix(scores, "scores", model).fresh()
        rows = known.rows[self._there(known, library)].reshape(-1, len(names))
        tags = [
            {
                "tag": name,
                "threshold": limits.get(name, self.threshold),
                "tracks": int((rows[:, n] >= limits.get(name, self.threshold)).sum()),
                "counts": np.histogram(rows[:, n], bins, (0.0, 1.0))[0].tolist(),
            }
            for n, name in enumerate(names)
        ]
        return {"model": model, "files": len(rows), "bins": bins, "calibration": calibration, "tags": tags}

    def _present(self, ids: list[int]) -> list[dict[str, Any]]:
        """The tracks, in the order given; without those that were removed just now."""
        found: dict[int, dict[str, Any]] = {}
        with self.tables.read() as connection:
            for first in range(0, len(ids), AT_ONCE):
                part = tracks.c.id.in_(ids[first : first + AT_ONCE])
                rows = connection.execute(_joined().where(part)).all()
                found |= {one["id"]: one for one in self._shown(connection, rows)}
        return [found[track] for track in ids if track in found]

    def _shown(self, connection: Connection, rows: Sequence[Any]) -> list[dict[str, Any]]:
        """Rows as they are answered, with the tags of each."""
        own = and_(scores.c.track.in_([row.id for row in rows]), tracks.c.model == scores.c.model)
        asked = select(scores.c.track, scores.c.scores).join(tracks, tracks.c.id == scores.c.track)
        blobs = {row.track: row.scores for row in connection.execute(asked.where(own))} if rows else {}
        known: dict[Any, Any] = {}
        for key in {(row.library, row.model) for row in rows if row.id in blobs}:
            known[key] = outputs.names(connection, key[1]), outputs.in_force(connection, *key)[1]

        def tags(row: Any) -> list[str]:
            if row.id not in blobs:
                return []
            names, limits = known[row.library, row.model]
            return outputs.chosen(names, outputs.floats(blobs[row.id]), limits, self.threshold)

        return [{**_shown(row), "tags": tags(row)} for row in rows]

    def _model(self, library: int | None) -> str | None:
        """The model that was used last, in a library or at all."""
        if library is None:
            asked = select(models.c.model).order_by(models.c.used_at.desc())
        else:
            asked = select(tracks.c.model).where(tracks.c.library == library, tracks.c.tagged_at.is_not(None))
            asked = asked.order_by(tracks.c.tagged_at.desc())
        with self.tables.read() as connection:
            found = connection.execute(asked.limit(1)).scalar()
        return None if found is None else str(found)

    def warm(self) -> None:
        """Read what questions are answered from, so that the first one does not wait for it."""
        model = self._model(None)
        if model is not None:
            self._matrix(embeddings, "vec", model).fresh()
            self._matrix(scores, "scores", model).fresh()

    def _matrix(self, table: Table, column: str, model: str) -> Matrix:
        with self._making:
            key = (table.name, model)
            if key not in self._matrices:
                self._matrices[key] = Matrix(self.tables, table, column, model, unit=table is embeddings)
            return self._matrices[key]


def _largest(values: Floats, count: int) -> NDArray[np.int64]:
    """The places of the largest values, the largest first."""
    if count <= 0:
        return np.empty(0, np.int64)
    some = np.argpartition(-values, count - 1)[:count] if count < len(values) else np.arange(len(values))
    return some[np.argsort(-values[some], kind="stable")]


def _places(names: Sequence[str], tags: Sequence[str]) -> dict[str, int]:
    place = {name: n for n, name in enumerate(names)}
    for tag in tags:
        if tag not in place:
            raise BadArguments(f"there is no tag {tag!r}; there are: {', '.join(sorted(names))}")
    return place


def _conditions(query: Query) -> list[Any]:
    found: list[Any] = []
    if query.library is not None:
        found.append(tracks.c.library == query.library)
    found.append(tracks.c.state == query.state if query.state else tracks.c.state != "gone")
    found += [tracks.c.words.contains(word, autoescape=True) for word in words(query.text).split()]
    return found


def _joined() -> Any:
    return select(tracks, libraries.c.name.label("in_library")).join(libraries, libraries.c.id == tracks.c.library)


_KEPT = (
    "id",
    "library",
    "format",
    "size",
    "duration",
    "title",
    "artist",
    "album",
    "state",
    "reason",
    "job",
    "tagged_at",
    "model",
)


def _shown(row: Any) -> dict[str, Any]:
    values = as_dict(row)
    return {"path": row.shown, "library_name": row.in_library, **{name: values[name] for name in _KEPT}}
