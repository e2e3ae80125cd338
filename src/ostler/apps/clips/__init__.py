"""The clip service (seed 002), as a user of Ostler writes it:  ostler up ostler.apps.clips

A job cuts a piece out of a video and publishes it as {job id}/clip.mp4. It is safe to run again after any crash: nothing
but a checked, whole clip ever appears under that key, and a run that finds one there has nothing left to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostler import Job, Ostler
from ostler.apps.clips import media, probe
from ostler.apps.clips import source as sources
from ostler.apps.clips.rules import Cut, Refused, Rules, clip_key, limited_memory

if TYPE_CHECKING:
    from fastapi import APIRouter

    from ostler.web.extend import NodeApi

app = Ostler()
# Seed 002 asks for it: while others need the machine, a long queue is held for moments.
app.pool("clips", workers=2, high_watermark=500)


@app.job(queue="clips", attempts=3, timeout=600)
def clip(job: Job, source: str, start: float, end: float) -> dict[str, Any]:
    """Cut `source` (a path under OSTLER_CLIPS_ROOTS, an upload, or a URL) from `start` to `end` seconds.

    What can never work fails for good with VALIDATION, INPUT_TOO_LARGE, UNREADABLE_SOURCE or BAD_OUTPUT; trouble of disks
    and networks passes as it is and is tried again.
    """
    rules, wanted = Rules.from_environment(), Cut(source, float(start), float(end))
    rules.check_cut(wanted.start, wanted.end)
    with limited_memory(rules, source):
        return _earlier(job, rules, wanted) or _make(job, rules, wanted)


def _earlier(job: Job, rules: Rules, wanted: Cut) -> dict[str, Any] | None:
    """The result, when an earlier run died between publishing and being done."""
    seen: list[probe.Clip] = []
    found = job.published(clip_key(job.id), lambda path: seen.append(probe.verify(path, wanted, rules)))
    if found is None:
        return None
    job.progress(100, "publish")
    return seen[0].result(found.key, found.size)


def _make(job: Job, rules: Rules, wanted: Cut) -> dict[str, Any]:
    path = sources.get(job, rules, wanted.source)
    facts = probe.read(path, wanted, rules)
    job.event("source:ready", facts.shown())
    # Not before source:ready: the timeline of 002 has all progress after it. Each stage is at least 1 % further than
    # the one before, because a report without news is not stored.
    job.progress(1, "probe")
    output = job.scratch / "clip.mp4"
    made = _cut(job, rules, wanted, facts, output)
    job.progress(99, "publish")
    published = job.publish(output, clip_key(job.id))
    job.progress(100, "publish")
    return made.result(published.key, published.size)


def _cut(job: Job, rules: Rules, wanted: Cut, facts: probe.Facts, output: Path) -> probe.Clip:
    """Cut and check. Where a stream copy does not give a good clip, encoding does: only the last way's failure counts."""
    ways = media.modes(facts, wanted)
    for mode in ways:
        try:
            media.cut(job, rules, wanted, facts, mode, output)
            job.progress(97, "check")
            return probe.verify(output, wanted, rules, facts)
        except Refused as refused:
            if mode == ways[-1]:
                raise probe.blamed(refused, wanted, rules, facts) from None
    raise AssertionError(ways)


@app.web
def routes(node: NodeApi) -> APIRouter:
    """`/api/v1/clips`. Imported here, in the node: workers carry no web framework."""
    rules = Rules.from_environment()
    media.check_installed(rules)
    from ostler.apps.clips.routes import router  # noqa: PLC0415

    return router(node, rules)
