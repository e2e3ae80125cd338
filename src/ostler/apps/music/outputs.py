"""A track's tags on their way out: chosen by thresholds from its scores, and written where the library wants them."""

from __future__ import annotations

import contextlib
import json
import os
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, select, update

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
from ostler.apps.music.walk import signed


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
    try:
        from ostler.apps.music import writing  # noqa: PLC0415
    except ImportError:
        return {}
    found = writing.read(path)
    return {name: getattr(found, name) for name in ("title", "artist", "album", "duration")}


def settle(tables: Tables, track: int) -> list[str]:
    """Bring what is written for a track in line with its thresholds and its library's choice. The tags."""
    asked = select(libraries.c.write_to).join(tracks, tracks.c.library == libraries.c.id).where(tracks.c.id == track)
    with tables.read() as connection:
        write_to = connection.execute(asked).scalar()
    if write_to == "database":
        withdraw(tables, track)
    return apply(tables, track)


def apply(tables: Tables, track: int) -> list[str]:
    """Write the tags that a track is to have, where its library wants them, unless they are there. The tags.

    Raises OSError where the file or its directory cannot be written: then the old tags are still there.
    """
    asked = select(tracks, libraries.c.root, libraries.c.write_to, scores.c.scores)
    asked = asked.join(libraries, libraries.c.id == tracks.c.library)
    asked = asked.join(scores, (scores.c.track == tracks.c.id) & (scores.c.model == tracks.c.model))
    with tables.read() as connection:
        row = connection.execute(asked.where(tracks.c.id == track)).first()
        if row is None:
            return []
        _, limits = in_force(connection, row.library, row.model)
        tags = names(connection, row.model)
        earlier = connection.execute(select(written).where(written.c.track == track)).first()
    wanted = chosen(tags, floats(row.scores), limits, Rules.from_environment().threshold)
    if row.write_to != "database":
        _put(tables, row, {"tags": wanted, "model": [row.model]}, earlier)
    return wanted


def _put(tables: Tables, row: Any, wanted: dict[str, list[str]], earlier: Any | None) -> None:
    if earlier is not None and earlier.target == row.write_to and from_json(earlier.tags) == wanted:
        return
    if earlier is not None and earlier.target != row.write_to:
        withdraw(tables, row.id)
        earlier = None
    path = os.path.realpath(os.path.join(row.root, row.path))  # noqa: PTH118  bytes
    before = earlier.before if earlier is not None else None
    if row.write_to == "file":
        from ostler.apps.music import writing  # noqa: PLC0415

        made = writing.write(path, wanted)
        before = before if earlier is not None else json.dumps(made.before)
    else:
        _write_sidecar(sidecar(row.library, row.path, path), {"track": row.shown, **wanted})
    told = {"track": row.id, "at": now_ms(), "target": row.write_to, "tags": json.dumps(wanted), "before": before}
    with tables.write() as connection:
        tables.upsert(connection, written, [told])
        _is_ours(connection, row.id, path)


def withdraw(tables: Tables, track: int) -> bool:
    """Take away what was written for a track, and put back what was there of ours before; whether there was anything."""
    asked = select(tracks, libraries.c.root, written.c.target, written.c.before.label("had"))
    asked = asked.join(libraries, libraries.c.id == tracks.c.library).join(written, written.c.track == tracks.c.id)
    with tables.read() as connection:
        row = connection.execute(asked.where(tracks.c.id == track)).first()
    if row is None:
        return False
    path = os.path.realpath(os.path.join(row.root, row.path))  # noqa: PTH118  bytes
    if row.target == "file":
        from ostler.apps.music import writing  # noqa: PLC0415

        writing.restore(path, from_json(row.had) or {})
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(sidecar(row.library, row.path, path))  # noqa: PTH108  bytes
    with tables.write() as connection:
        connection.execute(delete(written).where(written.c.track == track))
        _is_ours(connection, track, path)
    return True


def _is_ours(connection: Connection, track: int, path: bytes) -> None:
    """The file is as we left it: a scan need not look at it again."""
    facts = os.stat(path)  # noqa: PTH116  bytes
    values: dict[str, Any] = {"size": facts.st_size, "mtime_ns": facts.st_mtime_ns, "inode": signed(facts.st_ino)}
    values["sha256"] = content(path)
    connection.execute(update(tracks).where(tracks.c.id == track).values(**values))


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
