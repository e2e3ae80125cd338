"""The music tagger (seeds 000 and 001), as a user of Ostler writes it:  ostler up ostler.apps.music

Three pools: `library` scans directories into rows, `tag` runs the model over each new file and writes its tags, `calibration` finds
thresholds and writes tags again. Every job can be run again after any crash; what it needs third-party modules for is imported when
it runs.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from ostler import Fail, Job, NotFound, Ostler, extras
from ostler.apps.music.rules import Rules, sizes

if TYPE_CHECKING:
    from fastapi import APIRouter

    from ostler.web.extend import NodeApi

app = Ostler()
for _pool, _workers in sizes(len(os.sched_getaffinity(0))).items():
    app.pool(_pool, workers=_workers)
# Sees changes in the libraries, and has what is due scanned.
app.command("watch", [sys.executable, "-m", "ostler.apps.music.watching"], workers=1)


@app.on_start("tag")
def load_model() -> None:
    """Once in each worker, before its first track. Without a model no track is to blame: the worker does not start."""
    from ostler.apps.music import tagging  # noqa: PLC0415

    tagging.load()


@app.job(queue="library", attempts=3, unique=True)
def scan(job: Job, library: int) -> dict[str, Any]:
    """Bring a library's rows up to date, and have new and changed files tagged. Goes on where an earlier run of it was killed."""
    from ostler.apps.music import catalogue, opening  # noqa: PLC0415
    from ostler.apps.music.library import Away, Found, Scan  # noqa: PLC0415

    opened = opening.here()

    def tick(done: float, found: Found) -> None:
        job.check()
        job.progress(99 * done, f"{found.seen} files")

    try:
        found = Scan(opened, library, job.id, tick, lambda: queue_tags(library), queue_writes).run()
    except Away as away:
        raise Fail("AWAY", str(away)) from None
    except LookupError as error:
        raise Fail("NOT_FOUND", str(error)) from None
    if not found.partial:
        catalogue.recover(opened, library, _is_live)
    queue_tags(library)
    return found.result()


_TAG_RUNS = 3


@app.job(queue="tag", attempts=_TAG_RUNS, timeout=900, unique=True)
def tag(job: Job, track: int, version: int) -> dict[str, Any]:
    """Find a track's tags and write them. A file that cannot be decoded fails for good; one that crashes its workers becomes toxic."""
    from ostler.apps.music import opening, tagging  # noqa: PLC0415

    crashes = app.settings().crash_limit
    return tagging.Tagging(opening.here(), job, track, version, crashes=crashes, runs=_TAG_RUNS).run()


# Not unique, as one that runs may have looked already.
@app.job(queue="library", attempts=3)
def queue(job: Job, library: int) -> int:  # noqa: ARG001  every job has the handle
    """Store a job for each new track of a library that has none, or whose job was cancelled: after a retry."""
    from ostler.apps.music import catalogue, opening  # noqa: PLC0415

    catalogue.recover(opening.here(), library, _is_live)
    return queue_tags(library)


def _is_live(job: int) -> bool:
    try:
        return app.find(job).info()["status"] in ("queued", "processing")
    except NotFound:
        return False


@app.job(queue="calibration", attempts=3, timeout=600, unique=True)
def calibrate(job: Job, library: int, dry_run: bool = False) -> dict[str, Any]:
    """Find the thresholds of a library's tags from its own scores, and have changed tags written. A dry run changes nothing."""
    from ostler.apps.music import calibration, opening  # noqa: PLC0415

    rules = Rules.from_environment()
    return calibration.calibrate(
        opening.here(),
        library,
        job.id,
        dry_run=dry_run,
        fewest=int(rules.calibration_files),
        default=rules.threshold,
        write=queue_writes,
    )


# Not unique: one that already runs may have read the thresholds of before. One too many finds nothing to do.
@app.job(queue="calibration", attempts=3, timeout=600)
def write(job: Job, track: int) -> dict[str, Any]:  # noqa: ARG001  every job has the handle
    """Write the tags that a track is to have now; where its library is not to be written any more, take away what was."""
    from ostler.apps.music import opening, outputs  # noqa: PLC0415

    return outputs.apply(opening.here(), track)._asdict()


@app.job(queue="calibration", attempts=3, timeout=600)
def rewrite(job: Job, library: int) -> int:
    """Have the tags of all tracks of a library written as they are to be now: after an undo, or a change of where they go."""
    from ostler.apps.music import catalogue, opening  # noqa: PLC0415

    count = 0
    for page in catalogue.pages(opening.here(), library):
        job.check()
        queue_writes(page)
        count += len(page)
    return count


def queue_writes(tracks: list[int]) -> None:
    """Store a job for each of these tracks whose tags are to be written, or taken out: not where they only ever were in the database."""
    from ostler.apps.music import catalogue, opening  # noqa: PLC0415
    from ostler.apps.music.tables import AT_ONCE  # noqa: PLC0415

    for first in range(0, len(tracks), AT_ONCE):
        found = catalogue.written_outside(opening.here(), tracks[first : first + AT_ONCE])
        write.enqueue_many([{"track": track} for track in found])


def queue_tags(library: int) -> int:
    """Store a job for each new track that has none; how many. Also what an earlier run was killed before."""
    from ostler.apps.music import catalogue, opening  # noqa: PLC0415

    return catalogue.queue_tags(opening.here(), library, tag.enqueue_many)


@app.web
def routes(node: NodeApi) -> APIRouter:
    """`/api/v1/libraries` and `/api/v1/tracks`. Imported here, in the node: workers carry no web framework."""
    extras.require("music", "the music tagger")
    from ostler.apps.music import tagging  # noqa: PLC0415
    from ostler.apps.music.routes import router  # noqa: PLC0415

    tagging.check()
    return router(node, Rules.from_environment())
