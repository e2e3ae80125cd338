"""Environments: how they are described, built, replaced and looked at, and that a job runs in one. Real venvs, no network."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ostler import config, envs
from ostler.app import Ostler
from ostler.envs import install, state
from ostler.envs.build import users_of
from ostler.errors import ConfigError, Conflict, EnvError, EnvNotBuilt
from tests.environments import OSTLER, UV, Quick, asked, offline, other_python, wheel
from tests.harness import until

ROOT = Path(__file__).resolve().parent.parent


# A build with pip takes twenty times the CPU of one with uv: `make test` has one of them, `make soak` all.
WITH_PIP = pytest.param("pip", marks=pytest.mark.soak)
WITH_UV = pytest.param("uv", marks=pytest.mark.skipif(UV is None, reason="uv is not installed"))


@pytest.fixture(params=[WITH_PIP, WITH_UV])
def installer(request) -> str:
    return request.param


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    find = install.find
    monkeypatch.setattr(install, "find", lambda wanted: Quick("quick") if wanted == "quick" else find(wanted))


def settings_of(tmp_path: Path, toml: str = "", **more) -> config.Settings:
    file = tmp_path / "ostler.toml"
    file.write_text(toml)
    return config.load({"data": str(tmp_path / "data"), **more}, file=file, environ={})


def tiny(tmp_path: Path, *requirements: str, **more) -> tuple[config.Settings, Ostler]:
    """An app with an environment `tiny`."""
    wheel(tmp_path / "wheels")
    app = Ostler()
    app.env("tiny", requirements=offline(tmp_path / "wheels", *(requirements or ("tinypack",))), **more)
    return settings_of(tmp_path), app


# ---- descriptions


def test_a_description_comes_from_the_file_and_its_paths_count_from_there(tmp_path: Path) -> None:
    found = settings_of(
        tmp_path,
        """
        [env.ocr]
        python = "3.12"
        requirements = "reqs/ocr.txt"
        constraints = "lock.txt"
        extra_index = "https://example.org/simple"
        [env.own]
        path = "venvs/own"
        """,
    )
    assert found.envs["ocr"] == config.EnvSettings(
        python="3.12",
        requirements=str(tmp_path / "reqs/ocr.txt"),
        constraints=str(tmp_path / "lock.txt"),
        extra_index=("https://example.org/simple",),
        folder=str(tmp_path),
    )
    assert found.envs["own"].path == str(tmp_path / "venvs/own")


def test_the_file_overrules_the_code_key_by_key(tmp_path: Path) -> None:
    app = Ostler()
    app.env("a", python="3.11", requirements=["x==1"])
    app.env("b", requirements=["x==1"])
    app.env("c", path="/opt/c")
    toml = '[env.a]\nrequirements = ["x==2"]\n[env.b]\npath = "/opt/b"\n[env.c]\nrequirements = ["y"]\n[env.d]\n'
    known = settings_of(tmp_path, toml)
    a, b, c = (known.env(n, app.envs[n]) for n in "abc")
    assert (a.python, a.requirements, a.folder) == ("3.11", ("x==2",), str(tmp_path))
    assert (b.path, b.requirements) == ("/opt/b", None)
    assert (c.path, c.requirements) == (None, ("y",))
    assert known.env("d") == config.EnvSettings(folder=str(tmp_path))
    assert known.env("e") is None


def test_paths_in_code_count_from_the_file_that_calls() -> None:
    app = Ostler()
    app.env("a", requirements="reqs.txt")
    assert app.envs["a"].requirements == str(Path(__file__).parent / "reqs.txt")


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ('[env."a.b"]', "'a.b' cannot be the name of an environment"),
        ("env = 3", "env must be a table of tables"),
        ("[env]\na = 3", "must be a table"),
        ("[env.a]\npyton = '3.12'", "did you mean 'python'?"),
        ("[env.a]\npython = 3.12", "python must be text"),
        ("[env.a]\npython = 'python3'", "must be a version such as 3.12 or the path"),
        ("[env.a]\nrequirements = [1]", "requirements must be text or a list of texts"),
        ("[env.a]\nconstraints = ['a']", "constraints must be text, found"),
        ("[env.a]\npath = 'x'\npython = '3.12'", "so python cannot be used with it"),
        ("[envs.a]\npython = '3.12'", "did you mean 'env'?"),
        ("[pools.a]\nenv = 3", "pools.a.env must be text"),
    ],
)
def test_a_wrong_description_is_refused_with_its_place(tmp_path: Path, toml: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        settings_of(tmp_path, toml)


def test_the_jobs_of_a_queue_share_one_environment() -> None:
    app = Ostler()
    app.pool("p", env="y")

    @app.job("q", env="x")
    def one(job) -> None: ...

    @app.job("p")  # the pool speaks for it
    def two(job) -> None: ...

    assert (app.env_of("q"), app.env_of("p"), app.env_of("r")) == ("x", "y", None)
    for queue, env in (("q", "z"), ("q", None), ("p", "x")):
        with pytest.raises(ConfigError, match="all workers of a queue run in one environment"):
            app.job(queue, env=env, name="three")(lambda job: None)
    with pytest.raises(ConfigError, match="the pool of queue 'q' has env 'z', but job 'one' has env 'x'"):
        app.pool("q", env="z")
    app.pool("q", workers=3)
    app.pool("q", env="x")
    assert set(app.tasks) == {"one", "two"}


def test_a_nested_requirements_file_counts_and_a_circle_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("-r b.txt\n")
    (tmp_path / "b.txt").write_text("--requirement=a.txt\nx==1\n")
    found = config.EnvSettings(requirements=str(tmp_path / "a.txt"))
    before = state.digest(found)
    (tmp_path / "b.txt").write_text("--requirement=a.txt\nx==2\n")
    assert state.digest(found) != before


def test_every_key_is_documented() -> None:
    text = (ROOT / "docs" / "settings.md").read_text().partition("[env.")[2]
    assert [key for key in config.ENV_KEYS if f"`{key}`" not in text] == []


def test_the_examples_of_the_docs_are_right(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "environments.md").read_text()
    (toml,), (code,) = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("toml", "python"))
    found = settings_of(tmp_path, toml)
    assert (set(found.envs), found.pools["ocr"].env) == ({"ocr", "tts", "trial"}, "ocr")
    scope: dict = {"__name__": "docs"}
    exec(compile(code, str(tmp_path / "app.py"), "exec"), scope)
    assert scope["app"].env_of("ocr") == "ocr"
    documented = re.findall(r"^\| (`[^|]+) \|", text.partition("## Building")[0], re.MULTILINE)
    assert [key for key in config.ENV_KEYS if f"`{key}`" not in " ".join(documented)] == []
    assert all(f"| `{word}` |" in text for word in ("not built", "building", "ready", "outdated", "failed"))


# ---- building


@pytest.mark.parametrize("installer", ["pip", WITH_UV])
def test_a_build_makes_an_environment_with_the_package(tmp_path: Path, installer: str) -> None:
    known, app = tiny(tmp_path)
    told: list[str] = []
    with pytest.raises(EnvNotBuilt):
        envs.interpreter(known, app, "tiny")
    built = envs.build(known, app, "tiny", installer=installer, tell=told.append)
    assert (built.state, built.installer) == ("ready", installer)
    python = envs.interpreter(known, app, "tiny")
    assert asked(python, "import tinypack, sys; print(tinypack.VERSION, sys.prefix)") == f"1.0 {built.directory}"
    assert built.python == asked(python, "import platform; print(platform.python_version())")
    assert (known.data_dir / "envs" / "tiny" / "bin" / "python").exists()
    assert "building" in told[0]
    assert "is ready" in told[-1]
    assert any("tinypack" in line for line in told[1:-1])
    assert (known.data_dir / "envs" / "tiny.builds" / "build.log").read_text().startswith("$ ")


def test_a_package_can_be_installed_without_what_it_says_it_needs(tmp_path: Path, installer: str) -> None:
    wheel(tmp_path / "wheels", "needy", needs="nosuchpack==9")
    lines = offline(tmp_path / "wheels", "needy")
    app = Ostler()
    app.env("needy", no_deps=lines)
    settings = settings_of(tmp_path)
    assert not envs.look(settings, app, "needy").interpreter
    found = envs.build(settings, app, "needy", installer=installer)
    assert asked(found.interpreter, "import needy; print(needy.VERSION)") == "1.0"
    changed = Ostler()
    changed.env("needy", no_deps=[*lines, "tinypack"])
    assert envs.look(settings, changed, "needy").state == "outdated"


def test_an_environment_names_its_installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for = []
    monkeypatch.setattr(install, "find", lambda wanted: asked_for.append(wanted) or Quick("quick"))
    settings, app = tiny(tmp_path, installer="pip")
    envs.build(settings, app, "tiny")
    envs.build(settings, app, "tiny", installer="uv", force=True)
    assert asked_for == ["pip", "uv"]
    with pytest.raises(ConfigError, match="installer must be pip or uv"):
        app.env("other", installer="conda")


def test_a_requirements_file_with_constraints_is_installed(tmp_path: Path, installer: str) -> None:
    wheel(tmp_path / "wheels", version="1.0")
    wheel(tmp_path / "wheels", version="2.0")
    (tmp_path / "reqs.txt").write_text("--no-index\n--find-links wheels\ntinypack\n")
    (tmp_path / "lock.txt").write_text("tinypack==1.0\n")
    known = settings_of(tmp_path, '[env.tiny]\nrequirements = "reqs.txt"\nconstraints = "lock.txt"\n')
    envs.build(known, Ostler(), "tiny", installer=installer)
    assert asked(envs.interpreter(known, Ostler(), "tiny"), "import tinypack; print(tinypack.VERSION)") == "1.0"


def test_relative_paths_in_lines_count_from_the_description(tmp_path: Path, installer: str) -> None:
    wheel(tmp_path / "wheels")
    known = settings_of(
        tmp_path, '[env.tiny]\nrequirements = ["--no-index", "./wheels/tinypack-1.0-py3-none-any.whl"]\n'
    )
    assert envs.build(known, Ostler(), "tiny", installer=installer).state == "ready"


def test_a_ready_environment_is_not_built_again_unless_forced(tmp_path: Path) -> None:
    known, app = tiny(tmp_path)
    first = envs.build(known, app, "tiny", installer="quick")
    told: list[str] = []
    assert envs.build(known, app, "tiny", installer="quick", tell=told.append) == first
    assert told == ["environment 'tiny' is ready; --force builds it again"]
    second = envs.build(known, app, "tiny", installer="quick", force=True)
    assert second.directory != first.directory
    assert not first.directory.exists()


def test_the_states_follow_the_description_and_its_files(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels")
    (tmp_path / "more.txt").write_text("tinypack\n")
    lines = f'[env.tiny]\nrequirements = ["--no-index", "--find-links {tmp_path}/wheels", "-r more.txt"]\n'
    known, app = settings_of(tmp_path, lines), Ostler()

    def is_now() -> str:
        return envs.look(known, app, "tiny").state

    assert is_now() == "not built"
    envs.build(known, app, "tiny", installer="quick")
    assert is_now() == "ready"
    (tmp_path / "more.txt").write_text("tinypack==1.0\n")
    assert is_now() == "outdated"
    assert envs.interpreter(known, app, "tiny").exists()
    envs.build(known, app, "tiny", installer="quick")
    assert is_now() == "ready"
    known = settings_of(tmp_path, lines + 'extra_index = "https://example.org/simple"\n')
    assert is_now() == "outdated"
    known = settings_of(tmp_path)
    assert [(e.name, e.state, e.described) for e in envs.listing(known, app)] == [("tiny", "ready", None)]


def test_a_failed_build_leaves_the_old_one_usable_and_tells_why(tmp_path: Path, installer: str) -> None:
    known, app = tiny(tmp_path)
    before = envs.build(known, app, "tiny", installer=installer)
    broken = Ostler()
    broken.env("tiny", requirements=offline(tmp_path / "wheels", "nosuchpack==9"))
    with pytest.raises(EnvError, match="exit code 1 of .*nosuchpack==9") as failed:
        envs.build(known, broken, "tiny", installer=installer)
    assert "No " in str(failed.value)  # the installer's own words
    found = envs.look(known, broken, "tiny")
    assert (found.state, found.interpreter) == ("failed", before.interpreter)
    assert "exit code 1 of" in found.reason
    assert any("nosuchpack" in line for line in found.tail)
    assert asked(envs.interpreter(known, broken, "tiny"), "import tinypack; print(tinypack.VERSION)") == "1.0"
    assert [p.name for p in (known.data_dir / "envs" / "tiny.builds").iterdir() if p.name.isdigit()] == [
        before.directory.name
    ]
    assert envs.build(known, app, "tiny", installer=installer).state == "ready"


def test_what_is_missing_is_said_in_words(tmp_path: Path) -> None:
    known = settings_of(
        tmp_path, '[env.a]\nrequirements = "gone.txt"\n[env.b]\npython = "3.99"\nrequirements = ["x"]\n'
    )
    with pytest.raises(EnvError, match="requirements file .*gone.txt does not exist"):
        envs.build(known, Ostler(), "a")
    assert envs.look(known, Ostler(), "a").state == "failed"
    with pytest.raises(EnvError, match="Python 3.99 is not found here .*install uv"):
        envs.build(known, Ostler(), "b", installer="pip")
    with pytest.raises(ConfigError, match="environment 'bb' is not described; did you mean 'b'"):
        envs.look(known, Ostler(), "bb")


SLOW = """
import os, sys, time
sys.path.insert(0, {source!r})
from pathlib import Path
from ostler import config, envs
from ostler.app import Ostler
from ostler.envs import install

class Stuck(install.Installer):
    def commands(self, described, target):
        first = [sys.executable, "-m", "venv", "--without-pip", str(target)]
        code = "import time; print('installing', flush=True); time.sleep(600)"
        return [first, [str(target / "bin" / "python"), "-c", code]]

install.find = lambda wanted: Stuck("pip")
envs.build(config.load({{"data": {data!r}}}, file=Path({file!r}), environ={{}}), Ostler(), "tiny", force=True, tell=lambda line: print(line, flush=True))
"""


def stuck(tmp_path: Path, known: config.Settings) -> subprocess.Popen[str]:
    """A builder in a process of its own whose installer has begun and does not end."""
    code = SLOW.format(source=str(ROOT / "src"), data=str(known.data_dir), file=str(tmp_path / "ostler.toml"))
    builder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    for line in builder.stdout:
        if line == "installing\n":
            return builder
    raise AssertionError("the builder ended")


def described(tmp_path: Path) -> config.Settings:
    wheel(tmp_path / "wheels")
    return settings_of(
        tmp_path, f'[env.tiny]\nrequirements = ["--no-index", "--find-links {tmp_path}/wheels", "tinypack"]\n'
    )


def test_two_builds_of_one_environment_do_not_mix_and_a_killed_one_is_cleaned_up(tmp_path: Path) -> None:
    known, app = described(tmp_path), Ostler()
    before = envs.build(known, app, "tiny", installer="quick")
    builder = stuck(tmp_path, known)
    try:
        found = envs.look(known, app, "tiny")
        assert (found.state, found.reason) == ("building", f"by process {builder.pid}")
        assert found.interpreter == before.interpreter
        for order in (envs.build, envs.remove):
            with pytest.raises(Conflict, match=f"is being built by process {builder.pid}"):
                order(known, app, "tiny")
        half = next(p for p in (known.data_dir / "envs" / "tiny.builds").iterdir() if p.name == "2")
        installers = users_of(half)
        assert installers
    finally:
        builder.kill()
        builder.wait()
        builder.stdout.close()
    assert envs.look(known, app, "tiny").state == "building"  # its installer lives on
    for pid in installers:
        os.kill(pid, signal.SIGKILL)
    until(lambda: envs.look(known, app, "tiny").state != "building", "the lock to be free")
    found = envs.look(known, app, "tiny")
    assert (found.state, found.reason, found.interpreter) == ("failed", "the last build broke off", before.interpreter)
    assert half.exists()
    after = envs.build(known, app, "tiny", installer="quick")
    assert after.state == "ready"
    assert [p for p in (known.data_dir / "envs" / "tiny.builds").iterdir() if p.name.isdigit()] == [after.directory]


def test_an_interrupted_build_takes_its_installer_with_it(tmp_path: Path) -> None:
    known = described(tmp_path)
    builder = stuck(tmp_path, known)
    half = known.data_dir / "envs" / "tiny.builds" / "1"
    installers = users_of(half)
    assert installers
    builder.send_signal(signal.SIGINT)
    builder.wait(60)
    builder.stdout.close()
    until(lambda: not users_of(half), "the installer to end")
    assert not half.exists()
    assert envs.look(known, Ostler(), "tiny").state == "failed"


def test_looking_at_the_state_does_not_disturb_a_build(tmp_path: Path) -> None:
    known, app = described(tmp_path), Ostler()
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            envs.look(known, app, "tiny")

    watchers = [threading.Thread(target=watch) for _ in range(4)]
    for one in watchers:
        one.start()
    try:
        assert envs.build(known, app, "tiny", installer="quick").state == "ready"
    finally:
        stop.set()
        for one in watchers:
            one.join()


def test_a_running_process_keeps_its_environment_while_it_is_rebuilt(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", version="1.0")
    known, app = tiny(tmp_path)
    old = envs.build(known, app, "tiny", installer="quick")
    code = "import sys; print('up', flush=True); sys.stdin.readline(); import tinypack; print(tinypack.VERSION)"
    running = subprocess.Popen(
        [old.interpreter, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={}
    )
    try:
        assert running.stdout.readline() == "up\n"
        wheel(tmp_path / "wheels", version="2.0")
        new = envs.build(known, app, "tiny", installer="quick", force=True)
        assert asked(new.interpreter, "import tinypack; print(tinypack.VERSION)") == "2.0"
        with pytest.raises(Conflict, match=f"in use by process {running.pid}"):
            envs.remove(known, app, "tiny")
        assert running.communicate("go\n", timeout=60)[0] == "1.0\n"
    finally:
        running.kill()
        running.wait()
    envs.build(known, app, "tiny", installer="quick", force=True)
    assert not old.directory.exists()
    envs.remove(known, app, "tiny")
    assert list((known.data_dir / "envs").iterdir()) == []


def test_a_lock_that_is_removed_before_it_is_taken_does_not_count(tmp_path: Path, monkeypatch) -> None:
    known, app = tiny(tmp_path)
    where, real, taken = state.place(known, "tiny"), fcntl.flock, []

    def flock(file, how) -> None:
        if how & fcntl.LOCK_EX and not taken:
            where.lock.unlink()  # as `ostler env remove` does
        if how & fcntl.LOCK_EX:
            taken.append(file)
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    seen: list[str] = []
    envs.build(
        known, app, "tiny", installer="quick", tell=lambda line: seen.append(envs.look(known, app, "tiny").state)
    )
    assert len(taken) == 2
    assert seen[0] == "building"


def test_code_of_packages_sees_no_secret_of_the_node(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OSTLER_TOKEN", "geheim")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("PIP_INDEX_URL", "https://example.org/simple")

    class Telling(Quick):
        def commands(self, described, target):
            made = super().commands(described, target)
            return [*made, [sys.executable, "-c", "import os; print('SEEN', dict(os.environ))"]]

    known, app = tiny(tmp_path)
    monkeypatch.setattr(install, "find", lambda wanted: Telling("quick"))
    told: list[str] = []
    envs.build(known, app, "tiny", tell=told.append)
    (seen,) = [line for line in told if line.startswith("SEEN")]
    assert "https://example.org/simple" in seen
    assert "geheim" not in seen
    assert "/somewhere" not in seen


def test_an_environment_whose_interpreter_does_not_run_is_not_taken(tmp_path: Path, monkeypatch) -> None:
    class Breaking(Quick):
        def commands(self, described, target):
            made = super().commands(described, target)
            return [*made, ["ln", "-sf", "/bin/false", str(target / "bin" / "python")]]

    known, app = tiny(tmp_path)
    before = envs.build(known, app, "tiny", installer="quick")
    monkeypatch.setattr(install, "find", lambda wanted: Breaking("quick"))
    with pytest.raises(EnvError, match="does not run"):
        envs.build(known, app, "tiny", force=True)
    found = envs.look(known, app, "tiny")
    assert (found.state, found.interpreter) == ("failed", before.interpreter)


def test_a_dangling_interpreter_is_not_used(tmp_path: Path) -> None:
    known, app = tiny(tmp_path)
    built = envs.build(known, app, "tiny", installer="quick")
    (built.directory / "bin" / "python").unlink()
    found = envs.look(known, app, "tiny")
    assert (found.state, found.interpreter) == ("failed", None)
    with pytest.raises(EnvNotBuilt, match="its interpreter is gone"):
        envs.interpreter(known, app, "tiny")
    assert envs.build(known, app, "tiny", installer="quick").state == "ready"


def test_what_is_not_an_environment_is_not_replaced(tmp_path: Path) -> None:
    known, app = tiny(tmp_path)
    mine = known.data_dir / "envs" / "tiny" / "mine"
    mine.mkdir(parents=True)
    with pytest.raises(EnvError, match="is in the way"):
        envs.build(known, app, "tiny", installer="quick")
    assert mine.exists()


def test_an_environment_of_the_users_own_is_used_and_never_touched(tmp_path: Path) -> None:
    known = settings_of(tmp_path, '[env.own]\npath = "venv"\n')
    with pytest.raises(EnvNotBuilt, match=f"python3 -m venv {tmp_path}/venv"):
        envs.interpreter(known, Ostler(), "own")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    assert envs.interpreter(known, Ostler(), "own") == tmp_path / "venv" / "bin" / "python"
    assert envs.look(known, Ostler(), "own").python == "%d.%d.%d" % sys.version_info[:3]
    for order in (envs.build, envs.remove):
        with pytest.raises(EnvError, match="is your own"):
            order(known, Ostler(), "own")
    assert (tmp_path / "venv" / "bin" / "python").exists()


def test_an_environment_of_somebody_else_says_so(tmp_path: Path, monkeypatch) -> None:
    def refuse(self) -> None:
        raise PermissionError(13, "Permission denied", str(self.link))

    known, app = tiny(tmp_path)
    monkeypatch.setattr(state.Place, "current", refuse)
    (found,) = envs.listing(known, app)
    assert found.state == "failed"
    with pytest.raises(EnvNotBuilt, match="permission denied: .*tiny; build it as the user who runs it"):
        envs.interpreter(known, app, "tiny")


def test_the_command_in_the_error_builds_the_environment(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels")
    (tmp_path / "app.py").write_text(
        "from ostler import Ostler\napp = Ostler()\n"
        f"app.env('tiny', requirements={offline(tmp_path / 'wheels', 'tinypack')!r})\n"
    )
    app = Ostler()
    app.env("tiny")
    app.target = "app.py"
    known = config.load({"data": str(tmp_path / "data")}, environ={})
    with pytest.raises(EnvNotBuilt) as error:
        envs.interpreter(known, app, "tiny")
    assert error.value.code == "ENV_NOT_BUILT"
    command = str(error.value).partition("build it with: ")[2]
    assert command == f"ostler env build tiny --app app.py --data {tmp_path / 'data'}"
    done = subprocess.run([*OSTLER, *shlex.split(command)[1:]], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert envs.interpreter(known, app, "tiny").exists()


def test_passwords_of_an_index_are_shown_nowhere(tmp_path: Path) -> None:
    known, app = tiny(tmp_path, extra_index="https://me:geheim@127.0.0.1:1/simple")
    told: list[str] = []
    built = envs.build(known, app, "tiny", installer="pip", tell=told.append)
    kept = [p.read_text() for p in (known.data_dir / "envs" / "tiny.builds").iterdir() if p.is_file()]
    assert "//***@127.0.0.1:1" in "".join(told)
    assert "geheim" not in "".join([*told, *kept, json.dumps(envs.shown(built))])


@pytest.mark.skipif(other_python((3, 9), (3, 11)) is None, reason="no Python 3.9 or 3.10 is installed")
def test_an_environment_that_is_too_old_for_what_runs_in_it_is_refused(tmp_path: Path) -> None:
    known, app = tiny(tmp_path, python=other_python((3, 9), (3, 11)))
    built = envs.build(known, app, "tiny")
    assert built.python.startswith(("3.9.", "3.10."))
    assert envs.interpreter(known, app, "tiny") == built.interpreter
    with pytest.raises(EnvError, match="needs 3.11 or later"):
        envs.command(known, app, "tiny", "ostler.jobs.runner", "app.py")
    start = ROOT / "src" / "ostler" / "envs" / "start.py"
    done = subprocess.run([built.interpreter, start, "ostler.jobs.runner"], capture_output=True, text=True)
    assert (done.returncode, "jobs need Python 3.11 or later" in done.stderr) == (70, True)


@pytest.mark.skipif(other_python((3, 12), (3, 16)) is None, reason="no later Python is installed")
def test_another_python_is_used_where_it_is_named(tmp_path: Path, installer: str) -> None:
    python = other_python((3, 12), (3, 16))
    known, app = tiny(tmp_path, python=python)
    built = envs.build(known, app, "tiny", installer=installer)
    assert built.python == asked(python, "import platform; print(platform.python_version())")
