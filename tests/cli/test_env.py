"""`ostler env` as a user types it. Builds take pip or uv as they are found; nothing needs the network."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.environments import OSTLER, UV, wheel
from tests.harness import gone, until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    wheel(tmp_path / "wheels")
    lines = '["--no-index", "--find-links wheels", "tinypack"]'
    (tmp_path / "ostler.toml").write_text(
        f'[env.tiny]\nrequirements = {lines}\n[env.own]\npath = "venv"\n[env.broken]\nrequirements = "gone.txt"\n'
    )
    return tmp_path


def ostler(folder: Path, *args: str, status: int = 0, **env: str) -> str:
    done = subprocess.run(
        [*OSTLER, "env", *args], cwd=folder, capture_output=True, text=True, timeout=110, env={**os.environ, **env}
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def listed(folder: Path) -> dict[str, str]:
    return {e["name"]: e["state"] for e in json.loads(ostler(folder, "list", "--json"))["envs"]}


@pytest.mark.parametrize(
    "installer",
    [
        pytest.param("pip", marks=pytest.mark.soak),
        pytest.param("uv", marks=pytest.mark.skipif(UV is None, reason="uv is not installed")),
    ],
)
def test_an_environment_from_its_description_to_its_end(folder: Path, installer: str) -> None:
    assert listed(folder) == {"broken": "not built", "own": "not built", "tiny": "not built"}
    said = ostler(folder, "show", "tiny")
    assert "tiny is not built" in said
    assert "build it with: ostler env build tiny" in said
    said = ostler(folder, "build", "tiny", "--installer", installer)
    assert "building environment 'tiny'" in said
    assert "tinypack" in said
    assert "environment 'tiny' is ready: Python 3." in said
    assert listed(folder)["tiny"] == "ready"
    assert "is ready; --force builds it again" in ostler(folder, "build", "tiny", "--installer", installer)
    told = json.loads(ostler(folder, "show", "tiny", "--json"))
    assert told["installer"] == installer
    assert told["interpreter"].startswith(str(folder / ".ostler" / "envs"))
    assert "ready" in ostler(folder, "list")
    assert "removed environment tiny" in ostler(folder, "remove", "tiny")
    assert listed(folder)["tiny"] == "not built"


def test_what_cannot_be_built_says_why_and_ends_with_2(folder: Path) -> None:
    said = ostler(folder, "build", "broken", status=2)
    assert said == f"ostler: the requirements file {folder / 'gone.txt'} does not exist\n"
    assert listed(folder)["broken"] == "failed"
    assert "gone.txt does not exist" in ostler(folder, "show", "broken")
    assert "is your own" in ostler(folder, "build", "own", status=2)
    assert "environment 'tinny' is not described; did you mean 'tiny'?" in ostler(folder, "build", "tinny", status=2)
    assert "name an environment, or --all" in ostler(folder, "build", status=2)


def test_all_are_built_even_if_one_of_them_cannot_be(folder: Path) -> None:
    said = ostler(folder, "build", "--all", status=2)
    assert "ostler: not built: broken; " in said
    assert listed(folder) == {"broken": "failed", "own": "not built", "tiny": "ready"}


def test_environments_of_an_app_and_in_another_directory(folder: Path) -> None:
    (folder / "app.py").write_text("from ostler import Ostler\napp = Ostler()\napp.env('coded')\n")
    assert "environment 'coded' is not described" in ostler(folder, "show", "coded", status=2)
    said = ostler(folder, "show", "coded", "--app", "app.py", OSTLER_ENV_DIR=str(folder / "venvs"))
    assert "build it with: ostler env build coded --app app.py" in said
    ostler(folder, "build", "coded", "--app", "app.py", OSTLER_ENV_DIR=str(folder / "venvs"))
    assert (folder / "venvs" / "coded" / "bin" / "python").exists()
    assert not (folder / ".ostler").exists()
    # Without the app it is still seen, and can be removed.
    assert "nothing describes it any more" in ostler(folder, "list", OSTLER_ENV_DIR=str(folder / "venvs"))
    assert "any more; 'ostler env remove coded'" in ostler(
        folder, "build", "coded", status=2, OSTLER_ENV_DIR=str(folder / "venvs")
    )
    ostler(folder, "remove", "coded", OSTLER_ENV_DIR=str(folder / "venvs"))
    assert list((folder / "venvs").iterdir()) == []


def test_no_environments_is_one_sentence(tmp_path: Path) -> None:
    assert ostler(tmp_path, "list").startswith("no environments are declared; add [env.NAME] to ostler.toml")


def test_a_build_that_is_told_to_end_leaves_nothing_that_runs(folder: Path) -> None:
    # An sdist whose build never ends: pip runs its backend in a process of its own.
    stuck = folder / "stuck"
    stuck.mkdir()
    (stuck / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "slow"\nbackend-path = ["."]\n[project]\nname = "stuck"\nversion = "1"\n'
    )
    (stuck / "slow.py").write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(folder / 'pid')!r}).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    (folder / "ostler.toml").write_text('[env.stuck]\nrequirements = ["--no-index", "./stuck"]\n')
    builder = subprocess.Popen(
        [*OSTLER, "env", "build", "stuck", "--installer", "pip"], cwd=folder, stdout=subprocess.DEVNULL
    )
    until(lambda: (folder / "pid").exists() and (folder / "pid").read_text(), "the backend to run")
    assert listed(folder) == {"stuck": "building"}
    builder.send_signal(signal.SIGTERM)
    assert builder.wait(60) == 130
    pid = int((folder / "pid").read_text())
    until(lambda: gone(pid), "the backend to end")
    assert listed(folder) == {"stuck": "failed"}
    assert "the last build broke off" in ostler(folder, "show", "stuck")
