"""The pure parts of the clip service."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from ostler import ConfigError
from ostler.apps.clips import fetch, media, probe, result, uploads
from ostler.apps.clips.rules import Cut, Refused, Rules
from ostler.jobs.results import LocalResults

FACTS = probe.Facts(Path("/v/a.mp4"), 1000, 60.0, 0, "h264", 1, "aac", 160, 120, 25.0, 4.0)


@pytest.mark.parametrize(
    ("change", "start", "first"),
    [
        ({}, 4.0, "copy"),
        ({}, 4.009, "copy"),
        ({}, 3.991, "copy"),
        ({}, 4.02, "encode"),
        ({"key": None}, 4.0, "encode"),
        ({"video_codec": "hevc"}, 4.0, "copy"),
        ({"video_codec": "av1", "audio_codec": "mp3"}, 4.0, "copy"),
        ({"video_codec": "vp9"}, 4.0, "encode"),
        ({"audio_codec": "vorbis"}, 4.0, "encode"),
        ({"audio": None, "audio_codec": None}, 4.0, "copy"),
        ({"rate": 1.0}, 4.0, "encode"),
    ],
)
def test_a_copy_needs_a_key_frame_at_the_start_and_codecs_that_fit(change, start, first) -> None:
    ways = media.modes(replace(FACTS, **change), Cut("a.mp4", start, start + 5))
    assert ways[0] == first
    assert ways[-1] == "encode"


def test_the_command_reads_files_only_and_writes_fast_start() -> None:
    argv = media.command(Rules(ffmpeg="ffmpeg"), Cut("a.mp4", 4, 6.5), FACTS, "copy", Path("/out/clip.mp4"))
    pairs = dict(zip(argv, argv[1:]))
    assert (pairs["-ss"], pairs["-t"], pairs["-i"], pairs["-c"]) == ("4.000500", "2.500000", "/v/a.mp4", "copy")
    assert (pairs["-protocol_whitelist"], pairs["-movflags"], argv[-1]) == ("file", "+faststart", "/out/clip.mp4")
    assert "hls" not in pairs["-format_whitelist"]
    assert argv.index("-format_whitelist") < argv.index("-i")
    encoded = media.command(Rules(ffmpeg="ffmpeg"), Cut("a.mp4", 4, 6.5), FACTS, "encode", Path("/out/clip.mp4"))
    assert dict(zip(encoded, encoded[1:]))["-c:v"] == "libx264"
    assert dict(zip(encoded, encoded[1:]))["-ss"] == "4.000000"


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        (b"out_time_us=1500000", 1.5),
        (b"out_time_us=-20000", 0.0),
        (b"out_time_us=N/A", None),
        (b"out_time_us=", None),
        (b"out_time=00:00:01.5", None),
        (b"progress=end", None),
        (b"", None),
    ],
)
def test_progress_lines(line, seconds) -> None:
    assert media.made(line) == seconds


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:93.184.216.34", True),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
    ],
)
def test_addresses(address, public) -> None:
    assert fetch.is_public(ipaddress.ip_address(address)) is public


def test_a_name_is_looked_up_once_and_the_connection_goes_to_what_was_judged(monkeypatch) -> None:
    """A second look-up could give another address: that is DNS rebinding."""
    looked, connected = [], []

    def look(host, port, **_):
        looked.append(host)
        address = "93.184.216.34" if len(looked) == 1 else "127.0.0.1"
        return [(2, 1, 6, "", (address, port))]

    def connect(address, timeout):
        connected.append(address)
        raise ConnectionRefusedError("as far as it goes")

    monkeypatch.setattr(fetch.socket, "getaddrinfo", look)
    monkeypatch.setattr(fetch.socket, "create_connection", connect)
    with pytest.raises(ConnectionRefusedError):
        fetch.download("http://tricky.example/a.mp4", Rules(http=True), Path("/nowhere"), lambda: None)
    assert (looked, connected) == (["tricky.example"], [("93.184.216.34", 80)])
    with pytest.raises(Refused, match="not public"):
        fetch.download("http://tricky.example/a.mp4", Rules(http=True), Path("/nowhere"), lambda: None)
    assert connected == [("93.184.216.34", 80)]


@pytest.mark.parametrize(
    "url", ["http://", "http:///a", "http://[::1", "http://h:99999/", "http://h/a b", "http://ü.example/"]
)
def test_urls_that_are_none(url) -> None:
    with pytest.raises(Refused, match="URL|ASCII"):
        fetch.check(url, Rules(http=True))


def test_fast_start_is_judged_by_the_order_of_the_boxes(tmp_path: Path) -> None:
    def box(kind: bytes, size: int) -> bytes:
        return (size + 8).to_bytes(4, "big") + kind + bytes(size)

    large = (1).to_bytes(4, "big") + b"free" + (24).to_bytes(8, "big") + bytes(8)
    for content, fast in [
        (box(b"ftyp", 16) + box(b"moov", 8) + box(b"mdat", 8), True),
        (box(b"ftyp", 16) + large + box(b"moov", 8), True),
        (box(b"ftyp", 16) + box(b"mdat", 8) + box(b"moov", 8), False),
        (b"", False),
        (b"\0" * 64, False),
    ]:
        (tmp_path / "x").write_bytes(content)
        assert probe.fast_start(tmp_path / "x") is fast


def test_rules_come_from_the_environment(tmp_path: Path) -> None:
    assert Rules.from_environment({}) == Rules()
    found = Rules.from_environment(
        {"OSTLER_CLIPS_ROOTS": f"{tmp_path}{os.pathsep}/", "OSTLER_CLIPS_MAX_INPUT_MB": "2", "OSTLER_CLIPS_HTTP": "1"}
    )
    assert (found.roots, found.max_bytes, found.http) == ((tmp_path.resolve(), Path("/")), 2 << 20, True)
    assert Rules.from_environment({"OSTLER_CLIPS_RESULT_TTL": "0"}).result_ttl == 0
    for name, value in [("MAX_SECONDS", "0"), ("MAX_SECONDS", "-1"), ("MAX_INPUT_MB", "inf"), ("RESULT_TTL", "nan")]:
        with pytest.raises(ConfigError, match=name):
            Rules.from_environment({f"OSTLER_CLIPS_{name}": value})


def test_uploads_are_swept_when_their_job_has_ended_or_they_never_had_one(tmp_path: Path) -> None:
    folder = tmp_path / "uploads"
    folder.mkdir()
    names = {kind: f"{n}" * 32 for n, kind in enumerate(["live", "ended", "orphan", "fresh", "broken", "writing"])}
    for kind, token in names.items():
        path = folder / f"{token}.{'part' if kind == 'writing' else 'source'}"
        path.write_text("video")
        if kind in ("orphan", "broken"):
            os.utime(path, (0, 0))
    uploads.assign(tmp_path, names["live"], 1)
    uploads.assign(tmp_path, names["ended"], 2)
    (folder / f"{names['broken']}.job").touch()
    os.utime(folder / f"{names['broken']}.job", (0, 0))

    async def live(job: int) -> bool:
        return job == 1

    asyncio.run(uploads.sweep(tmp_path, Rules(), live, (folder / f"{names['fresh']}.source").stat().st_mtime + 60))
    assert {p.stem for p in folder.iterdir()} == {names["live"], names["fresh"], names["writing"]}


def test_the_note_of_an_uploads_job_is_on_the_disk_before_the_answer(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "uploads").mkdir()
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    uploads.assign(tmp_path, "a" * 32, 17)
    folder = str(tmp_path / "uploads")
    assert synced == [f"{folder}/{'a' * 32}.note", folder]
    assert (tmp_path / "uploads" / f"{'a' * 32}.job").read_text() == "17"


def test_clips_are_deleted_when_they_are_too_old_and_nothing_else_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"clip")
    store = LocalResults(tmp_path / "results")
    at = [store.put(tmp_path / "file", key, 1).at / 1000 for key in ("1/clip.mp4", "1/other.mp4", "2/clip.mp4")]
    assert result.expire(store, 0, at[-1] + 1000) == 0
    assert result.expire(store, 60, at[-1] + 10) == 0
    assert result.expire(store, 60, at[-1] + 61) == 2
    assert [store.find(k) is not None for k in ("1/clip.mp4", "1/other.mp4", "2/clip.mp4")] == [False, True, False]


def test_every_setting_of_the_clip_service_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "clips.md").read_text()
    defaults = {f.name: f.default for f in fields(Rules)}
    for name, default in defaults.items():
        row = re.search(rf"^\| `OSTLER_CLIPS_{name.upper()}` \| ([^|]*) \|", text, re.MULTILINE)
        assert row, name
        if isinstance(default, int | float):
            assert float(row.group(1)) == float(default), name
