"""Limited keys: what is claimed is what a simple model says, and what waits under a full key costs a claim nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ostler.store import Store
from ostler.store.rows import Finish, NewJob, Requeue, Turn
from tests.store.counted import counted
from tests.stores import rows

QUEUES, KEYS = ("p", "q"), {"a": 1, "b": 2, "c": 5}


def job(queue: str = "q", key: str | None = None, most: int | None = None, **more) -> NewJob:
    return NewJob("t", queue, "{}", limit_key=key, limit_max=most, **more)


class Model:
    """All waiting jobs in a list, looked at one after another."""

    def __init__(self) -> None:
        self.waiting: dict[int, tuple] = {}  # id -> (queue, key, -priority, place)
        self.running: dict[int, tuple] = {}

    def claims(self, wants: dict[str, int]) -> list[int]:
        taken = []
        for queue, count in wants.items():
            for id_, row in sorted(self.waiting.items(), key=lambda item: (item[1][2:], item[0])):
                held = sum(1 for other in self.running.values() if other[1] is not None and other[1] == row[1])
                if row[0] == queue and count and (row[1] is None or held < KEYS[row[1]]):
                    self.running[id_] = self.waiting.pop(id_)
                    taken.append(id_)
                    count -= 1
        return taken


def heads(store: Store) -> list:
    """Keys that have more than one job in the ready index."""
    return rows(
        store,
        "SELECT queue, limit_key, min(id), max(id) FROM jobs WHERE status = 'queued' AND later = 0 AND behind = 0"
        " AND limit_key IS NOT NULL GROUP BY 1, 2 HAVING count(*) > 1",
    )


@pytest.mark.parametrize("seed", range(12))
def test_random_operations_claim_what_the_model_says(store: Store, seed: int) -> None:
    draw, model = random.Random(seed), Model()
    fences: dict[int, int] = {}
    later: dict[int, tuple] = {}
    newest = 0
    for now in range(1000, 1150):
        match draw.choice(("put", "put", "claim", "claim", "end", "back", "cancel", "retry")):
            case "put":
                for _ in range(draw.randint(1, 4)):
                    queue, key = draw.choice(QUEUES), draw.choice([None, *KEYS])
                    priority, due = draw.randint(-1, 1), draw.choice([None, None, now + 5])
                    (newest,) = store.jobs.enqueue([job(queue, key, KEYS.get(key), priority=priority, run_at=due)], now)
                    (model.waiting if due is None else later)[newest] = (queue, key, -priority, newest)
            case "claim":
                due = [i for i in later if store.jobs.get(i)["run_at"] <= now]
                model.waiting |= {i: later.pop(i) for i in due}
                wants = {q: draw.randint(1, 6) for q in draw.sample(QUEUES, 2)}
                turn = Turn("n", now, wants={q: [f"w{n}" for n in range(count)] for q, count in wants.items()})
                claims = store.turns.take(turn).claims
                assert [c.id for c in claims] == model.claims(wants)
                fences |= {c.id: c.fence for c in claims}
            case "end" if model.running:
                status = draw.choice(("done", "failed"))
                for i in draw.sample(sorted(model.running), draw.randint(1, len(model.running))):
                    store.turns.take(Turn("n", now, finishes=[Finish(i, fences[i], status, 1, now, status)]))
                    del model.running[i]
            case "back" if model.running:
                i, last = draw.choice(sorted(model.running)), draw.randint(0, 1)
                store.turns.take(Turn("n", now, requeues=[Requeue(i, fences[i], "returned", now, last=last)]))
                row = model.running.pop(i)
                model.waiting[i] = (*row[:3], newest + 1 if last else row[3])
            case "cancel" if model.waiting:
                i = draw.choice(sorted(model.waiting))
                assert store.jobs.cancel(i, now) == "queued"
                row = model.waiting.pop(i)
                if draw.random() < 0.5:
                    store.jobs.retry(i, now)
                    model.waiting[i] = (*row[:3], i)
        assert heads(store) == []
        assert store.jobs.depths() == counted(store)


def steps(store: Store, turn: Turn) -> int:
    """How many steps SQLite's machine takes for a turn: a measure that no busy machine changes."""
    count = [0]

    def tick() -> int:
        count[0] += 1
        return 0

    store.db._connection.set_progress_handler(tick, 10)
    store.turns.take(turn)
    store.db._connection.set_progress_handler(None, 10)
    return count[0]


def cost(folder: Path, backlog: int, strangers: int) -> int:
    with Store.open("", folder, durable=False) as store:
        store.jobs.enqueue([job("other") for _ in range(strangers)], 1)
        store.jobs.enqueue([job(key="k", most=1) for _ in range(backlog)], 1)
        store.jobs.enqueue([job() for _ in range(20)], 1)
        store.turns.take(Turn("n", 2, wants={"q": ["w"]}))  # the key is full
        taken = steps(store, Turn("n", 3, wants={"q": ["w"] * 4}))
        assert len(store.jobs.list(status="processing")[0]) == 5
        return taken


def test_a_claim_costs_the_same_however_many_wait_under_a_full_key(tmp_path: Path) -> None:
    few = cost(tmp_path / "few", 1_000, 0)
    assert cost(tmp_path / "many", 20_000, 0) <= 1.3 * few
    assert cost(tmp_path / "strangers", 20_000, 20_000) <= 1.3 * few


def test_a_finished_job_of_a_full_key_lets_the_next_in_at_the_same_cost(tmp_path: Path) -> None:
    def freed(backlog: int) -> int:
        with Store.open("", tmp_path / str(backlog), durable=False) as store:
            store.jobs.enqueue([job(key="k", most=1) for _ in range(backlog)], 1)
            (c,) = store.turns.take(Turn("n", 2, wants={"q": ["w"]})).claims
            end = Finish(c.id, c.fence, "done", 1, 3, "done")
            return steps(store, Turn("n", 3, finishes=[end], wants={"q": ["w"]}))

    assert freed(20_000) <= 1.3 * freed(1_000)


def test_a_lower_limit_holds_for_the_jobs_that_have_it_and_all_of_them_run(store: Store) -> None:
    store.jobs.enqueue([job(key="k", most=most) for most in (3, 3, 1, 3, 1)], 1)
    done: list[int] = []
    while claims := store.turns.take(Turn("n", 2, wants={"q": ["w"] * 5})).claims:
        rows = {c.id: c for c in claims}
        if 3 in rows or 5 in rows:  # those that allow one alone run alone
            assert len(rows) == 1
        ends = [Finish(c.id, c.fence, "done", 1, 3, "done") for c in claims]
        store.turns.take(Turn("n", 3, finishes=ends))
        done += rows
    assert done == [1, 2, 3, 4, 5]
