"""docs/models.md: every block of code is a file that works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ostler.app import load
from ostler.calls.model import ModelOptions
from tests.calls.bench import Bench, until, worker

DOC = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", DOC, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_of_the_documentation_declares_models_that_load_and_pass_their_example(
    tmp_path: Path, number: int
) -> None:
    file = tmp_path / f"models_{number}.py"
    file.write_text(BLOCKS[number])
    app = load(str(file))
    assert app.models
    for spec in app.models.values():
        for index, (model_id, options) in enumerate(spec.models.items()):
            if spec.is_server:
                continue
            assert getattr(spec.target, "example", None) is not None
            folder = tmp_path / f"{spec.name}{index}"
            folder.mkdir()
            with worker(
                folder, spec.name, model_id, target=str(file), batch=options.batch, concurrency=options.concurrency
            ) as bench:
                until(lambda: bench.get("/healthz").json["ready"], "ready")  # noqa: B023


def test_the_documented_defaults_are_the_defaults() -> None:
    table = dict(re.findall(r"^\| `(\w+)`[^|]*\| ([^|]+?) \|", DOC, re.MULTILINE))
    defaults = ModelOptions()
    for name in ("idle", "queue", "startup", "timeout", "workers", "concurrency", "pinned", "kill_on_cancel"):
        value = getattr(defaults, name)
        assert table[name] == (str(value) if isinstance(value, bool) else f"{value:g}"), name
    assert set(re.findall(r"`(\w+)`", DOC.partition("| option |")[2].partition("\n\n")[0])) >= set(
        ModelOptions.__dataclass_fields__
    )


def test_the_first_example_answers_as_the_page_says(tmp_path: Path) -> None:
    file = tmp_path / "first.py"
    file.write_text(BLOCKS[0])
    bench: Bench
    with worker(tmp_path, "embedding", target=str(file)) as bench:
        assert bench.call({"texts": ["a"]}).result == {"embeddings": [[97.0]]}
        assert bench.call({}).error == (400, "BAD_PAYLOAD", "texts must be a list")
