"""What users of other queues expect, on real workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from ostler.jobs import scratch
from tests.harness import Node, until
from tests.stores import rows, store_of, value

APP = Path(__file__).resolve().parent.parent / "featured.py"
# About files and processes, not about the store.
once = pytest.mark.parametrize("node", ["sqlite"], indirect=True)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def node(request: pytest.FixtureRequest, tmp_path_factory):
    sizes = [f for pool in ("narrow=4", "keys=4", "slow=2", "work=2") for f in ("--pool", pool)]
    with store_of(request) as url:
        running = Node(tmp_path_factory.mktemp("features") / "data", APP, *sizes, OSTLER_STORE=url).start()
        yield running
        running.stop()


@pytest.fixture
def make_node(store_url: str, make_node):
    """On both databases."""
    return make_node


def python(node: Node, code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", f"from featured import *\n{code}"],
        capture_output=True,
        text=True,
        env=node.producer_env,
        check=True,
    ).stdout


def test_a_queue_and_a_key_run_no_more_at_once_than_allowed(node: Node, tmp_path: Path) -> None:
    jobs = [node.enqueue("hold", folder=str(tmp_path)) for _ in range(12)]
    assert max(node.wait_job(j)["result"] for j in jobs) <= 2
    users = [node.enqueue("per_user", user=u, folder=str(tmp_path)) for _ in range(5) for u in ("ann", "bob")]
    assert max(node.wait_job(j)["result"] for j in users) == 1


def claimed_at(job: dict) -> int:
    return next(e["at"] for e in job["events"] if e["name"] == "processing")


def test_a_rate_is_kept(node: Node) -> None:
    jobs = [node.enqueue("begin") for _ in range(12)]
    times = sorted(claimed_at(node.wait_job(j)) for j in jobs)
    # a burst of 5, then 5 a second: the twelfth cannot have been claimed before 7 / 5 s
    assert times[-1] - times[0] >= 1300


def test_a_unique_job_is_stored_once_over_http_and_from_python(node: Node) -> None:
    node.post("/api/v1/pools/work/pause")
    status, first = node.post("/api/v1/jobs", {"task": "once", "args": {"name": "a"}})
    assert (status, first["duplicate"]) == (201, False)
    status, again = node.post("/api/v1/jobs", {"task": "once", "args": {"name": "a", "other": 5}})
    assert (status, again["id"], again["duplicate"]) == (200, first["id"], True)
    assert int(python(node, "print(int(once.enqueue(name='a')))")) == first["id"]
    assert int(python(node, "print(int(double.options(unique_key='k').enqueue(x=1)))")) == int(
        python(node, "print(int(double.options(unique_key='k').enqueue(x=2)))")
    )
    node.post("/api/v1/pools/work/resume")
    node.wait_job(first["id"])
    assert node.post("/api/v1/jobs", {"task": "once", "args": {"name": "a"}})[0] == 201


def test_bulk_enqueue_is_all_or_none(node: Node) -> None:
    status, answer = node.post(
        "/api/v1/jobs/bulk", {"jobs": [{"task": "double", "args": {"x": n}} for n in range(300)]}
    )
    assert (status, len(answer["ids"])) == (201, 300)
    assert [node.wait_job(i)["result"] for i in answer["ids"][-3:]] == [594, 596, 598]
    newest = node.get("/api/v1/jobs?limit=1")[1]["jobs"][0]["id"]
    status, answer = node.post(
        "/api/v1/jobs/bulk", {"jobs": [{"task": "double", "args": {"x": 1}}, {"task": "double", "args": {"x": "no"}}]}
    )
    assert status == 422
    assert node.get("/api/v1/jobs?limit=1")[1]["jobs"][0]["id"] == newest
    ids = python(node, "print(*map(int, double.enqueue_many({'x': n} for n in range(3))))").split()
    assert [node.wait_job(int(i))["result"] for i in ids] == [0, 2, 4]


def test_a_chain_passes_results_on(node: Node) -> None:
    first = int(
        python(node, "print(int(double.s(x=3).then(double.s(), into='x').then(double.s(), into='x').enqueue()))")
    )
    assert node.wait_job(first)["result"] == 6
    until(
        lambda: (
            [j["result"] for j in node.get("/api/v1/jobs?task=double&limit=2&status=done")[1]["jobs"]] == ["24", "12"]
        ),
        "the chain's end",
    )


def test_a_batch_reports_when_all_have_ended(node: Node) -> None:
    batch = int(
        python(
            node,
            "print(int(app.batch([double.s(x=1), fails.s(), double.s(x=2).then(double.s(), into='x')], then=report.s(), into='summary')))",
        )
    )
    found = until(lambda: (b := node.get(f"/api/v1/batches/{batch}")[1])["callback_job"] and b, "the callback")
    assert node.wait_job(found["callback_job"])["result"] == {"batch": batch, "total": 3, "failed": 1}
    assert node.get("/api/v1/batches/99999")[0] == 404


def test_snooze_costs_no_attempt(node: Node) -> None:
    job = node.wait_job(node.enqueue("snoozes", options={"attempts": 1}))
    assert (job["status"], job["result"], job["attempt"], job["errors"]) == ("done", 1, 1, [])
    assert "snoozed" in node.events(job["id"])


def test_dead_letters_are_redriven_and_queued_jobs_cancelled_by_filter(node: Node) -> None:
    jobs = [node.enqueue("fails") for _ in range(3)]
    for job in jobs:
        assert node.wait_job(job)["status"] == "failed"
    assert node.post("/api/v1/jobs/retry", {})[0] == 422
    status, answer = node.post("/api/v1/jobs/retry", {"task": "fails", "code": "RETRIES_EXHAUSTED"})
    assert (status, set(jobs) <= set(answer["ids"])) == (200, True)
    assert all(node.wait_job(j, "failed")["attempt"] == 1 for j in jobs)
    assert all(len(node.job(j)["errors"]) == 2 for j in jobs)
    node.post("/api/v1/pools/work/pause")
    waiting = [node.enqueue("double", x=1) for _ in range(4)]
    assert set(node.post("/api/v1/jobs/cancel", {"queue": "work", "status": "queued"})[1]["ids"]) >= set(waiting)
    node.post("/api/v1/pools/work/resume")
    assert all(node.job(j)["status"] == "cancelled" for j in waiting)


@once
def test_scratch_is_deleted_on_success_and_kept_on_failure(node: Node) -> None:
    good, bad = node.wait_job(node.enqueue("scratches")), node.wait_job(node.enqueue("scratches", fail=True))
    assert not Path(good["result"]).exists()
    (kept,) = (node.folder / "scratch" / str(bad["id"])).glob("*/big")
    assert kept.stat().st_size == 1000
    until(
        lambda: (
            f"job {bad['id']}: a run failed, and its scratch is kept" in _logs(node) and "(1000 bytes)" in _logs(node)
        ),
        "its size in the log",
    )


@once
@pytest.mark.parametrize("levels", [1500, 5000])
def test_a_deep_scratch_costs_its_job_nothing(node: Node, levels: int) -> None:
    good = node.wait_job(node.enqueue("digs", levels=levels))
    assert (good["status"], good["crashes"], good["attempt"]) == ("done", 0, 1)
    assert not (node.folder / "scratch" / str(good["id"])).exists()
    bad = node.wait_job(node.enqueue("digs", levels=levels, fail=True))
    assert (bad["status"], bad["crashes"], "too deep" in bad["error"]["message"]) == ("failed", 0, True)
    kept = node.folder / "scratch" / str(bad["id"])
    assert kept.exists()
    assert scratch.delete(kept) is None


def _logs(node: Node) -> str:
    return "".join(p.read_text() for p in (node.folder / "logs").glob("work-*.log"))


def test_an_artifact_is_published_once_and_short_circuits_a_second_run(node: Node) -> None:
    job = node.wait_job(node.enqueue("publishes", die=True))
    assert (job["status"], job["result"], job["crashes"]) == ("done", "found", 1)
    assert node.events(job["id"]) == ["created", "processing", "uploaded", "requeued:crash", "processing", "done"]
    folder = node.folder / "results" / str(job["id"])
    assert sorted(p.name for p in folder.iterdir()) == [".out.txt.ostler", "out.txt"]
    assert (folder / "out.txt").read_text() == "content"


def test_a_run_that_lost_its_claim_cannot_publish(make_node, tmp_path: Path) -> None:
    node = make_node("--pool", "work=1", app=APP, OSTLER_POLL_INTERVAL="3600")
    job = node.enqueue("publishes", wait=str(tmp_path / "go"))
    node.wait_running(job)
    # somebody else decides about the job, and this node has not heard of it yet
    with node.open_store() as store:
        rows(store, "UPDATE jobs SET fence = fence + 1 WHERE id = :job", job=job)
    (tmp_path / "go").touch()
    until(lambda: f"job {job}: a late result was dropped" in node.log(), "its result to be refused")
    assert not (node.folder / "results" / str(job)).exists()
    assert node.job(job)["status"] == "processing"  # it is the other owner's to end


def test_what_a_job_prints_is_kept_for_the_job(node: Node) -> None:
    first, second = node.enqueue("talks", text="one"), node.enqueue("talks", text="two")
    node.wait_job(first), node.wait_job(second)

    def text(job: int) -> str:
        with urllib.request.urlopen(f"{node.url}/api/v1/jobs/{job}/logs") as response:
            return response.read().decode()

    until(
        lambda: text(first) == "python says one\na child says one\nto stderr\n", "the first job's lines, and no others"
    )
    until(lambda: text(second) == "python says two\na child says two\nto stderr\n", "the second's")
    assert node.post(f"/api/v1/jobs/{second}/retry")[0] == 200
    again = "python says two\na child says two\nto stderr\n"
    worker = node.wait_job(second, "done")["worker"]
    until(lambda: text(second) == f"{again}--- attempt 1, on {worker} ---\n{again}", "what the second run printed")
    done = subprocess.run(
        [sys.executable, "-m", "ostler", "logs", "--job", str(first), "-f", "--data", str(node.folder)],
        env=node.env,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout == text(first)
    assert "\x1e" not in _logs(node)
    with urllib.request.urlopen(f"{node.url}/api/v1/workers/{node.job(first)['worker']}/logs") as response:
        assert "a child says one" in response.read().decode()
    assert node.get("/api/v1/workers/worker:nope:0/logs")[0] == 404


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
def test_nothing_that_a_job_prints_can_be_taken_for_a_label(make_node, tmp_path: Path) -> None:
    app = tmp_path / "rude.py"
    app.write_text(
        "import os\nfrom ostler import Ostler\napp = Ostler()\n"
        "@app.job(queue='q')\ndef rude(job, path: str):\n"
        "    print('cell\\x1e999')\n    os.write(1, b'\\x1exyz\\n')\n    print('\\x1e\\u00b2')\n    print('still here')\n"
        "    file = os.open(path, os.O_CREAT | os.O_WRONLY)\n    os.dup2(file, 1)\n    os.write(1, b'mine\\n')\n"
        "@app.job(queue='q')\ndef plain(job): print('plain says', job.id)\n"
    )
    node = make_node("--pool", "q=1", app=app)
    rude, plain = node.enqueue("rude", path=str(tmp_path / "file")), node.enqueue("plain")
    node.wait_job(rude), node.wait_job(plain)
    logs = node.folder / "logs" / "jobs" / "0"
    until(
        lambda: (logs / f"{plain}.log").exists() and (logs / f"{plain}.log").read_text() == f"plain says {plain}\n",
        "the second job's own line",
    )
    assert (logs / f"{rude}.log").read_text() == "cell\x1e999\n\x1exyz\n\x1e\u00b2\nstill here\n"
    assert (tmp_path / "file").read_text() == "mine\n"
    assert not (logs / "999.log").exists()


def test_a_bad_request_does_not_hurt_the_good_ones_beside_it(node: Node) -> None:
    from concurrent.futures import ThreadPoolExecutor

    bad = {"task": "double", "args": {"x": 1}, "limit_key": "k", "limit_max": 10**30}
    bodies = [bad if n % 5 == 0 else {"task": "double", "args": {"x": n}} for n in range(50)]
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda body: node.post("/api/v1/jobs", body)[0], bodies))
    assert answers == [422 if n % 5 == 0 else 201 for n in range(50)]
    assert node.get("/api/v1/jobs/" + "9" * 30)[0] in (404, 422)
    assert node.get("/api/v1/jobs?batch=" + "9" * 30)[0] == 422


def test_metrics_are_there_under_the_promised_names(node: Node) -> None:
    node.wait_job(node.enqueue("double", x=1))
    with urllib.request.urlopen(node.url + "/metrics") as response:
        assert response.headers["content-type"].startswith("text/plain")
        text = response.read().decode()
    names = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert names >= {
        "worker_heartbeats_total", "worker_recovered_jobs_total", "worker_retry_attempts_total", "worker_duplicate_skips_total",
        "worker_atomic_acquire_fail_total", "worker_inflight_jobs", "worker_pauses_total", "ostler_queue_jobs", "ostler_queue_oldest_seconds",
        "ostler_run_seconds", "ostler_worker_crashes_total", "ostler_worker_starts_total", "ostler_workers",
    }  # fmt: skip
    assert re.search(r'^ostler_runs_total\{event="done",queue="work",task="double"\} [1-9]', text, re.MULTILINE)
    assert re.search(r"^worker_heartbeats_total [1-9]", text, re.MULTILINE)
    assert re.search(r'^ostler_workers\{node="[^"]+",pool="work",status="healthy"\} 2', text, re.MULTILINE)


def test_a_schedule_that_was_missed_fires_once_at_the_next_start(make_node) -> None:
    node = make_node("--pool", "work=1", "--pool", "narrow=0", "--pool", "keys=0", "--pool", "slow=0", app=APP)
    (found,) = node.get("/api/v1/schedules")[1]["schedules"]
    assert (found["name"], found["zone"], found["last_job"]) == ("new_year", "Europe/Berlin", None)
    node.stop()
    with node.open_store() as store:
        rows(store, "UPDATE schedules SET next_at = 1000")
    node.start()
    job = until(lambda: node.get("/api/v1/schedules")[1]["schedules"][0]["last_job"], "it to fire")
    assert node.wait_job(job)["result"] == "happy"
    assert len(node.get("/api/v1/jobs?task=new_year")[1]["jobs"]) == 1
    command = [sys.executable, "-m", "ostler", "schedules", "--data", str(node.folder)]
    shown = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TZ": "UTC"}).stdout
    assert "new_year" in shown
    assert "-01-01 00:00 Europe/Berlin" in shown  # as the schedule's zone has it, whatever ours is

    status, ran = node.post("/api/v1/schedules/new_year/run")
    assert (status, node.wait_job(ran["id"])["result"]) == (201, "happy")
    assert node.post("/api/v1/schedules/new_year/pause")[1]["paused"] is True
    again = subprocess.run([*command[:4], "run", "new_year", *command[4:]], capture_output=True, text=True).stdout
    assert node.wait_job(int(re.findall(r"\d+", again)[0]))["result"] == "happy"  # a paused one can be run, too
    assert "paused" in subprocess.run(command, capture_output=True, text=True).stdout
    told = subprocess.run([*command[:4], "resume", "new_year", *command[4:]], capture_output=True, text=True).stdout
    assert "-01-01 00:00" in told
    status, refused = node.post("/api/v1/schedules/nope/run")
    assert (status, refused["error"]["code"]) == (404, "NOT_FOUND")


def test_old_jobs_and_their_logs_are_deleted(make_node) -> None:
    node = make_node("--pool", "work=1", app=APP, OSTLER_RETENTION="1", OSTLER_UPKEEP_INTERVAL="0.3")
    job = node.enqueue("talks", text="x")
    made = node.enqueue("publishes")
    failed = node.enqueue("fails")
    node.wait_job(failed)
    path = node.folder / "logs" / "jobs" / "0" / f"{job}.log"
    until(lambda: node.get(f"/api/v1/jobs/{job}")[0] == 404, "the job to be gone")
    until(lambda: not path.exists(), "its log too")
    until(lambda: not (node.folder / "results" / str(made)).exists(), "what another has published")
    assert node.job(failed)["status"] == "failed"


def test_a_publish_first_asks_the_store_with_a_write(node: Node) -> None:
    job = node.enqueue("publishes")
    assert node.wait_job(job)["result"] == "made"
    with node.open_store() as store:
        assert value(store, "SELECT held FROM jobs WHERE id = :job", job=job) == 1
