"""The command line, run as a user runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from ostler.cli import doctor
from tests.harness import APP, FAST, Node, until


def ostler(*args: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("OSTLER_")}
    return subprocess.run(
        [sys.executable, "-m", "ostler", *args],
        capture_output=True,
        text=True,
        timeout=240,  # the demo on a busy machine
        cwd=cwd,
        env={**clean, **FAST, **env},
    )


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    running = Node(tmp_path_factory.mktemp("cli") / "data", APP, "--pool", "work=2", "--pool", "other=1").start()
    yield running
    running.stop()


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().count("\n") == 0, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def test_enqueue_watch_and_look(node: Node) -> None:
    where = ("--data", str(node.folder))
    done = ostler("enqueue", "add", "a=40", "b=2", "--watch", *where)
    assert done.returncode == 0, done.stderr
    assert "result   42" in done.stdout
    assert json.loads(ostler("enqueue", "add", "a=40", "b=2", "--watch", "--json", *where).stdout)["result"] == 42
    refused(ostler("enqueue", "add", "a=1", "a=2", *where), "'a' is given twice")
    assert "processing" in done.stdout
    found = json.loads(ostler("enqueue", "other", "say=123", "--json", *where).stdout)
    assert found["args"] == {"say": "123"}  # declared as text, stays text
    node.wait_job(found["id"])
    assert f"{found['id']}" in ostler("jobs", *where).stdout
    assert json.loads(ostler("jobs", str(found["id"]), "--json", *where).stdout)["result"] == "123"
    assert json.loads(ostler("jobs", "--status", "done", "--limit", "1", "--json", *where).stdout)["jobs"]
    failed = ostler("enqueue", "gives_up", "--watch", *where)
    assert failed.returncode == 1
    assert "VALIDATION: this can never work" in failed.stdout


def test_workers_health_pause_resume_drain_restart_reset(node: Node) -> None:
    where = ("--data", str(node.folder))
    assert "worker:work:0" in ostler("workers", *where).stdout
    assert len(json.loads(ostler("workers", "--json", *where).stdout)["workers"]) == 3
    health = ostler("health", *where)
    assert (health.returncode, health.stdout.splitlines()[0]) == (0, "healthy: 3 healthy")
    assert ostler("pause", *where).stdout == "all pools paused\n"
    assert node.get("/api/v1/info")[1]["worker_enabled"] is False
    assert ostler("resume", *where).stdout == "all pools resumed\n"
    assert ostler("pause", "other", *where).returncode == 0
    assert [p["paused"] for p in node.get("/api/v1/info")[1]["pools"] if p["pool"] == "other"] == [True]
    assert ostler("resume", "other", *where).returncode == 0
    assert ostler("drain", "other:0", *where).stdout == "worker:other:0 is draining\n"
    node.wait_status("worker:other:0", "stopped")
    assert ostler("restart", "other", *where).returncode == 0
    node.wait_status("worker:other:0", "healthy")
    assert ostler("reset", "worker:work:0", *where).returncode == 0
    before = node.worker("worker:other:0")["generation"]
    assert ostler("kill", "worker:other:0", *where).returncode == 0
    again = node.wait_worker("worker:other:0", "again", lambda w: w["status"] == "healthy" and w["generation"] > before)
    assert again["restart_count"] == 0
    refused(ostler("drain", "nope", *where), "no worker or pool 'nope'", "worker:work:0")


def test_cancel_retry_and_logs(node: Node) -> None:
    where = ("--data", str(node.folder))
    later = ostler("enqueue", "add", "a=1", "--run-at", "2100-01-31T09:30+01:00", "--json", *where)
    job, run_at = (json.loads(later.stdout)[name] for name in ("id", "run_at"))
    assert run_at == datetime.fromisoformat("2100-01-31T08:30Z").timestamp() * 1000
    assert ostler("cancel", str(job), *where).stdout == f"job {job} is cancelled\n"
    assert ostler("retry", str(job), *where).returncode == 0
    assert node.wait_job(job)["result"] == 2
    running = node.enqueue("listens")
    node.wait_running(running)
    told = ostler("cancel", str(running), *where).stdout
    assert "asked to stop" in told or told == f"job {running} is cancelled\n", "it may have stopped before the answer"
    assert node.wait_job(running)["status"] == "cancelled"
    deaf = node.enqueue("wait_for", path=str(node.folder / "never"))
    node.wait_running(deaf)
    node.post(f"/api/v1/jobs/{deaf}/cancel")
    assert node.job(deaf)["waiting_for"]["reason"] == "cancelling"
    (node.folder / "never").touch()
    node.wait_job(deaf)
    delayed = json.loads(ostler("enqueue", "add", "a=1", "--delay", "5m", "--json", *where).stdout)
    assert abs(delayed["run_at"] - delayed["created_at"] - 300_000) < 60_000
    assert "neither a number of seconds" in ostler("enqueue", "add", "a=1", "--delay", "soon", *where).stderr
    node.wait_job(node.enqueue("other", say="seen in the log"))
    until(lambda: "seen in the log" in ostler("logs", "worker:other:0", *where).stdout, "the line")
    assert "seen in the log" in ostler("logs", "other", *where).stdout
    assert "worker:work:1" in ostler("logs", "work", *where).stderr
    refused(ostler("logs", "work", "-f", *where), "worker:work:0, worker:work:1")
    refused(ostler("logs", str(job), *where), f"ostler logs --job {job}")
    refused(ostler("logs", "worker:nope:0", *where), "worker:work:0")
    assert "`ostler up APP`" in ostler("worker").stderr
    assert "Try: enqueue" in ostler("enqeue").stderr
    refused(ostler("cancel", "99999", *where), "no job 99999")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("enqueue", "nope"), ["no task 'nope'; did you mean 'noop'?"]),
        (("enqueue", "add"), ["'a' is missing"]),
        (("enqueue", "add", "a=x"), ["'a' must be int", '"x"']),
        (("enqueue", "add", "a"), ["key=value"]),
        (("enqueue", "add", "a=1", "--timeout", "-1"), ["timeout must be more than 0"]),
        (("enqueue", "add", "--args", "[1]"), ["JSON object"]),
        (("enqueue", "add", "a=1", "--run-at", "1800000000"), ["this looks like seconds"]),
        (("jobs", "424242"), ["no job 424242"]),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(node: Node, args: tuple[str, ...], words: list[str]) -> None:
    before = node.get("/api/v1/jobs?limit=1")[1]["jobs"]
    refused(ostler(*args, "--data", str(node.folder)), *words)
    assert node.get("/api/v1/jobs?limit=1")[1]["jobs"] == before


@pytest.mark.parametrize("moment", ["tomorrow", "²", "--5", "9" * 5000])
def test_what_is_no_time_is_refused_and_says_what_would_be_one(node: Node, moment: str) -> None:
    done = ostler("enqueue", "add", "a=1", f"--run-at={moment}", "--data", str(node.folder))
    assert done.returncode == 2
    assert "is neither a time such as 2026-01-31T09:30" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "env", "toml", "words"),
    [
        ((), {}, "heartbeat_intervall = 5", ["heartbeat_intervall", "did you mean 'heartbeat_interval'"]),
        ((), {}, "[pools.work]\nsize = 3", ["pools.work.size", "not a known setting"]),
        ((), {}, "port = 'x'", ["port", "whole number"]),
        ((), {}, "not toml", ["not valid TOML"]),
        ((), {}, "[pools.nope]\nworkers = 3", ["'nope'", "work"]),
        (
            (),
            {"OSTLER_STALE_AFTER": "10", "OSTLER_HEARTBEAT_INTERVAL": "5"},
            "",
            ["stale_after (10 s)", "3 x heartbeat_interval (5 s)"],
        ),
        (
            (),
            {"OSTLER_HEARTBEAT_INTERVALL": "5"},
            "",
            ["OSTLER_HEARTBEAT_INTERVALL", "did you mean OSTLER_HEARTBEAT_INTERVAL"],
        ),
        ((), {"OSTLER_HEARTBEET": "3"}, "", ["OSTLER_HEARTBEET", "did you mean OSTLER_HEARTBEAT_INTERVAL"]),
        ((), {"OSTLER_DEADLINE": "3"}, "", ["did you mean OSTLER_STARTUP_DEADLINE"]),
        ((), {"OSTLER_PORT": "http"}, "", ["OSTLER_PORT", "'http'"]),
        ((), {"OSTLER_STOP_GRACE": "-1"}, "", ["stop_grace must not be negative"]),
        (("--pool", "work"), {}, "", ["--pool", "name=number"]),
        (("--pool", "work=²"), {}, "", ["--pool", "name=number"]),
        (("--host", "0.0.0.0"), {}, "", ["OSTLER_TOKEN"]),
        ((), {"OSTLER_ADVERTISE": "10.0.0.7:8356"}, "", ["advertise must be a URL", "'10.0.0.7:8356'"]),
        (("--data", "/proc/nope"), {}, "", ["/proc/nope", "--data"]),
        (("--store", "mysql://x"), {}, "", ["mysql", "not supported"]),
        (("--config", "missing.toml"), {}, "", ["missing.toml", "does not exist"]),
    ],
)
def test_wrong_configuration_is_refused_with_one_sentence(
    tmp_path: Path, args: tuple[str, ...], env: dict[str, str], toml: str, words: list[str]
) -> None:
    (tmp_path / "ostler.toml").write_text(toml)
    refused(ostler("up", str(APP), "--port", "0", *args, cwd=tmp_path, **env), *words)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nowhere.py", ["no file nowhere.py"]),
        ("no.such.module", ["no module 'no.such.module'"]),
        ("json:app", ["no Ostler app named 'app'"]),
        ("json", ["no app"]),
    ],
)
def test_an_app_that_cannot_be_found_is_refused(tmp_path: Path, target: str, words: list[str]) -> None:
    refused(ostler("up", target, cwd=tmp_path), *words)


def test_an_app_that_cannot_be_imported_shows_why(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import nonexistent_thing\n")
    done = ostler("up", "bad.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "bad.py cannot be loaded: ModuleNotFoundError: No module named 'nonexistent_thing'" in done.stderr


def test_commands_without_a_node_say_what_to_do(tmp_path: Path) -> None:
    for command in (("workers",), ("health",), ("jobs",), ("enqueue", "x")):
        refused(ostler(*command, cwd=tmp_path), "ostler up")
    refused(ostler("pause", cwd=tmp_path), "no node is running", "ostler up")


def test_check_shows_what_the_app_declares(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        """from datetime import date, timedelta
from ostler import Ostler
app = Ostler()
@app.job(queue="q", cron="0 3 * * *", zone="Asia/Tokyo")
def report(job, day: date | None = None, every: timedelta = timedelta(1), title: str = "Sales"): ...
app.cron("hourly", "0 * * * *", report.s(title="Hours"))
@app.sessions("echo")
async def echo(worker): yield worker.socket
"""
    )
    done = ostler("check", "app.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    words = re.sub(" +", " ", done.stdout)
    assert 'report(day: date or null = null, every: timedelta = 86400.0, title: str = "Sales") q 2' in words
    assert re.search(r"^report 0 3 \* \* \* \d{4}-\d\d-\d\d 03:00 Asia/Tokyo report\(\)", words, re.MULTILINE)
    assert re.search(r"^hourly 0 \* \* \* \* [-0-9]+ \d\d:00 UTC report\(title='Hours'\)", words, re.MULTILINE)
    assert "sessions echo" in words and "all good" in words
    assert not (tmp_path / ".ostler").exists()


def test_jobs_can_be_enqueued_while_no_node_runs(make_node) -> None:
    node = make_node("--pool", "work=1")
    node.stop()
    queued = ostler("enqueue", "add", "a=1", "--json", "--data", str(node.folder))
    job, told = (
        json.loads(queued.stdout)["id"],
        f"ostler: no node is running in {node.folder}; start one with 'ostler up'",
    )
    for stderr in (queued.stderr, ostler("jobs", "--data", str(node.folder)).stderr):
        assert stderr.startswith(told) and stderr.count("\n") == 1
    down = ostler("health", "--data", str(node.folder))
    assert down.returncode == 1
    assert "down" in down.stdout
    node.start()
    assert node.wait_job(job)["result"] == 2
    assert ostler("jobs", "--data", str(node.folder)).stderr == ""


def test_an_app_can_be_named_as_a_module(make_node) -> None:
    node = make_node(app="ostler.apps.clips:app")
    assert [t["name"] for t in node.get("/api/v1/info")[1]["tasks"]] == ["clip"]


def test_the_demo_ends_by_itself_without_a_terminal(tmp_path: Path) -> None:
    done = ostler("demo", "--data", str(tmp_path / "demo"))
    assert done.returncode == 0, done.stderr + done.stdout
    assert "6 of 6 jobs done" in done.stdout
    assert "kill -9" in done.stdout
    assert "requeued:crash" in done.stdout
    assert len(list((tmp_path / "demo" / "results").glob("*/clip.mp4"))) == 6


def test_text_that_looks_like_markup_or_emoji_is_shown_as_it_is(make_node, tmp_path: Path) -> None:
    app = tmp_path / "loud.py"
    app.write_text(
        "from ostler import Ostler, Fail\napp = Ostler()\n@app.job(queue='shell')\ndef bad(job): raise Fail('[/x]', ':smile: [bold]')\n"
    )
    node = make_node("--pool", "shell=1", app=app)
    job = node.wait_job(node.enqueue("bad"))["id"]
    where = ("--data", str(node.folder))
    assert "[/x]" in ostler("jobs", *where).stdout
    assert "[/x]: :smile: [bold]" in ostler("jobs", str(job), *where).stdout
    assert "worker:shell:0" in ostler("workers", *where).stdout


def test_a_worker_is_shown_with_its_history(node: Node) -> None:
    shown = ostler("workers", "work:0", "--data", str(node.folder))
    assert shown.returncode == 0
    assert "worker:work:0" in shown.stdout
    refused(ostler("workers", "nope:0", "--data", str(node.folder)), "worker:work:0")
    listed = ostler("workers", "work", "--data", str(node.folder)).stdout
    assert ("worker:work:1" in listed, "worker:other:0" in listed) == (True, False)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("app.pool('nope', workers=1)", ["'nope'", "no such queue"]),
        ("app.queue('nope', at_once=1)", ["'nope'", "no job uses it"]),
        ("app.pool('q', stale_after=1)", ["stale_after (1 s)", "3 x heartbeat_interval"]),
        ("app.command('c', ['sleep', '{prt}'])", ["{prt}", "{port}"]),
        ("@app.job()\ndef b(x: int): ...", ["job b", "first parameter is the job handle", "x: int"]),
        ("@app.job(cron='61 * * * *')\ndef b(job): ...", ["schedule 'b' (app.py, line 5): '61 * * * *'", "cron"]),
        ("@app.job(cron='* * * * *')\ndef b(job, x: int): ...", ["schedule 'b'", "'x' is missing"]),
        ("@app.job(unique=['y'])\ndef b(job, x: int): ...", ["'y'", "parameters (x)"]),
        ("app = Ostler('photodesk')", ["(app.py, line 5)", "is not the URL of a store"]),
        ("app.queue('q', rate='fast')", ["'fast'", "100/m"]),
    ],
)
def test_check_and_up_refuse_the_same_mistakes_and_leave_nothing(tmp_path: Path, lines: str, words: list[str]) -> None:
    (tmp_path / "app.py").write_text(
        f"from ostler import Ostler\napp = Ostler()\n@app.job(queue='q')\ndef a(job): ...\n{lines}\n"
    )
    for command in (("check", "app.py"), ("up", "app.py", "--port", "0")):
        refused(ostler(*command, cwd=tmp_path, OSTLER_HEARTBEAT_INTERVAL="5", OSTLER_STALE_AFTER="30"), *words)
    assert not (tmp_path / ".ostler").exists()


def test_what_jobs_print_and_say_does_nothing_to_the_terminal(node: Node) -> None:
    where = ("--data", str(node.folder))
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31mtext"
    job = node.enqueue("other", say=evil)
    node.wait_job(job)
    until(lambda: "text" in ostler("logs", "--job", str(job), *where).stdout, "the line")
    for command in (
        ("logs", "--job", str(job)),
        ("logs", "worker:other:0"),
        ("jobs", str(job)),
        ("jobs",),
        ("workers",),
    ):
        done = ostler(*command, *where)
        assert done.returncode == 0, done
        assert not set(done.stdout) & {"\x1b", "\x07", "\x9b"}, command
    assert r"\x1b]0;owned\x07\x1b[2J\x9b31mtext" in ostler("logs", "--job", str(job), *where).stdout
    assert evil in ostler("logs", "--job", str(job), "--raw", *where).stdout


def test_logs_say_when_there_are_older_lines(node: Node) -> None:
    where = ("--data", str(node.folder))
    job = node.enqueue("other", say="\n".join(f"line {n}" for n in range(50)))
    node.wait_job(job)
    until(lambda: "line 49" in ostler("logs", "--job", str(job), *where).stdout, "the lines")
    few = ostler("logs", "--job", str(job), "-n", "3", *where)
    assert few.stdout.splitlines() == ["line 47", "line 48", "line 49"]
    assert few.stderr == "ostler: these are the last 3 lines; -n NUMBER shows more\n"
    assert ostler("logs", "--job", str(job), "-n", "50", *where).stderr == ""


def test_a_variable_that_nothing_reads_is_a_warning(tmp_path: Path) -> None:
    done = ostler("check", str(APP), cwd=tmp_path, OSTLER_FOO_BAR="1", OSTLER_CLIPS_ROOTS="/")
    assert done.returncode == 0, done
    assert done.stdout.count("warning: environment variable") == 1
    assert "warning: environment variable OSTLER_FOO_BAR is not a setting of Ostler" in done.stdout


def test_cancel_says_which_options_it_has_and_works_with_and_without_a_node(make_node) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0")
    where = ("--data", str(node.folder))
    refused(ostler("cancel", *where), "--batch, --code, --task, --queue")
    assert "--status" not in ostler("cancel", *where).stderr
    running = node.enqueue("listens")
    node.wait_running(running)
    waiting = [node.enqueue("other") for _ in range(3)]
    done = ostler("cancel", "--queue", "work", *where)
    assert done.stdout == f"job {running} is running and was asked to stop\n", done
    assert node.wait_job(running)["status"] == "cancelled"
    done = ostler("cancel", str(waiting[0]), *where)
    assert done.stdout == f"job {waiting[0]} is cancelled\n"
    node.stop()
    done = ostler("cancel", "--queue", "other", *where)
    assert done.stdout == "".join(f"job {job} is cancelled\n" for job in waiting[1:])


def test_a_second_enqueue_of_a_unique_job_says_that_nothing_was_stored(make_node) -> None:
    node = make_node("--pool", "work=0", app=APP.parent / "featured.py")
    where = ("--data", str(node.folder))
    first = json.loads(ostler("enqueue", "once", "name=a", "--json", *where).stdout)
    assert first["duplicate"] is False
    done = ostler("enqueue", "once", "name=a", *where)
    assert done.stdout == f"job {first['id']} already has this unique key; no new job was stored\n"
    assert json.loads(ostler("enqueue", "once", "name=a", "--json", *where).stdout)["duplicate"] is True


def test_the_doctor_looks_at_everything_and_tells_what_is_wrong(node: Node, tmp_path: Path) -> None:
    done = ostler("doctor", "--deep", "--json", "--data", str(node.folder))
    found = {f["what"]: f for f in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0, done
    assert {"ostler", "sqlite", "data", "filesystem", "free space", "open files", "node", "database"} <= found.keys()
    assert found["node"]["text"].startswith(f"runs at {node.url}")
    assert found["integrity"]["level"] == "ok"
    fresh = ostler("doctor", "--data", str(tmp_path / "new"))
    assert fresh.returncode == 0, fresh
    assert "does not exist yet; a node will create it" in fresh.stdout
    assert not (tmp_path / "new").exists()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "ostler.db").write_text("no database at all " * 100)
    bad = ostler("doctor", "--data", str(tmp_path / "bad"))
    assert bad.returncode == 1
    assert "not a usable SQLite database" in bad.stdout


@pytest.mark.parametrize(
    ("version", "level"), [((3, 7, 0), "warning"), ((3, 51, 2), "warning"), ((3, 51, 3), "ok"), ((3, 53, 0), "ok")]
)
def test_the_doctor_knows_which_sqlite_has_the_bug(version: tuple[int, int, int], level: str) -> None:
    found = doctor.sqlite_version(version)
    assert found.level == level
    assert level == "ok" or "upgrade that" in found.text


def test_the_doctor_finds_the_filesystem_of_the_deepest_mount() -> None:
    mounts = [("/", "ext4"), ("/srv", "ext4"), ("/srv/shared", "nfs4"), ("/srv/shared2", "xfs")]
    assert doctor.filesystem(Path("/srv/shared/ostler"), mounts) == "nfs4"
    assert doctor.filesystem(Path("/srv/shared3"), mounts) == "ext4"
    assert doctor.filesystem(Path("/srv"), []) is None


def test_a_demo_never_deletes_a_directory_that_it_did_not_make(node: Node, tmp_path: Path) -> None:
    refused(ostler("demo", "--data", str(node.folder)), "a node is already running in")
    other = tmp_path / "real"
    other.mkdir()
    (other / "node.lock").touch()
    (other / "ostler.db").write_text("precious")
    refused(ostler("demo", "--data", str(other)), "was not created by a demo")
    assert (other / "ostler.db").read_text() == "precious"


def test_resuming_all_resumes_pools_that_were_paused_by_name_and_resuming_one_says_what_still_holds_it(
    make_node,
) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=1")
    where = ("--data", str(node.folder))
    for command in (("pause", "work"), ("pause",)):
        assert ostler(*command, *where).returncode == 0
    assert "all pools are still paused" in ostler("resume", "work", *where).stdout
    job = node.enqueue("add", a=1)
    assert node.job(job)["waiting_for"]["text"] == "all pools are paused; to resume: ostler resume"
    assert ostler("pause", "work", *where).returncode == 0
    assert ostler("resume", *where).returncode == 0
    assert node.get("/api/v1/health")[1]["paused"] == []
    assert node.wait_job(job)["status"] == "done"


def test_a_task_that_is_no_longer_declared_is_refused_on_the_command_line(make_node, tmp_path: Path) -> None:
    app = tmp_path / "tasks.py"
    text = "from ostler import Job, Ostler\napp = Ostler()\n@app.job()\ndef {}(job: Job) -> None: ...\n"
    app.write_text(text.format("before"))
    node = make_node(app=app)
    node.stop()
    app.write_text(text.format("after"))
    node.start()
    refused(ostler("enqueue", "before", "--data", str(node.folder)), "there is no task 'before'", "declared are: after")


def test_the_token_of_the_settings_is_not_confused_with_the_stored_one(make_node) -> None:
    node = make_node("--pool", "work=1", start=False)
    node.env["OSTLER_TOKEN"] = "configured"
    node.start(ready=False)
    refused(ostler("token", "--data", str(node.folder)), "was started with a configured token")


def test_a_filter_that_fits_nothing_says_so(node: Node) -> None:
    where = ("--queue", "nowhere", "--data", str(node.folder))
    assert ostler("cancel", *where).stdout == "no queued or running job matches\n"
    assert ostler("retry", *where).stdout == "no failed job matches\n"


def test_a_setting_that_is_neither_true_nor_false_is_refused_in_one_sentence(tmp_path: Path) -> None:
    refused(ostler("check", str(APP), OSTLER_RECYCLE_WARM="maybe"), "true or false", "maybe")
