"""What a file is, by PyAV: the source before the cut, and the clip before it is published."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostler.apps.clips.rules import PREFIX, Cut, Refused, Rules

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

# Playlists and scripts (HLS, DASH, concat…) make ffmpeg open other files and addresses, past every rule on sources. So only
# formats that hold their own data are read, and only through files.
FORMATS = "mov,matroska,webm,avi,mpegts,mpeg,flv,asf,ogg,mxf,h264,hevc"
OPTIONS = {"protocol_whitelist": "file", "format_whitelist": FORMATS}
NEAR = 0.01  # seconds; a key frame that near to the start is at the start
_PAST_END = 0.1  # seconds; a duration is often a frame shorter than people think
_TOLERANCE = 0.5  # seconds; 002's limit for the length of a clip


@dataclass(frozen=True, slots=True)
class Facts:
    """A source: what is in it, and where its last key frame up to the wanted start is (None: not known)."""

    path: Path
    size: int
    duration: float
    video: int
    video_codec: str
    audio: int | None
    audio_codec: str | None
    width: int
    height: int
    rate: float
    key: float | None

    def shown(self) -> dict[str, Any]:
        """The data of the event source:ready."""
        codecs = [c for c in (self.video_codec, self.audio_codec) if c]
        return {"duration": round(self.duration, 3), "codecs": codecs, "size": self.size}


@dataclass(frozen=True, slots=True)
class Clip:
    """A checked clip; width and height are as it is shown, after rotation."""

    seconds: float
    width: int
    height: int
    mode: str

    def result(self, key: str, size: int) -> dict[str, Any]:
        shape = {"mode": self.mode, "width": self.width, "height": self.height}
        return {"key": key, "seconds": round(self.seconds, 3), "bytes": size, **shape}


def read(path: Path, wanted: Cut, rules: Rules) -> Facts:
    """Probe the source; raises Refused when it cannot serve for this cut."""
    with _opened(path, wanted.source, rules) as container:
        video = _video(container)
        if video is None:
            raise Refused("UNREADABLE_SOURCE", f"{wanted.source} has no video in it; name a video file")
        rules.check_pixels(video.width, video.height, wanted.source)
        duration = _duration(container, video, wanted.source)
        _check_duration(duration, wanted, rules)
        rate = float(video.average_rate or video.guessed_rate or 25)
        _check_rate(container, video, rate, wanted, rules)
        audio = next(iter(container.streams.audio), None)
        return Facts(
            path=path,
            size=path.stat().st_size,
            duration=duration,
            video=video.index,
            video_codec=video.codec.canonical_name,
            audio=audio.index if audio else None,
            audio_codec=audio.codec.canonical_name if audio else None,
            width=video.width,
            height=video.height,
            rate=rate,
            key=_key_frame(container, video, wanted.start),
        )


def verify(path: Path, wanted: Cut, rules: Rules, facts: Facts | None = None) -> Clip:
    """The integrity check before a clip is published, or taken for done: raises Refused with BAD_OUTPUT."""
    try:
        _check(fast_start(path), "its index (moov) is not at the front")
        with _opened(path, "the clip", rules) as container:
            video = _video(container)
            _check(video is not None, "it has no video")
            assert video is not None
            _check(facts is None or facts.audio is None or bool(container.streams.audio), "its sound is missing")
            seconds = (container.duration or 0) / 1_000_000
            lengths = [
                seconds,
                *([float(video.duration * video.time_base)] if video.duration and video.time_base else []),
            ]
            for length in lengths:
                _check(
                    abs(length - wanted.length) <= _TOLERANCE, f"it is {length:.2f} s long, not {wanted.length:.2f} s"
                )
            mode = next((m for m in ("copy", "encode") if container.metadata.get("encoder") == wanted.mark(m)), "")
            _check(bool(mode), "it is another cut's clip")
            video.codec_context.options = {"max_pixels": str(rules.decoder_pixels)}
            frame = next(container.decode(video))  # a picture can be had from it
            turned = frame.rotation % 180 != 0
            width, height = (frame.height, frame.width) if turned else (frame.width, frame.height)
            return Clip(seconds, width, height, mode)
    except (Refused, StopIteration) as error:
        message = "it has no picture" if isinstance(error, StopIteration) else str(error)
        raise Refused("BAD_OUTPUT", f"the clip is not good and was not published: {message}") from None


def blamed(refused: Refused, wanted: Cut, rules: Rules, facts: Facts) -> Refused:
    """The refusal of a clip, or of its source where the source is the cause: truncated files pass the probe."""
    if refused.code != "BAD_OUTPUT":
        return refused
    try:
        last = _last_moment(facts.path, wanted, rules)
    except (Refused, OSError):
        last = 0.0
    if last >= wanted.end - _TOLERANCE:
        return refused
    return Refused(
        "UNREADABLE_SOURCE",
        f"{wanted.source} says that it is {facts.duration:.2f} s long, but can be read only up to {last:.2f} s: it is "
        "damaged or incomplete; copy it again",
    )


def fast_start(path: Path) -> bool:
    """Whether an mp4's index (moov) comes before its data (mdat), so that a player can begin at once."""
    with path.open("rb") as file:
        while len(header := file.read(8)) == 8:
            size, kind = int.from_bytes(header[:4]), header[4:]
            if kind in (b"moov", b"mdat"):
                return kind == b"moov"
            if size == 1:
                size = int.from_bytes(file.read(8)) - 8
            if size < 8:
                return False
            file.seek(size - 8, 1)
    return False


@contextlib.contextmanager
def _opened(path: Path, source: str, rules: Rules) -> Iterator[InputContainer]:
    """The file, for reading. What is wrong with the file is Refused; what is wrong with the disk passes as OSError."""
    import av  # noqa: PLC0415  large; only a running job needs it

    try:
        # Opening decodes some frames already, so the limit must be there before the size is known.
        options = {**OPTIONS, "max_pixels": str(rules.decoder_pixels)}
        with av.open(str(path), options=options, metadata_errors="replace") as container:
            yield container
    except FileNotFoundError:
        raise Refused("UNREADABLE_SOURCE", f"there is no file {source} any more; it was deleted or moved") from None
    except av.error.FFmpegError as error:
        if isinstance(error, OSError | MemoryError):
            raise
        raise Refused(
            "UNREADABLE_SOURCE",
            f"{source} cannot be read as a video ({error.strerror}): not a video, damaged or incomplete",
        ) from None


def _video(container: InputContainer) -> VideoStream | None:
    """The first video stream that is not a cover picture."""
    from av.stream import Disposition  # noqa: PLC0415

    return next((s for s in container.streams.video if not s.disposition & Disposition.attached_pic), None)


def _duration(container: InputContainer, video: VideoStream, source: str) -> float:
    if video.duration and video.time_base:
        return float(video.duration * video.time_base)
    if container.duration:
        return float(container.duration) / 1_000_000
    # Browsers record files that do not tell; the packets do.
    last = max((_moment(p) for p in container.demux(video)), default=0.0)
    if last <= 0:
        raise Refused("UNREADABLE_SOURCE", f"{source} has no pictures in it; name a video file")
    return last - _origin(container)


def _check_duration(duration: float, wanted: Cut, rules: Rules) -> None:
    if duration > rules.max_input_seconds:
        raise Refused(
            "INPUT_TOO_LARGE",
            f"{wanted.source} is {duration:.0f} s long, more than the {rules.max_input_seconds:g} s that "
            f"{PREFIX}MAX_INPUT_SECONDS allows",
        )
    if wanted.end > duration + _PAST_END:
        raise Refused(
            "VALIDATION",
            f"the cut ends at {wanted.end:g} s, but {wanted.source} is only {duration:.2f} s long; end it earlier",
        )


def _check_rate(container: InputContainer, video: VideoStream, rate: float, wanted: Cut, rules: Rules) -> None:
    """Refuse too many pixels a second. Some files claim the tick of their clock as their rate (browsers do, 1000 a second):
    before a file is refused, the frames of the wanted piece are counted.
    """
    size = video.width * video.height
    if size * rate <= rules.max_pixel_rate:
        return
    most, frames, origin = rules.max_pixel_rate * wanted.length / max(1, size), 0, _origin(container)
    container.seek(int((wanted.start + origin) * 1_000_000))
    for packet in container.demux(video):
        if _moment(packet) - origin > wanted.end:
            return
        frames += _moment(packet) - origin > wanted.start
        if frames > most:
            rules.check_pixel_rate(video.width, video.height, rate, wanted.source)


def _key_frame(container: InputContainer, video: VideoStream, start: float) -> float | None:
    """Seconds from the source's beginning to its last key frame up to `start`."""
    import av  # noqa: PLC0415

    origin = _origin(container)
    try:
        container.seek(int((start + NEAR + origin) * 1_000_000))
        for packet in container.demux(video):
            if packet.is_keyframe and packet.pts is not None and packet.time_base:
                return float(packet.pts * packet.time_base) - origin
    except av.error.FFmpegError:
        return None  # it cannot seek: then it is encoded
    return None


def _last_moment(path: Path, wanted: Cut, rules: Rules) -> float:
    """How far the source can really be read, looking no further than the wanted end."""
    last = 0.0
    with _opened(path, wanted.source, rules) as container:
        video, origin = _video(container), _origin(container)
        container.seek(int((wanted.start + origin) * 1_000_000))
        for packet in container.demux(video):
            last = max(last, _moment(packet) - origin)
            if last >= wanted.end:
                break
    return last


def _moment(packet: Any) -> float:
    """When the packet's picture ends to be shown."""
    return float((packet.pts + (packet.duration or 0)) * packet.time_base) if packet.pts is not None else 0.0


def _origin(container: InputContainer) -> float:
    """Some formats (MPEG-TS) do not begin at 0; ffmpeg counts from the beginning, and so do we."""
    return (container.start_time or 0) / 1_000_000


def _check(good: bool, complaint: str) -> None:
    if not good:
        raise Refused("BAD_OUTPUT", complaint)
