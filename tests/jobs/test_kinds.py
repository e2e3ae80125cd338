"""Annotations of jobs: what is checked when a job is enqueued, and what its function receives."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple, NewType, NotRequired, Optional, TypedDict, Union
from uuid import UUID

import pytest
from pydantic import BaseModel, Field

from ostler import BadArguments, Job, JobFailed, Ostler
from ostler.cli.enqueue import pairs
from ostler.jobs import kinds, signature
from ostler.jobs.annotations import type_of
from ostler.testing import Bench

NOON = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
KEY = UUID("6f1c2d1e-0a55-4f4e-8a5b-3f1f0d9a7c11")


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Shape(enum.Enum):
    SQUARE = (1, 1)  # not JSON


@dataclass
class Point:
    x: int
    y: int = 0


@dataclass(frozen=True)
class Order:
    id: UUID
    at: datetime
    path: list[Point]
    price: Decimal | None = None
    tags: tuple[str, ...] = field(default_factory=tuple)
    total: int = field(init=False, default=3)


@dataclass
class Tree:
    name: str
    leaves: list[Tree] = field(default_factory=list)


@dataclass
class Line:
    start: Point
    end: Point


class Item(BaseModel):
    name: str
    count: int = Field(gt=0)


class Size(NamedTuple):
    width: int
    color: Color


class Plain(TypedDict):
    name: str
    age: NotRequired[int]


class Dated(TypedDict, total=False):
    day: date


UserId = NewType("UserId", int)

# annotation, value, its JSON, its kind in words
TYPES: list[tuple[Any, Any, Any, str]] = [
    (datetime, NOON, "2026-01-31T12:00:00+00:00", "datetime"),
    (date, NOON.date(), "2026-01-31", "date"),
    (time, time(12, 30), "12:30:00", "time"),
    (timedelta, timedelta(minutes=1.5), 90.0, "timedelta"),
    (UUID, KEY, str(KEY), "uuid"),
    (Path, Path("/a/b"), "/a/b", "path"),
    (PurePosixPath, PurePosixPath("a"), "a", "path"),
    (Decimal, Decimal("12.50"), "12.50", "decimal"),
    (Color, Color.RED, "red", 'one of "red", "blue"'),
    (Level, Level.HIGH, 2, "one of 1, 2"),
    (Rights, Rights.READ | Rights.WRITE, 3, "int"),
    (Point, Point(1, 2), {"x": 1, "y": 2}, "Point(x: int, y: int = …)"),
    (
        Order,
        Order(KEY, NOON, [Point(1)], Decimal(1), ("a",)),
        {"id": str(KEY), "at": NOON.isoformat(), "path": [{"x": 1, "y": 0}], "price": "1", "tags": ["a"]},
        "Order(id: uuid, at: datetime, path: list of Point(x: int, y: int = …), price: decimal or null = …, tags: list of str = …)",
    ),
    (
        Tree,
        Tree("a", [Tree("b", [Tree("c")])]),
        {"name": "a", "leaves": [{"name": "b", "leaves": [{"name": "c", "leaves": []}]}]},
        "Tree(name: str, leaves: list of dict = …)",
    ),
    (Size, Size(3, Color.BLUE), [3, "blue"], 'list of 2 (int, one of "red", "blue")'),
    (Plain, {"name": "a"}, {"name": "a"}, "Plain(name: str, age: int = …)"),
    (Dated, {"day": NOON.date()}, {"day": "2026-01-31"}, "Dated(day: date = …)"),
    (Literal["a", 1], 1, 1, 'one of "a", 1'),
    (Optional[date], None, None, "date or null"),
    (Union[int, date], NOON.date(), "2026-01-31", "int or date"),
    (date | str, "tomorrow", "tomorrow", "date or str"),
    (list[datetime], [NOON], ["2026-01-31T12:00:00+00:00"], "list of datetime"),
    (tuple[int, Path], (1, Path("a")), [1, "a"], "list of 2 (int, path)"),
    (tuple[int, ...], (1, 2), [1, 2], "list of int"),
    (dict[str, Point], {"a": Point(1)}, {"a": {"x": 1, "y": 0}}, "dict of Point(x: int, y: int = …)"),
    (dict[int, list[date]], {7: [NOON.date()]}, {"7": ["2026-01-31"]}, "dict of list of date"),
    (dict[Level, str], {Level.LOW: "a"}, {"1": "a"}, "dict of str"),
    (dict[UUID, int], {KEY: 1}, {str(KEY): 1}, "dict of int"),
    (UserId, 5, 5, "int"),
]  # fmt: skip


@pytest.mark.parametrize(("hint", "value", "form", "words"), TYPES)
def test_a_value_goes_to_json_and_back(hint: Any, value: Any, form: Any, words: str) -> None:
    found = type_of(hint)
    assert kinds.words(found.kind) == words
    plain = kinds.plain(value)
    assert json.loads(json.dumps(plain)) == plain == form
    assert kinds.fits(json.loads(json.dumps(found.kind)), form), "it travels as data"
    assert not kinds.complaint("x", found.kind, form)
    back = form if found.load is None else found.load(form)
    assert (back, type(back)) == (value, type(value))


@pytest.mark.parametrize(
    "hint", [int, str, list[int], dict[str, Any], Any, bytes, set[int], Shape, object, Plain | None]
)
def test_what_is_json_or_unknown_is_not_converted(hint: Any) -> None:
    assert type_of(hint).load is None


WRONG: list[tuple[Any, Any, str]] = [
    (datetime, "tomorrow", """'x' must be datetime (text such as "2026-01-31T12:00:00+00:00"), found "tomorrow\""""),
    (datetime, 5, "'x' must be datetime"),
    (date, "2026-01-31T12:00:00", "'x' must be date (text such as"),
    (time, "noon", "'x' must be time"),
    (timedelta, "5m", "'x' must be timedelta (a number of seconds), found \"5m\""),
    (timedelta, 1e300, "'x' must be timedelta"),
    (UUID, "x", "'x' must be uuid"),
    (Path, 5, "'x' must be path (text), found 5"),
    (Path, "a\0b", "'x' must be path"),
    (Decimal, "a", "'x' must be decimal"),
    (Decimal, True, "'x' must be decimal"),
    (Color, "green", """'x' must be one of "red", "blue", found "green\""""),
    (Point, {"x": "1"}, "'x.x' must be int, found \"1\""),
    (Point, {}, "'x.x' is missing"),
    (Point, {"x": 1, "z": 2}, "'x' has no field 'z'; it has x, y"),
    (Point, [1, 2], "'x' must be Point(x: int, y: int = …), found [1, 2]"),
    (Point | None, {"y": 1}, "'x.x' is missing"),
    (list[Point], [{"x": 1}, {"x": None}], "'x[1].x' must be int, found null"),
    (Order, {"id": str(KEY), "at": "2026-01-31", "path": [{"y": 1}]}, "'x.path[0].x' is missing"),
    (Size, [1], 'must be list of 2 (int, one of "red", "blue"), found [1]'),
    (Line, {"start": {"x": 1}, "end": {"x": "a"}}, "'x.end.x' must be int"),
    (Plain, {"name": "a", "age": "b"}, "'x.age' must be int"),
    (dict[int, str], {"a": "b"}, "'x' must be dict of str"),
    (dict[UUID, str], {"a": "b"}, "'x' must be dict of str"),
    (dict[Level, str], {"3": "b"}, "'x' must be dict of str"),
    (list[date], ["2026-01-31", 5], "'x' must be list of date (text such as"),
    (date | None, "soon", "'x' must be date or null (text"),
]  # fmt: skip


@pytest.mark.parametrize(("hint", "value", "complaint"), WRONG)
def test_a_value_that_does_not_fit_is_refused_in_words(hint: Any, value: Any, complaint: str) -> None:
    assert complaint in str(kinds.complaint("x", type_of(hint).kind, value))


def test_models_of_pydantic_are_theirs_to_check() -> None:
    app = Ostler()

    @app.job(queue="q")
    def twice(job: Job, item: Item | None) -> Item:
        assert item is not None
        return Item(name=item.name, count=2 * item.count)

    with Bench(app) as bench:
        assert twice.enqueue(item=Item(name="a", count=3)).result() == Item(name="a", count=6)
        for store in (
            twice.enqueue,
            lambda **args: bench.put(twice.s(**args)),
            lambda **args: twice.enqueue_many([args]),
        ):
            with pytest.raises(BadArguments, match=r"'item\.count': Input should be greater than 0, found 0"):
                store(item={"name": "a", "count": 0})
        assert twice.enqueue(item={"name": "a", "count": "2"}).result().count == 4  # as pydantic reads it
        assert twice.enqueue(item=None).info()["args"] == {"item": None}
    assert signature.words(twice.parameters) == "item: Item(name: str, count: int) or null"


def test_values_on_the_command_line_are_texts_where_the_type_wants_one() -> None:
    def task(job: Job, at: date, place: Path, name: str | None, size: int, price: Decimal) -> None: ...

    given = ("at=20260131", "place=123", "name=5", "size=5", "price=1.50")
    found = pairs(given, signature.describe(task).parameters)
    assert found == {"at": "20260131", "place": "123", "name": "5", "size": 5, "price": 1.5}
    assert pairs(("name=null",), signature.describe(task).parameters) == {"name": None}


def test_the_function_and_the_caller_get_the_annotated_types() -> None:
    app = Ostler()
    got: list[Any] = []

    @app.job(queue="q", unique=["at"])
    def remind(job: Job, at: datetime, order: Order | None = None, color: Color = Color.RED, more: Any = None) -> Order:
        got.append((at, order, color))
        return Order(KEY, at, [Point(1)])

    @app.job(queue="q")
    def give(job: Job, what: str) -> Any:
        return {"at": NOON, "color": Color.RED, "point": Point(1), "id": KEY, "path": Path("a")}[what]

    @app.job(queue="q")
    def later(job: Job, order: Order) -> date:
        return order.at.date()

    @app.job(queue="q")
    def dated(job: Job, days: list[date], more: Any, any_of: dict[str, Any] | date) -> None: ...

    @app.job(queue="q", attempts=5)
    def positive(job: Job, size: Positive) -> None: ...

    order = Order(KEY, NOON, [Point(1)])
    with Bench(app) as bench:
        first = remind.enqueue(NOON, order, color=Color.BLUE)
        assert bench.enqueued(remind)[0]["at"] == "2026-01-31T12:00:00+00:00"
        assert not remind.enqueue(at=NOON.isoformat()).is_new, "the same time, the same key"
        assert first.result() == order and app.find(first).result() == order
        assert remind.enqueue_many([{"at": NOON}])[0].result() == order
        assert got == [(NOON, order, Color.BLUE), (NOON, None, Color.RED)]
        assert remind.s(at=NOON).then(later.s(), into="order").enqueue().result() == NOON.date()
        assert [give.enqueue(what=what).result() for what in ("at", "color", "point", "id", "path")] == [
            NOON.isoformat(), "red", {"x": 1, "y": 0}, str(KEY), "a"
        ], "a result whose annotation does not say what it is"  # fmt: skip
        with pytest.raises(
            BadArguments, match=r"'order.path' must be list of Point.*It takes \(at: datetime, order: Order"
        ):
            remind.enqueue(at=NOON, order={"id": str(KEY), "at": NOON, "path": 5})  # type: ignore[arg-type]
        with pytest.raises(BadArguments, match=r"datetime is not JSON serializable \('more'; annotate the parameter"):
            remind.enqueue(at=NOON, more={"when": NOON})
        endless: list[Any] = []
        endless.append(endless)
        with pytest.raises(BadArguments, match="cannot be written as JSON: .*nested|Circular"):
            dated.enqueue(days=[NOON.date()], more=endless, any_of={"x": endless})
        with pytest.raises(
            JobFailed, match="BAD_ARGUMENTS.*'size' is refused by its type: ValueError: -1 is not positive"
        ):
            bench.put(positive.s(size={"n": -1})).result()
        assert app.tasks["remind"].parameters[2]["default"] == "red"


@dataclass
class Positive:
    n: int

    def __post_init__(self) -> None:
        if self.n < 0:
            raise ValueError(f"{self.n} is not positive")
