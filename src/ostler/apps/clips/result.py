"""A clip on its way out: found or not, expired or not. Only the node imports this."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from ostler import InputError, NotFound
from ostler.apps.clips.rules import ENDED, Rules, clip_key
from ostler.jobs.results import LocalResults, Published, Results
from ostler.web.extend import NodeApi


class NotReady(NotFound):
    """The job has no clip (yet)."""

    code = "NOT_READY"


class Expired(InputError):
    """There was a clip, and it is gone or too old."""

    code = "EXPIRED"
    status = 410


async def find(node: NodeApi, rules: Rules, job: dict[str, Any]) -> Published:
    """The clip of a job, or why there is none."""
    if job["status"] != "done":
        error = f": {job['error']['code']}, {job['error']['message']}" if job["error"] else ""
        more = "" if job["status"] in ENDED else "; ask again when it is done"
        raise NotReady(f"job {job['id']} has no clip, it is {job['status']}{error}{more}")
    found = await asyncio.to_thread(node.results.find, clip_key(job["id"]))
    if found is None:
        raise Expired(f"the clip of job {job['id']} has been deleted; cut it again")
    age = time.time() - found.at / 1000
    if rules.result_ttl and age > rules.result_ttl:
        raise Expired(
            f"the clip of job {job['id']} is {age / 3600:.1f} h old, kept are {rules.result_ttl / 3600:g} h; cut it again"
        )
    return found


async def answer(node: NodeApi, request: Request, clip: Published) -> Response:
    """The clip, or the piece of it that the request asks for."""
    try:
        return await node.artifact(request, clip.key)
    except NotFound:
        raise Expired(f"{clip.key} has been deleted; cut it again") from None


def expire(results: Results, ttl: float, now: float) -> int:
    """Delete clips that are too old to be given out; how many. Only in a local directory: buckets have rules of their own."""
    if not ttl or not isinstance(results, LocalResults):
        return 0
    deleted = 0
    for made in list(results.root.glob("*/clip.mp4")):
        clip = results.find(f"{made.parent.name}/clip.mp4")
        if clip is not None and now - clip.at / 1000 > ttl:
            results.delete(clip.key)
            deleted += 1
    return deleted
