"""What holds the project together: layers, public names, documented settings, light workers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click

import ostler
from ostler import config
from ostler.cli import cli

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "ostler"

# Imports go down only. A file's layer is its folder (or its name, at the top level).
LAYERS = [
    {"cli", "__main__"},
    {"runtime"},
    {"pools", "registration"},
    {"folder"},
    {"check"},
    {"apps", "testing"},
    {"web"},
    {"live"},
    {"app", "declarations", "flows", "handles", "storing", "task"},
    {"plane"},
    {"jobs", "calls", "sessions"},
    {"lifecycle"},
    {"store"},
    {"envs"},
    {"private"},
    {"config", "errors", "events", "extras", "habits", "loading", "names", "parts", "settings", "tcp"},
]
# Programs of their own, like the CLI: they may load an app.
PROGRAMS = {"jobs/runner.py", "calls/running.py", "sessions/worker.py"}
RANK = {name: number for number, names in enumerate(LAYERS) for name in names}


def _imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for guard in ast.walk(tree)
        if isinstance(guard, ast.If) and isinstance(guard.test, ast.Name) and guard.test.id == "TYPE_CHECKING"
        for node in ast.walk(guard)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ostler"):
            found |= (
                {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "ostler" else {node.module}
            )
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("ostler.")}
    return found


def test_imports_go_down_only() -> None:
    wrong = []
    for path in SOURCE.rglob("*.py"):
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if own == "__init__" or str(path.relative_to(SOURCE)) in PROGRAMS:
            continue
        for name in _imports(path):
            parts = name.split(".")
            if len(parts) > 1 and parts[1] in RANK and RANK[parts[1]] < RANK[own]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_the_public_names_are_these() -> None:
    assert ostler.__all__ == sorted(ostler.__all__)
    assert set(ostler.__all__) == {
        "Artifact", "BadArguments", "BatchId", "Body", "CallBusy", "CallError", "CallRefused", "CallTimeout", "Cancel", "Cancelled", "Chain",
        "ConfigError", "Conflict", "Endpoint", "Fail", "InputError", "Job", "JobArtifact", "JobCancelled", "JobFailed", "JobId", "JobTimeout", "LostClaim", "ModelFailed", "NotFound", "Ostler", "OstlerError", "PayloadTooLarge", "Published", "Retry", "Snooze", "Step", "StoreBusy", "Task",
        "UnknownTask", "cancelled", "deadline", "load", "loading_progress",
    }  # fmt: skip
    assert all(hasattr(ostler, name) for name in ostler.__all__)


def test_importing_ostler_and_the_runner_loads_no_third_party_module() -> None:
    """A worker costs what its own imports cost."""
    code = (
        "import sys, ostler, ostler.jobs.runner\n"
        "outside = {m.partition('.')[0] for m in sys.modules} - set(sys.stdlib_module_names) - {'ostler', '__main__'}\n"
        "heavy = {'asyncio', 'sqlite3', 'http', 'ostler.store', 'ostler.web', 'ostler.runtime', 'ostler.lifecycle.supervisor'} & set(sys.modules)\n"
        "print(sorted(n for n in outside if not n.startswith('_')), sorted(heavy))\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(SOURCE.parent)},
    )
    assert done.stdout.strip() == "[] []"


def test_every_command_is_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    missing = [name for name in cli.list_commands(click.Context(cli)) if f"ostler {name}" not in page]
    assert missing == [], f"docs/cli.md does not name {missing}"


def test_every_setting_is_documented_with_its_variable_and_default() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    for name, field in config.NODE_KEYS.items():
        row = re.search(rf"^\| `{name}` \| `OSTLER_{name.upper()}` \| `?([^|`]*)`? \|", text, re.MULTILINE)
        assert row, f"docs/settings.md has no row for {name}"
        default = field.default
        whole = isinstance(default, float) and default == int(default)
        shown = (
            str(default).lower() if isinstance(default, bool) else str(int(default)) if whole else str(default) or '""'
        )
        assert row.group(1).strip() == shown, f"{name}: documented as {row.group(1)!r}, is {shown!r}"
    for name in config.POOL_KEYS:
        assert f"`{name}`" in text.partition("[pools.")[2], f"docs/settings.md does not name pools.<name>.{name}"


def test_every_setting_can_come_from_toml_environment_and_flags(tmp_path: Path) -> None:
    values = {"str": "debug", "int": 7, "float": 45.5, "bool": True}
    for name, field in config.NODE_KEYS.items():
        value = values[str(field.type)]
        if name in ("store", "data", "name", "token", "host"):
            value = "localhost"
        value = {"registry": "redis://localhost", "log_format": "json"}.get(name, value)
        toml = tmp_path / "o.toml"
        text = {True: "true"}.get(value, repr(value)) if isinstance(value, bool) else repr(value)
        base = "".join(f"{n} = 1000\n" for n in ("stale_after", "node_lease") if n != name)
        toml.write_text(f"{base}{name} = {text}\n".replace("'", '"'))
        assert getattr(config.load(file=toml, environ={}), name) == value
        variables = {"OSTLER_STALE_AFTER": "1000", "OSTLER_NODE_LEASE": "1000"} | {f"OSTLER_{name.upper()}": str(value)}
        if name in ("stale_after", "node_lease"):
            variables["OSTLER_HEARTBEAT_INTERVAL"] = "5"
        assert getattr(config.load(environ=variables), name) == value
        flags = {"stale_after": 1000.0, "node_lease": 1000.0} | {name: value}
        assert getattr(config.load(flags, environ=variables | {f"OSTLER_{name.upper()}": str(value)}), name) == value


def test_flags_beat_environment_beats_toml_beats_code(tmp_path: Path) -> None:
    toml = tmp_path / "o.toml"
    toml.write_text("data = 'toml'\nport = 1\nname = 'toml'\n[pools.tag]\nworkers = 1\nstop_grace = 3\n")
    found = config.load(
        {"name": "flag", "pools": {"tag": 9}},
        code={"data": "code", "store": "sqlite"},
        file=toml,
        environ={"OSTLER_PORT": "2", "OSTLER_NAME": "env", "OSTLER_POOLS": "tag=5,b=6"},
    )
    assert (found.store, found.data, found.port, found.name) == ("sqlite", "toml", 2, "flag")
    assert (found.pools["tag"].workers, found.pools["tag"].stop_grace, found.pools["b"].workers) == (9, 3.0, 6)


def test_a_pool_takes_its_own_then_the_codes_then_the_nodes_value() -> None:
    settings = config.load({"pools": {"a": 4}}, environ={})
    declared = config.PoolSettings(workers=7, stop_grace=1.0)
    found = settings.pool("a", declared)
    assert (found.workers, found.stop_grace, found.startup_deadline) == (4, 1.0, 60.0)
    assert settings.pool("b").workers == 2


def test_the_defaults_are_the_designs() -> None:
    s = config.Settings()
    assert (s.heartbeat_interval, s.stale_after, s.startup_deadline, s.stop_grace, s.term_grace) == (5, 30, 60, 10, 2)
    assert (s.healthy_after, s.restart_limit, s.restart_window, s.restart_lifetime, s.backoff_max) == (
        300,
        5,
        300,
        20,
        60,
    )
    assert (s.port, s.host, s.data, s.max_payload, s.poll_interval, s.crash_limit) == (
        8356,
        "127.0.0.1",
        ".ostler",
        1_048_576,
        1,
        2,
    )


def test_files_stay_small() -> None:
    long = {str(p.relative_to(SOURCE)): n for p in SOURCE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 400}
    assert long == {}


def test_the_version_is_the_same_everywhere() -> None:
    assert _pyproject()["project"]["version"] == ostler.__version__
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings, "CHANGELOG.md has no section"
    released = [name for name in headings if name != "Unreleased"]
    assert released[:1] in ([], [ostler.__version__]), "the newest release in CHANGELOG.md is another version"


def test_the_linters_exceptions_are_for_files_that_exist() -> None:
    patterns = _pyproject()["tool"]["ruff"]["lint"]["per-file-ignores"]
    assert [pattern for pattern in patterns if not any(ROOT.glob(pattern))] == []


def _pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_tests_that_the_requirements_name_exist() -> None:
    text = (ROOT / "docs" / "requirements.md").read_text()
    named = re.findall(r"`((?:[a-z_]+/)?test_[a-z_]+\.py)::(test_\w+)`", text)
    assert len(named) > 50
    missing = [f"{file}::{test}" for file, test in named if f"def {test}(" not in (ROOT / "tests" / file).read_text()]
    assert missing == []


def test_no_path_of_one_machine_is_in_the_project() -> None:
    files = _files()
    assert {"README.md", "pyproject.toml", "src/ostler/__init__.py"} <= set(files)
    own = str(Path(__file__).relative_to(ROOT))
    machine = re.compile(r"(^|[^\w.-])/(work|root)/", re.MULTILINE)
    assert [f for f in files if f != own and machine.search((ROOT / f).read_text(errors="replace"))] == []


def _files() -> list[str]:
    """What belongs to the project: what git lists, or, in an unpacked archive, all that is no build product."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        return [f for f in listed.stdout.splitlines() if (ROOT / f).is_file()]
    parts = [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()]
    return [str(p) for p in parts if not any(q.startswith(".") or q == "__pycache__" for q in p.parts)]
