"""What must hold after a power cut at any moment, checked on the files that one leaves."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import sqlite3
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.powercut.rebuild import Image

PROMISES = {
    "integrity": "the store passes SQLite's integrity check",
    "jobs": "every acknowledged job is in the store",
    "states": "every job is in a legal state, and its timeline has no gap",
    "flows": "no chain, batch or callback is there in part",
    "pauses": "an acknowledged pause or resume is in the store",
    "artifacts": "an acknowledged artifact is there, whole, with its note",
    "ids": "an artifact belongs to the job that its note names; no other job gets that id",
    "fences": "no note has a fence above that of its job",
    "uploads": "an acknowledged upload is there, whole",
    "upload notes": "beside an acknowledged upload is the note that names its job",
    "folders": "all of this holds where only a sync of the directory above makes a new folder safe",
}
STORE = "data/ostler.db"
ENDED = ("done", "failed", "cancelled")


class Broken(NamedTuple):
    """A promise that one image breaks."""

    promise: str
    text: str


class Row(NamedTuple):
    """A job in the store."""

    task: str
    args: dict[str, Any]
    status: str
    fence: int
    seq: int
    batch: int | None
    result: str | None


class Facts(NamedTuple):
    """What a store holds."""

    integrity: str
    jobs: dict[int, Row]
    timelines: dict[int, tuple[int, int, int]]  # events, the last number, how many of them are `done`
    batches: dict[int, dict[str, Any]]
    paused: frozenset[str]
    last_id: int


class Promised:
    """What was acknowledged so far."""

    def __init__(self) -> None:
        self.jobs: dict[int, str] = {}
        self.batches: dict[int, list[int]] = {}
        self.artifacts: dict[str, dict[str, Any]] = {}
        self.uploads: list[dict[str, Any]] = []
        self.pauses: dict[str, set[bool]] = {}  # what each pool may be: as acknowledged, or as asked for since

    def take(self, line: bytes) -> None:
        fact = json.loads(line)
        match fact["kind"]:
            case "job":
                self.jobs[fact["id"]] = fact["token"]
            case "batch":
                self.batches[fact["id"]] = fact["jobs"]
                self.jobs.update(zip(fact["jobs"], fact["tokens"], strict=True))
            case "publishing":  # while it replaces an earlier one, there may be none: its job runs again
                self.artifacts.pop(fact["key"], None)
            case "artifact":
                self.artifacts[fact["key"]] = fact
            case "upload":
                self.uploads.append(fact)
            case "asked":
                self.pauses.setdefault(fact["pool"], {False}).add(fact["paused"])
            case "pause":
                self.pauses[fact["pool"]] = {fact["paused"]}


class Checker:
    """Opens images in `folder` and checks them. A store that was seen a moment ago is not read again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: OrderedDict[bytes, Facts] = OrderedDict()

    def check(self, image: Image, promised: Promised) -> list[Broken]:
        facts = self.facts(image)
        notes = _notes(image)
        return [
            *self._all("integrity", [] if facts.integrity == "ok" else [facts.integrity]),
            *self._all("jobs", _lost_jobs(facts, promised)),
            *self._all("states", _bad_states(facts)),
            *self._all("flows", _halves(facts, promised)),
            *self._all("pauses", _lost_pauses(facts, promised)),
            *self._all("artifacts", _lost_artifacts(image, notes, promised)),
            *self._all("ids", _strangers(facts, image, notes)),
            *self._all("fences", _fences(facts, notes)),
            *self._all("uploads", _lost_uploads(image, promised)),
            *self._all("upload notes", _lost_upload_notes(image, promised)),
        ]

    def _all(self, promise: str, texts: Iterable[str]) -> list[Broken]:
        """The first few are enough: an image without a store breaks its promise to every job."""
        return [Broken(promise, text) for text in itertools.islice(texts, 3)]

    def facts(self, image: Image) -> Facts:
        """What the image's store holds, read by SQLite, which recovers it first."""
        files = {name: content for name, content in sorted(image.items()) if name.startswith(STORE)}
        key = hashlib.blake2b(repr([(n, hashlib.blake2b(c).digest()) for n, c in files.items()]).encode()).digest()
        if key not in self._seen:
            self._seen[key] = self._read(files)
            if len(self._seen) > 16:
                self._seen.popitem(last=False)
        return self._seen[key]

    def _read(self, files: Image) -> Facts:
        for old in self._folder.iterdir():
            old.unlink()
        for name, content in files.items():  # the store, its log, and at the very beginning its rollback journal
            (self._folder / Path(name).name).write_bytes(content)
        path = self._folder / Path(STORE).name
        if not path.exists():
            return Facts("ok", {}, {}, {}, frozenset(), 0)
        try:
            with contextlib.closing(sqlite3.connect(path)) as connection:
                return _facts(connection)
        except sqlite3.DatabaseError as error:
            return Facts(str(error), {}, {}, {}, frozenset(), 0)


@functools.lru_cache(maxsize=100_000)
def _parsed(args: str) -> dict[str, Any]:
    return dict(json.loads(args))


def _facts(db: sqlite3.Connection) -> Facts:
    db.execute("PRAGMA synchronous = OFF")  # the image is thrown away
    integrity = db.execute("PRAGMA integrity_check").fetchone()[0]
    if integrity != "ok" or not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'jobs'").fetchone():
        return Facts(integrity, {}, {}, {}, frozenset(), 0)
    rows = db.execute("SELECT id, task, args, status, fence, seq, batch, result FROM jobs")
    jobs = {id_: Row(task, _parsed(args), *rest) for id_, task, args, *rest in rows}
    timelines = db.execute("SELECT job, count(*), max(seq), sum(name = 'done') FROM timeline GROUP BY job")
    batches = db.execute("SELECT id, total, pending, callback IS NOT NULL, callback_job FROM batches")
    paused = db.execute("SELECT key FROM meta WHERE key LIKE 'pool_paused:%' AND value = 'true'")
    last = db.execute("SELECT max(id) FROM jobs").fetchone()
    return Facts(
        integrity,
        jobs,
        {job: tuple(counts) for job, *counts in timelines},
        {id_: dict(zip(("total", "pending", "calls", "callback_job"), rest)) for id_, *rest in batches},
        frozenset(key.removeprefix("pool_paused:") for (key,) in paused),
        last[0] or 0,
    )


# ---- one function per promise: what breaks it


def _lost_jobs(facts: Facts, promised: Promised) -> Iterator[str]:
    for job, token in promised.jobs.items():
        row = facts.jobs.get(job)
        if row is None:
            yield f"job {job} was acknowledged and is not there"
        elif row.args.get("token") != token:
            yield f"job {job} was acknowledged with the token {token} and has {row.args}"


def _bad_states(facts: Facts) -> Iterator[str]:
    for job, row in facts.jobs.items():
        events, last, dones = facts.timelines.get(job, (0, 0, 0))
        if row.status not in ("queued", "processing", *ENDED):
            yield f"job {job} is {row.status!r}"
        if not events == last == row.seq or dones != (row.status == "done"):
            yield f"job {job}, {row.status}: {events} events, the last is {last} of {row.seq}, {dones} are done"


def _halves(facts: Facts, promised: Promised) -> Iterator[str]:
    chains: dict[str, dict[int, Row]] = defaultdict(dict)
    members: dict[int, list[Row]] = defaultdict(list)
    for row in facts.jobs.values():
        if row.task == "link":
            chains[row.args["token"]][row.args["n"]] = row
        if row.batch is not None:
            members[row.batch].append(row)
    for token, steps in chains.items():
        complete = [steps[n].status == "done" for n in sorted(steps)]
        if sorted(steps) != list(range(1, len(steps) + 1)) or not all(complete[:-1]):
            yield f"chain {token} has the steps {sorted(steps)}, done: {complete}"
        elif complete[-1] and len(steps) != steps[1].args["of"]:
            yield f"chain {token}: step {len(steps)} is done and the next one is not there"
    for batch, row in facts.batches.items():
        live = sum(member.status not in ENDED for member in members[batch])
        if (row["total"], row["pending"]) != (len(members[batch]), live):
            yield f"batch {batch} is {row} and has {len(members[batch])} jobs, {live} of them live"
        if row["calls"] and (row["callback_job"] in facts.jobs) != (live == 0):
            yield f"batch {batch} is {row} and its callback is {facts.jobs.get(row['callback_job'])}"
    for batch in promised.batches.keys() - facts.batches.keys():
        yield f"batch {batch} was acknowledged and is not there"


def _lost_pauses(facts: Facts, promised: Promised) -> Iterator[str]:
    for pool, allowed in promised.pauses.items():
        if (pool in facts.paused) not in allowed:
            yield f"pool {pool} was acknowledged as paused: {allowed}, and is {pool in facts.paused}"


def _notes(image: Image) -> dict[str, dict[str, Any]]:
    """The valid artifacts of an image by their key: with a note, and of the size and checksum that it says."""
    found = {}
    for name, content in image.items():
        folder, _, file = name.rpartition("/")
        if name.startswith("data/results/") and file.startswith(".") and file.endswith(".ostler"):
            with contextlib.suppress(ValueError, KeyError):
                note = json.loads(content)
                artifact = image[f"{folder}/{file[1:].removesuffix('.ostler')}"]
                if hashlib.sha256(artifact).hexdigest() == note["sha256"]:
                    found[note["key"]] = note
    return found


def _lost_artifacts(image: Image, notes: dict[str, dict[str, Any]], promised: Promised) -> Iterator[str]:
    for key, artifact in promised.artifacts.items():
        note = notes.get(key)
        if note is None:
            held = sorted(name for name in image if name.startswith(f"data/results/{key.partition('/')[0]}/"))
            yield f"{key} was published and is not there whole; its folder has {held}"
        elif note["fence"] < artifact["fence"]:
            yield f"{key} was published with fence {artifact['fence']}; an older one, {note['fence']}, is there"


def _strangers(facts: Facts, image: Image, notes: dict[str, dict[str, Any]]) -> Iterator[str]:
    for key, note in notes.items():
        row = facts.jobs.get(note["job"])
        if row is None and facts.last_id < note["job"]:
            yield f"{key} is published by job {note['job']}, which is not there; the next job gets {facts.last_id + 1}"
        elif row is not None and not image[f"data/results/{key}"].startswith(str(row.args.get("token")).encode()):
            yield f"{key} is published by job {note['job']}, and that is another job now: {row}"


def _fences(facts: Facts, notes: dict[str, dict[str, Any]]) -> Iterator[str]:
    for key, note in notes.items():
        row = facts.jobs.get(note["job"])
        if row is not None and note["fence"] > row.fence:
            yield f"{key} is published with fence {note['fence']}, its job has fence {row.fence}"


def _lost_uploads(image: Image, promised: Promised) -> Iterator[str]:
    for upload in promised.uploads:
        source = image.get(f"data/uploads/{upload['token']}.source")
        if source is None or len(source) != upload["size"] or not source.startswith(upload["begins"].encode()):
            yield f"the upload of job {upload['job']} is not there whole"


def _lost_upload_notes(image: Image, promised: Promised) -> Iterator[str]:
    for upload in promised.uploads:
        note = image.get(f"data/uploads/{upload['token']}.job")
        if note is None or note.strip() != str(upload["job"]).encode():
            yield f"the upload of job {upload['job']} has the note {note!r}"
