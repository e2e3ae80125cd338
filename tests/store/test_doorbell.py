from __future__ import annotations

import select
from pathlib import Path

from ostler.store.doorbell import Doorbell, ring


def test_rings_wake_once_and_a_missing_bell_is_no_error(tmp_path: Path) -> None:
    ring(tmp_path)
    bell = Doorbell(tmp_path)
    for _ in range(3):
        ring(tmp_path)
    assert select.select([bell], [], [], 5)[0]
    woken = []
    bell.answer(lambda: woken.append(1))
    assert woken == [1]
    assert not select.select([bell], [], [], 0)[0]
    bell.close()
    ring(tmp_path)


def test_a_path_too_long_for_a_socket_works_all_the_same(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    bell = Doorbell(folder)
    ring(folder)
    assert select.select([bell], [], [], 5)[0]
    bell.close()


def test_a_full_bell_does_not_block_who_rings(tmp_path: Path) -> None:
    bell = Doorbell(tmp_path)
    for _ in range(5000):
        ring(tmp_path)
    bell.answer(lambda: None)
    bell.close()
