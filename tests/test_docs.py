"""Every code block of README.md, docs/ and examples/ runs as printed, or says why it does not; every link leads somewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import ostler
from ostler import config, testing
from ostler.testing import Bench
from ostler.web.extend import NodeApi
from ostler.apps.browsers import installed
from tests import docs
from tests.harness import Node
from tests.stores import new_database

ROOT = docs.ROOT
INNER = {ostler.JobId: ("of",), ostler.BatchId: ("of",), NodeApi: ("gpu_lock_held",)}  # public for Ostler itself
NOT_RUN = 35  # more would be noticed here; fewer are welcome: lower it then


def python(what: str, plan: list[dict], folder: Path, **environ: str) -> None:
    """Run the Python blocks in a process of their own."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.docs", what, json.dumps(plan)],
        capture_output=True, text=True, timeout=300, cwd=folder, env={**os.environ, "PYTHONPATH": path, **environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def uses_node(page: str) -> bool:
    shell = any(block.kind in ("shell", "sql") for block in docs.blocks(page))
    return shell or any(program.needs_node for program in docs.programs(page))


def prepare(page: str, folder: Path) -> dict[str, str]:
    """What the blocks of a page take for granted, as files and variables."""
    if page == "docs/browsers.md":
        if not installed.find("chromium"):
            pytest.skip("there is no Chromium")
    if page == "docs/models.md":
        (folder / "photo.png").write_bytes(bytes(range(256)))
    if page == "docs/clips.md":
        from imageio_ffmpeg import get_ffmpeg_exe

        source = ["-f", "lavfi", "-i", "testsrc=size=160x120:rate=25:duration=6", "-pix_fmt", "yuv420p"]
        subprocess.run([get_ffmpeg_exe(), *source, folder / "a.mp4"], check=True, capture_output=True, timeout=60)
        return {"OSTLER_CLIPS_ROOTS": str(folder)}
    return {}


PAGES = [page for page in docs.pages() if uses_node(page)]


def test_every_block_is_run_or_parsed_or_says_why_it_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    found = [block for page in docs.pages() for block in docs.blocks(page)]
    fences = sum(len(re.findall(r"^ *```", (ROOT / page).read_text(), re.MULTILINE)) for page in docs.pages())
    assert fences == 2 * len(found), "a fence is not closed, or is written in a way that tests/docs.py does not know"
    kinds = Counter(block.kind for block in found)
    reasons = Counter(block.reason for block in docs.not_run())
    with capsys.disabled():
        print(f"\nblocks of the docs: {dict(kinds)}; not run: {reasons.total()}")
        print(*(f"{count:4} {reason}" for reason, count in reasons.most_common()), sep="\n")
    unknown = [
        block.where for block in found if block.kind not in ("python", "shell", "sql", "data", "shown", "not run")
    ]
    assert not unknown, "these need a reason: <!-- not run: … --> on the line before the block"
    assert reasons.total() <= NOT_RUN


def test_every_program_of_the_docs_can_be_loaded_by_a_node(tmp_path: Path) -> None:
    plan = []
    for number, page in enumerate(docs.pages()):
        (folder := tmp_path / str(number)).mkdir()
        plan += docs.write(page, folder, docs.ADDRESS)
    python("load", plan, tmp_path)


@pytest.mark.parametrize(
    "block", [b for p in docs.pages() for b in docs.blocks(p) if b.kind == "data"], ids=lambda b: b.where
)
def test_blocks_of_data_can_be_parsed(block: docs.Block, tmp_path: Path) -> None:
    assert docs.data(block)
    if block.language == "toml":  # all of them are parts of an ostler.toml
        (tmp_path / "ostler.toml").write_text(block.text)
        assert config.load(file=tmp_path / "ostler.toml", environ={})


@pytest.mark.timeout(600)  # up to a dozen processes start, one command after another
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_as_printed(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run = [block for block in docs.blocks(page) if block.kind in ("python", "shell", "sql")]
    if any(block.kind == "sql" or "psycopg" in block.text for block in run):
        with new_database(request.getfixturevalue("postgres")) as url:
            run_page(page, tmp_path, url)
    else:
        run_page(page, tmp_path, "sqlite")


def run_page(page: str, folder: Path, store: str) -> None:
    environ = {"OSTLER_STORE": store, "OSTLER_WORKERS": "1", **prepare(page, folder)}
    docs.write(page, folder, docs.ADDRESS)
    apps = re.findall(r"ostler up (ostler\.apps\.\w+)", "".join(b.text for b in docs.blocks(page) if b.kind == "shell"))
    node = Node(folder / "data", apps[0] if apps else folder / "page.py", **environ)
    try:
        address = node.start().url.removeprefix("http://")
        plan = docs.write(page, folder, address)
        environ["OSTLER_DATA"] = str(node.folder)
        if any(program.needs_node for program in docs.programs(page)):
            python("perform", plan, folder, **environ)
        bin = docs.shims(folder / "bin")
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environ |= {
            "PATH": f"{bin}:{os.environ['PATH']}",
            "PYTHONPATH": path,
            "OSTLER_DOCS_PYTHON": sys.executable,
            "OSTLER_DOCS_ROOT": str(ROOT),
        }
        (folder / ".venv").mkdir()
        (folder / ".venv" / "bin").symlink_to(bin)
        (folder / "examples").symlink_to(ROOT / "examples")
        wrong = []
        for block in docs.blocks(page):
            if block.kind == "shell":
                wrong += docs.shell(block, address, {**os.environ, **environ}, folder)
            elif block.kind == "sql":
                docs.sql(block, store)
        assert not wrong, "\n\n".join(wrong)
    finally:
        if node.process is not None and node.process.poll() is None:
            node.kill()


# ---- what the pages say


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", "")).replace(" ", "-")


def prose(path: Path) -> str:
    return re.sub(r"^ *```.*?^ *```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_every_relative_link_leads_to_a_file_and_a_heading() -> None:
    sources = [ROOT / page for page in docs.pages()] + [
        ROOT / docs.TUTORIAL,
        *(ROOT / "docs" / "decisions").glob("*.md"),
        ROOT / "CHANGELOG.md",
    ]
    anchors: dict[Path, set[str]] = {}
    broken = []
    for source in sources:
        for link in re.findall(r"\]\(([^)\s]+)\)", prose(source)):
            if re.match(r"\w+:", link):
                continue
            page, _, anchor = link.partition("#")
            target = (source.parent / page).resolve() if page else source
            if not target.exists():
                broken.append(f"{source.name}: {link}")
            elif anchor:
                if target not in anchors:
                    anchors[target] = {slug(head) for head in re.findall(r"^#+ (.+)$", prose(target), re.MULTILINE)}
                if anchor not in anchors[target]:
                    broken.append(f"{source.name}: {link} (no such heading)")
    assert not broken


def test_every_public_name_is_explained() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    rows = dict(re.findall(r"^\| (.+?) \| (.+) \|$", page, re.MULTILINE))
    explained = {name for names, said in rows.items() if len(said) > 15 for name in re.findall(r"`(\w+)[`(]", names)}
    explained |= set(re.findall(r"^`(\w+)\([^`]*\)` \w+", page, re.MULTILINE))  # a paragraph that begins with it
    assert sorted({*ostler.__all__, *testing.__all__} - explained) == []
    methods = {name for name in dir(ostler.Ostler) if not name.startswith("_")}
    used = {name for name in methods if callable(getattr(ostler.Ostler, name))} - {"env_of", "serve", "settings"}
    assert {"job", "batch", "call"} <= used
    assert [name for name in sorted(used) if not re.search(rf"`@?(await )?app\.{name}[(`]|`{name}`", page)] == []


@pytest.mark.parametrize(
    "kind", [Bench, NodeApi, ostler.Artifact, ostler.BatchId, ostler.Job, ostler.JobId, ostler.Task]
)
def test_every_method_is_explained(kind: type) -> None:
    text = "".join((ROOT / "docs" / f"{page}.md").read_text() for page in ("artifacts", "jobs", "python"))
    names = [name for name in vars(kind) if not name.startswith("_") and name not in INNER.get(kind, ())]
    assert [name for name in names if not re.search(rf"[.`]{name}\b", text)] == []
