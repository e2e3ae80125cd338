"""Artifacts read by later jobs, other programs and the command line: from a directory, a bucket, and the node that has them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ostler import Artifact, Job, NotFound, Ostler
from ostler.config import Settings
from ostler.errors import OstlerError, Unreachable
from ostler.events import Bus
from ostler.jobs.producer import Producer
from ostler.jobs.results import LocalResults
from ostler.jobs.upkeep import Upkeep
from ostler.names import media_type
from ostler.store import Store, now_ms
from ostler.store.artifacts import ArtifactRow
from ostler.store.lanes import Lane
from ostler.store.rows import Finish, NewJob, Note, Turn
from ostler.testing import Bench, kill_at
from tests.cli.test_cli import ostler, refused
from tests.harness import Node
from tests.servers import Server, free_port
from tests.stores import new_database, store_of
from tests.web.test_artifacts import APP, fetch, run


@contextlib.contextmanager
def program(data: Path, store: str = "", results: str = "") -> Iterator[Ostler]:
    """An app as a program beside the node has it."""
    app = Ostler()
    app._producer = Producer(Settings(data=str(data), store=store, results=results))
    yield app
    app.producer.close()


# ---- one node: a directory on SQLite, or a bucket on PostgreSQL


@pytest.fixture(scope="module", params=["sqlite", "postgres"], ids=["directory", "bucket"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder, is_bucket = tmp_path_factory.mktemp("artifacts"), request.param == "postgres"
    results = {"OSTLER_RESULTS": f"local://{folder}/bucket"} if is_bucket else {}
    with store_of(request) as url:
        running = Node(folder / "data", APP, OSTLER_STORE=url, **results).start()
        running.is_bucket = is_bucket
        yield running
        running.stop()


@pytest.fixture
def app(node: Node) -> Iterator[Ostler]:
    with program(node.folder, node.env["OSTLER_STORE"], node.env.get("OSTLER_RESULTS", "")) as found:
        yield found


def test_a_program_reads_what_a_job_has_published(node: Node, app: Ostler, tmp_path: Path) -> None:
    job = app.find(run(node, "publish", key="{job}/notes.md", text="# text"))
    (found,) = job.artifacts()
    digest = hashlib.sha256(b"# text").hexdigest()
    assert (found.key, found.size, found.sha256, found.type) == (f"{job}/notes.md", 6, digest, "text/markdown")
    assert abs(found.at - now_ms()) < 3_600_000
    assert found.read_bytes() == b"# text"
    with found.open() as file:
        file.seek(2)
        assert file.read() == b"text"
    assert found.save(tmp_path) == tmp_path / "notes.md"
    assert found.save(str(tmp_path / "other")).read_text() == "# text"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.md", "other"]


def test_a_program_reads_a_long_list_and_that_of_a_failure(node: Node, app: Ostler) -> None:
    job = run(node, "publish_many", count=230)
    assert [one.read_bytes() for one in app.find(job).artifacts()] == [str(n).encode() for n in range(230)]
    failed = node.enqueue("publish_and_fail", key="of-a-failure")
    node.wait_job(failed, "failed")
    assert [one.read_bytes() for one in app.find(failed).artifacts()] == [b"of a failure"]
    killed = run(node, "publish_and_die", key="of-the-dead")
    assert [one.read_bytes() for one in app.find(killed).artifacts()] == [b"of the dead"]


def test_a_later_job_reads_it_as_bytes_and_as_a_file(node: Node) -> None:
    run(node, "publish", key="models/latest.json", text='{"a": 1}')
    found = node.job(run(node, "measure", key="models/latest.json"))["result"]
    path = Path(found.pop("path"))
    assert found == {
        "size": 8,
        "type": "application/json",
        "head": '{"a"',
        "text": '{"a": 1}',
        "in_path": 8,
        "saved": "latest.json",
    }
    assert path.name == "latest.json"
    assert path.is_relative_to(node.folder / ("scratch" if node.is_bucket else "results"))


def test_a_job_that_finds_nothing_says_what_to_do(node: Node) -> None:
    job = node.enqueue("measure", key="nowhere.txt")
    error = node.wait_job(job, "failed")["error"]
    assert error["message"].startswith("NotFound: no artifact is published under 'nowhere.txt'; `ostler artifacts JOB`")


def test_what_was_replaced_or_deleted_since_is_not_given_for_the_other(node: Node, app: Ostler) -> None:
    old, new = (run(node, "publish", key="moving.txt", text=text) for text in ("old", "new"))
    with pytest.raises(NotFound, match=r"moving.txt was replaced"):
        app.find(old).artifacts()[0].read_bytes()
    (found,) = app.find(new).artifacts()
    assert found.read_bytes() == b"new"
    found._reader._results.delete("moving.txt")
    with pytest.raises(NotFound, match="no artifact is published under 'moving.txt'"):
        found.open()


def test_a_damaged_file_is_told_and_not_saved(node: Node, app: Ostler, tmp_path: Path) -> None:
    (found,) = app.find(run(node, "publish", key="damaged.txt", text="content")).artifacts()
    root = node.folder.parent / "bucket" if node.is_bucket else node.folder / "results"
    (root / "damaged.txt").write_text("CONTENT")
    with pytest.raises(OstlerError, match="does not match its checksum"):
        found.save(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_the_node_serves_a_bucket_in_ranges(node: Node) -> None:
    run(node, "publish", key="ranged.txt", text="0123456789")
    status, headers, body = fetch(node, "/api/v1/artifacts/ranged.txt", Range="bytes=3-5")
    assert (status, body, headers["content-range"]) == (206, b"345", "bytes 3-5/10")
    assert fetch(node, "/api/v1/artifacts/ranged.txt", "HEAD")[1]["content-length"] == "10"


# ---- the command line


def test_the_command_line_lists_and_reads(node: Node, tmp_path: Path) -> None:
    where = ("--data", str(node.folder))
    env = {name: node.env[name] for name in ("OSTLER_STORE", "OSTLER_RESULTS") if name in node.env}
    job = run(node, "publish", key="cli/report.txt", text="for the terminal")
    shown = ostler("artifacts", str(job), *where, **env).stdout
    assert "cli/report.txt" in shown and "text/plain" in shown and "16" in shown
    (row,) = json.loads(ostler("artifacts", str(job), "--json", *where, **env).stdout)["artifacts"]
    assert row == node.job(job)["artifacts"][0]
    assert ostler("artifacts", "get", "cli/report.txt", "-o", "-", *where, **env).stdout == "for the terminal"
    saved = ostler("artifacts", "get", "cli/report.txt", *where, cwd=tmp_path, **env)
    assert saved.stdout == "report.txt: 16 bytes\n"
    assert (tmp_path / "report.txt").read_text() == "for the terminal"
    refused(ostler("artifacts", "get", "cli/report.txt", *where, cwd=tmp_path, **env), "report.txt already exists")
    refused(ostler("artifacts", "get", "cli/none.txt", *where, cwd=tmp_path, **env), "no artifact is published")
    refused(ostler("artifacts", "get", "../ostler.db", *where, cwd=tmp_path, **env), "not a usable key")
    refused(ostler("artifacts", "get", "cli/report.txt", "-o", "no/x", *where, cwd=tmp_path, **env), "no directory no")
    refused(ostler("artifacts", "999999", *where, **env), "no job 999999")


# ---- two nodes, each with a directory of its own


class Pair:
    """n1 listens on loopback only and runs `here`; n2 advertises an address and runs `work`."""

    def __init__(self, folder: Path, url: str) -> None:
        port = free_port()
        self.folder, self.url = folder, url
        own, other = (
            ("--pool", "here=1", "--pool", "work=0"),
            ("--pool", "here=0", "--pool", "work=1", "--port", str(port)),
        )
        self.n1 = Node(folder / "n1", APP, "--name", "n1", *own, OSTLER_STORE=url)
        self.n2 = Node(folder / "n2", APP, "--name", "n2", *other, OSTLER_STORE=url)
        self.n2.env |= {"OSTLER_ADVERTISE": f"http://127.0.0.1:{port}", "OSTLER_UPKEEP_INTERVAL": "1"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, postgres: Server) -> Iterator[Pair]:
    with new_database(postgres) as url:
        found = Pair(tmp_path_factory.mktemp("pair"), url)
        try:
            found.n1.start()
            found.n2.start()
            yield found
        finally:
            for node in (found.n1, found.n2):
                if node.process is not None and node.process.poll() is None:
                    node.kill()


def test_a_node_passes_on_what_another_one_has(pair: Pair) -> None:
    run(pair.n1, "publish", key="far/letters.txt", text="abcdefghij")
    assert not (pair.n1.folder / "results" / "far").exists()
    path = "/api/v1/artifacts/far/letters.txt"
    far, own = fetch(pair.n1, path), fetch(pair.n2, path)
    assert far[0] == 200
    assert (far[2], {**far[1], "date": ""}) == (own[2], {**own[1], "date": ""})
    assert fetch(pair.n1, path, Range="bytes=-3")[::2] == (206, b"hij")
    assert fetch(pair.n1, path, "HEAD")[1]["content-length"] == "10"
    assert fetch(pair.n1, path, Range="bytes=10-")[0] == 416
    assert fetch(pair.n1, path, If_None_Match=far[1]["etag"])[0] == 304


def test_a_large_file_is_passed_on_whole(pair: Pair) -> None:
    run(pair.n1, "publish_large", key="far/large.bin", megabytes=20)
    assert fetch(pair.n1, "/api/v1/artifacts/far/large.bin")[2] == b"".join(bytes([n]) * 1_000_000 for n in range(20))


def test_jobs_programs_and_the_command_line_read_what_another_node_has(pair: Pair) -> None:
    job = run(pair.n1, "publish", key="far/notes.txt", text="from afar")
    found = pair.n1.job(run(pair.n1, "measure", key="far/notes.txt"))["result"]
    assert (found["text"], found["in_path"]) == ("from afar", 9)
    assert Path(found["path"]).is_relative_to(pair.n1.folder / "scratch")
    nowhere = pair.folder / "nowhere"
    with program(nowhere, pair.url) as app:
        assert [one.read_bytes() for one in app.find(job).artifacts()] == [b"from afar"]
    read = ostler("artifacts", "get", "far/notes.txt", "-o", "-", "--data", str(nowhere), OSTLER_STORE=pair.url)
    assert read.stdout == "from afar", read.stderr


def test_of_two_nodes_that_have_a_key_the_newer_one_is_read(pair: Pair) -> None:
    first = run(pair.n1, "publish_here", key="both.txt", text="of n1")
    assert fetch(pair.n1, "/api/v1/artifacts/both.txt")[2] == b"of n1"
    second = run(pair.n1, "publish", key="both.txt", text="of n2")
    assert [fetch(node, "/api/v1/artifacts/both.txt")[2] for node in (pair.n1, pair.n2)] == [b"of n2"] * 2
    assert pair.n1.job(run(pair.n1, "measure", key="both.txt"))["result"]["text"] == "of n2"
    assert [pair.n1.job(job)["artifacts"][0]["replaced_by"] for job in (first, second)] == [second, None]


def test_what_cannot_be_had_from_another_node_is_told_with_what_to_do(pair: Pair) -> None:
    job = run(pair.n1, "publish_here", key="near.txt", text="of n1")
    status, _, body = fetch(pair.n2, "/api/v1/artifacts/near.txt")
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (502, "NODE_UNREACHABLE")
    assert "near.txt is on node n1, which listens on loopback only; set advertise" in error["message"]
    with (
        program(pair.folder / "nowhere", pair.url) as app,
        pytest.raises(Unreachable, match="set results to a place that all nodes share"),
    ):
        app.find(job).artifacts()[0].open()
    run(pair.n1, "publish", key="far/deleted.txt")
    (pair.n2.folder / "results" / "far" / "deleted.txt").unlink()
    status, _, body = fetch(pair.n1, "/api/v1/artifacts/far/deleted.txt")
    assert (status, json.loads(body)["error"]["code"]) == (404, "NOT_FOUND")
    assert fetch(pair.n1, "/api/v1/artifacts/far/none.txt")[0] == 404


def test_what_a_node_that_was_killed_has_is_told_and_read_again_when_it_is_back(pair: Pair) -> None:
    run(pair.n1, "publish", key="far/kept.txt", text="kept")
    pair.n2.kill()
    status, _, body = fetch(pair.n1, "/api/v1/artifacts/far/kept.txt")
    assert status == 502, body
    pair.n2.start()
    assert fetch(pair.n1, "/api/v1/artifacts/far/kept.txt")[::2] == (200, b"kept")


# ---- deleting


def published(store: Store, folder: Path, key: str, text: str, home: str = "own") -> int:
    """A job that ended long ago and has published a file in a results directory there."""
    (job,) = store.jobs.enqueue([NewJob("t", "q", "{}")], 1000)
    (claim,) = store.turns.take(Turn("n", 1000, wants={"q": ["w"]})).claims
    assert store.jobs.hold(job, claim.fence, key, home)
    source = folder / "source"
    source.write_text(text)
    made = LocalResults(folder / home / "results").put(source, key, claim.fence, "", job)
    row = ArtifactRow(job, key, home, made.at, made.size, made.sha256)
    store.turns.take(Turn("n", 1000, notes=[Note(job, claim.fence, "uploaded", 1000, artifact=row)]))
    store.turns.take(Turn("n", 1000, finishes=[Finish(job, claim.fence, "done", 1000, 1000, "done")]))
    return job


def clean(folder: Path, home: str = "own") -> None:
    """One round of upkeep of a node whose data directory is there."""

    async def main() -> None:
        known = Settings(data=str(folder / home), retention=1.0, failed_retention=1.0)
        lane = Lane(
            "t", lambda: Store.open(os.environ["OSTLER_STORE"], folder, durable=False), asyncio.get_running_loop()
        )
        await lane.start()
        await Upkeep(known, lane, lane, Bus(), lambda: None, lambda: "n", "", home).clean()
        await lane.stop()

    asyncio.run(main())


def files(folder: Path, home: str = "own") -> list[str]:
    root = folder / home / "results"
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_artifacts_under_any_key_go_with_their_job(store: Store, tmp_path: Path) -> None:
    job = published(store, tmp_path, "reports/2026/daily.txt", "x")
    store.jobs.enqueue([NewJob("t", "other", "{}")], now_ms())
    assert store.jobs.get(job)["artifacts"][0]["key"] == "reports/2026/daily.txt"
    clean(tmp_path)
    assert files(tmp_path) == []
    assert not (tmp_path / "own" / "results" / "reports").exists()
    assert store.jobs.artifacts.gone() == [] and store.jobs.artifacts.of(job) == []


def test_a_file_that_a_younger_job_has_published_there_stays(store: Store, tmp_path: Path) -> None:
    old = published(store, tmp_path, "latest.txt", "old")
    (young,) = store.jobs.enqueue([NewJob("t", "q", "{}")], now_ms())
    source = tmp_path / "source"
    source.write_text("young")
    LocalResults(tmp_path / "own" / "results").put(source, "latest.txt", 1, "", young)
    clean(tmp_path)
    assert files(tmp_path) == [".latest.txt.ostler", "latest.txt"]
    assert store.jobs.artifacts.of(old) == []


def test_a_node_leaves_the_files_of_another_one_to_that(store: Store, tmp_path: Path) -> None:
    published(store, tmp_path, "a.txt", "x", home="other")
    store.jobs.enqueue([NewJob("t", "other", "{}")], now_ms())
    clean(tmp_path)
    assert files(tmp_path, "other") == [".a.txt.ostler", "a.txt"]
    assert [one.home for one in store.jobs.artifacts.gone()] == ["other"]
    clean(tmp_path, "other")
    assert files(tmp_path, "other") == [] and store.jobs.artifacts.gone() == []


def test_a_publish_is_written_down_before_its_file_is_there(store: Store) -> None:
    """So that the file of a run that was killed goes with its job. Who no longer owns the job writes nothing."""
    (job,) = store.jobs.enqueue([NewJob("t", "q", "{}")], 1000)
    (claim,) = store.turns.take(Turn("n", 1000, wants={"q": ["w"]})).claims
    assert not store.jobs.hold(job, claim.fence + 1, "late.txt", "h")
    assert store.jobs.hold(job, claim.fence, "begun.txt", "h")
    assert store.jobs.artifacts.of(job) == [ArtifactRow(job, "begun.txt", "h")]
    assert store.jobs.artifacts.newest("begun.txt") is None
    assert store.jobs.get(job)["artifacts"] == []


# ---- the bench, and names


def test_on_the_bench_artifacts_are_read_like_anywhere(tmp_path: Path) -> None:
    app = Ostler()

    @app.job()
    def make(job: Job) -> str:
        path = job.scratch / "made"
        path.write_text("made")
        return job.publish(path, f"{job.id}/made.txt").key

    @app.job()
    def use(job: Job, key: str) -> str:
        return job.artifact(key).path().read_text()

    with Bench(app) as bench:
        chain = make.s().then(use.s(), into="key").enqueue()
        with kill_at("uploaded"):
            bench.run()
        bench.run()
        assert chain.result() == "made"
        (found,) = app.find(chain).artifacts()
        assert isinstance(found, Artifact)
        assert found.read_bytes() == b"made"
        assert bench.job(chain)["artifacts"][0]["type"] == "text/plain"


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.txt", "text/plain"), ("A.PNG", "image/png"), ("a.tar.gz", "application/octet-stream"), ("x.html", "text/html"), ("a", "application/octet-stream"),
     ("dir.mp4/x", "application/octet-stream"), ("a.opus", "audio/ogg"), ("a.webp", "image/webp"), ("a.", "application/octet-stream")],
)  # fmt: skip
def test_the_type_of_a_name_is_the_same_everywhere(name: str, kind: str) -> None:
    assert media_type(name) == kind
