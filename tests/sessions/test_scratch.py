"""Directories of session workers: nobody else's, one for each worker, and removed whatever is in them."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

from ostler.errors import ConfigError
from ostler.sessions.scratch import Scratch
from tests.sessions.planes import PATIENCE


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary directory."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_long_names_of_pools_that_begin_alike_share_no_directory(shared: Path, tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    names = ["chromium-headless-shell-of-us", "chromium-headless-shell-of-them", "short"]
    assert len({scratch.of(name, 0, 1) for name in names}) == 3
    assert max(len(scratch.of(name, 0, 1).name) for name in names) <= 24 + len(".0.1")


def test_a_link_that_somebody_puts_there_before_the_start_is_not_followed(shared: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(0o700)
    scratch = Scratch(tmp_path)
    scratch.root.parent.symlink_to(theirs)
    with pytest.raises(ConfigError, match="TMPDIR"):
        asyncio.run(scratch.start())
    assert theirs.stat().st_mode & 0o777 == 0o700
    assert [*theirs.iterdir()] == []


def test_what_a_worker_left_is_removed_however_deep_it_is(shared: Path, tmp_path: Path) -> None:
    async def main() -> None:
        scratch = Scratch(tmp_path)
        await scratch.start()
        left = scratch.of("echo", 0, 1)
        dig(left)
        scratch.remove("echo", 0, 1)
        async with asyncio.timeout(PATIENCE):
            while left.exists():
                await asyncio.sleep(0.005)
        dig(scratch.of("echo", 0, 2))
        await Scratch(tmp_path).start()  # the next node on the same data
        await scratch.stop()
        assert [*shared.iterdir()] == []

    asyncio.run(main())


def dig(folder: Path) -> None:
    """Folders in one another, more than Python has levels of calls."""
    folder.mkdir()
    inner = os.open(folder, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("a", dir_fd=inner)
        deeper = os.open("a", os.O_RDONLY, dir_fd=inner)
        os.close(inner)
        inner = deeper
    os.close(inner)


def test_a_guard_that_removes_the_empty_directory_at_that_moment_does_no_harm(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, removed = Path.chmod, []

    def chmod(path: Path, mode: int) -> None:
        real(path, mode)
        if not removed:
            removed.append(path)
            path.rmdir()

    monkeypatch.setattr(Path, "chmod", chmod)
    made = Scratch(tmp_path / "data")
    asyncio.run(made.start())
    assert removed
    assert made.root.is_dir()
