"""A power cut, simulated: a real node, workers, producers and uploads are recorded, and their files are rebuilt as a power cut
would leave them at many moments. What was acknowledged must be there.

`make soak` looks at many more moments; `OSTLER_POWER_CUTS=20000 make soak` at that many.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.harness import Node, until
from tests.powercut.checks import ENDED, PROMISES, STORE, Broken, Checker, Promised
from tests.powercut.rebuild import Cut, Disk, Image, Kept, Names
from tests.powercut.record import Change, Recorder, build

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

# Promises that are known to be broken. A promise that holds again fails its test until it is taken out of here.
PENDING: set[str] = set()

pytestmark = pytest.mark.timeout(300)

IMAGES = 320  # of each kind of file system, in `make test`
SOAK_IMAGES = int(os.environ.get("OSTLER_POWER_CUTS", "6000"))
CAPACITY = 1 << 30  # bytes of the log; the file is sparse


class RecordedNode(Node):
    """A node that makes its data directory itself, and whose own log is elsewhere."""

    def start_process(self) -> int:
        argv = [
            sys.executable,
            "-m",
            "ostler",
            "up",
            str(self.app),
            "--data",
            str(self.folder),
            "--port",
            "0",
            *self.flags,
        ]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                argv, stdout=log, stderr=log, env=self.env, cwd=ROOT, start_new_session=True
            )
        return self.process.pid

    @property
    def _log(self) -> Path:
        return self.folder.parent.with_name("node.log")

    def log(self) -> str:
        return self._log.read_text(errors="replace")


class Recording(NamedTuple):
    changes: list[Change]
    left: Image  # the files as they were in the end


def record(folder: Path, singles: int, flows: int, http: int) -> Recording:
    """Run a node, twice, and those who use it until everything is done; what they wrote."""
    disk = folder.resolve() / "disk"
    disk.mkdir()
    recorder = Recorder(build(folder), disk, folder / "log", CAPACITY)
    env = {
        **recorder.env,
        "OSTLER_DATA": str(disk / "data"),
        "POWERCUT_ACKS": str(disk / "acks"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    pools = ["--pool", "work=2", "--pool", "held=1", "--pool", "clips=0"]
    for _ in range(2):
        node = RecordedNode(disk / "data", HERE / "app.py", *pools, **env)
        try:
            node.start()
            _use(node, singles // 2, flows // 2, http // 2)
        finally:
            node.stop()
    left = {str(path.relative_to(disk)): path.read_bytes() for path in disk.rglob("*") if path.is_file()}
    changes = recorder.changes()
    recorder.delete()
    return Recording(changes, left)


def _use(node: Node, singles: int, flows: int, http: int) -> None:
    roles = [("singles", singles), ("singles", singles), ("flows", flows, node.url), ("http", http, node.url)]
    program = [sys.executable, "-m", "tests.powercut.actors"]
    actors = [subprocess.Popen([*program, *map(str, role)], env=node.env, cwd=ROOT) for role in roles]
    try:
        assert [actor.wait(600) for actor in actors] == [0] * len(actors)
    finally:
        for actor in actors:
            actor.kill()
            actor.wait()
    until(lambda: not any(_live(node, "work")), "all jobs to end", patience=300)


def _live(node: Node, queue: str) -> list[int]:
    depth = node.get("/api/v1/info")[1]["queues"][queue]
    return [depth[status] for status in ("queued", "processing", "scheduled")]


# ---- looking at images


Plan = dict[int, list[Cut]]  # the cuts after each change


def plan(changes: list[Change], images: int, seed: int) -> Plan:
    """Moments to look at: a third around syncs, a third just after an acknowledgement, the others anywhere."""
    dice, found = random.Random(seed), Plan()
    syncs = [number for number, change in enumerate(changes) if change.op == "F"]
    told = [number for number, change in enumerate(changes) if change.op == "W" and change.data.startswith(b'{"kind"')]
    for number in range(images // 2):
        places = (syncs, told, range(len(changes)))[number % 3]
        at = dice.choice(places) + (dice.randrange(-1, 3) if places is syncs else 0)
        torn = Cut(dice.choice((Kept.FIRST, Kept.SOME, Kept.SOME)), dice.choice((512, 4096)), number)
        found.setdefault(min(max(at, 0), len(changes) - 1), []).extend((Cut(Kept.NONE), torn))
    return found


class Look(NamedTuple):
    """One image that was checked."""

    at: int
    cut: Cut
    broken: list[Broken]
    image: Image | None


def look(
    changes: list[Change],
    cuts: Plan,
    names: Names,
    folder: Path,
    honoured: Callable[[str], bool] = lambda name: True,
    keep: Callable[[int], bool] = lambda number: False,
) -> list[Look]:
    """Check the image of each cut. Those that `keep` wants (by their number) are returned with their files."""
    folder.mkdir(parents=True, exist_ok=True)
    disk, promised, checker, looks = Disk(names, honoured), Promised(), Checker(folder), list[Look]()
    for at, change in enumerate(changes):
        disk.take(change)
        if change.op == "W" and disk.name(change) == "acks":
            promised.take(change.data)
        for cut in cuts.get(at, ()):
            image = disk.image(cut)
            broken = checker.check(image, promised)
            looks.append(Look(at, cut, broken, image if keep(len(looks)) else None))
    return looks


def tally(looks: list[Look]) -> Counter[str]:
    """In how many images each promise is broken."""
    return Counter(promise for found in looks for promise in {broken.promise for broken in found.broken})


def examples(looks: list[Look], promise: str) -> str:
    found = [(one, broken) for one in looks for broken in one.broken if broken.promise == promise]
    return "\n".join(f"after change {one.at}, {one.cut}: {broken.text}" for one, broken in found[:5])


class Survey(NamedTuple):
    by_names: dict[Names, list[Look]]

    def broken(self, promise: str) -> str:
        """Examples of images that break the promise; "" where none does."""
        if promise != "folders":
            return "\n".join(
                f"{names}: {found}"
                for names in (Names.EXT4, Names.POSIX_FILES)
                if (found := examples(self.by_names[names], promise))
            )
        known = set(tally(self.by_names[Names.EXT4])) | set(tally(self.by_names[Names.POSIX_FILES]))
        strict = self.by_names[Names.POSIX]
        return "\n".join(examples(strict, other) for other in tally(strict) if other not in known)


def survey(recording: Recording, folder: Path, images: int, keep: Callable[[int], bool]) -> Survey:
    cuts = plan(recording.changes, images, seed=1)
    fewer = plan(recording.changes, images // 4, seed=2)
    return Survey(
        {
            Names.EXT4: look(recording.changes, cuts, Names.EXT4, folder / "ext4", keep=keep),
            Names.POSIX_FILES: look(recording.changes, cuts, Names.POSIX_FILES, folder / "files"),
            Names.POSIX: look(recording.changes, fewer, Names.POSIX, folder / "posix"),
        }
    )


def judge(promise: str, broken: str) -> None:
    if promise in PENDING:
        assert broken, f"{promise!r} holds: take it out of PENDING"
        print(f"pending, and broken: {PROMISES[promise]}\n{broken}")
    else:
        assert not broken, f"{PROMISES[promise]}: not so\n{broken}"


# ---- the short run


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(tmp_path_factory.mktemp("powercut"), singles=60, flows=12, http=12)


@pytest.fixture(scope="module")
def surveyed(recording: Recording, tmp_path_factory: pytest.TempPathFactory) -> Survey:
    return survey(recording, tmp_path_factory.mktemp("images"), IMAGES, keep=lambda number: number % 40 in (17, 18))


def test_the_recording_has_every_change(recording: Recording) -> None:
    """With nothing lost, the rebuilt files are the files."""
    for names in Names:
        disk = Disk(names)
        for change in recording.changes:
            disk.take(change)
        rebuilt = disk.image(Cut(Kept.ALL))
        left = {name: content for name, content in recording.left.items() if not name.endswith("-shm")}
        assert rebuilt.keys() == left.keys()
        assert [name for name in left if rebuilt[name] != left[name]] == []


def test_the_recording_has_what_the_promises_are_about(recording: Recording) -> None:
    disk, kinds, resets, checkpointed = Disk(Names.EXT4), Counter[str](), 0, 0
    for change in recording.changes:
        disk.take(change)
        if change.op == "W" and disk.name(change) == "acks":
            kinds[json.loads(change.data)["kind"]] += 1
        checkpointed += change.op == "W" and disk.name(change) == STORE
        resets += change.op == "W" and disk.name(change) == f"{STORE}-wal" and change.at == 0
    assert min(kinds[kind] for kind in ("job", "batch", "artifact", "upload", "pause")) >= 10, kinds
    assert checkpointed > 100
    assert resets >= 3, "the log of the store should have begun anew"


@pytest.mark.parametrize("promise", PROMISES)
def test_after_a_power_cut(surveyed: Survey, promise: str) -> None:
    judge(promise, surveyed.broken(promise))


@pytest.mark.parametrize(
    ("ignored", "lost"),
    [
        ("all", {"jobs", "artifacts", "uploads", "pauses"}),
        ("ostler.db-wal", {"jobs"}),
        ("results", {"artifacts"}),
        ("uploads", {"uploads"}),
    ],
)
def test_without_syncs_the_loss_is_seen(recording: Recording, tmp_path: Path, ignored: str, lost: set[str]) -> None:
    """The checks can fail: where the syncs of these files do not count, acknowledged things are gone."""
    cuts = plan(recording.changes, 60, seed=3)
    looks = look(
        recording.changes,
        cuts,
        Names.POSIX_FILES,
        tmp_path,
        honoured=lambda name: ignored != "all" and ignored not in name,
    )
    assert tally(looks).keys() >= lost


def usable(found: Survey) -> list[Image]:
    """The images that were kept and on which jobs can end well: a lost pause or note of an upload does not hinder that."""
    kept = [one for one in found.by_names[Names.EXT4] if one.image is not None]
    return [one.image for one in kept if one.image and {b.promise for b in one.broken} <= {"pauses", "upload notes"}]


def restart(image: Image, folder: Path, make_node: Any) -> None:
    """Start a real node on the image: every job ends, and with its own result."""
    for name, content in image.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    node = make_node(
        "--pool", "work=2", "--pool", "held=1", "--pool", "clips=1", app=HERE / "app.py", folder=folder / "data"
    )
    assert node.post("/api/v1/pools/held/resume")[0] == 200
    for queue in ("work", "held", "clips"):
        until(lambda: not any(_live(node, queue)), f"all jobs of {queue} to end", patience=100)
    node.stop()
    files = {f"data/{path.name}": path.read_bytes() for path in (folder / "data").glob("ostler.db*")}
    (folder / "look").mkdir()
    jobs = Checker(folder / "look").facts(files).jobs
    assert [row for row in jobs.values() if row.status not in ENDED] == []
    for row in jobs.values():
        if row.task != "clip":  # their uploads are no videos
            assert (row.status, json.loads(row.result or "null")) == ("done", row.args["token"]), row


def test_a_node_that_starts_after_a_power_cut_ends_every_job(surveyed: Survey, tmp_path: Path, make_node) -> None:
    images = usable(surveyed)
    assert len(images) >= 3
    for number, image in enumerate((images[len(images) // 2],)):
        restart(image, tmp_path / str(number), make_node)


# ---- the long run


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_many_power_cuts(tmp_path: Path, make_node) -> None:
    recording = record(tmp_path, singles=300, flows=60, http=60)
    found = survey(recording, tmp_path / "images", SOAK_IMAGES, keep=lambda number: number % (SOAK_IMAGES // 40) == 7)
    for names, looks in found.by_names.items():
        print(f"{names}: {len(looks)} images of {len(recording.changes)} changes, broken in: {dict(tally(looks))}")
    for promise in PROMISES:
        judge(promise, found.broken(promise))
    images = usable(found)
    assert len(images) >= 10
    for number, image in enumerate(images[:20]):
        restart(image, tmp_path / f"started{number}", make_node)
