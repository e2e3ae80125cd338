"""The music tagger on a real node, with a stand-in for the model: scans, jobs, watching, crashes, commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import NamedTuple

import pytest


from click.testing import CliRunner

from ostler import ConfigError, OstlerError
from ostler.apps.music import writing
from ostler.apps.music.rules import Rules, sizes
from ostler.cli import cli
from tests.apps.music.sounds import corpus, save
from tests.harness import Node, until
from tests.stores import new_database

APP = Path(__file__).with_name("standin.py")
SMALL = ("--pool", "tag=2", "--pool", "library=2", "--pool", "calibration=1")
RULES = {"OSTLER_MUSIC_SETTLE": "0.1", "OSTLER_MUSIC_CALIBRATION_FILES": "20"}


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """One node for all tests that do no harm to it. What the database has to do with it, test_scan, test_search and test_calibration hold for both."""
    node = Node(tmp_path_factory.mktemp("music-node"), APP, *SMALL, **RULES).start()
    yield node
    node.stop()


class Library:
    def __init__(self, node: Node, root: Path, **wishes) -> None:
        self.node, self.root = node, root
        root.mkdir(exist_ok=True)
        wishes = {"path": str(root), "name": root.parent.name, "watch": False, **wishes}
        status, made = node.post("/api/v1/libraries", wishes)
        assert status == 201, made
        self.id, self.job = made["id"], made["job"]

    def get(self, path: str = "") -> dict:
        status, found = self.node.get(f"/api/v1/libraries/{self.id}{path}")
        assert status == 200, found
        return found

    def tracks(self) -> dict[str, dict]:
        status, found = self.node.get(f"/api/v1/tracks?library={self.id}&limit=1000")
        assert status == 200, found
        return {one["path"]: one for one in found["tracks"]}

    def states(self) -> dict[str, str]:
        return {path: one["state"] for path, one in self.tracks().items()}

    def settled(self, count: int) -> Library:
        """So many tracks are there, and none is to be tagged any more."""
        until(
            lambda: [one["state"] == "new" for one in self.tracks().values()] == [False] * count,
            f"{count} tracks to be tagged",
        )
        return self

    def scan(self) -> dict:
        status, made = self.node.post(f"/api/v1/libraries/{self.id}/scan")
        assert status == 202, made
        return self.node.wait_job(made["job"])


def fill(root: Path, count: int, start: int = 0) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for n in range(start, start + count):
        (root / f"{n:03}.mp3").write_text(f"sound {n}")
    return root


class Done(NamedTuple):
    code: int
    stdout: str
    stderr: str


def ostler(node: Node, *args: str) -> Done:
    """The command, in this process: a new one takes a second each."""
    done = CliRunner().invoke(cli, ["music", *args, "--data", str(node.folder)])
    if done.exception is not None and not isinstance(done.exception, OstlerError | SystemExit):
        raise done.exception
    return Done(
        2 if isinstance(done.exception, OstlerError) else done.exit_code,
        done.stdout,
        str(done.exception or done.stderr),
    )


def test_a_library_is_scanned_and_each_track_is_tagged(node, tmp_path):
    lib = Library(node, fill(tmp_path / "lib", 5)).settled(5)
    assert set(lib.states().values()) == {"tagged"}
    found = lib.get()
    assert (found["tracks"], found["counts"]["tagged"], found["state"], found["due"]) == (5, 5, "ready", False)
    track = lib.tracks()["000.mp3"]
    status, whole = node.get(f"/api/v1/tracks/{track['id']}")
    assert (
        status == 200
        and len(whole["scores"]) == 50
        and whole["tags"] == sorted(whole["tags"], key=lambda tag: -whole["scores"][tag])
    )
    status, alike = node.get(f"/api/v1/tracks/{track['id']}/similar?library={lib.id}")
    assert status == 200 and len(alike["tracks"]) == 4
    best = whole["tags"][0]
    status, fits = node.get(f"/api/v1/tracks?tag={best}:{whole['scores'][best] - 0.01}&library={lib.id}")
    assert status == 200 and "000.mp3" in [one["path"] for one in fits["tracks"]]


def test_pools_have_the_seeds_names(node):
    names = {w["component"] for w in node.workers()}
    assert {"worker:tag:0", "worker:tag:1", "worker:library:0", "worker:calibration:0", "worker:watch:0"} <= names
    info = node.get("/api/v1/info")[1]
    assert {pool["pool"]: pool["workers"] for pool in info["pools"]} == {
        "tag": 2,
        "library": 2,
        "calibration": 1,
        "watch": 1,
    }
    assert info["pages"] == [{"title": "Music", "path": "/music"}] and info["worker_enabled"]


def test_pools_are_sized_down_on_small_machines():
    assert [tuple(sizes(cores).values()) for cores in (1, 2, 4, 64)] == [(1, 5, 2), (2, 10, 4), (2, 10, 5), (2, 10, 5)]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("THRESHHOLD", "1", "did you mean OSTLER_MUSIC_THRESHOLD"),
        ("THRESHOLD", "1.5", "out of range"),
        ("SETTLE", "soon", "must be a number"),
        ("RESCAN", "nan", "out of range"),
        ("ROOTS", "music", "not an absolute path"),
    ],
)
def test_settings_that_cannot_be_are_refused(name, value, said):
    with pytest.raises(ConfigError, match=said):
        Rules.from_environment({f"OSTLER_MUSIC_{name}": value})


def test_a_file_that_crashes_its_worker_three_times_is_toxic_and_the_others_go_on(node, tmp_path):
    root = fill(tmp_path / "lib", 4)
    (root / "bad.flac").write_text("crash")
    (root / "broken.ogg").write_text("broken")
    lib = Library(node, root).settled(6)
    found = lib.tracks()
    until(lambda: node.job(found["bad.flac"]["job"])["status"] == "failed", "the job to be given up")
    assert node.job(found["bad.flac"]["job"])["error"]["code"] == "TOXIC"
    bad, broken = lib.tracks()["bad.flac"], lib.tracks()["broken.ogg"]
    assert bad["state"] == "toxic" and bad["reason"].startswith("3 workers died on it")
    assert (
        broken["state"] == "failed"
        and broken["reason"] == "it cannot be decoded: invalid data found when processing input"
    )
    assert sorted(lib.states().values()) == ["failed"] + ["tagged"] * 4 + ["toxic"]
    (root / "bad.flac").write_text("mended")
    assert ostler(node, "retry", str(lib.id)).stdout.startswith("2 tracks")
    until(
        lambda: lib.states()["bad.flac"] == "tagged" and lib.states()["broken.ogg"] == "failed",
        "the mended file to be tagged",
    )
    status, refused = node.post(f"/api/v1/tracks/{bad['id']}/retry")
    assert status == 409 and "is tagged" in refused["error"]["message"]


def test_a_watched_library_follows_its_directory(node, tmp_path):
    lib = Library(node, fill(tmp_path / "lib", 2), watch=True).settled(2)
    before = lib.tracks()
    fill(lib.root / "new", 1, start=7)
    lib.settled(3)
    (lib.root / "000.mp3").rename(lib.root / "moved.mp3")
    (lib.root / "001.mp3").unlink()
    until(lambda: sorted(lib.states()) == ["moved.mp3", "new/007.mp3"], "the changes to be seen")
    assert lib.tracks()["moved.mp3"]["id"] == before["000.mp3"]["id"] and lib.tracks()["moved.mp3"]["state"] == "tagged"


def test_a_watched_library_that_is_unplugged_is_scanned_when_it_is_back(node, tmp_path):
    lib = Library(node, fill(tmp_path / "lib", 2), watch=True).settled(2)
    until(lambda: not lib.get()["due"], "the scans to be done")
    lib.root.rename(tmp_path / "unplugged")
    until(lambda: "is not there" in (lib.get()["watching"] or ""), "the watcher to see it")
    assert set(lib.states().values()) == {"tagged"}
    fill(tmp_path / "unplugged", 1, start=9)
    (tmp_path / "unplugged").rename(lib.root)
    lib.settled(3)
    until(lambda: lib.get()["watching"] is None, "the watcher to watch again")


def test_a_track_whose_job_was_cancelled_is_tagged_after_a_retry(node, tmp_path):
    node.post("/api/v1/pools/tag/pause")
    lib = Library(node, fill(tmp_path / "lib", 1))
    node.wait_job(lib.job)
    job = until(lambda: [one["job"] for one in lib.tracks().values() if one["job"]], "the track to have a job")[0]
    assert node.post(f"/api/v1/jobs/{job}/cancel")[0] == 200
    node.post("/api/v1/pools/tag/resume")
    assert lib.states() == {"000.mp3": "new"}
    ostler(node, "retry", str(lib.id))
    lib.settled(1)


def test_a_scan_whose_worker_is_killed_goes_on_where_it_was(node, tmp_path):
    root = fill(tmp_path / "lib", 50)
    hold = root / ".hold"
    hold.touch()
    lib = Library(node, root)
    scan = until(
        lambda: (lib.get()["scan"] or {}).get("files") and lib.get()["scan"], "the scan to have written something"
    )
    assert scan["job"] == lib.job and 0 < scan["progress"] < 1
    (worker,) = [w for w in node.workers() if w["current_job"] == lib.job]
    os.kill(worker["pid"], signal.SIGKILL)
    hold.unlink()
    done = node.wait_job(lib.job, "done")
    assert done["crashes"] == 1 and done["result"]["resumed"] and done["result"]["seen"] == 50
    assert done["result"]["new"] == 50 - scan["files"]
    assert set(lib.settled(50).states().values()) == {"tagged"}


def test_a_library_that_is_unplugged_is_said_to_be_away_and_loses_nothing(node, tmp_path):
    lib = Library(node, fill(tmp_path / "lib", 3)).settled(3)
    lib.root.rename(tmp_path / "unplugged")
    failed = lib.scan()
    assert failed["error"]["code"] == "AWAY" and "is it mounted?" in failed["error"]["message"]
    assert lib.get()["state"] == "away" and set(lib.states().values()) == {"tagged"}
    assert "is it mounted?" in " ".join(ostler(node, "status").stdout.split())
    track = lib.tracks()["000.mp3"]["id"]
    assert node.get(f"/api/v1/tracks/{track}/audio")[0] == 404
    (tmp_path / "unplugged").rename(lib.root)
    assert lib.scan()["status"] == "done" and lib.get()["state"] == "ready"


def test_calibration_is_shown_tried_stored_and_undone(node, tmp_path):
    lib = Library(node, fill(tmp_path / "lib", 25)).settled(25)
    tried = json.loads(ostler(node, "calibrate", str(lib.id), "--dry-run", "--json").stdout)
    assert tried["dry_run"] and tried["files"] == 25 and len(tried["tags"]) == 50
    assert lib.get("/calibrations") == {"calibrations": []}
    done = ostler(node, "calibrate", lib.root.parent.name)
    assert done.code == 0 and "of 25 tracks get different tags" in done.stdout
    (one,) = lib.get("/calibrations")["calibrations"]
    spread = lib.get("/tags")
    assert spread["calibration"] == one["id"] and spread["files"] == 25 and len(spread["tags"]) == 50
    assert "is undone" in ostler(node, "undo", str(lib.id)).stdout
    assert lib.get("/tags")["calibration"] is None
    assert ostler(node, "undo", str(lib.id)).code == 2


def test_too_few_tracks_are_no_ground_for_a_calibration(node, tmp_path):
    lib = Library(node, fill(tmp_path / "lib", 3)).settled(3)
    done = ostler(node, "calibrate", str(lib.id))
    assert done.code == 2 and "has 3 tagged tracks; a calibration needs 20" in done.stderr


def test_tags_go_to_sidecar_files_and_are_taken_away_again(node, tmp_path):
    root = fill(tmp_path / "lib", 3)
    before = {file.name: file.read_bytes() for file in root.iterdir()}
    lib = Library(node, root, write_to="sidecar").settled(3)
    until(lambda: len(list(root.glob("*.ostler.json"))) == 3, "the sidecar files")
    track = lib.tracks()["001.mp3"]["id"]
    until(lambda: (root / "001.mp3.ostler.json").exists(), "a sidecar")
    written = json.loads((root / "001.mp3.ostler.json").read_text())
    assert written["tags"] == node.get(f"/api/v1/tracks/{track}")[1]["tags"] and written["track"] == "001.mp3"
    assert lib.scan()["result"]["changed"] == 0
    assert "3 tracks are taken away" in ostler(node, "undo", "--all", str(root)).stdout
    until(lambda: {file.name for file in root.iterdir()} == before.keys(), "the directory to be as it was")
    assert {file.name: file.read_bytes() for file in root.iterdir()} == before
    assert lib.get()["write_to"] == "database" and set(lib.states().values()) == {"tagged"}


def test_tags_go_into_the_files_themselves_and_are_taken_out_again(node, tmp_path):
    root = tmp_path / "lib"
    root.mkdir()
    save(root / "tone.flac")
    save(root / "tone.mp3")
    writing.write(root / "tone.mp3", {"mood": "there before"})
    (root / "text.ogg").write_text("this is no music")
    sound = {name: writing.packets(root / name) for name in ("tone.flac", "tone.mp3")}
    lib = Library(node, root, write_to="file").settled(3)
    for name in sound:
        wanted = node.get(f"/api/v1/tracks/{lib.tracks()[name]['id']}")[1]["tags"]
        until(lambda name=name: "tags" in writing.ours(root / name), "the tags to be written")
        assert writing.ours(root / name) == {"tags": wanted, "model": ["standin"]}
    until(lambda: lib.tracks()["text.ogg"]["reason"], "the reason why it cannot be written")
    assert lib.states()["text.ogg"] == "tagged" and "in the database alone" in lib.tracks()["text.ogg"]["reason"]
    assert lib.scan()["result"]["changed"] == 0
    assert "to the sidecar" in ostler(node, "change", str(lib.id), "--write-to", "sidecar").stdout
    until(
        lambda: (root / "tone.mp3.ostler.json").exists() and (root / "tone.flac.ostler.json").exists(),
        "the sidecar files",
    )
    assert writing.ours(root / "tone.flac") == {} and writing.ours(root / "tone.mp3") == {"mood": ["there before"]}
    assert ostler(node, "undo", "--all", str(lib.id)).code == 0
    until(
        lambda: sorted(os.listdir(root)) == ["text.ogg", "tone.flac", "tone.mp3"], "the sidecar files to be taken away"
    )
    assert {name: writing.packets(root / name) for name in sound} == sound


def test_the_audio_is_sent_in_ranges(node, tmp_path):
    root = tmp_path / "lib"
    name = os.fsdecode(b"\xff odd.mp3")
    root.mkdir()
    (root / name).write_text("0123456789")
    lib = Library(node, root).settled(1)
    (track,) = lib.tracks().values()
    request = urllib.request.Request(f"{node.url}/api/v1/tracks/{track['id']}/audio", headers={"Range": "bytes=2-5"})
    with urllib.request.urlopen(request, timeout=30) as response:
        assert (response.status, response.read(), response.headers["content-type"]) == (206, b"2345", "audio/mpeg")
        assert response.headers["content-range"] == "bytes 2-5/10"


def test_the_page_shows_libraries_distributions_failures_and_plays_what_is_alike(node, tmp_path):
    from tests.browser import PATIENCE, launched

    root = fill(tmp_path / "lib", 3)
    save(root / "tone.wav")
    (root / "bad.ogg").write_text("broken")
    lib = Library(node, root, name="of the page").settled(5)
    with launched() as browser:
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.set_default_timeout(PATIENCE)
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None)
        page.goto(node.url)
        page.get_by_role("navigation").get_by_role("link", name="Music").click()  # the dashboard has a link
        row = page.locator("#libraries tr").filter(has_text="of the page")
        row.get_by_role("button", name="Show").click()
        page.locator("#failures").get_by_text("it cannot be decoded").wait_for()
        page.locator("#plots figure").nth(11).wait_for()
        page.get_by_label("Library", exact=True).select_option("of the page")
        page.get_by_label("Words").fill("tone.wav")
        page.get_by_role("button", name="Search", exact=True).click()
        tone = page.locator("#results tr").filter(has_text="tone.wav")
        tone.get_by_role("button", name="Play").click()
        until(lambda: page.evaluate("document.getElementById('audio').readyState") >= 2, "the player to have sound")
        tone.get_by_role("button", name="Similar").click()
        page.locator("#results tr").filter(has_text="000.mp3").first.wait_for()
        page.locator("#results").get_by_role("button", name="000.mp3", exact=True).first.click()
        page.locator(".scores rect.over").first.wait_for()
        shots = os.environ.get("OSTLER_TEST_SHOTS")
        if shots:
            page.screenshot(path=shots, full_page=True)
        assert wrong == []
    assert lib.get()["counts"]["failed"] == 1


def test_commands_show_search_and_export(node, tmp_path):
    root = fill(tmp_path / "lib", 4)
    (root / "bad.mp3").write_text("broken")
    lib = Library(node, root).settled(5)
    assert "tagged" in ostler(node, "status", str(lib.root)).stdout
    found = json.loads(ostler(node, "search", "--text", "002", "--library", str(lib.id), "--json").stdout)
    assert [one["path"] for one in found] == ["002.mp3"]
    alike = json.loads(ostler(node, "similar", str(found[0]["id"]), "--limit", "2", "--json").stdout)
    assert len(alike) == 2
    file = tmp_path / "list.m3u8"
    assert "4 tracks" in ostler(node, "playlist", "tag1:0", "--library", str(lib.id), "-o", str(file)).stdout
    assert "4 tracks" in ostler(node, "playlist", "--library", str(lib.id), "-o", str(file)).stdout, "not the bad one"
    lines = file.read_text().splitlines()
    assert lines[0] == "#EXTM3U" and sorted(lines[2::2]) == [str(lib.root / f"{n:03}.mp3") for n in range(4)]
    assert json.loads(
        (ostler(node, "playlist", "tag1", "-o", str(tmp_path / "x.nsp")), (tmp_path / "x.nsp").read_text())[1]
    )["all"]
    assert "no tag 'polka'" in ostler(node, "search", "polka").stderr
    assert "is forgotten" in ostler(node, "remove", str(lib.id)).stdout
    assert node.get(f"/api/v1/libraries/{lib.id}")[0] == 404


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "path must be"),
        ({"path": "relative"}, "absolute"),
        ({"path": "/no/such/directory"}, "is not a directory"),
        ({"path": "/tmp", "colour": "red"}, "colour"),
        ([], "must be a JSON object"),
    ],
)
def test_what_cannot_be_a_library_is_refused(node, body, said):
    status, answer = node.post("/api/v1/libraries", body)
    assert status == 422 and said in answer["error"]["message"]


SENSELESS = [
    *(
        "tracks?tag=rock:loud",
        "tracks?tag=tag0:nan",
        "tracks?tag=tag0:2",
        "tracks?state=odd",
        "tracks?limit=0",
        "tracks?limit=100000",
    ),
    *("libraries/nothing", "libraries/%00", "libraries/a%2Fb", "libraries/..%2F..%2Fetc", "tracks?library=%00"),
    *(
        "tracks/999999",
        "tracks/999999/similar",
        "tracks/-1",
        f"tracks/{2**64}",
        f"tracks/{2**64}/audio",
        "tracks/..%2F1/audio",
    ),
    *("playlists/a.txt", "playlists/..%2F..%2Fetc%2Fpasswd", f"playlists/a.m3u8?similar={2**64}"),
]


def answers_with_4xx(node: Node) -> None:
    for path in SENSELESS:
        status, answer = node.get(f"/api/v1/{path}")
        assert 400 <= status < 500 and (answer.get("error") or answer)["message"], path
    for body in ({"path": "/\0"}, {"path": "/\ud800"}, {"path": "/", "name": "\0"}, {"path": 1}):
        assert node.post("/api/v1/libraries", body)[0] == 422, body
    assert node.get("/api/v1/tracks?text=%00%FF'%25_")[0] == 200
    assert node.get("/music/..%2Froutes.py")[0] == 404


def test_questions_that_make_no_sense_are_answered_with_4xx(node):
    answers_with_4xx(node)


def test_without_its_model_a_node_does_not_start_and_says_what_to_do(tmp_path):
    argv = [sys.executable, "-m", "ostler", "up", "ostler.apps.music", "--data", str(tmp_path), "--port", "0"]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=60, env={**os.environ, "OSTLER_MUSIC_MODEL": "nothing"}
    )
    assert done.returncode == 2 and "nothing" in done.stderr


def test_a_node_without_the_app_is_told_from_one_without_the_library(node, monkeypatch):
    assert "there is no library nothing" in ostler(node, "status", "nothing").stderr
    monkeypatch.setattr("ostler.cli.music._API", "/api/v0")
    assert "does not run the music tagger; start one with" in ostler(node, "status").stderr


def test_on_postgres_the_tables_are_beside_the_store(make_node, postgres, tmp_path):
    with new_database(postgres) as url:
        node = make_node(*SMALL, app=APP, OSTLER_STORE=url, **RULES)
        lib = Library(node, fill(tmp_path / "lib", 22)).settled(22)
        assert not (node.folder / "music.db").exists()
        answers_with_4xx(node)
        (lib.root / "000.mp3").rename(lib.root / "x.mp3")
        assert lib.scan()["result"]["moved"] == 1
        _, made = node.post(f"/api/v1/libraries/{lib.id}/calibrate")
        assert node.wait_job(made["job"], "done")["result"]["files"] == 22
        _, alike = node.get(f"/api/v1/tracks/{lib.tracks()['x.mp3']['id']}/similar")
        assert len(alike["tracks"]) == 20
        node.stop()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.soak)])
def test_a_damaged_library_that_is_unplugged_while_workers_are_killed_goes_through_with_every_file_accounted_for(
    node, tmp_path, count
):
    root = tmp_path / "real" / "lib"
    root.parent.mkdir()
    assert corpus(root, count) == count
    before = {path.name: path.read_bytes() for path in root.iterdir()}
    lib = Library(node, root, name=str(root), write_to="file")
    for number, share in enumerate((0.1, 0.2)):
        until(lambda share=share: lib.get()["counts"]["new"] < (1 - share) * count, "some files to be done", 120)
        os.kill(node.worker(f"worker:tag:{number}")["pid"], signal.SIGKILL)
    root.rename(tmp_path / "unplugged")
    until(
        lambda: not lib.get()["counts"]["new"] or not node.get("/api/v1/info")[1]["queues"]["tag"]["queued"],
        "jobs",
        120,
    )
    (tmp_path / "unplugged").rename(root)
    assert lib.scan()["status"] == "done"
    until(lambda: not lib.get()["counts"]["new"], "every file to be done", 120)
    assert lib.scan()["status"] == "done"  # which has written what could not be while it was away
    until(lambda: node.get("/api/v1/info")[1]["queues"]["calibration"]["queued"] == 0, "the writes", 120)
    found = lib.tracks()
    assert sorted(found) == sorted(before)
    assert {one["state"] for one in found.values()} == {"tagged", "failed"}

    def settled() -> bool:
        return all(accounted(one, root / name, before[name]) for name, one in lib.tracks().items())

    until(settled, "every file to be tagged, or refused with a reason", 60)
    until(
        lambda: sorted(before) == sorted(path.name for path in root.iterdir()), "drafts to be taken over or removed", 60
    )
    assert ostler(node, "undo", str(lib.id), "--all").code == 0
    until(lambda: not any(ours(root / name) for name in found), "all tags to be taken out", 60)
    assert not [path.name for path in root.iterdir() if path.name.startswith(".")]
    assert all((root / name).read_bytes() == before[name] for name, one in found.items() if one["state"] == "failed")


def accounted(track: dict, path: Path, before: bytes) -> bool:
    """A file that failed, or could not be written, has a reason and is as it was; all others have tags."""
    if track["state"] == "failed" or (track["reason"] or "").startswith("its tags are in the database alone"):
        return len(track["reason"]) > 10 and path.read_bytes() == before
    return track["reason"] is None and "model" in ours(path)


def ours(path: Path) -> dict:
    try:
        return writing.ours(path)
    except OstlerError:
        return {}


@pytest.mark.soak
def test_two_nodes_share_a_library_and_one_of_them_is_killed(make_node, postgres, tmp_path):
    with new_database(postgres) as url:
        first, second = (make_node(*SMALL, app=APP, OSTLER_STORE=url, **RULES) for _ in range(2))
        lib = Library(first, fill(tmp_path / "lib", 200), watch=True)
        until(lambda: lib.get()["counts"]["tagged"] > 20, "some tracks to be tagged")
        second.kill()
        fill(lib.root / "more", 50, start=300)
        lib.settled(250)
        assert set(lib.states().values()) == {"tagged"}
        first.stop()


@pytest.mark.models
def test_the_demo_tags_a_library_with_the_real_model_and_loses_a_worker(tmp_path):
    argv = [sys.executable, "-m", "ostler", "demo", "music", "--data", str(tmp_path / "demo")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 failed, 0 toxic" in done.stdout
    assert "--> kill -9" in done.stdout and "not an audio file" in done.stdout
    nearest = done.stdout.partition("Tracks that sound like chord 3.wav")[2].splitlines()[2]
    assert nearest.startswith("chord"), nearest
