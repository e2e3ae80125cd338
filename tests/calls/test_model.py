"""Declaring models: options, ids, checks and names; and what a file may import in the environment of a model."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ostler
from ostler import ConfigError, InputError, Ostler
from ostler.calls.launch import launch
from ostler.calls.model import ModelOptions, seconds
from ostler.errors import BadArguments, NotFound


class Model:
    def load(self, model_id): ...

    def infer(self, payload): ...


class Batched(Model):
    def infer_batch(self, payloads): ...


def declared(target=Model, **options):
    app = Ostler()
    assert app.model("embedding", **options)(target) is target
    return app.models["embedding"]


def test_options_of_an_id_are_put_over_those_of_all() -> None:
    spec = declared(
        models={"minilm": {}, "org/big:7b": {"env": "big", "gpu_mb": 9000, "pinned": True, "idle": "5m"}},
        idle=30,
        timeout="2m",
    )
    assert spec.options("minilm") == ModelOptions(idle=30.0, timeout=120.0)
    assert spec.options("org/big:7b") == ModelOptions(env="big", gpu_mb=9000, pinned=True, idle=300.0, timeout=120.0)
    with pytest.raises(NotFound, match=r"embedding has no model 'x'; known: minilm, org/big:7b"):
        spec.options("x")


def test_without_ids_the_one_id_is_the_name_and_a_list_is_enough() -> None:
    assert list(declared().models) == ["embedding"]
    assert list(declared(models=["a", "b"]).models) == ["a", "b"]


def test_any_id_is_taken_where_it_is_asked_for_but_none_that_leads_out_of_a_directory() -> None:
    spec = declared(any_model=True, max_models=3, models={"known": {"gpu_mb": 5}})
    assert (spec.max_models, spec.options("org/new:1").gpu_mb, spec.options("known").gpu_mb) == (3, 0, 5)
    for wrong in ("", "a" * 201, "a\nb", "../x", "a/../../x", "a\\..\\x", "/etc/passwd", "~/x", None, 5):
        with pytest.raises(BadArguments):
            spec.options(wrong)
    assert declared(any_model=True).models == {}
    assert spec.options("a..b/c...d").idle == 60


def test_the_defaults_are_the_documented_ones() -> None:
    one = declared().options("embedding")
    assert one == ModelOptions(idle=60.0, batch=1, concurrency=1, workers=1, queue=100, startup=120.0, timeout=300.0)
    assert (one.env, one.pinned, one.preload, one.kill_on_cancel, one.park, one.files) == (
        None,
        False,
        False,
        False,
        None,
        (),
    )
    assert (
        one.connections,
        declared(Batched, batch=8).common.connections,
        declared(concurrency=3).common.connections,
    ) == (1, 16, 3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"idel": 5}, "has no option 'idel'; known: env,"),
        ({"idle": "soon"}, "idle must be a number of seconds or text such as \"5m\", found 'soon'"),
        ({"idle": float("nan")}, "idle must be"),
        ({"idle": True}, "idle must be"),
        ({"timeout": 0}, "timeout must be more than 0 seconds, found 0"),
        ({"startup": -1}, "startup must be more than 0"),
        ({"gpu_mb": -5}, "gpu_mb must be a number from 0 to 1e+09, found -5"),
        ({"memory_mb": "8 GB"}, "memory_mb must be a number"),
        ({"concurrency": 0}, "concurrency must be a whole number from 1 to 256, found 0"),
        ({"workers": 1.5}, "workers must be a whole number"),
        ({"queue": True}, "queue must be a whole number"),
        ({"batch": 4}, "batch=4 needs a method infer_batch"),
        ({"batch_wait": 60}, "batch_wait must be a number from 0 to 10, found 60"),
        ({"pinned": "yes"}, "pinned must be True or False, found 'yes'"),
        ({"env": "../x"}, "env must be the name of an environment or None"),
        ({"models": "minilm"}, "models must be a list of ids"),
        ({"models": []}, "models is empty"),
        ({"models": [5]}, "printable characters, found 5"),
        ({"models": ["a\r\nb"]}, "printable characters"),
        ({"models": {"a": None}}, "the options of 'a' must be a dict"),
        ({"models": {"a": {"idle": "x"}}}, "model 'embedding', 'a': idle must be"),
        ({"models": {"a": {"models": {}}}}, "has no option 'models'"),
        ({"max_models": 0}, "max_models must be a whole number from 1"),
    ],
)
def test_a_wrong_option_is_refused_with_what_was_found(options: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        declared(**options)


def test_batch_and_concurrency_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"batch=8 and concurrency=2 cannot be combined; use workers="):
        declared(Batched, batch=8, concurrency=2)
    with pytest.raises(ConfigError, match="cannot be combined"):
        declared(Batched, batch=8, models={"a": {"concurrency": 2}})


def test_a_class_that_cannot_be_a_model_is_refused() -> None:
    class NoLoad:
        def infer(self, payload): ...

    class NoInfer:
        def load(self, model_id): ...

    class Wrong(Model):
        def infer(self): ...

    class Sleepy(Model):
        def park(self): ...

    for target, says in [
        (NoLoad, "class NoLoad has no method load; it needs load(self, model_id) and infer(self, payload)"),
        (NoInfer, "class NoInfer has no method infer"),
        (Wrong, "Wrong.infer(self) must take one argument: def infer(self, payload)"),
        (Sleepy, "needs both park and wake, or neither"),
        (len, "must be a class"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(says)):
            declared(target)
    assert declared(type("Only", (), {"load": Model.load, "infer_batch": Batched.infer_batch})).streams is False


def test_a_name_is_used_once_by_a_queue_a_command_or_a_model() -> None:
    app = Ostler()
    app.model("a")(Model)
    app.command("b", ["sleep", "1"])

    @app.job(queue="c")
    def work(job): ...

    for name, kind in (("a", "a model"), ("b", "a command"), ("c", "the queue of job 'work'")):
        said = rf"{name!r} is already the name of {kind} \(test_model.py, line \d+\); this \(test_model.py, line \d+\) needs another"
        with pytest.raises(ConfigError, match=said):
            app.model(name)(Model)
        with pytest.raises(ConfigError, match=said):
            app.server(name, ["x", "{port}"])
    with pytest.raises(ConfigError, match="'a' is already the name of a model"):
        app.command("a", ["x"])
    with pytest.raises(ConfigError, match=r"of a model \(.*\); the queue of job '<lambda>' \(.*\) needs"):
        app.job(queue="a")(lambda job: None)
    for wrong in ("plane", "a/b", "", "x" * 64, "ä"):
        with pytest.raises(ConfigError):
            app.model(wrong)(Model)
    with pytest.raises(ConfigError, match=re.escape('write @app.model("name")')):
        app.model(Model)


def test_a_server_says_how_it_is_reached_and_when_it_is_ready() -> None:
    app = Ostler()
    app.server(
        "llm",
        ["llama-server", "-m", "{model}", "--port", "{port}"],
        ready="http:/health",
        concurrency=4,
        idle=-1,
        variables={"A": "{n}"},
    )
    spec = app.models["llm"]
    assert (spec.is_server, spec.argv[0], spec.ready, spec.options("llm").concurrency, spec.options("llm").idle) == (
        True, "llama-server", "http:/health", 4, -1.0,
    )  # fmt: skip
    for argv, more, says in [
        ("llama-server", {}, "argv must be a list of strings"),
        ([], {}, "argv must be a list of strings"),
        (["x"], {}, "put {port} or {socket}"),
        (["x", "{prot}"], {}, "{prot} is not a placeholder; use {port}, {socket}, {model}, {n}"),
        (["x", "{port}"], {"ready": "soon"}, "is not a probe"),
        (["x", "{port}"], {"ready": "line:("}, "is not a regular expression"),
        (["x", "{port}"], {"batch": 2}, "a server does its own batching"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(says)):
            app.server("other", argv, **more)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (5, 5.0),
        (0, 0.0),
        (-1, -1.0),
        (-7, -1.0),
        ("90", 90.0),
        ("5m", 300.0),
        ("1.5h", 5400.0),
        ("2d", 172_800.0),
        ("250ms", 0.25),
        ("-1", -1.0),
        ("-1m", -1.0),
    ],
)
def test_durations_are_numbers_or_texts(value: object, found: float) -> None:
    assert seconds(value, "idle") == found


def test_the_worker_of_another_environment_gets_no_path_of_the_node() -> None:
    argv = launch(
        "/e/bin/python", "app.py", "t", "org/m:1", ModelOptions(env="e", batch=4), run="/r", socket="t.0.1.sock"
    )
    assert argv[:3] == ["/e/bin/python", "-E", "-s"]
    assert argv[4:8] == ["app.py", "t", "org/m:1", "t.0.1.sock"]
    assert json.loads(argv[8]) == {
        "foreign": True, "env": "e", "concurrency": 1, "batch": 4, "batch_wait": 0.0, "max_body": 67_108_864, "run": "/r",
    }  # fmt: skip
    own = launch(sys.executable, "app.py", "t", "m", ModelOptions(), run="/r", socket="s")
    assert own[1].endswith("worker.py")
    assert json.loads(own[-1])["foreign"] is False


# ---- the stand-in


PACKAGE = Path(ostler.__file__).parent
STANDIN = PACKAGE / "calls" / "standin"


def test_the_stand_in_has_every_public_name() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(STANDIN)!r})\n"
        f"import ostler; assert 'standin' in ostler.__file__\n"
        f"for name in {ostler.__all__!r}: getattr(ostler, name)\n"
        "import ostler.errors, ostler.lifecycle.child\n"
        "assert 'standin' not in ostler.errors.__file__\n"
        "print(sorted(m for m in sys.modules if m.startswith('ostler.') and 'standin' not in m))\n"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, env={}, cwd="/")
    assert done.returncode == 0, done.stderr
    assert "ostler.config" not in done.stdout


def foreign_files() -> list[Path]:
    """What runs in the environment of a model."""
    own = "answer body current inline looped model request running serving threads worker __init__".split()
    files = [PACKAGE / "calls" / f"{name}.py" for name in own] + sorted(STANDIN.rglob("*.py"))
    files += [PACKAGE / "lifecycle" / f"{name}.py" for name in ("__init__", "child", "wire", "family")]
    return [
        *files,
        PACKAGE / "errors.py",
        PACKAGE / "loading.py",
        PACKAGE / "jobs" / "outcome.py",
        PACKAGE / "jobs" / "__init__.py",
    ]


# Fine in Python 3.11 and an error at run time in 3.9, where no parser sees it.
PITFALLS = {
    "slots=True": r"dataclass\([^)]*(slots|kw_only)=",
    "zip(strict=)": r"zip\([^)]*strict=",
    "tomllib and the like": r"^\s*(import|from) (tomllib|annotationlib)",
    "typing names": r"from typing import .*\b(Self|ParamSpec|Concatenate|TypeAlias|Unpack|Never|assert_never|StrEnum)\b",
    "asyncio.timeout, TaskGroup, Runner": r"asyncio\.(timeout|TaskGroup|Runner|Barrier)\b",
    "except*": r"except\*",
    "add_note": r"\.add_note\(",
    "int | float in isinstance": r"isinstance\([^()]*,\s*\w+ \| \w+\)",
    "format_exception of one argument": r"(format|print)_exception\(\w+\)",
    "datetime.UTC": r"datetime\.UTC",
    "itertools.pairwise, batched": r"\b(pairwise|batched)\(",
    "waitstatus of child": r"contextlib\.chdir",
}


@pytest.mark.parametrize("path", foreign_files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_what_runs_in_another_environment_is_python_3_9(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text, feature_version=(3, 9))
    assert not any(isinstance(node, ast.Match) for node in ast.walk(tree))
    annotated = any(isinstance(n, (ast.FunctionDef, ast.AnnAssign)) for n in ast.walk(tree))
    assert "from __future__ import annotations" in text or not annotated or path.name == "worker.py"
    allowed = {"isinstance(after, int | float)"} if path.name == "outcome.py" else set()  # only when a job raises it
    found = [
        name
        for name, mark in PITFALLS.items()
        if any(m.group() not in allowed for m in re.finditer(mark, text, re.MULTILINE))
    ]
    assert found == []
    imported = {n.name for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names} | {
        node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level
    }
    outside = {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names) - {"ostler"}
    assert outside == set()


def test_input_errors_are_known_to_models() -> None:
    assert issubclass(NotFound, InputError)


def test_an_async_chat_needs_an_async_infer() -> None:
    class Model:
        def load(self, model_id: str) -> None: ...
        def infer(self, payload: object) -> object: ...
        async def chat(self, messages: object, options: object) -> object: ...

    with pytest.raises(ConfigError, match="Model.chat is async, so infer must be async"):
        Ostler().model("talk")(Model)
