"""A producer in a process of its own: stores jobs of all kinds while the server comes and goes, and keeps a ledger of them.

Every plain job has a number of its own. A line of the ledger says what came of an enqueue: `ok`, or `doubt` when the connection was
lost during the commit. One that was refused is tried again. It stores so many, and goes on slowly until it is told that it is enough.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ostler.errors import StoreBusy, StoreDoubt
from tests.nodes import flock

CHAIN = 4  # steps
BATCH = 10  # jobs


def main(ledger: Path, first: int, count: int, enough: Path) -> None:
    dice = random.Random(first)
    with ledger.open("a", buffering=1) as file:
        number = first
        while number < first + count or not enough.exists():
            if number >= first + count:
                time.sleep(0.05)
            kind = dice.choices([*KINDS], [weight for weight, _ in KINDS.values()])[0]
            size, outcome = attempt(KINDS[kind][1], number, dice)
            file.write(json.dumps([kind, number, size, outcome]) + "\n")
            number += size


def attempt(store: Callable[[int, random.Random], int], number: int, dice: random.Random) -> tuple[int, str]:
    """(how many numbers it used, what came of it)."""
    state = dice.getstate()
    while True:
        try:
            dice.setstate(state)
            return store(number, dice), "ok"
        except StoreDoubt:
            dice.setstate(state)
            return SIZES.get(store, 1), "doubt"
        except StoreBusy:
            continue


def some_plain(number: int, _: random.Random) -> int:
    flock.plain.enqueue_many([{"n": n} for n in range(number, number + 50)])
    return 50


def one_plain(number: int, _: random.Random) -> int:
    flock.plain.enqueue(n=number)
    return 1


def told(number: int, _: random.Random) -> int:
    flock.told.enqueue_many([{"n": n} for n in range(number, number + 5)])
    return 5


def mixed(number: int, dice: random.Random) -> int:
    """What has a limit, fails or dies, in one transaction; it has no numbers."""
    steps: list[Any] = [flock.flaky.s(times=1), flock.wrong.s()]
    steps += [flock.narrow.s() for _ in range(4)] + [flock.paced.s() for _ in range(2)]
    steps += [flock.per_user.s(user=f"u{dice.randrange(4)}") for _ in range(4)]
    if dice.random() < 0.5:
        steps.append(flock.dies.s(times=1))
    flock.app.producer.enqueue([step.prepared() for step in steps])
    return 1


def unique(number: int, dice: random.Random) -> int:
    flock.once.enqueue(name=f"k{dice.randrange(5)}")
    return 1


def chain(number: int, _: random.Random) -> int:
    steps = flock.add.s(a=number).then(flock.add.s(), into="a")
    for _ in range(CHAIN - 2):
        steps = steps.then(flock.add.s(), into="a")
    steps.enqueue()
    return 1


def batch(number: int, _: random.Random) -> int:
    steps = [flock.plain.s(n=n) for n in range(number, number + BATCH)]
    flock.app.batch(steps, then=flock.report.s(), into="summary")
    return BATCH


KINDS: dict[str, tuple[float, Callable[[int, random.Random], int]]] = {
    "some": (20, some_plain),
    "one": (20, one_plain),
    "told": (10, told),
    "mixed": (6, mixed),
    "unique": (10, unique),
    "chain": (8, chain),
    "batch": (6, batch),
}
SIZES = {some_plain: 50, told: 5, batch: BATCH}

if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
