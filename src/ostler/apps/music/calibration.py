"""Thresholds per tag from a library's own scores. `limits` is pure; the job `calibrate` stores what it finds and has tags written again.

A model's scores are not comparable from tag to tag: "rock" may reach 0.8 where "choral" never passes 0.3. For each tag the scores of the
library are put on the logit scale and split in two by Otsu's method, which makes the two groups as narrow as they can be. Where they
are two groups indeed (the split explains at least 3/4 of the variance, as two separate modes do; one bell curve has 0.64) the threshold
is the middle of the gap between them. Else the tag is taken for the highest tenth of the tracks. A threshold is never below 0.1, where a model
says no, and never above 0.5, where it says yes: a library that is all rock keeps its tag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import Connection, insert, select, update

from ostler import Conflict, Fail
from ostler.apps.music import outputs
from ostler.apps.music.tables import (
    Tables,
    as_dict,
    calibrations,
    libraries,
    now_ms,
    scores,
    thresholds,
    tracks,
    written,
)

if TYPE_CHECKING:
    import numpy as np

LOWEST, HIGHEST = 0.1, 0.5
SHARE = 0.1  # of the tracks that get a tag whose scores have no gap
SEPARATE = 0.75  # of the variance that the split of two groups explains
FEWEST = 0.01  # of the tracks that a group must have: a few odd ones are no group
_EDGE = 1e-6
_AT_ONCE = 5_000  # rows read at once


class Limit(NamedTuple):
    """A tag's threshold: `gap` between two groups of scores, or `share` of the tracks; `lowest` or `highest` where it was bounded."""

    value: float
    method: str


def limits(values: np.ndarray) -> list[Limit]:
    """The threshold of each tag, from scores of so many tracks (rows) and tags (columns)."""
    return [_limit(values[:, column]) for column in range(values.shape[1])]


def _limit(column: np.ndarray) -> Limit:
    import numpy as np  # noqa: PLC0415

    ordered = np.sort(column.astype("float64"))
    found = _gap(ordered)
    method = "gap" if found is not None else "share"
    value = float(found if found is not None else np.quantile(ordered, 1 - SHARE))
    if value < LOWEST:
        return Limit(LOWEST, "lowest")
    if value > HIGHEST:
        return Limit(HIGHEST, "highest")
    return Limit(round(value, 4), method)


def _gap(ordered: np.ndarray) -> float | None:
    """The middle between the two groups that Otsu's method finds; None where the scores are one group."""
    import numpy as np  # noqa: PLC0415

    clipped = np.clip(ordered, _EDGE, 1 - _EDGE)
    logits = np.log(clipped / (1 - clipped))
    count, spread = len(logits), float(logits.var())
    if count < 2 or spread < 1e-12:
        return None
    sizes = np.arange(1, count)
    sums = np.cumsum(logits)
    low, high = sums[:-1] / sizes, (sums[-1] - sums[:-1]) / (count - sizes)
    between = sizes * (count - sizes) / count**2 * (high - low) ** 2
    allowed = (sizes >= FEWEST * count) & (count - sizes >= FEWEST * count) & (logits[1:] > logits[:-1])
    if not allowed.any():
        return None
    split = int(np.argmax(np.where(allowed, between, -1.0)))
    if between[split] / spread < SEPARATE:
        return None
    middle = (logits[split] + logits[split + 1]) / 2
    return float(1 / (1 + np.exp(-middle)))


# ---- the library's scores


def read_scores(tables: Tables, library: int, model: str) -> tuple[list[int], np.ndarray]:
    """The ids of a library's tracks that are there, and their scores; a page at a time, into one matrix."""
    import numpy as np  # noqa: PLC0415

    ids: list[int] = []
    pages: list[np.ndarray] = []
    asked = select(scores.c.track, scores.c.scores).join(tracks, tracks.c.id == scores.c.track)
    asked = asked.where(tracks.c.library == library, tracks.c.state != "gone", scores.c.model == model)
    with tables.read() as connection:
        wide = len(outputs.names(connection, model))
        while True:
            after = ids[-1] if ids else 0
            page = connection.execute(
                asked.where(scores.c.track > after).order_by(scores.c.track).limit(_AT_ONCE)
            ).all()
            if not page:
                break
            ids += [row.track for row in page]
            pages.append(np.frombuffer(b"".join(row.scores for row in page), "float32").reshape(len(page), wide))
    return ids, np.concatenate(pages) if pages else np.empty((0, wide), "float32")


def latest_model(connection: Connection, library: int) -> str | None:
    """The model that tagged a library's tracks last."""
    asked = select(tracks.c.model).where(tracks.c.library == library, tracks.c.tagged_at.is_not(None))
    found = connection.execute(asked.order_by(tracks.c.tagged_at.desc()).limit(1)).scalar()
    return None if found is None else str(found)


# ---- the job


def calibrate(
    tables: Tables,
    library: int,
    job: int,
    *,
    dry_run: bool,
    fewest: int,
    default: float,
    write: Callable[[list[int]], object],
) -> dict[str, Any]:
    """Find thresholds, and unless it is a dry run store them and have the tags of tracks written that get others.

    Nothing is decoded and no model runs. A job that runs again after a crash goes on with the calibration that it stored.
    """
    with tables.read() as connection:
        model = latest_model(connection, library)
        if model is None:
            raise Fail("TOO_FEW", f"library {library} has no tagged tracks; a calibration needs {fewest}")
        tags = outputs.names(connection, model)
        current, now = outputs.in_force(connection, library, model)
        own = connection.execute(select(calibrations).where(calibrations.c.job == job)).first()
    ids, values = read_scores(tables, library, model)
    if len(ids) < fewest:
        raise Fail("TOO_FEW", f"library {library} has {len(ids)} tagged tracks; a calibration needs {fewest}")
    if own is not None:  # stored by a run that was killed: it counts, and what went before it is not asked again
        current, before = own.id, _before(tables, library, model, own.id)
        made = {tag: Limit(value, "") for tag, value in now.items()}
    else:
        before, made = now, dict(zip(tags, limits(values), strict=True))
        if not dry_run:
            current = _store(tables, library, model, job, len(ids), made)
    after = {tag: limit.value for tag, limit in made.items()}
    changed = _changed(ids, values, tags, before, after, default)
    if not dry_run:
        write(changed)
    return {
        "library": library,
        "model": model,
        "calibration": None if dry_run else current,
        "dry_run": dry_run,
        "files": len(ids),
        "changed": len(changed),
        "tags": _compared(values, tags, before, made, default),
    }


def _store(tables: Tables, library: int, model: str, job: int, files: int, made: dict[str, Limit]) -> int:
    with tables.write() as connection:
        row = {"library": library, "model": model, "at": now_ms(), "files": files, "job": job}
        stored = connection.execute(insert(calibrations).values(**row)).inserted_primary_key
        assert stored is not None
        rows = [{"calibration": stored[0], "tag": tag, **limit._asdict()} for tag, limit in made.items()]
        connection.execute(insert(thresholds), rows)
    return int(stored[0])


def _before(tables: Tables, library: int, model: str, calibration: int) -> dict[str, float]:
    """The thresholds that counted before a calibration."""
    own = select(calibrations.c.id).where(calibrations.c.library == library, calibrations.c.model == model)
    older = own.where(calibrations.c.undone.is_(None), calibrations.c.id < calibration)
    with tables.read() as connection:
        found = connection.execute(older.order_by(calibrations.c.id.desc()).limit(1)).scalar()
        asked = select(thresholds.c.tag, thresholds.c.value).where(thresholds.c.calibration == found)
        return {row.tag: row.value for row in connection.execute(asked)}


def _reached(values: np.ndarray, tags: Sequence[str], at: dict[str, float], default: float) -> np.ndarray:
    import numpy as np  # noqa: PLC0415

    reached: np.ndarray = values >= np.array([at.get(tag, default) for tag in tags])
    return reached


def _changed(
    ids: list[int],
    values: np.ndarray,
    tags: Sequence[str],
    before: dict[str, float],
    after: dict[str, float],
    default: float,
) -> list[int]:
    """The tracks that have other tags with other thresholds."""
    differs = (_reached(values, tags, before, default) != _reached(values, tags, after, default)).any(axis=1)
    return [ids[n] for n in differs.nonzero()[0]]


def _compared(
    values: np.ndarray, tags: Sequence[str], before: dict[str, float], made: dict[str, Limit], default: float
) -> list[dict[str, Any]]:
    had = _reached(values, tags, before, default).sum(axis=0)
    has = _reached(values, tags, {tag: limit.value for tag, limit in made.items()}, default).sum(axis=0)
    return [
        {
            "tag": tag,
            "before": before.get(tag, default),
            "after": made[tag].value if tag in made else default,
            "method": made[tag].method if tag in made else "",
            "tracks_before": int(had[n]),
            "tracks_after": int(has[n]),
        }
        for n, tag in enumerate(tags)
    ]


# ---- undo


def listing(tables: Tables, library: int) -> list[dict[str, Any]]:
    """A library's calibrations, the newest first."""
    asked = select(calibrations).where(calibrations.c.library == library).order_by(calibrations.c.id.desc()).limit(100)
    with tables.read() as connection:
        return [as_dict(row) for row in connection.execute(asked)]


def undo_last(tables: Tables, library: int) -> int:
    """Take back the newest calibration: the one before it counts again, or the default. Its id; raises Conflict."""
    newest = select(calibrations.c.id).where(calibrations.c.library == library, calibrations.c.undone.is_(None))
    with tables.write() as connection:
        found = connection.execute(newest.order_by(calibrations.c.id.desc()).limit(1)).scalar()
        if found is None:
            raise Conflict(f"library {library} has no calibration that could be undone")
        connection.execute(update(calibrations).where(calibrations.c.id == found).values(undone=now_ms()))
    return int(found)


def undo_all(tables: Tables, library: int) -> int:
    """From now on nothing is written for a library any more; how many tracks have something to take back."""
    with tables.write() as connection:
        connection.execute(update(libraries).where(libraries.c.id == library).values(write_to="database"))
        return len(connection.execute(_written_of(library)).all())


def _written_of(library: int) -> Any:
    return select(written.c.track).join(tracks, tracks.c.id == written.c.track).where(tracks.c.library == library)
