"""A track's tags on their way out: chosen by thresholds from its scores, and written where the library wants them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, and_, delete, select, update

from ostler import Fail
from ostler.apps.music.library import content
from ostler.apps.music.rules import Rules
from ostler.apps.music.tables import (
    Tables,
    calibrations,
    from_json,
    libraries,
    models,
    now_ms,
    scores,
    thresholds,
    tracks,
    written,
)
from ostler.apps.music.walk import said, signed


def chosen(tags: Sequence[str], values: Sequence[float], limits: Mapping[str, float], default: float) -> list[str]:
    """The tags whose score reaches their threshold, the highest score first."""
    found = [(-score, tag) for tag, score in zip(tags, values, strict=True) if score >= limits.get(tag, default)]
    return [tag for _, tag in sorted(found)]


def floats(blob: bytes) -> array[float]:
    return array("f", blob)


def in_force(connection: Connection, library: int, model: str) -> tuple[int | None, dict[str, float]]:
    """The calibration that counts for a library, the newest that was not undone, and its thresholds."""
    own = select(calibrations.c.id).where(calibrations.c.library == library, calibrations.c.model == model)
    newest = own.where(calibrations.c.undone.is_(None)).order_by(calibrations.c.id.desc()).limit(1)
    calibration = connection.execute(newest).scalar()
    if calibration is None:
        return None, {}
    limits = select(thresholds.c.tag, thresholds.c.value).where(thresholds.c.calibration == calibration)
    return int(calibration), {row.tag: row.value for row in connection.execute(limits)}


def names(connection: Connection, model: str) -> list[str]:
    """The names of a model's scores; none where it was never used."""
    found = connection.execute(select(models.c.tags).where(models.c.model == model)).scalar()
    return list(from_json(found) or [])


def described(path: bytes) -> dict[str, Any]:
    """Title, artist, album and duration, as far as the file tells."""
    from ostler.apps.music import writing  # noqa: PLC0415

    found = writing.read(path)
    return {"title": found.title, "artist": found.artist, "album": found.album, "duration": found.duration}


class Applied(NamedTuple):
    """The tags of a track, and why they could not be written where the library wants them; None: they are there."""

    tags: list[str]
    refusal: str | None = None


def apply(tables: Tables, track: int) -> Applied:
    """Bring what is written for a track in line with its scores, the thresholds and its library's choice.

    A file that can never be written, or may not be, is no failure: its tags are in the database. Raises OSError where another try may
    help, such as with a full disk; then the old tags are still there.
    """
    asked = select(tracks, libraries.c.root, libraries.c.write_to, scores.c.scores)
    asked = asked.join(libraries, libraries.c.id == tracks.c.library)
    asked = asked.join(scores, (scores.c.track == tracks.c.id) & (scores.c.model == tracks.c.model))
    with tables.read() as connection:
        row = connection.execute(asked.where(tracks.c.id == track)).first()
        if row is None or row.state == "gone":
            return Applied([])
        _, limits = in_force(connection, row.library, row.model)
        tags = names(connection, row.model)
        earlier = connection.execute(select(written).where(written.c.track == track)).first()
    wanted = chosen(tags, floats(row.scores), limits, Rules.from_environment().threshold)
    path = os.path.realpath(os.path.join(row.root, row.path))  # noqa: PTH118  bytes
    refusal = None
    try:
        if earlier is not None and earlier.target != row.write_to:
            _withdraw(tables, row, path, earlier)
            earlier = None
        if row.write_to != "database":
            _put(tables, row, path, {"tags": wanted, "model": [row.model]}, earlier)
    except Fail as never:
        refusal = f"its tags are in the database alone: {never}"
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        refusal = f"its tags are in the database alone: {said(error)}"
    if refusal != row.reason:
        with tables.write() as connection:
            own = and_(tracks.c.id == track, tracks.c.state == "tagged")
            connection.execute(update(tracks).where(own).values(reason=refusal))
    return Applied(wanted, refusal)


def _put(tables: Tables, row: Any, path: bytes, wanted: dict[str, list[str]], earlier: Any) -> None:
    if earlier is not None and from_json(earlier.tags) == wanted:
        return
    told = {"track": row.id, "at": now_ms(), "target": row.write_to, "tags": "{}"}
    if row.write_to == "file":
        from ostler.apps.music import writing  # noqa: PLC0415

        if (
            earlier is None
        ):  # before anything is written: a run that is killed in between must not take our tags for older ones
            with tables.write() as connection:
                tables.upsert(connection, written, [{**told, "before": json.dumps(writing.ours(path))}])
        writing.write(path, wanted)
    else:
        _write_sidecar(sidecar(row.library, row.path, path), {"track": row.shown, **wanted})
    facts = _facts(path)
    with tables.write() as connection:
        tables.upsert(connection, written, [{**told, "tags": json.dumps(wanted)}])
        connection.execute(update(tracks).where(tracks.c.id == row.id).values(**facts))


def _withdraw(tables: Tables, row: Any, path: bytes, earlier: Any) -> None:
    """Take away what was written for a track, and put back what was there of ours before."""
    if earlier.target == "file":
        from ostler.apps.music import writing  # noqa: PLC0415

        writing.restore(path, from_json(earlier.before) or {})
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(sidecar(row.library, row.path, path))  # noqa: PTH108  bytes
    facts = _facts(path)
    with tables.write() as connection:
        connection.execute(delete(written).where(written.c.track == row.id))
        connection.execute(update(tracks).where(tracks.c.id == row.id).values(**facts))


def _facts(path: bytes) -> dict[str, Any]:
    """The file as we left it, so that a scan need not look at it again. Before a transaction: reading it takes its time."""
    facts = os.stat(path)  # noqa: PTH116  bytes
    place = {"size": facts.st_size, "mtime_ns": facts.st_mtime_ns, "inode": signed(facts.st_ino)}
    return {**place, "sha256": content(path)}


# ---- sidecar files


def sidecar(library: int, relative: bytes, path: bytes) -> bytes:
    """Where a track's sidecar file is: beside it, or below OSTLER_MUSIC_SIDECARS where that is set."""
    folder = Rules.from_environment().sidecars
    if not folder:
        return path + b".ostler.json"
    return os.path.join(os.fsencode(folder), str(library).encode(), relative + b".json")  # noqa: PTH118  bytes


def _write_sidecar(path: bytes, value: dict[str, Any]) -> None:
    """Whole or not at all."""
    os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120  bytes
    draft = path + b".part"
    with open(draft, "w", encoding="utf-8") as file:  # noqa: PTH123  bytes
        json.dump(value, file, ensure_ascii=False, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)  # noqa: PTH105  bytes
