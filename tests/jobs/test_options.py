"""Options of a job: each is heeded or refused, never ignored."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import pytest

import ostler
from ostler import BadArguments, ConfigError, Job, Ostler, Retry, Snooze
from ostler.jobs.producer import prepare
from ostler.jobs.signature import describe
from ostler.testing import Bench

TASK = {
    "name": "t",
    "queue": "q",
    "attempts": 3,
    "timeout": None,
    "priority": 0,
    "parameters": [{"name": "x", "type": "any", "required": False}],
}


def made(policy: dict | None = None, args: dict | None = None, **options):
    return prepare({"t": {**TASK, "policy": policy or {}}}, "t", args or {}, 1000, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"prority": 9},
        {"limit_key": "\ud800", "limit_max": 1},
        {"limit_key": "k"},
        {"limit_key": "k", "limit_max": 10**30},
        {"limit_key": "k", "limit_max": True},
        {"limit_key": "", "limit_max": 1},
        {"limit_key": "x" * 501, "limit_max": 1},
        {"unique_key": "a\0b"},
        {"unique_key": "\udfff"},
        {"unique_for": 5},
        {"unique_key": "k", "unique_for": -1},
        {"run_at": 1.5},
        {"run_at": "tomorrow"},
        {"run_at": 10**30},
        {"delay": -1},
        {"delay": "1h"},
        {"delay": float("nan")},
        {"timeout": -1},
        {"attempts": 0},
        {"priority": 10**9},
    ],
)
def test_what_cannot_be_heeded_is_refused(options: dict) -> None:
    with pytest.raises(BadArguments):
        made(**options)


def test_what_is_given_is_heeded() -> None:
    found = made(
        unique_key="k", unique_for=5, limit_key="l", limit_max=2, attempts=1, timeout=2.5, priority=-3, run_at=17
    )
    assert (found.unique_key, found.unique_for, found.limit_key, found.limit_max) == ("t:=k", 5, "l", 2)
    assert (found.attempts, found.timeout, found.priority, found.run_at) == (1, 2.5, -3, 17)


def test_keys_by_policy() -> None:
    assert made({"at_once": 2}).limit_key == "t"
    assert made({"at_once": 2, "per": "x"}, {"x": "ann"}).limit_key == 't:"ann"'
    assert (
        made({"unique": True}, {"x": 1}).unique_key
        == made({"unique": True}, {"x": 1}).unique_key
        != made({"unique": True}, {"x": 2}).unique_key
    )


def test_a_value_that_is_yet_to_come_cannot_be_part_of_a_key() -> None:
    for policy in ({"at_once": 1, "per": "x"}, {"unique": True}, {"unique": ["x"]}):
        with pytest.raises(BadArguments, match="receives the result of the previous step"):
            made(policy, into="x")


@pytest.mark.parametrize(
    "declared",
    [
        {"at_once": 1.5}, {"at_once": "2"}, {"at_once": 0}, {"per": "x"}, {"unique": "x"}, {"unique": []}, {"unique": ["y"]},
        {"unique": True, "unique_for": -5}, {"unique": True, "unique_for": "60"}, {"unique_for": 0}, {"backoff": (5, 1)},
    ],
)  # fmt: skip
def test_a_wrong_declaration_is_refused(declared: dict) -> None:
    with pytest.raises(ConfigError):
        Ostler().job(**declared)(_x)


@pytest.mark.parametrize(
    "limits", [{"at_once": "2"}, {"at_once": 0}, {"rate": 100}, {"rate": "²/s"}, {"rate": "5/y"}, {"rate": "0/s"}]
)
def test_a_wrong_limit_of_a_queue_is_refused(limits: dict) -> None:
    with pytest.raises(ConfigError):
        Ostler().queue("q", **limits)


def _x(job, x: int = 1) -> None: ...


def test_a_period_alone_means_unique() -> None:
    app = Ostler()
    app.job(unique_for=60)(_x)
    assert app.tasks["_x"].row["policy"] == {"unique": True, "unique_for": 60}


def test_chains_and_callbacks_take_single_steps() -> None:
    app = Ostler()
    task = app.job()(_x)
    with pytest.raises(BadArguments, match="one step"):
        task.s().then(task.s().then(task.s()))
    with pytest.raises(BadArguments, match="one step"):
        app.batch([task.s()], then=task.s().then(task.s()))
    with pytest.raises(BadArguments, match="cannot have run_at"):
        task.s().then(task.options(run_at=5).s()).prepared()


def test_a_default_that_is_spelled_out_is_the_same_job() -> None:
    def cut(job, source: str, user: str = "me", size: tuple = (1, 2), where: object = object) -> None: ...

    task = {**TASK, "parameters": describe(cut).parameters}

    def keys(policy: dict, **args: object) -> tuple[str | None, str | None]:
        found = prepare({"t": {**task, "policy": policy}}, "t", args, 1000)
        assert json.loads(found.args) == args  # stored as given: a default that the code changes counts then
        return found.unique_key, found.limit_key

    everything, per_user = {"unique": True}, {"at_once": 2, "per": "user"}
    assert keys(everything, source="a") == keys(everything, source="a", user="me", size=[1, 2])
    assert keys(everything, source="a") != keys(everything, source="a", user="you")
    assert keys(per_user, source="a") == keys(per_user, source="b", user="me")
    assert keys(per_user, source="a") != keys(per_user, source="b", user="you")


@pytest.mark.parametrize("name", ["\ud800", "a\nb", "x" * 201, 7])
def test_a_name_that_cannot_be_shown_is_refused(name: object) -> None:
    with pytest.raises(ConfigError, match="cannot be a job's name"):
        Ostler().job(queue="q", name=name)(lambda job: None)  # type: ignore[arg-type]


def test_times_may_be_datetimes_and_timedeltas() -> None:
    app, hour = Ostler(), timedelta(hours=1)
    task = app.job(timeout=2 * hour, backoff=(1, hour), unique_for=hour)(_x)
    assert task.row["timeout"] == 7200
    assert task.row["policy"] == {"unique": True, "unique_for": 3600, "backoff": {"base": 1, "max": 3600}}
    noon = datetime(2030, 1, 1, 12, tzinfo=timezone(hour))
    job = task.options(run_at=noon, timeout=hour, unique_for=2 * hour).s().prepared()
    assert (job.run_at, job.timeout, job.unique_for) == (int(noon.timestamp()) * 1000, 3600, 7200)
    assert task.s().then(task.options(delay=hour).s()).prepared().next.count('"delay": 3600') == 1
    assert (Retry(after=hour).after, Snooze(hour).after) == (3600, 3600)
    with pytest.raises(BadArguments, match=r"run_at 2030-01-01T12:00:00 has no time zone.*timezone.utc"):
        task.options(run_at=noon.replace(tzinfo=None))
    with pytest.raises(BadArguments, match="delay must be a number of seconds from 0"):
        task.options(delay=-hour)
    with pytest.raises(BadArguments, match="run_at must be"):
        task.options(run_at=hour)
    with pytest.raises(BadArguments, match="delay must be a number of seconds"):
        task.options(delay=noon)


habits = Ostler()


@habits.job(queue="q")
def add(job: Job, a: int = 0) -> int:
    return a


@pytest.mark.parametrize(
    ("code", "kind", "hint"),
    [
        ("app.job(retries=3)(lambda job: 1)", ConfigError, r"job '<lambda>' \(<string>, line 1\): @app.job has no option 'retries'; use attempts=4, which counts all runs, the first one included"),
        ("app.job(max_retries=None)(lambda job: 1)", ConfigError, "use attempts=…, which"),
        ("app.job(bind=True)(lambda job: 1)", ConfigError, "use nothing: the first parameter is always the job handle"),
        ("app.job(speed=5)(lambda job: 1)", ConfigError, r"no option 'speed'$"),
        ("app.task()", AttributeError, "'Ostler' object has no attribute 'task'; use @app.job"),
        ("app.send_task('add')", AttributeError, r"use task\.enqueue\(…\): import the task"),
        ("app.nothing", AttributeError, "no attribute 'nothing'$"),
        ("add.delay(1)", AttributeError, r"'Task' object has no attribute 'delay'; use task\.enqueue"),
        ("add.apply_async(countdown=5)", AttributeError, r"use task\.enqueue\(…\), with task\.options\(delay=…\)"),
        ("add(a=1)", TypeError, r"calling task 'add' runs its function here.*use add\.enqueue"),
        ("add(1)", TypeError, r"use add\.enqueue"),
        ("add.options(countdown=5)", BadArguments, "'countdown' is not an option; use delay=…"),
        ("add.options(retries=0)", BadArguments, "use attempts=1"),
        ("add.options(delay='5m')", BadArguments, r"delay must be a number of seconds from 0, found '5m'; in Python, give seconds or timedelta\(minutes=5\)"),
        ("add.options(run_at='2026-01-31')", BadArguments, "in Python, give a datetime with a time zone"),
        ("app.job(timeout='1h')(lambda job: 1)", ConfigError, r"give seconds or timedelta\(hours=1\)"),
        ("app.job(unique_for='soon')(lambda job: 1)", ConfigError, r"found 'soon'; in Python, give seconds or timedelta"),
        ("app.job(backoff=('1s', '1m'))(lambda job: 1)", ConfigError, r"must be \(first, longest\) in seconds or as timedeltas"),
        ("app.job(backoff=10)(lambda job: 1)", ConfigError, r"found \(10,\)"),
        ("add.enqueue(a=1, delay=5)", BadArguments, r"'delay' is not a parameter; as an option, write add\.options\(delay=…\)"),
        ("add.enqueue(a=1, eta=5)", BadArguments, r"'eta' is not a parameter; write add\.options\(run_at=…\)\.enqueue\(…\)"),
        ("add.enqueue(a=1, countdown=5)", BadArguments, r"'countdown' is not a parameter; write add\.options\(delay=…\)\.enqueue\(…\)"),
        ("add.enqueue(a=1, rate_limit=5)", BadArguments, r"'rate_limit' is not a parameter; use app\.queue"),
        ("add.s(a=1).delay()", AttributeError, r"'Step' object has no attribute 'delay'; use step\.enqueue\(\)"),
        ("add.s(a=1).apply_async()", AttributeError, r"use step\.enqueue\(\), with task\.options"),
        ("add.s(a=1) | add.s()", TypeError, r"use a\.s\(…\)\.then\(b\.s\(\), into=…\)"),
        ("add.s(a=1).then(add.s()) | add.s()", TypeError, r"use a\.s\(…\)\.then"),
        ("app.batch([add])", BadArguments, r"a batch is made of steps, found <Task add queue=q>; write add\.s\(…\)"),
        ("app.batch([5])", BadArguments, r"found 5; write task\.s\(…\)"),
        ("Ostler('photodesk')", ConfigError, r"Ostler\('photodesk'\) \(<string>, line 1\): 'photodesk' is not the URL of a store; write Ostler\(\)"),
        ("Ostler(store='redis://localhost')", ConfigError, "is not the URL of a store"),
        ("Ostler(broker='redis://localhost')", ConfigError, r"Ostler\(…\) \(<string>, line 1\) has no option 'broker'; use nothing: jobs are in the store"),
        ("Ostler(colour=1)", ConfigError, "no option 'colour'; known are: store, data"),
        ("app.pool('lab', concurrency=4)", ConfigError, r"app\.pool\('lab', …\) \(<string>, line 1\) has no option 'concurrency'; use workers=…"),
        ("app.pool('lab', colour=4)", ConfigError, r"known are: workers, .*, env$"),
        ("ostler.chain", AttributeError, r"has no attribute 'chain'; use a\.s\(…\)\.then"),
        ("ostler.group", AttributeError, r"use app\.batch"),
        ("add.enqueue(a=1).get(timeout=5)", AttributeError, r"'JobId' object has no attribute 'get'; use job\.result\(timeout=…\)"),
        ("app.batch([add.s(a=1)]).get()", AttributeError, r"'BatchId' object has no attribute 'get'; use batch\.results"),
        ("add.enqueue(a=1).nothing", AttributeError, "no attribute 'nothing'$"),
        ("Job(1, 't', 1, 0, 1, print).retry(countdown=5)", AttributeError, r"use raise Retry\(after=…\)"),
    ],
)  # fmt: skip
def test_a_word_of_another_job_queue_is_answered_with_ours(code: str, kind: type[Exception], hint: str) -> None:
    with Bench(habits), pytest.raises(kind, match=hint):
        eval(code, {"app": habits, "add": add, "Job": Job, "Ostler": Ostler, "ostler": ostler})


def test_the_plain_function_can_be_called_with_any_handle() -> None:
    assert (add(Job(1, "t", 1, 0, 1, print), a=1), add(None, 2)) == (1, 2)
    assert not hasattr(add, "delay") and not hasattr(habits, "task")
