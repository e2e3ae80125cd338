"""Programs that know nothing of Ostler, under the very same lifecycle. The program is fake_program.py with flags."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from ostler import Ostler
from ostler.errors import ConfigError
from tests.harness import Node, family_of, gone, until

PROGRAM = Path(__file__).with_name("fake_program.py")


def app(folder: Path, *lines: str) -> Path:
    path = folder / "commands.py"
    path.write_text(
        "\n".join(
            [
                "import sys",
                "from ostler import Ostler",
                "app = Ostler()",
                f"P = [sys.executable, '-u', {str(PROGRAM)!r}]",
                *lines,
            ]
        )
        + "\n"
    )
    return path


def test_tcp_readiness_gives_each_worker_a_port_of_its_own(make_node, tmp_path: Path) -> None:
    node = make_node(
        app=app(tmp_path, "app.command('srv', [*P, '--port', '{port}'], workers=2, ready='tcp://127.0.0.1:{port}')")
    )
    rows = [node.wait_status(f"worker:srv:{n}", "healthy") for n in (0, 1)]
    assert [(r["component"], r["status"], r["pool"]) for r in rows] == [
        ("worker:srv:0", "healthy", "srv"),
        ("worker:srv:1", "healthy", "srv"),
    ]
    ports = {r["metadata"]["port"] for r in rows}
    assert len(ports) == 2
    until(lambda: all((r["rss_mb"] or 0) > 1 for r in node.workers()), "their memory to be known")


def test_a_killed_program_is_restarted_with_an_exit_record(make_node, tmp_path: Path) -> None:
    node = make_node(
        app=app(
            tmp_path,
            "app.command('srv', [*P, '--port', '{port}', '--say', 'hello there'], ready='tcp://127.0.0.1:{port}')",
        )
    )
    first = node.worker("worker:srv:0")
    os.kill(first["pid"], signal.SIGKILL)
    row = node.wait_worker("worker:srv:0", "again", lambda w: w["generation"] == 2 and w["status"] == "healthy")
    assert row["restart_count"] == 1
    exits = node.get("/api/v1/workers/worker:srv:0")[1]["exits"]
    assert (exits[0]["signal"], "hello there" in exits[0]["log"]) == ("SIGKILL", True)


def test_a_line_of_output_is_readiness_too(make_node, tmp_path: Path) -> None:
    node = make_node(
        app=app(
            tmp_path,
            r"app.command('srv', [*P, '--wait-for', 'go', '--say', 'Listening on 42'], ready=r'line:Listening on \d+', cwd=%r)"
            % str(tmp_path),
        ),
        ready=False,
    )
    node.wait_status("worker:srv:0", "starting")
    (tmp_path / "go").touch()
    node.wait_status("worker:srv:0", "healthy")


def test_http_health_that_turns_bad_kills_and_restarts(make_node, tmp_path: Path) -> None:
    sick = tmp_path / "sick"
    node = make_node(
        app=app(
            tmp_path,
            f"app.command('srv', [*P, '--http', '{{port}}', '--sick-if', {str(sick)!r}], ready='http://127.0.0.1:{{port}}/health')",
        ),
        OSTLER_HEARTBEAT_INTERVAL="0.3",
        OSTLER_STALE_AFTER="2",
    )
    before = node.worker("worker:srv:0")
    sick.touch()
    node.wait_worker("worker:srv:0", "to be restarted", lambda w: w["generation"] > before["generation"])
    exits = node.get("/api/v1/workers/worker:srv:0")[1]["exits"]
    assert (exits[-1]["reason"], exits[-1]["kind"]) == ("unwell", "crash")
    sick.unlink()
    node.wait_status("worker:srv:0", "healthy")


def test_without_a_probe_alive_is_ready_and_silence_is_no_reason(make_node, tmp_path: Path) -> None:
    node = make_node(
        app=app(tmp_path, "app.command('bg', ['sleep', '300'])"),
        OSTLER_HEARTBEAT_INTERVAL="0.2",
        OSTLER_STALE_AFTER="0.6",
    )
    beat = node.worker("worker:bg:0")["last_heartbeat"]
    row = node.wait_worker("worker:bg:0", "to outlive the stale limit", lambda w: w["last_heartbeat"] > beat + 2000)
    assert row["generation"] == 1


def test_drain_uses_the_signal_of_choice_and_stop_escalates(make_node, tmp_path: Path) -> None:
    note = tmp_path / "signals"
    node = make_node(
        app=app(
            tmp_path,
            f"app.command('srv', [*P, '--note-signals', {str(note)!r}, '--leave-on', 'SIGINT'], drain_signal='SIGINT', ready='line:up')",
        ),
    )
    node.post("/api/v1/workers/worker:srv:0/drain")
    node.wait_status("worker:srv:0", "stopped")
    assert note.read_text().split() == ["SIGINT"]
    node.post("/api/v1/workers/worker:srv:0/restart")
    node.wait_status("worker:srv:0", "healthy")


def test_a_program_that_ignores_everything_is_killed_after_the_grace(make_node, tmp_path: Path) -> None:
    note = tmp_path / "signals"
    node = make_node(
        app=app(
            tmp_path,
            f"app.command('srv', [*P, '--note-signals', {str(note)!r}], drain_signal='SIGUSR1', ready='line:up', stop_grace=0.3)",
        ),
        OSTLER_TERM_GRACE="0.3",
    )
    pid = node.worker("worker:srv:0")["pid"]
    assert node.stop() == 0
    assert gone(pid)
    assert note.read_text().split() == ["SIGUSR1", "SIGTERM"]


def test_unasked_exit_0_is_respawned_free_up_to_a_rate_then_a_crash_loop(make_node, tmp_path: Path) -> None:
    node = make_node(app=app(tmp_path, "app.command('once', ['true'])"), ready=False, OSTLER_RESTART_LIMIT="3")
    row = node.wait_status("worker:once:0", "failed")
    assert (row["exit_reason"], row["restart_count"]) == ("exit-loop", 3)
    kinds = [e["kind"] for e in node.get("/api/v1/workers/worker:once:0")[1]["exits"]]
    assert kinds == ["crash"] * 3 + ["clean"] * 3


def test_a_program_that_does_not_exist_fails_with_a_reason(make_node, tmp_path: Path) -> None:
    node = make_node(
        app=app(tmp_path, "app.command('none', ['/no/such/program'])"), ready=False, OSTLER_RESTART_LIMIT="2"
    )
    row = node.wait_status("worker:none:0", "failed")
    assert (row["exit_reason"], row["exit_code"]) == ("spawn", -1)
    assert "/no/such/program: No such file or directory" in node.log()


def test_programs_are_recycled_by_age_and_by_the_memory_of_their_whole_session(make_node, tmp_path: Path) -> None:
    node = make_node(
        app=app(
            tmp_path,
            "app.command('old', ['sleep', '300'], recycle_age=0.4)",
            "app.command('fat', ['sh', '-c', 'sleep 300 & exec ' + ' '.join([*P, '--eat', '120'])], ready='line:up', recycle_rss_mb=100)",
        ),
        OSTLER_HEARTBEAT_INTERVAL="0.2",
        OSTLER_STALE_AFTER="5",
        ready=False,
    )
    for component in ("worker:old:0", "worker:fat:0"):
        row = node.wait_worker(component, "the third generation", lambda w: w["generation"] >= 3)
        assert row["restart_count"] == 0


def test_nothing_of_a_program_outlives_a_sigkill_of_the_node(make_node, tmp_path: Path) -> None:
    """The program never looks at its parent; the guard does."""
    node = make_node(
        app=app(tmp_path, "app.command('deaf', ['sh', '-c', 'setsid sleep 300 & nohup sleep 300 & sleep 300; true'])")
    )
    until(lambda: len(family_of(node.folder)) == 4, "all four processes")
    node.kill()
    until(lambda: not family_of(node.folder), "no survivors", patience=10)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"argv": []}, "argv must be a list"),
        ({"argv": "sleep 5"}, "argv must be a list"),
        ({"argv": ["x"], "ready": "udp://x:1"}, "is not a probe"),
        ({"argv": ["x"], "ready": "tcp://x"}, "is not a probe"),
        ({"argv": ["x"], "ready": "line:("}, "not a regular expression"),
        ({"argv": ["x"], "drain_signal": "SIGNOPE"}, "not a signal"),
    ],
)
def test_a_wrong_declaration_is_refused_in_words(arguments: dict, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint.replace("(", r"\(")):
        Ostler().command("c", **arguments)


def test_names_do_not_clash() -> None:
    a = Ostler()
    a.command("x", ["true"])
    with pytest.raises(ConfigError, match="already"):
        a.command("x", ["true"])
    with pytest.raises(ConfigError, match="already"):
        a.job(queue="x")(lambda job: None)
    with pytest.raises(ConfigError, match="cannot be the name"):
        a.command("a/b", ["true"])


_ = (Node, sys)


def test_a_data_directory_and_an_app_with_places_in_their_names_are_left_as_they_are(make_node, tmp_path: Path) -> None:
    """Only what the user wrote in app.command is filled in."""
    folder = tmp_path / "data{n}-{port}"
    folder.mkdir()
    shown = "import os, time; print(os.environ['OSTLER_DATA'], os.environ['MINE'], flush=True); time.sleep(600)"
    code = [
        f"app.command('show', [sys.executable, '-c', {shown!r}], env={{'MINE': 'number {{n}}'}}, ready='line:number')",
        "@app.job(queue='work')",
        "def put(job):",
        "    (job.scratch / 'file').write_text('x')",
        "    return str(job.publish(job.scratch / 'file', f'{job.id}/file').key)",
    ]
    node = make_node("--pool", "work=1", app=app(folder, *code), folder=folder)
    job = node.wait_job(node.enqueue("put"))
    assert (folder / "results" / job["result"]).read_text() == "x"
    log = (folder / "logs" / "show-0.log").read_text()
    assert f"{folder} number 0" in log
    assert list(tmp_path.iterdir()) == [folder]
