"""Uploads: streamed to a file in the data directory, there whole or not at all, and deleted when their job has ended.

`{token}.part` is being written, `{token}.source` is whole, `{token}.job` holds the id of the job that uses it. What has no
job (the client or the node went away in between) is deleted by age.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ostler import private
from ostler.apps.clips import source
from ostler.apps.clips.rules import Refused, Rules

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_GATHER = 1 << 20  # bytes that go to the disk in one step, in a thread
_BOUNDARY = 70  # bytes (RFC 2046)
_FIELD = 1024  # bytes that a field other than the file may have
_FIELDS = 16  # parts that a form may have besides its file
FORM = 65_536  # bytes that a form may have besides its file, headers and all


class Upload:
    """One multipart form on its way in. `write` takes its bytes; then `fields` has the small ones, `token` names the file."""

    def __init__(self, boundary: bytes, rules: Rules, data: Path) -> None:
        from python_multipart.multipart import MultipartParser  # noqa: PLC0415

        if not 0 < len(boundary) <= _BOUNDARY:
            found = f"one of {len(boundary)} bytes" if boundary else "none"
            raise Refused("VALIDATION", f"the form's Content-Type must name a boundary of 1 to 70 bytes, found {found}")
        self.fields: dict[str, str] = {}
        self.token = ""
        self._rules, self._data = rules, data
        self._folder = source.uploads(data)
        self._file: IO[bytes] | None = None
        self._part = self._folder
        self._size = self._received = self._parts = 0
        self._name, self._value = b"", bytearray()  # of the header that is read
        self._field, self._text = "", bytearray()  # of the part that is read
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_end": self._ended,
        }
        self._whole = False
        self._parser = MultipartParser(boundary, callbacks)

    def write(self, data: bytes) -> None:
        """More of the form. Raises Refused when it is too large or no form; OSError when the disk is in trouble."""
        from python_multipart.exceptions import FormParserError  # noqa: PLC0415

        try:
            self._parser.write(data)
        except FormParserError as error:
            raise Refused("VALIDATION", f"the form cannot be read: {error}") from error
        self._received += len(data)
        if self._received - self._size > FORM:
            raise Refused(
                "INPUT_TOO_LARGE",
                f"the form has more than {FORM} bytes besides its file; send file, start and end only",
            )

    def finish(self) -> None:
        """The whole form was taken: the file is on the disk for good, or Refused is raised."""
        if not self._whole:
            raise Refused("VALIDATION", "the form broke off before its end; send it again")
        if not self.token:
            raise Refused("VALIDATION", "the form has no file; send it as the part 'file', with 'start' and 'end'")
        self._part.replace(source.upload_path(self._data, self.token))
        private.anchor(self._folder)

    def discard(self) -> None:
        """Delete what was written."""
        if self._file is not None:
            self._file.close()
        if self.token:
            self._part.unlink(missing_ok=True)
            source.upload_path(self._data, self.token).unlink(missing_ok=True)

    # ---- what the parser finds

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _FIELDS + 1:
            raise Refused(
                "INPUT_TOO_LARGE", f"the form has more than {_FIELDS} fields besides its file; send start and end only"
            )
        self._field, self._text = "", bytearray()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        from python_multipart.multipart import parse_options_header  # noqa: PLC0415

        if self._name.lower() == b"content-disposition":
            self._field = parse_options_header(bytes(self._value))[1].get(b"name", b"").decode(errors="replace")
        self._name, self._value = b"", bytearray()

    def _headers_finished(self) -> None:
        if self._field != "file":
            return
        if self.token:
            raise Refused("VALIDATION", "the form has more than one file; send one")
        private.make(self._folder)
        self.token = secrets.token_hex(16)
        self._part = self._folder / f"{self.token}.part"
        self._file = private.open(self._part, "xb")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._file is not None:
            self._size += end - start
            self._rules.check_size(self._size, "the upload (so far)")
            self._file.write(data[start:end])
        else:
            self._text += data[start:end]
            if len(self._text) > _FIELD:
                raise Refused("VALIDATION", f"the field {self._field!r} is too long; send the video as the part 'file'")

    def _part_end(self) -> None:
        if self._file is None:
            self.fields[self._field] = self._text.decode(errors="replace")
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None

    def _ended(self) -> None:
        self._whole = True


async def receive(stream: AsyncIterator[bytes], boundary: bytes, rules: Rules, data: Path) -> Upload:
    """Take a form to its end, a piece at a time. On any error nothing of it is left."""
    upload, pending = Upload(boundary, rules, data), bytearray()
    try:
        async for piece in stream:
            pending += piece
            if len(pending) >= _GATHER:
                await asyncio.to_thread(upload.write, bytes(pending))
                pending.clear()
        await asyncio.to_thread(upload.write, bytes(pending))
        await asyncio.to_thread(upload.finish)
    except BaseException:
        upload.discard()
        raise
    return upload


def assign(data: Path, token: str, job: int) -> None:
    """Note which job uses the upload; it is kept as long as that job may run. On the disk for good when this returns."""
    note = source.upload_path(data, token).with_suffix(".job")
    fresh = note.with_suffix(".note")
    with private.open(fresh, "wb") as file:
        file.write(str(job).encode())
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(note)  # a note is there whole or not at all: an empty one would name no job
    private.sync(note.parent)


async def sweep(data: Path, rules: Rules, live: Callable[[int], Awaitable[bool]], now: float) -> None:
    """One look: delete the uploads of ended jobs, and those without a job that nothing was written to for a long time."""
    folder = source.uploads(data)
    for token in await asyncio.to_thread(lambda: {path.stem for path in folder.glob("*.*")}):
        files = [folder / f"{token}.{kind}" for kind in ("part", "source", "note", "job")]
        job = _noted(files[-1])
        ended = not await live(job) if job else now - max(map(_touched, files)) > rules.upload_ttl
        if ended:  # the note goes last: without it, what is left would stay until it is old
            for path in files:
                path.unlink(missing_ok=True)


def _noted(note: Path) -> int | None:
    """The job that uses the upload; None when none is noted."""
    try:
        return int(note.read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return None


def _touched(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
