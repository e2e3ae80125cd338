"""Artifacts at any URL that fsspec can reach (s3://…, gs://…, memory://…)."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import IO, Any

from ostler import extras
from ostler.errors import ConfigError
from ostler.jobs.results import NOTE, PARTS, Holds, Published, check_fence, check_key, checksum, part_name


class RemoteResults:
    """Anything that fsspec can reach. A put of an object is atomic there; the note follows it."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec  # type: ignore[import-untyped]  # noqa: PLC0415
        except ImportError:
            raise ConfigError(f"results {url!r} needs fsspec: {extras.command('storage')}") from None
        self._fs: Any
        self._fs, root = fsspec.core.url_to_fs(url)
        self._root = root.rstrip("/")
        self._parts = f"{self._root}/{PARTS}"

    def _at(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def put(
        self, source: Path, key: str, fence: int, origin: str = "", job: int = 0, holds: Holds | None = None
    ) -> Published:
        target = self._at(key)
        check_fence(self.find(key), key, fence, origin, job, holds)
        published = Published(
            key, source.stat().st_size, checksum(source), fence, time.time_ns() // 1_000_000, origin, job
        )
        temporary = f"{self._parts}/{part_name(fence)}"
        for folder in (self._parts, target.rpartition("/")[0]):
            self._fs.makedirs(folder, exist_ok=True)
        try:
            self._fs.put_file(str(source), temporary)
            self._fs.mv(temporary, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(temporary)
        self._fs.pipe_file(_beside(target), json.dumps(published._asdict()).encode())
        return published

    def find(self, key: str) -> Published | None:
        target = self._at(key)
        with contextlib.suppress(FileNotFoundError):
            note = self._note(target)
            return note if note is not None and self._fs.size(target) == note.size else None
        return None

    def _note(self, target: str) -> Published | None:
        """Other trouble passes: it does not mean that nothing is there."""
        try:
            return Published(**json.loads(self._fs.cat_file(_beside(target))))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def open(self, key: str) -> IO[bytes]:
        opened: IO[bytes] = self._fs.open(self._at(key), "rb")
        return opened

    def take(self, key: str) -> tuple[Published, IO[bytes]] | None:
        found = self.find(key)
        try:
            return None if found is None else (found, self.open(key))
        except FileNotFoundError:
            return None

    def fetch(self, key: str, to: Path) -> Path:
        self._fs.get_file(self._at(key), str(to))
        return to

    def delete(self, key: str) -> None:
        for path in (_beside(self._at(key)), self._at(key)):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(path)

    def remove(self, key: str, job: int, origin: str = "") -> bool:
        note = self._note(self._at(key))
        is_its = note is not None and (note.job, note.origin) == (job, origin)
        if is_its:
            self.delete(key)
        return is_its

    def forget(self, job: int, origin: str = "") -> None:
        with contextlib.suppress(FileNotFoundError):
            for path in self._fs.find(f"{self._root}/{job}"):
                folder, _, name = path.rpartition("/")
                if name.startswith(".") and name.endswith(NOTE):
                    key = f"{folder}/{name[1 : -len(NOTE)]}".removeprefix(self._root).lstrip("/")
                    self.remove(key, job, origin)

    def sweep(self, max_age: float = 86400.0, now: float | None = None) -> int:
        deleted = 0
        oldest = (time.time() if now is None else now) - max_age
        with contextlib.suppress(FileNotFoundError):
            for path in self._fs.ls(self._parts, detail=False):
                with contextlib.suppress(FileNotFoundError):
                    if self._fs.modified(path).timestamp() < oldest:
                        self._fs.rm_file(path)
                        deleted += 1
        return deleted


def _beside(target: str) -> str:
    folder, _, name = target.rpartition("/")
    return f"{folder}/.{name}{NOTE}"
