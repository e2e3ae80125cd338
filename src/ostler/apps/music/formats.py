"""Tags in audio files of all kinds, by mutagen: what is there, what of it is ours, and a copy of the file in which ours are others.

| kind | where our tags are |
|---|---|
| mp3, wav | ID3 frames `TXXX:ostler:NAME` |
| flac, ogg (Vorbis, Opus, FLAC) | Vorbis comments `ostler:NAME` |
| m4a | atoms `----:com.apple.iTunes:ostler:NAME` |
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import math
import os
import shutil
import struct
from collections.abc import Iterator
from typing import IO, Any

from ostler import Fail
from ostler.apps.music import id3
from ostler.apps.music.id3 import Tags
from ostler.apps.music.walk import plain

_ATOM = "----:com.apple.iTunes:"
_V1 = 128  # bytes of an ID3v1 tag, at the end of the file


class Unwritable(Fail):
    """Tags cannot be written into this file, and another run would not change that. The message says why."""

    def __init__(self, reason: str) -> None:
        super().__init__("UNWRITABLE", reason)


def kind(file: IO[bytes]) -> str:
    """What the file is by its content, whatever its name; raises Unwritable."""
    file.seek(0)
    head = file.read(65_536)
    skipped = id3.length(head)
    if skipped:
        file.seek(skipped)
        if file.read(4) == b"fLaC":
            return "flac"
    if head[:4] == b"fLaC":
        return "flac"
    if head[:4] == b"OggS":
        return next((k for mark, k in _OGG if mark in head[:4096]), "") or _unknown("this kind of Ogg stream")
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        return "wav"
    if head[4:8] == b"ftyp":
        return "m4a"
    if skipped or _is_mpeg(head):
        return "mp3"
    return _unknown("this kind of file")


_OGG = ((b"\x01vorbis", "vorbis"), (b"OpusHead", "opus"), (b"\x7fFLAC", "oggflac"))


def _unknown(what: str) -> str:
    raise Unwritable(f"tags cannot be written into {what}; mp3, flac, ogg, opus, m4a and wav can have them")


def _is_mpeg(head: bytes) -> bool:
    """Whether a frame of MPEG layer 1, 2 or 3 begins in the first bytes, perhaps after some rubbish."""
    return any(head[i] == 0xFF and head[i + 1] & 0xE6 in (0xE2, 0xE4, 0xE6) for i in range(min(len(head) - 1, 4096)))


def load(file: IO[bytes], which: str) -> Any:
    """The file as mutagen has it; raises Unwritable where it cannot be understood."""
    from mutagen import flac, id3, mp4, oggflac, oggopus, oggvorbis, wave  # noqa: PLC0415

    kinds = {
        "flac": flac.FLAC,
        "vorbis": oggvorbis.OggVorbis,
        "opus": oggopus.OggOpus,
        "oggflac": oggflac.OggFLAC,
        "m4a": mp4.MP4,
    }
    file.seek(0)
    with understood():
        if which == "mp3":
            try:
                return id3.ID3(file, translate=False, load_v1=False)
            except id3.ID3NoHeaderError:
                return _of_v1(file)
        if which == "wav":
            found = wave.WAVE(file, translate=False, load_v1=False).tags
            return id3.ID3() if found is None else found
        return kinds[which](file)


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """mutagen's errors as ours: a full disk is not the file's fault."""
    from mutagen import MutagenError  # noqa: PLC0415

    try:
        yield
    except MutagenError as error:
        if isinstance(error.__context__, MemoryError):
            raise MemoryError from None  # noqa: TRY004  what went wrong, not what was found
        cause = error.args[0] if error.args else None
        if isinstance(cause, OSError) and cause.errno is not None:
            raise cause from None
        raise Unwritable(f"its tags cannot be read, it may be damaged ({type(error).__name__}: {error})") from None
    except (
        ValueError,
        LookupError,
        ArithmeticError,
        TypeError,
        AttributeError,
        EOFError,
        struct.error,
        AssertionError,
    ) as error:
        raise Unwritable(f"its tags cannot be read, it may be damaged ({type(error).__name__}: {error})") from None


def ours(found: Any, which: str, prefix: str) -> dict[str, list[str]]:
    """Our tags by name, without the prefix."""
    if which in ("mp3", "wav"):
        own = [frame for frame in found.getall("TXXX") if frame.desc.lower().startswith(prefix)]
        return {frame.desc[len(prefix) :].lower(): id3.split([str(text) for text in frame.text]) for frame in own}
    if which == "m4a":
        start = _ATOM + prefix
        return {
            name[len(start) :]: [bytes(value).decode("utf-8", "replace") for value in values]
            for name, values in (found.tags or {}).items()
            if name.startswith(start)
        }
    names = {name.lower() for name, _ in found.tags or () if name.lower().startswith(prefix)}
    return {name[len(prefix) :]: list(found.tags[name]) for name in sorted(names)}


def others(found: Any, which: str, prefix: str) -> Any:
    """All tags that are not ours, as values to compare."""
    if which in ("mp3", "wav"):
        known = [f for f in found.values() if not getattr(f, "desc", "").lower().startswith(prefix)]
        return sorted(str([type(f), *map(_value, vars(f).items())]) for f in known), sorted(found.unknown_frames)
    if which == "m4a":
        return {
            name: [(repr(vars(one)) if hasattr(one, "__dict__") else "", _value(one)) for one in values]
            if isinstance(values, list)
            else repr(values)
            for name, values in (found.tags or {}).items()
            if not name.startswith(_ATOM + prefix)
        }
    pairs = [(name, value) for name, value in found.tags or () if not name.lower().startswith(prefix)]
    if any("\ufffd" in value for _, value in pairs):
        raise Unwritable(
            "one of its tags is not valid UTF-8 and could not be kept as it is; repair it with a tag editor"
        )
    pictures = [_value(picture.write()) for picture in getattr(found, "pictures", ())]
    return getattr(found.tags, "vendor", ""), pairs, pictures


def _value(value: Any) -> str:
    """A value to compare; of a picture its hash, because it may have many megabytes."""
    if isinstance(value, tuple):
        return f"{value[0]}={_value(value[1])}"
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else repr(value)


def rewritten(source: IO[bytes], target: IO[bytes], which: str, prefix: str, wanted: Tags) -> None:
    """Write a copy of `source` with these tags, and no others, under the prefix."""
    if which in ("mp3", "wav"):
        try:
            (_mp3 if which == "mp3" else _wav)(source, target, prefix, wanted)
            if ours(load(target, which), which, prefix) == {name: id3.split(values) for name, values in wanted.items()}:
                return
        except id3.NotPlain:
            pass
        # Another program has put our frames elsewhere, or the tag is of a rare kind.
    _copied(source, target)
    found = load(target, which)
    with understood():
        _put(found, which, prefix, wanted)
        target.seek(0)
        _save(found, target, which)


def _put(found: Any, which: str, prefix: str, wanted: Tags) -> None:
    if which in ("mp3", "wav"):
        from mutagen.id3 import TXXX  # noqa: PLC0415

        for frame in found.getall("TXXX"):
            if frame.desc.lower().startswith(prefix):
                del found[frame.HashKey]
        for name, values in wanted.items():
            found.add(TXXX(encoding=3, desc=prefix + name, text=values))
        return
    if found.tags is None:
        found.add_tags()
    if which == "m4a":
        from mutagen.mp4 import MP4FreeForm  # noqa: PLC0415

        for name in [name for name in found.tags if name.startswith(_ATOM + prefix)]:
            del found.tags[name]
        for name, values in wanted.items():
            found.tags[_ATOM + prefix + name] = [MP4FreeForm(value.encode()) for value in values]
        return
    for name in {name.lower() for name, _ in found.tags if name.lower().startswith(prefix)}:
        del found.tags[name]
    for name, values in sorted(wanted.items()):
        found.tags[prefix + name] = values


def _save(found: Any, target: IO[bytes], which: str) -> None:
    if which not in ("mp3", "wav"):
        found.save(target)
        return
    version = found.version[1]
    if version == 2:
        found.update_to_v24()
    last = _tail(target)
    found.save(target, v2_version=3 if version == 3 else 4, v23_sep=None)
    if which == "mp3" and last[:3] == b"TAG":  # mutagen would bring it into line with the new tag
        target.seek(-_V1, os.SEEK_END)
        target.write(last)


def _mp3(source: IO[bytes], target: IO[bytes], prefix: str, wanted: Tags) -> None:
    source.seek(0)
    size = id3.length(source.read(10))
    source.seek(0)
    tag = source.read(size) if size else _from_v1(source, wanted)
    _emptied(target).write(id3.rewrite(tag, prefix, wanted))
    source.seek(size)
    shutil.copyfileobj(source, target, 1 << 20)


def _from_v1(source: IO[bytes], wanted: Tags) -> bytes:
    """A file with only the old ID3v1 tag at its end gets a copy of it: many players look no further than the tag in front."""
    tag, made = _of_v1(source), io.BytesIO()
    if not tag or not wanted:
        return b""
    tag.save(made, padding=lambda _: 0)
    return made.getvalue()


def _of_v1(file: IO[bytes]) -> Any:
    from mutagen.id3 import ID3, ParseID3v1  # noqa: PLC0415

    tag = ID3()
    for frame in (ParseID3v1(_tail(file)) or {}).values():
        tag.add(frame)
    return tag


def _wav(source: IO[bytes], target: IO[bytes], prefix: str, wanted: Tags) -> None:
    """RIFF: chunks with a name and a length, each padded to an even number of bytes."""
    end = source.seek(0, os.SEEK_END)
    place, found = 12, (end, end, b"")
    while place + 8 <= end:
        source.seek(place)
        name, size = struct.unpack("<4sI", source.read(8))
        if place + 8 + size > end:
            raise Unwritable("it says that it is longer than it is: it is incomplete, or was recorded as a stream")
        after = min(place + 8 + size + (size & 1), end)
        if name.lower() == b"id3 ":
            found = (place, after, source.read(size))
            break
        place = after
    start, after, tag = found
    tag = id3.rewrite(tag if id3.length(tag) else b"", prefix, wanted)
    chunk = b"id3 " + struct.pack("<I", len(tag)) + tag + b"\0" * (len(tag) & 1) if tag else b""
    odd = b"\0" * (start & 1 if tag else 0)
    total = start + len(odd) + len(chunk) + (end - after)
    if total - 8 > 0xFFFFFFFF:
        raise Unwritable("a wav file cannot be larger than 4 GB")
    _emptied(target).write(b"RIFF" + struct.pack("<I", total - 8))
    _range(source, target, 8, start)
    target.write(odd + chunk)
    _range(source, target, after, end)


def _range(source: IO[bytes], target: IO[bytes], start: int, end: int) -> None:
    source.seek(start)
    while start < end and (part := source.read(min(1 << 20, end - start))):
        target.write(part)
        start += len(part)


def _copied(source: IO[bytes], target: IO[bytes]) -> None:
    source.seek(0)
    shutil.copyfileobj(source, _emptied(target), 1 << 20)
    target.flush()


def _emptied(target: IO[bytes]) -> IO[bytes]:
    target.seek(0)
    target.truncate()
    return target


def _tail(file: IO[bytes]) -> bytes:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _V1))
    return file.read(_V1)


def described(file: IO[bytes], which: str) -> tuple[str | None, str | None, str | None, float | None]:
    """Title, artist, album and duration."""
    from mutagen.mp3 import MP3  # noqa: PLC0415
    from mutagen.wave import WAVE  # noqa: PLC0415

    file.seek(0)
    with understood():
        found = {"mp3": MP3, "wav": WAVE}[which](file) if which in ("mp3", "wav") else load(file, which)
    length = getattr(found.info, "length", None)
    tags = found.tags if found.tags is not None else {}
    names = _NAMES["id3" if which in ("mp3", "wav") else which if which == "m4a" else "vorbis"]
    title, artist, album = (_text(tags.get(name)) for name in names)
    return title, artist, album, float(length) if length and math.isfinite(length) else None


_NAMES = {
    "id3": ("TIT2", "TPE1", "TALB"),
    "m4a": ("\xa9nam", "\xa9ART", "\xa9alb"),
    "vorbis": ("title", "artist", "album"),
}


def _text(value: Any) -> str | None:
    """All values of a tag as one text."""
    values = getattr(value, "text", value) or []
    return "; ".join(text for one in itertools.islice(values, 20) if (text := plain(str(one)))) or None
