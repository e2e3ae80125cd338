"""Other users of the machine, for real: processes that run as somebody else. Needs root; without it the tests are skipped."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ROOT

NOBODY, STRANGER = 65534, 65533
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it runs processes of two users")


@functools.cache
def _python() -> tuple[str, ...] | None:
    """A Python that every user can run, with our modules; this one may be in somebody's home."""
    for program in (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
        argv = (program, "-c", "import ostler.runtime")
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            try:
                done = subprocess.run(
                    argv, env=_env(), user=NOBODY, group=NOBODY, extra_groups=[], cwd=folder, capture_output=True
                )
            except OSError:
                continue
        if done.returncode == 0:
            return (program,)
    return None


def _env() -> dict[str, str]:
    own = [str(ROOT.parent / "src"), str(ROOT.parent)]  # an editable install is known to its own environment alone
    paths = [os.environ.get("PYTHONPATH", ""), *(p for p in sys.path if p.endswith("site-packages")), *own]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": "/",
    }


def python() -> tuple[str, ...]:
    found = _python()
    if found is None:
        pytest.skip("no Python on this machine can be run by another user with the project's modules")
    return found


def popen(uid: int, *args: str, groups: tuple[int, ...] = (), umask: int = 0o022, **more: Any) -> subprocess.Popen[str]:
    """Python with these arguments, as the user."""
    env = {**_env(), **more.pop("env", {})}
    return subprocess.Popen(
        [*python(), *args], env=env, user=uid, group=uid, extra_groups=list(groups), umask=umask, text=True, **more
    )


def run(uid: int, *args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """The same, to its end."""
    with popen(uid, *args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/", **more) as process:
        out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def status(uid: int, url: str, *, method: str = "GET", **headers: str) -> int:
    """What a request of that user is answered with."""
    code = (
        "import sys, json, urllib.request, urllib.error\n"
        "request = urllib.request.Request(sys.argv[1], method=sys.argv[2], headers=json.loads(sys.argv[3]))\n"
        "try:\n    print(urllib.request.urlopen(request, timeout=30).status)\n"
        "except urllib.error.HTTPError as error:\n    print(error.code)\n"
    )
    import json

    done = run(uid, "-c", code, url, method, json.dumps(headers))
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can get to (pytest's own is root's alone)."""
    folder = Path(tempfile.mkdtemp(prefix="ostler-users-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
