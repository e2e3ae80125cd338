"""Jobs in an environment of their own: a real node, real workers, and a package that the node has not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ostler import config, envs
from ostler.app import Ostler, load
from ostler.check import check_app, warnings
from ostler.envs import install
from ostler.errors import ConfigError, EnvError, EnvNotBuilt
from tests.environments import Quick, asked, offline, other_python, wheel
from tests.harness import Node, gone, until

APP = """
import multiprocessing, os, subprocess, sys
from ostler import Ostler

app = Ostler()
app.env("tiny", requirements={requirements!r}{more})


@app.job("plain")
def outside(job):
    return [sys.prefix, have("tinypack"), have("fastapi")]


@app.job("special", env="tiny")
def inside(job):
    import tinypack
    return [sys.prefix, tinypack.VERSION, have("fastapi"), os.environ["VIRTUAL_ENV"], job.id, __file__]


@app.job("special", env="tiny")
def which(job):
    return [sys.prefix, sys.version]


@app.job("special", env="tiny")
def children(job):
    code = "import sys, tinypack; print(sys.prefix, tinypack.VERSION)"
    shell = subprocess.run(["python", "-c", code], capture_output=True, text=True, check=True).stdout
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return [shell.strip(), pool.apply(prefix)]


@app.job("special", env="tiny")
def waiting(job, release):
    import pathlib, time
    job.event("begun")
    while not pathlib.Path(release).exists():
        time.sleep(0.01)
    import tinypack
    return tinypack.VERSION


@app.job("special", env="tiny")
def handing_over(job):
    return outside.enqueue()


def prefix():
    import ostler
    return sys.prefix


def have(name):
    import importlib.util
    return importlib.util.find_spec(name) is not None
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(install, "find", lambda wanted: Quick("quick"))


def written(tmp_path: Path, text: str = APP, more: str = "") -> Path:
    wheel(tmp_path / "wheels")
    path = tmp_path / "apps" / "tinyapp.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        text.replace("{requirements!r}", repr(offline(tmp_path / "wheels", "tinypack"))).replace("{more}", more)
    )
    return path


def build(path: Path, data: Path, **more) -> envs.Environment:
    app = Ostler()
    app.envs.update(_declared(path))
    return envs.build(config.load({"data": str(data)}, environ={}), app, "tiny", **more)


def _declared(path: Path) -> dict[str, config.EnvSettings]:
    sys.modules.pop("tinyapp", None)
    return load(str(path)).envs


@pytest.fixture
def node(tmp_path: Path, make_node) -> Node:
    path = written(tmp_path)
    build(path, tmp_path / "node")
    return make_node("--pool", "special=1", "--pool", "plain=1", app=path, folder=tmp_path / "node")


def test_a_job_runs_in_its_environment_with_a_package_that_the_node_has_not(node: Node) -> None:
    here, tinypack, fastapi = node.wait_job(node.enqueue("outside"), "done")["result"]
    assert (tinypack, fastapi) == (False, True)
    prefix, version, fastapi, active, _, file = node.wait_job(node.enqueue("inside"), "done")["result"]
    assert prefix != here
    assert prefix == active == str((node.folder / "envs" / "tiny").resolve())
    assert (version, fastapi) == ("1.0", False)  # of the node's packages, only Ostler itself
    assert file == str(node.app)


def test_what_a_job_starts_runs_in_its_environment_too(node: Node) -> None:
    prefix = str((node.folder / "envs" / "tiny").resolve())
    assert node.wait_job(node.enqueue("children"), "done")["result"] == [f"{prefix} 1.0", prefix]


def test_a_job_in_an_environment_stores_a_job_for_another(node: Node) -> None:
    job = node.wait_job(node.enqueue("handing_over"), "done")["result"]
    assert node.wait_job(job, "done")["result"][1] is False


def test_a_worker_keeps_its_build_and_the_next_one_takes_the_new(node: Node, tmp_path: Path) -> None:
    release = tmp_path / "release"
    job = node.enqueue("waiting", release=str(release))
    before = node.wait_running(job)
    wheel(tmp_path / "wheels", version="2.0")
    build(node.app, node.folder, force=True)
    release.touch()
    assert node.wait_job(job, "done")["result"] == "1.0"
    assert node.post(f"/api/v1/workers/{before['component']}/restart")[0] == 200
    node.wait_worker(
        before["component"], "to be another", lambda w: w["status"] == "healthy" and w["pid"] != before["pid"]
    )
    assert node.wait_job(node.enqueue("inside"), "done")["result"][1] == "2.0"


def test_the_api_lists_environments_and_health_does_not_mind(node: Node) -> None:
    status, found = node.get("/api/v1/envs")
    assert status == 200
    (env,) = found["envs"]
    assert (env["name"], env["state"], env["usable"], env["installer"]) == ("tiny", "ready", True, "quick")
    assert env["interpreter"] == str((node.folder / "envs" / "tiny").resolve() / "bin" / "python")
    (node.folder / "envs" / "tiny.builds" / "failed.json").write_text('{"reason": "no", "tail": ["a", "b"]}')
    (env,) = node.get("/api/v1/envs")[1]["envs"]
    assert (env["state"], env["reason"], env["tail"], env["usable"]) == ("failed", "no", ["a", "b"], True)
    assert node.get("/api/v1/health")[1]["status"] == "healthy"


def test_an_environment_that_goes_away_is_never_replaced_by_another_interpreter(node: Node) -> None:
    worker = node.worker("worker:special:0")
    link = node.folder / "envs" / "tiny"
    link.rename(link.with_name("elsewhere"))
    node.post(f"/api/v1/workers/{worker['component']}/kill")
    until(
        lambda: "cannot be started: environment 'tiny' is not built; build it with: ostler env build" in node.log(),
        "the command in the log",
    )
    link.with_name("elsewhere").rename(link)
    assert node.wait_job(node.enqueue("inside"), "done")["result"][1] == "1.0"
    assert gone(worker["pid"])


@pytest.mark.skipif(other_python((3, 12), (3, 16)) is None, reason="no later Python is installed")
def test_a_job_runs_in_an_environment_of_the_users_own_with_another_python(tmp_path: Path, make_node) -> None:
    own = tmp_path / "own"
    subprocess.run([other_python((3, 12), (3, 16)), "-m", "venv", "--without-pip", own], check=True)
    path = written(tmp_path)
    (tmp_path / "o.toml").write_text('[env.tiny]\npath = "own"\n')  # the file overrules the code
    node = make_node("--config", str(tmp_path / "o.toml"), app=path, PYTHONSAFEPATH="1")
    prefix, version = node.wait_job(node.enqueue("which"), "done")["result"]
    assert prefix == str(own)
    assert version == asked(own / "bin" / "python", "import sys; print(sys.version)")
    assert version != sys.version
    failed = node.wait_job(node.enqueue("inside"), "failed")
    assert "No module named 'tinypack'" in failed["error"]["message"]


# ---- refused at the start


def checked(path: Path, data: Path, **pools: str) -> None:
    settings = config.Settings(data=str(data), pools={q: config.PoolSettings(env=e) for q, e in pools.items()})
    sys.modules.pop("tinyapp", None)
    check_app(settings, load(str(path)), str(path))


def test_a_node_does_not_start_without_the_environment_and_says_the_command(tmp_path: Path, make_node) -> None:
    path = written(tmp_path)
    with pytest.raises(EnvNotBuilt):
        checked(path, tmp_path / "node")
    node = make_node(app=path, folder=tmp_path / "node", start=False)
    node.start_process()
    assert node.wait() == 2
    assert f"environment 'tiny' is not built; build it with: ostler env build tiny --app {path} --data" in node.log()


def test_an_unknown_environment_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    build(path, tmp_path)
    checked(path, tmp_path)
    with pytest.raises(ConfigError, match="environment 'tinny' is not described; did you mean 'tiny'"):
        checked(path, tmp_path, plain="tinny")


def test_a_command_has_no_environment() -> None:
    app = Ostler()
    app.command("web", ["true"])
    with pytest.raises(ConfigError, match="command 'web' cannot have an env"):
        check_app(config.Settings(pools={"web": config.PoolSettings(env="x")}), app, "app.py")


def test_an_outdated_environment_is_a_warning(tmp_path: Path) -> None:
    path = written(tmp_path)
    build(path, tmp_path)
    app = Ostler()
    app.env("tiny", requirements=["other"])
    app.job("special", env="tiny")(lambda job: None)
    known = config.Settings(data=str(tmp_path))
    check_app(known, app, "app.py")
    assert any("environment 'tiny' of queue 'special' is outdated" in said for said in warnings(known, app))


@pytest.mark.skipif(other_python((3, 9), (3, 11)) is None, reason="no Python 3.9 or 3.10 is installed")
def test_a_python_that_is_too_old_for_jobs_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "old"
    subprocess.run([other_python((3, 9), (3, 11)), "-m", "venv", "--without-pip", old], check=True)
    app = Ostler()
    app.env("old", path=old)
    app.job("special", env="old")(lambda job: None)
    with pytest.raises(EnvError, match="environment 'old' has Python 3.(9|10).*needs 3.11 or later"):
        check_app(config.Settings(data=str(tmp_path)), app, "app.py")


def test_an_import_that_the_environment_has_not_says_where_the_worker_runs(tmp_path: Path, make_node) -> None:
    path = written(tmp_path, "import fastapi\n" + APP)
    build(path, tmp_path / "node")
    node = make_node("--pool", "plain=0", app=path, folder=tmp_path / "node", ready=False)
    log = node.folder / "logs" / "special-0.log"
    until(lambda: log.exists() and "runs in environment 'tiny'" in log.read_text(), "the reason in the worker's log")
    assert "No module named 'fastapi'" in log.read_text()


def test_a_version_of_ostler_in_the_environment_does_not_take_its_place(tmp_path: Path) -> None:
    path = written(tmp_path)
    built = build(path, tmp_path)
    wheel(tmp_path / "other", name="ostler", code="raise ImportError('another ostler')\n")
    site = next(built.directory.glob("lib/python*/site-packages"))
    shutil.unpack_archive(next((tmp_path / "other").iterdir()), site, "zip")
    assert "another ostler" in asked(built.interpreter, "try: import ostler\nexcept ImportError as e: print(e)")
    known, app = config.Settings(data=str(tmp_path)), load(str(path))
    command = envs.command(known, app, "tiny", "ostler", "--version")
    done = subprocess.run(command, env=envs.variables(known, "tiny"), capture_output=True, text=True)
    assert "another ostler" not in done.stderr
    assert "click" in done.stderr  # ours was found, and needs what is not there
