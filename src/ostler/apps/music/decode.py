"""Audio files as mono samples at 16 kHz, by PyAV (FFmpeg): in pieces, so that memory does not grow with the length, and within limits.

FFmpeg is native code that reads whatever people have on their disks. An error in a file is `Undecodable`; a crash or a hang of the decoder ends the
worker, and is then charged to the job.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import av
import av.error
import av.filter
import numpy as np

from ostler import Fail
from ostler.apps.music.memory import MOST, limited_memory
from ostler.apps.music.spectrogram import RATE, Floats

_PIECE = 10 * RATE  # samples given at a time
# Playlists and scripts make FFmpeg open other files and addresses: only formats that hold their own data are read, and only from files.
_FORMATS = "mp3,flac,ogg,mov,mp4,m4a,wav,w64,aiff,aac,matroska,webm,asf,ape,wv,mpc,mpc8,tta,dsf,caf"
OPTIONS = {"protocol_whitelist": "file", "format_whitelist": _FORMATS, "max_pixels": "100000000"}
_RATES = range(1_000, 768_001)
_CHANNELS = 64
# As steep as soxr's "HQ", with which librosa resamples: flat up to 91 % of 8 kHz, 120 dB down at 8 kHz.
_RESAMPLER = "filter_size=180:cutoff=0.9565:filter_type=kaiser:kaiser_beta=12"


class Undecodable(Fail):
    """The file cannot be decoded: it is no audio, damaged, or over a limit. The message is the reason, for people."""

    def __init__(self, reason: str) -> None:
        super().__init__("UNDECODABLE", reason)


@dataclass(frozen=True, slots=True)
class Limits:
    """`seconds` of sound are taken, and what follows is ignored. Decoding may take `time` seconds, and `memory` MB more than the process has."""

    seconds: float = 1800.0
    time: float = 300.0
    memory: float = MOST


@dataclass(slots=True)
class Source:
    """An audio file that is being decoded: what is known of it so far."""

    path: str | bytes | os.PathLike[str]
    limits: Limits = Limits()
    seconds: float = 0.0  # decoded so far
    damaged: int = 0  # packets that could not be decoded
    cut: bool = False  # it is longer than the limit
    codec: str = ""

    def pieces(self) -> Iterator[Floats]:
        """The samples, in pieces of up to ten seconds; raises Undecodable, or OSError when the disk is at fault."""
        if os.stat(self.path).st_size == 0:  # noqa: PTH116  bytes
            raise Undecodable("the file is empty")
        try:
            with (
                limited_memory(self.limits.memory),
                av.open(os.fsdecode(self.path), options=OPTIONS, metadata_errors="replace") as container,
            ):
                yield from self._decoded(container)
        except MemoryError:
            raise Undecodable(f"decoding it takes more than {self.limits.memory:g} MB of memory") from None
        except av.error.FFmpegError as error:
            if isinstance(error, OSError) and not isinstance(error, av.error.InvalidDataError | ValueError):
                raise  # not found, no permission, a read error
            raise Undecodable(f"not an audio file, or damaged ({error.strerror})") from None
        if self.seconds == 0:
            raise Undecodable("no sound could be decoded: the file is empty, damaged or incomplete")

    def _decoded(self, container: Any) -> Iterator[Floats]:
        stream = next((one for one in container.streams.audio if one.codec_context is not None), None)
        if stream is None:
            raise Undecodable("there is no audio in the file, or none that can be decoded")
        self.codec = stream.codec_context.name
        stream.codec_context.thread_count = 1  # workers are processes: one core each
        left = int(self.limits.seconds * RATE)
        for samples in _converted(self._frames(container, stream)):
            self.cut = len(samples) > left
            self.seconds += len(samples[:left]) / RATE
            if len(samples[:left]):
                yield samples[:left]
            left -= len(samples[:left])
            if self.cut:
                return

    def _frames(self, container: Any, stream: Any) -> Iterator[Any]:
        deadline = time.monotonic() + self.limits.time
        for packet in container.demux(stream):
            if time.monotonic() > deadline:
                raise Undecodable(
                    f"decoding took more than {self.limits.time:g} s; it had come to {self.seconds:.0f} s"
                )
            try:
                yield from (frame for frame in packet.decode() if not _before_start(frame))
            except (av.error.InvalidDataError, av.error.ArgumentError, av.error.PatchWelcomeError):
                self.damaged += 1


def _before_start(frame: Any) -> bool:
    """Some encoders put samples before time 0, which are not meant to be heard."""
    if frame.pts is None or frame.pts >= 0 or not frame.time_base:
        return False
    return bool(frame.pts * frame.time_base * frame.sample_rate + frame.samples <= 0)


def _converted(frames: Iterator[Any]) -> Iterator[Floats]:
    """Frames of any kind as mono samples at 16 kHz. A file may change its rate or channels in the middle: then a new converter goes on."""
    graph, kind = None, None
    for frame in frames:
        now = (frame.format.name, frame.layout.name, frame.layout.nb_channels, frame.sample_rate)
        if now != kind:
            if graph is not None:
                graph.push(None)
                yield from _ready(graph)
            graph, kind = _graph(*now), now
        frame.pts = None  # timestamps of damaged files jump; the samples are what counts
        assert graph is not None
        graph.push(frame)
        yield from _ready(graph)
    if graph is not None:
        graph.push(None)
        yield from _ready(graph)


def _graph(kind: str, layout: str, channels: int, rate: int) -> Any:
    if rate not in _RATES or not 1 <= channels <= _CHANNELS:
        raise Undecodable(f"{channels} channels at {rate} Hz cannot be converted")
    graph = av.filter.Graph()
    # The mean of all channels, as the model was trained with; before resampling, which is then done once.
    mean = "+".join(f"{1 / channels:.9f}*c{i}" for i in range(channels))
    steps = [
        graph.add("abuffer", f"time_base=1/{rate}:sample_rate={rate}:sample_fmt={kind}:channel_layout={layout}"),
        graph.add("aformat", "sample_fmts=fltp"),
        graph.add("pan", f"mono|c0={mean}"),
        graph.add("aresample", f"{RATE}:{_RESAMPLER}"),
        graph.add("aformat", "sample_fmts=flt"),
        graph.add("asetnsamples", f"n={_PIECE}:p=0"),
        graph.add("abuffersink"),
    ]
    for one, following in itertools.pairwise(steps):
        one.link_to(following)
    graph.configure()
    return graph


def _ready(graph: Any) -> Iterator[Floats]:
    while True:
        try:
            samples = graph.pull().to_ndarray()[0]
        except (av.error.BlockingIOError, av.error.EOFError):
            return
        # Float formats can hold anything; one NaN would spoil all that follows.
        yield np.nan_to_num(samples, nan=0.0, posinf=0.0, neginf=0.0).clip(-8, 8)
