"""Following a log: each line once, across the change of files; and what was lost is said."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ostler.events import Bus, Printed
from ostler.jobs.logs import JobLogs
from ostler.lifecycle.logs import Reader
from ostler.live.tails import Tails


class Log:
    """A file that grows and is put aside, as workers' and jobs' logs are."""

    def __init__(self, path: Path) -> None:
        self.path, self.aside = path, path.with_suffix(".log.1")

    def say(self, *lines: str, end: str = "\n") -> None:
        with self.path.open("a") as file:
            file.write("\n".join(lines) + end)

    def rotate(self) -> None:
        self.path.replace(self.aside)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "work-0.log")


@pytest.fixture
def follow(log: Log):
    opened: list[Reader] = []

    def make() -> Reader:
        opened.append(Reader(log.path))
        return opened[-1]

    yield make
    for file in opened:
        file.close()


def numbers(start: int, stop: int) -> list[str]:
    return [f"line {n}" for n in range(start, stop)]


def test_the_last_lines_then_each_new_one_once(log: Log, follow) -> None:
    log.say(*numbers(0, 10))
    file = follow()
    assert file.start(3) == numbers(7, 10)
    assert file.read() == []
    log.say(*numbers(10, 12))
    assert file.read() == numbers(10, 12)
    assert file.read() == []
    assert file.lost is False


@pytest.mark.parametrize("lines", [0, 1, 10, 11, 10_000])
def test_as_many_lines_as_are_asked_for(log: Log, follow, lines: int) -> None:
    log.say(*numbers(0, 10))
    assert follow().start(lines) == numbers(max(0, 10 - lines), 10)


def test_a_line_is_told_when_it_is_whole(log: Log, follow) -> None:
    log.say("one", "tw", end="")
    file = follow()
    assert file.start(10) == ["one"]
    assert file.read() == []
    log.say("o", "three", end="")
    assert file.read() == ["two"]
    assert file.read() == []
    log.say("")
    assert file.read() == ["three"]


def test_a_file_that_is_not_there_yet(log: Log, follow) -> None:
    file = follow()
    assert (file.start(10), file.place) == ([], "")
    assert file.read() == []
    log.say("first")
    assert file.read() == ["first"]


def test_many_long_lines_are_found_from_the_end(log: Log, follow) -> None:
    lines = [f"{n} " + "x" * 3000 for n in range(200)]
    log.say(*lines)
    assert follow().start(150) == lines[-150:]


def test_lines_are_cut_and_bytes_that_are_no_text_do_no_harm(log: Log, follow) -> None:
    log.path.write_bytes(b"a" * 50_000 + b"\n\xff\xfe\r\n")
    assert follow().start(2) == ["a" * 10_000, "\ufffd\ufffd"]


def test_each_line_once_across_a_change_of_files(log: Log, follow) -> None:
    log.say(*numbers(0, 5))
    file = follow()
    file.start(5)
    log.say(*numbers(5, 7))
    log.rotate()
    assert file.read() == numbers(5, 7)  # there is no new file yet
    log.say(*numbers(7, 9))
    assert file.read() == numbers(7, 9)
    log.say(*numbers(9, 11))
    log.rotate()
    log.say(*numbers(11, 13))
    assert file.read() == numbers(9, 13)
    assert file.lost is False


def test_the_last_lines_reach_back_into_the_file_before(log: Log, follow) -> None:
    log.say(*numbers(0, 10))
    log.rotate()
    log.say(*numbers(10, 12))
    assert follow().start(5) == numbers(7, 12)
    log.rotate()
    assert follow().start(5) == numbers(10, 12)  # only the file put aside is left


def test_two_changes_between_two_reads_are_told_as_a_loss(log: Log, follow) -> None:
    log.say("a")
    file = follow()
    file.start(1)
    for line in ("b", "c", "d"):
        log.say(line)
        log.rotate()
    log.say("e")
    found = file.read()
    assert found == ["b", "d", "e"]  # what is still there is told
    assert file.lost is True


def test_who_comes_back_gets_what_came_after_its_place(log: Log, follow) -> None:
    log.say(*numbers(0, 3), "hal", end="")
    first = follow()
    first.start(2)
    place = first.place
    log.say("f", *numbers(3, 5))
    again = follow()
    assert again.start(2, place) == ["half", *numbers(3, 5)]
    assert again.lost is False
    log.rotate()
    log.say(*numbers(5, 6))
    later = follow()
    assert later.start(2, again.place) == numbers(5, 6)
    third = follow()
    assert third.start(2, place) == ["half", *numbers(3, 6)]
    assert third.lost is False


def test_a_place_that_is_gone_is_a_loss(log: Log, follow) -> None:
    log.say("a")
    first = follow()
    first.start(1)
    for line in ("b", "c", "d"):
        log.say(line)
        log.rotate()
    log.say("e")
    again = follow()
    assert again.start(10, first.place) == ["d", "e"]
    assert again.lost is True


@pytest.mark.parametrize("place", ["x", "-", "1-", "-1", "1", "1-1", "²-²", "٣-٣", "9" * 5000 + "-1", "1-" + "9" * 30])
def test_a_place_that_was_never_given_is_a_loss_and_no_error(log: Log, follow, place: str) -> None:
    log.say("a", "b")
    file = follow()
    assert file.start(10, place) == ["a", "b"]
    assert file.lost is True


@pytest.mark.parametrize("offset", ["9", "9" * 18, "9" * 30, "²"])
def test_a_place_behind_the_end_of_the_file_is_no_place(log: Log, follow, offset: str) -> None:
    """The number of a deleted file is given to the next one."""
    log.say("a", "b")
    file = follow()
    assert file.start(10, f"{log.path.stat().st_ino}-{offset}") == ["a", "b"]
    assert file.lost is True
    log.say("c")
    assert file.read() == ["c"]


def test_a_jobs_log_is_followed_through_its_own_changes(tmp_path: Path) -> None:
    logs, said = JobLogs(tmp_path), []
    file = Reader(logs.path(7))
    got = file.start(10)
    for n in range(400):
        line = f"{n} " + "x" * 10_000
        said.append(line[:10_000])
        logs.append(7, [line.encode()])
        got += file.read()
    file.close()
    assert got == said
    assert file.lost is False


def test_only_who_follows_the_subject_is_woken() -> None:
    async def main() -> None:
        bus = Bus()
        tails = Tails(bus)
        one, two, other = tails.follow("job:1"), tails.follow("job:1"), tails.follow("worker:w:0")
        bus.send(Printed("job:1"))
        bus.send(Printed("job:2"))
        assert (one.is_set(), two.is_set(), other.is_set()) == (True, True, False)
        one.clear()
        tails.leave("job:1", one)
        tails.leave("job:1", one)
        bus.send(Printed("job:1"))
        assert not one.is_set()
        tails.leave("job:1", two)
        tails.leave("job:9", two)
        assert list(tails._followers) == ["worker:w:0"]
        await tails.stop()
        assert (tails.closed, other.is_set()) == (True, True)

    asyncio.run(main())
