from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from ostler import Ostler
from ostler.check import warnings
from ostler.errors import BadArguments, ConfigError, PayloadTooLarge
from ostler.jobs import signature
from ostler.jobs.handle import Job


def task(
    job: Any, name: str, size: int, ratio: float = 1.0, flags: list[bool] | None = None, mode: Literal["a", "b"] = "a"
) -> None: ...


PARAMETERS = signature.describe(task).parameters


@pytest.mark.parametrize(
    "args",
    [
        {"name": "x", "size": 1},
        {"name": "x", "size": 1, "ratio": 2, "flags": [True], "mode": "b"},
        {"name": "x", "size": 1, "ratio": 2.5, "flags": None},
    ],
)
def test_arguments_that_fit_are_taken(args: dict[str, Any]) -> None:
    signature.check("task", PARAMETERS, args)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({"size": 1}, "'name' is missing"),
        ({"name": 5, "size": 1}, "'name' must be str, found 5"),
        ({"name": "x", "size": "1"}, "'size' must be int"),
        ({"name": "x", "size": True}, "'size' must be int"),
        ({"name": "x", "size": 1.5}, "'size' must be int"),
        ({"name": "x", "size": 1, "more": 2}, "'more' is not a parameter"),
        ({"name": "x", "size": 1, "flags": [1]}, "'flags' must be list of bool or null"),
        ({"name": "x", "size": 1, "mode": "c"}, '\'mode\' must be one of "a", "b"'),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_words(args: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadArguments, match=".") as raised:
        signature.check("task", PARAMETERS, args)
    assert complaint in str(raised.value)
    assert "It takes (name: str, size: int" in str(raised.value)


def test_all_complaints_come_at_once() -> None:
    with pytest.raises(BadArguments) as raised:
        signature.check("task", PARAMETERS, {"size": "x", "y": 1})
    assert all(
        word in str(raised.value) for word in ("'name' is missing", "'size' must be int", "'y' is not a parameter")
    )


def test_extra_keywords_are_taken_where_the_task_takes_them() -> None:
    signature.check("t", signature.describe(lambda job, **more: None).parameters, {"anything": 1})


@pytest.mark.parametrize("function", [lambda: None, lambda *a: None, lambda job, x, /: None, lambda job, *x: None])
def test_a_function_that_cannot_be_a_job_is_refused(function: Any) -> None:
    with pytest.raises(ConfigError):
        signature.describe(function)


@pytest.mark.parametrize("value", [{1, 2}, float("nan"), float("inf"), b"x", object()])
def test_what_is_not_json_is_refused(value: Any) -> None:
    with pytest.raises(BadArguments, match="JSON"):
        signature.encode("t", {"x": value}, 1000)


def test_what_is_nested_too_deep_for_a_reader_is_refused() -> None:
    def nested(levels: int) -> Any:
        return json.loads("[" * levels + "]" * levels)

    deepest = nested(signature.DEEPEST - 1)
    assert signature.encode("t", {"x": deepest}, 10_000)
    assert signature.encode("t", {"x": ["[" * 500, '\\"[' * 500, *([{}] * 500)]}, 10_000), (
        "brackets in texts and side by side"
    )
    for levels in (signature.DEEPEST, 950):
        with pytest.raises(BadArguments, match="nested|recursion"):  # which one depends on the depth of the caller
            signature.encode("t", {"x": nested(levels)}, 10_000)


def test_the_size_limit_is_exact() -> None:
    assert len(signature.encode("t", {"x": "a" * 92}, 100)) == 100
    with pytest.raises(PayloadTooLarge, match="101 bytes"):
        signature.encode("t", {"x": "a" * 93}, 100)


@pytest.mark.parametrize(
    "code",
    [
        "def f(job): ...", "def f(job, path): ...", "def f(_): ...", "def f(_job, x=1): ...", "def f(ctx): ...", "def f(self, x): ...",
        "def f(task): ...", "def f(thumbnail_job, path): ...", "def f(path: 'Job'): ...", "def f(x: Any): ...",
        "def f(whatever: 'OnlyForTypeCheckers'): ...", "async def f(job): ...",
    ],
)  # fmt: skip
def test_a_first_parameter_that_is_the_handle_by_name_or_annotation_is_taken(code: str) -> None:
    space: dict[str, Any] = {"Job": Job, "Any": Any}
    exec(code, space)
    signature.describe(space["f"])


@pytest.mark.parametrize(
    "code", ["def f(path): ...", "def f(path, size=1): ...", "def f(n=1): ...", "async def f(url): ..."]
)
def test_a_function_that_forgets_the_handle_is_told_what_to_write(code: str) -> None:
    space: dict[str, Any] = {}
    exec(code, space)
    name = code.partition("f(")[2].split(",")[0].split("=")[0].split(")")[0]
    with pytest.raises(
        ConfigError, match=rf"first parameter is the job handle, found '{name}'; write def f\(job, {name}"
    ):
        signature.describe(space["f"])


def test_an_annotation_that_cannot_be_resolved_or_is_a_set_is_doubted_and_the_others_are_checked() -> None:
    def task(job: Nope, a: int, b: set[int], c: Nope = None, d: list[frozenset[int]] | None = None) -> Nope: ...  # noqa: F821

    assert signature.words(signature.describe(task).parameters).startswith("a: int, b: any, c: any = null")
    assert signature.doubts(task) == [
        "'b' is annotated with a set, which JSON does not have: use a list",
        "the annotation 'Nope' of 'c' cannot be resolved, so its values are not checked",
        "'d' is annotated with a set, which JSON does not have: use a list",
    ]
    assert signature.doubts(lambda job, a, *b: None) == []
    app = Ostler()
    app.job(queue="q")(task)
    assert f"job 'task': {signature.doubts(task)[0]}" in warnings(app.settings(), app)
