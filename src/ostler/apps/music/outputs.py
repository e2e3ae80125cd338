"""A track's tags on their way out: chosen by thresholds from its scores, and written where the library wants them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import Connection, and_, delete, select, update
from sqlalchemy.exc import IntegrityError

from ostler import Fail
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
from ostler.apps.music.walk import file_facts, located, plain, said

if TYPE_CHECKING:
    from ostler.apps.music.writing import Written


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


UNWRITTEN = "its tags could not be written"  # so far: the next scan of the whole library has it tried again
_NEVER = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)


def apply(tables: Tables, track: int) -> Applied:
    """Bring what is written for a track in line with its scores, the thresholds and its library's choice, as they are when this ends.

    A file that can never be written, or may not be, is no failure: its tags are in the database. Raises OSError where another try may
    help, such as with a full disk; then the old tags are still there.
    """
    applied, done = Applied([]), None
    try:
        # A calibration or an undo that comes while it writes did not see what it wrote: then once more.
        while (plan := _plan(tables, track)) is not None and plan.decided != done:
            applied, done = _carried_out(tables, plan), plan.decided
    except IntegrityError:  # the library was removed meanwhile
        return Applied([])
    return applied


class _Plan(NamedTuple):
    """What is to be written for a track. `decided` is what that depends on."""

    row: Any
    earlier: Any
    wanted: list[str]
    decided: tuple[Any, ...]


def _plan(tables: Tables, track: int) -> _Plan | None:
    asked = select(tracks, libraries.c.root, libraries.c.write_to, scores.c.scores, scores.c.at)
    asked = asked.join(libraries, libraries.c.id == tracks.c.library)
    asked = asked.join(scores, (scores.c.track == tracks.c.id) & (scores.c.model == tracks.c.model))
    with tables.read() as connection:
        row = connection.execute(asked.where(tracks.c.id == track)).first()
        if row is None:
            return None
        calibration, limits = in_force(connection, row.library, row.model)
        tags = names(connection, row.model)
        earlier = connection.execute(select(written).where(written.c.track == track)).first()
    if row.state == "gone" and (earlier is None or (earlier.target, row.write_to) != ("sidecar", "database")):
        return None  # of a file that is not there only the sidecar can be taken away
    wanted = chosen(tags, floats(row.scores), limits, Rules.from_environment().threshold)
    return _Plan(row, earlier, wanted, (row.path, row.write_to, row.model, row.at, calibration))


def _carried_out(tables: Tables, plan: _Plan) -> Applied:
    row, earlier, refusal = plan.row, plan.earlier, None
    try:
        path = located(row.root, row.path)
        if earlier is not None and earlier.target != row.write_to:
            _withdraw(tables, row, path, earlier)
            earlier = None
        if row.write_to != "database":
            _put(tables, row, path, {"tags": plan.wanted, "model": [row.model]}, earlier)
    except Fail as never:
        refusal = f"its tags are in the database alone: {never}"
    except OSError as error:
        if error.errno not in _NEVER:
            _note(tables, row.id, f"{UNWRITTEN}: {said(error)}")
            raise
        refusal = f"its tags are in the database alone: {said(error)}"
    if refusal != row.reason:
        _note(tables, row.id, refusal)
    return Applied(plan.wanted, refusal)


def _note(tables: Tables, track: int, reason: str | None) -> None:
    with tables.write() as connection:
        own = and_(tracks.c.id == track, tracks.c.state == "tagged")
        connection.execute(update(tracks).where(own).values(reason=reason and plain(reason)))


def _put(tables: Tables, row: Any, path: bytes, wanted: dict[str, list[str]], earlier: Any) -> None:
    place = sidecar(row.library, row.path, path) if row.write_to == "sidecar" else None
    if earlier is not None and from_json(earlier.tags) == wanted and earlier.place in (place, None):
        return
    told = {"track": row.id, "at": now_ms(), "target": row.write_to, "tags": "{}", "place": place}
    facts: dict[str, Any] = {}
    if place is None:
        from ostler.apps.music import writing  # noqa: PLC0415

        if earlier is None:  # before anything is written: a run that is killed in between must not lose what was there
            with tables.write() as connection:
                tables.upsert(connection, written, [{**told, "before": json.dumps(writing.ours(path))}])
        facts = _facts(writing.write(path, wanted))
    else:
        _write_sidecar(place, {"track": row.shown, **wanted})
        if earlier is not None and earlier.place not in (place, None):  # the track was moved
            _remove_sidecar(earlier.place)
    with tables.write() as connection:
        tables.upsert(connection, written, [{**told, "tags": json.dumps(wanted)}])
        _keep(connection, row.id, facts)


OURS = ("tags", "model")  # what a track's tags are written as


def _withdraw(tables: Tables, row: Any, path: bytes, earlier: Any) -> None:
    """Take away what was written for a track, and put back what others had under our prefix. A copy of a file that Ostler had tagged
    came with tags of ours: these go as well.
    """
    facts: dict[str, Any] = {}
    if earlier.target == "file":
        from ostler.apps.music import writing  # noqa: PLC0415

        others = {name: value for name, value in (from_json(earlier.before) or {}).items() if name not in OURS}
        facts = _facts(writing.write(path, others))
    else:
        _remove_sidecar(earlier.place or sidecar(row.library, row.path, path))
    with tables.write() as connection:
        connection.execute(delete(written).where(written.c.track == row.id))
        _keep(connection, row.id, facts)


def _keep(connection: Connection, track: int, facts: dict[str, Any]) -> None:
    if facts:
        connection.execute(update(tracks).where(tracks.c.id == track).values(**facts))


def _facts(done: Written) -> dict[str, Any]:
    """The file as we left it, so that a scan need not look at it again; what somebody did to it since, a scan is to see."""
    if done.facts is None:
        return {}
    return {**file_facts(done.facts), "sha256": done.sha256}


# ---- sidecar files


def sidecar(library: int, relative: bytes, path: bytes) -> bytes:
    """Where a track's sidecar file is: beside it, or below OSTLER_MUSIC_SIDECARS where that is set."""
    folder = Rules.from_environment().sidecars
    if not folder:
        return path + b".ostler.json"
    return os.path.join(os.fsencode(folder), str(library).encode(), relative + b".json")  # noqa: PTH118  bytes


def _write_sidecar(path: bytes, value: dict[str, Any]) -> None:
    from ostler.apps.music import writing  # noqa: PLC0415

    os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120  bytes
    writing.replace(path, json.dumps(value, ensure_ascii=False, indent=1).encode("utf-8", "backslashreplace"))


def _remove_sidecar(path: bytes) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(path)  # noqa: PTH108  bytes
