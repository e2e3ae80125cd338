"""The clip service on real nodes, with the real ffmpeg."""

from __future__ import annotations

import http.client
import http.server
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import av
import pytest

from ostler.jobs.results import LocalResults
from tests.apps.samples import H264, ffmpeg, ffmpeg_of, slow_ffmpeg, video
from tests.harness import Node, gone, until

APP = "ostler.apps.clips"


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    """A root with videos of every kind, and things that are none."""
    root = tmp_path_factory.mktemp("clips") / "videos"
    root.mkdir()
    plain = video(root / "plain.mp4", *H264, "-c:a", "aac", "-movflags", "+faststart")
    video(root / "silent.mp4", *H264, sound=False)
    video(root / "odd.mkv", "-c:v", "mpeg4", "-c:a", "libvorbis", size="161x121", seconds=3)
    video(root / "slides.mkv", *H264, rate="1", seconds=6)
    video(root / "old.avi", *H264, "-bf", "2", "-c:a", "libmp3lame", seconds=4)
    video(
        root / "modern.mp4",
        "-c:v",
        "libx265",
        "-preset",
        "ultrafast",
        "-g",
        "50",
        "-x265-params",
        "log-level=none",
        "-c:a",
        "libmp3lame",
        seconds=4,
    )
    ffmpeg("-display_rotation", "90", "-i", plain, "-c", "copy", to=root / "turned.mp4")
    ffmpeg("-i", plain, "-vn", "-c:a", "copy", to=root / "sound.mp4")
    (root / "text.mp4").write_text("this is not a video\n" * 100)
    (root / "empty.mp4").touch()
    (root / "list.m3u8").write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:6\n#EXTINF:6,\n{plain}\n#EXT-X-ENDLIST\n")
    whole = plain.read_bytes()
    (root / "headless.mp4").write_bytes(whole[len(whole) // 2 :])
    (root / "truncated.mp4").write_bytes(whole[: len(whole) // 2])
    outside = root.parent / "outside.mp4"
    outside.write_bytes(whole)
    (root / "escape.mp4").symlink_to(outside)
    (root / "inside.mp4").symlink_to(plain)
    (root / "loop.mp4").symlink_to(root / "loop.mp4")
    (root / "folder").mkdir()
    os.mkfifo(root / "pipe")
    return root


@pytest.fixture(scope="module")
def node(tmp_path_factory, videos: Path):
    """One node for all tests that do no harm to it."""
    node = Node(tmp_path_factory.mktemp("clips-node"), APP, OSTLER_CLIPS_ROOTS=str(videos)).start()
    yield node
    node.stop()


def cut(node: Node, source: Path | str, start: float, end: float) -> int:
    status, job = node.post("/api/v1/clips", {"source": str(source), "start": start, "end": end})
    assert status == 201, job
    return int(job["id"])


def form(file: bytes | None, **fields: object) -> tuple[bytes, dict[str, str]]:
    edge = uuid.uuid4().hex
    parts = [
        f'--{edge}\r\nContent-Disposition: form-data; name="{n}"\r\n\r\n{v}\r\n'.encode() for n, v in fields.items()
    ]
    if file is not None:
        head = f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="a.mp4"\r\nContent-Type: video/mp4\r\n\r\n'
        parts.insert(0, head.encode() + file + b"\r\n")
    return b"".join(parts) + f"--{edge}--\r\n".encode(), {"Content-Type": f"multipart/form-data; boundary={edge}"}


def upload(node: Node, file: bytes | None, **fields: object) -> tuple[int, dict]:
    body, headers = form(file, **fields)
    return node.post("/api/v1/clips", body, **headers)


def fetch(node: Node, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    host, port = node.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    try:
        connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        response = connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    finally:
        connection.close()


def streams(data: bytes, folder: Path) -> dict:
    """What is in a clip, and that all of it can be decoded."""
    path = folder / "got.mp4"
    path.write_bytes(data)
    with av.open(str(path)) as container:
        found = {s.type: s.codec_context.name for s in container.streams}
        shown = container.streams.video[0]
        size, seconds = (shown.width, shown.height), container.duration / 1e6
        frames = sum(1 for _ in container.decode(shown))
    moov, mdat = data.index(b"moov"), data.index(b"mdat")
    return {"codecs": found, "size": size, "seconds": seconds, "frames": frames, "fast": moov < mdat}


def published(node: Node) -> list[str]:
    return sorted(str(p.relative_to(node.folder / "results")) for p in (node.folder / "results").rglob("*.mp4"))


# ---- cutting


def test_a_cut_at_a_key_frame_is_a_stream_copy(node: Node, videos: Path, tmp_path: Path) -> None:
    job = cut(node, videos / "plain.mp4", 2, 4)
    done = node.wait_job(job, "done", "failed")
    assert done["error"] is None
    result = done["result"]
    assert (result["mode"], result["width"], result["height"], result["key"]) == ("copy", 160, 120, f"{job}/clip.mp4")
    status, headers, data = fetch(node, f"/api/v1/clips/{job}/result")
    assert (status, headers["content-type"], len(data)) == (200, "video/mp4", result["bytes"])
    found = streams(data, tmp_path)
    assert found["codecs"] == {"video": "h264", "audio": "aac"}
    assert found["fast"]
    assert abs(found["seconds"] - 2) < 0.1
    assert 49 <= found["frames"] <= 52
    assert (node.folder / "results" / str(job) / "clip.mp4").read_bytes() == data


def test_a_cut_elsewhere_is_encoded_to_the_frame(node: Node, videos: Path, tmp_path: Path) -> None:
    done = node.wait_job(job := cut(node, "plain.mp4", 1.2, 2.8), "done", "failed")
    assert done["error"] is None
    assert done["result"]["mode"] == "encode"
    found = streams(fetch(node, f"/api/v1/clips/{job}/result")[2], tmp_path)
    assert found["frames"] == 40
    assert found["fast"]
    assert abs(found["seconds"] - 1.6) < 0.1


@pytest.mark.parametrize(
    ("name", "start", "end", "mode", "size", "kinds"),
    [
        ("silent.mp4", 2, 4, "copy", (160, 120), {"video": "h264"}),
        ("silent.mp4", 1, 2, "encode", (160, 120), {"video": "h264"}),
        ("odd.mkv", 0, 2, "encode", (160, 120), {"video": "h264", "audio": "aac"}),
        ("turned.mp4", 1, 2, "encode", (120, 160), {"video": "h264", "audio": "aac"}),
        ("turned.mp4", 2, 3, "copy", (120, 160), {"video": "h264", "audio": "aac"}),
        ("slides.mkv", 1.3, 3.8, "encode", (160, 120), {"video": "h264", "audio": "aac"}),
        ("old.avi", 0.5, 2, "encode", (160, 120), {"video": "h264", "audio": "aac"}),
        ("modern.mp4", 2, 4, "copy", (160, 120), {"video": "hevc", "audio": "mp3float"}),
        ("old.avi", 2, 4, None, (160, 120), None),
        ("inside.mp4", 5, 6.05, "encode", (160, 120), {"video": "h264", "audio": "aac"}),
    ],
)
def test_sources_of_other_kinds(node: Node, tmp_path: Path, name, start, end, mode, size, kinds) -> None:
    done = node.wait_job(job := cut(node, name, start, end), "done", "failed")
    assert done["error"] is None
    assert (done["result"]["mode"], (done["result"]["width"], done["result"]["height"])) == (
        mode or done["result"]["mode"],
        size,
    )
    found = streams(fetch(node, f"/api/v1/clips/{job}/result")[2], tmp_path)
    assert kinds is None or found["codecs"] == kinds
    assert abs(found["seconds"] - (end - start)) <= 0.5


def test_the_timeline_is_002s_and_progress_waits_for_the_upload(node: Node) -> None:
    done = node.wait_job(cut(node, "plain.mp4", 1, 3))
    assert node.events(done["id"]) == ["created", "processing", "source:ready", "uploaded", "done"]
    names = [e["name"] for e in done["events"]]
    ready, uploaded = names.index("source:ready"), names.index("uploaded")
    before = [e["data"] for e in done["events"][:uploaded] if e["name"] == "progress"]
    assert "progress" not in names[:ready]
    assert all(e["pct"] <= 99 for e in before)
    assert [e["stage"] for e in before if e["stage"] != "cut"] == ["probe", "check", "publish"]
    assert [e["data"]["pct"] for e in done["events"][uploaded:] if e["name"] == "progress"] == [100]
    assert [e["seq"] for e in done["events"]] == list(range(1, len(names) + 1))
    assert done["events"][ready]["data"] == {
        "duration": 6.0,
        "codecs": ["h264", "aac"],
        "size": done["events"][ready]["data"]["size"],
    }
    assert (done["progress"], done["stage"]) == (100, "publish")


# ---- what is refused


def refused(node: Node, source: object, start: object = 0, end: object = 1) -> tuple[int, str, str]:
    """The answer to a request that must store nothing."""
    before = node.get("/api/v1/jobs?limit=1")[1]["jobs"]
    status, answer = node.post("/api/v1/clips", {"source": source, "start": start, "end": end})
    assert node.get("/api/v1/jobs?limit=1")[1]["jobs"] == before
    return status, answer["error"]["code"], answer["error"]["message"]


@pytest.mark.parametrize(
    ("source", "code", "says"),
    [
        ("../outside.mp4", "VALIDATION", "is not under"),
        ("folder/../../outside.mp4", "VALIDATION", "is not under"),
        ("/etc/passwd", "VALIDATION", "is not under"),
        ("/no/such/thing", "VALIDATION", "is not under"),
        ("escape.mp4", "VALIDATION", "is not under"),
        ("loop.mp4", "VALIDATION", "not a usable path"),
        ("a\0b", "VALIDATION", "not a usable path"),
        ("x" * 5000, "VALIDATION", "not a usable path"),
        ("folder", "VALIDATION", "is a directory"),
        ("pipe", "VALIDATION", "is a pipe"),
        ("missing.mp4", "UNREADABLE_SOURCE", "there is no file missing.mp4"),
        ("plain.mp4/more", "UNREADABLE_SOURCE", "there is no file"),
        ("upload:../../etc/passwd", "VALIDATION", "not an upload"),
        ("upload:" + "0" * 32, "UNREADABLE_SOURCE", "send it again"),
        ("ftp://host/a.mp4", "VALIDATION", "ftp://"),
        ("file:///etc/passwd", "VALIDATION", "file://"),
        ("http://example.com/a.mp4", "VALIDATION", "OSTLER_CLIPS_HTTP=1"),
        ("", "VALIDATION", "source must be text"),
        (7, "VALIDATION", "source must be text"),
    ],
)
def test_sources_that_are_not_allowed_are_refused_and_nothing_is_stored(node: Node, source, code, says) -> None:
    status, found, message = refused(node, source)
    assert (status, found) == (422, code), message
    assert says in message


@pytest.mark.parametrize(
    ("start", "end", "says"),
    [
        (3, 2, "not after its start"),
        (2, 2, "not after its start"),
        (-1, 2, "before 0"),
        (0, 121, "120 s that OSTLER_CLIPS_MAX_SECONDS allows"),
        (1, 1.01, "too short"),
        ("1", 2, "start must be a number"),
        (True, 2, "start must be a number"),
        (0, None, "end must be a number"),
        (float("nan"), 2, "must be"),
        (0, float("inf"), "must be"),
        (0, 10**400, "must be"),
    ],
)
def test_numbers_that_make_no_clip_are_refused_and_nothing_is_stored(node: Node, start, end, says) -> None:
    status, code, message = refused(node, "plain.mp4", start, end)
    assert (status, code) == (422, "VALIDATION"), message
    assert says in message


@pytest.mark.parametrize("body", [b"", b"nonsense", b"[]", b'{"source": "a"}', b"[" * 60_000, b'{"source":"\xff"}'])
def test_requests_that_are_no_requests(node: Node, body: bytes) -> None:
    status, answer = node.post("/api/v1/clips", body, **{"Content-Type": "application/json"})
    assert (status, answer["error"]["code"]) == (422, "VALIDATION"), answer


@pytest.mark.parametrize(
    ("name", "start", "end", "code", "says"),
    [
        ("text.mp4", 0, 1, "UNREADABLE_SOURCE", "cannot be read as a video"),
        ("empty.mp4", 0, 1, "UNREADABLE_SOURCE", "cannot be read as a video"),
        ("headless.mp4", 0, 1, "UNREADABLE_SOURCE", "cannot be read as a video"),
        ("list.m3u8", 0, 1, "UNREADABLE_SOURCE", "cannot be read as a video"),
        ("sound.mp4", 0, 1, "UNREADABLE_SOURCE", "has no video"),
        ("truncated.mp4", 4, 6, "UNREADABLE_SOURCE", "truncated.mp4"),
        ("truncated.mp4", 3.3, 5.5, "UNREADABLE_SOURCE", "truncated.mp4"),
        ("plain.mp4", 5, 8, "VALIDATION", "only 6.00 s long"),
    ],
)
def test_what_only_a_look_inside_can_tell_fails_for_good(node: Node, name, start, end, code, says) -> None:
    failed = node.wait_job(job := cut(node, name, start, end))
    assert (failed["status"], failed["error"]["code"], failed["attempt"]) == ("failed", code, 1), failed["error"]
    assert says in failed["error"]["message"]
    status, _, body = fetch(node, f"/api/v1/clips/{job}/result")
    assert status == 404
    assert b"NOT_READY" in body
    assert code.encode() in body
    assert f"{job}/clip.mp4" not in published(node)


def test_the_job_checks_again_what_the_request_would_have_refused(node: Node) -> None:
    """A job can be stored by other ways than the clip service's own route."""
    for args, code in [
        ({"source": "../outside.mp4", "start": 0, "end": 1}, "VALIDATION"),
        ({"source": "plain.mp4", "start": 2, "end": 1}, "VALIDATION"),
        ({"source": "http://127.0.0.1/a.mp4", "start": 0, "end": 1}, "VALIDATION"),
    ]:
        failed = node.wait_job(node.enqueue("clip", **args))
        assert (failed["status"], failed["error"]["code"], failed["attempt"]) == ("failed", code, 1)


def test_a_source_that_is_deleted_before_the_run_fails_for_good(make_node, videos: Path) -> None:
    node = make_node("--pool", "clips=1", app=APP, OSTLER_CLIPS_ROOTS=str(videos))
    (videos / "brief.mp4").write_bytes((videos / "plain.mp4").read_bytes())
    assert node.post("/api/v1/pools/clips/pause")[0] == 200
    job = cut(node, "brief.mp4", 1, 2)
    (videos / "brief.mp4").unlink()
    assert node.post("/api/v1/pools/clips/resume")[0] == 200
    failed = node.wait_job(job)
    assert (failed["status"], failed["error"]["code"], failed["attempt"]) == ("failed", "UNREADABLE_SOURCE", 1)
    assert "there is no file brief.mp4" in failed["error"]["message"]
    assert published(node) == []


def test_limits_are_settings_and_each_has_its_code(make_node, videos: Path) -> None:
    limits = {
        "OSTLER_CLIPS_MAX_INPUT_MB": "0.1",
        "OSTLER_CLIPS_MAX_INPUT_SECONDS": "2",
        "OSTLER_CLIPS_MAX_SECONDS": "1",
    }
    node = make_node("--pool", "clips=1", app=APP, OSTLER_CLIPS_ROOTS=str(videos), **limits)
    status, code, message = refused(node, "plain.mp4")
    assert (status, code) == (413, "INPUT_TOO_LARGE")
    assert "more than the 0.1 MB that OSTLER_CLIPS_MAX_INPUT_MB allows" in message
    assert refused(node, "odd.mkv", 0, 2)[:2] == (422, "VALIDATION")
    small = video(videos / "small.mkv", *H264, size="32x32", seconds=3, sound=False)
    assert small.stat().st_size < 100_000
    failed = node.wait_job(cut(node, "small.mkv", 0, 1))
    assert (failed["status"], failed["error"]["code"]) == ("failed", "INPUT_TOO_LARGE")
    assert "OSTLER_CLIPS_MAX_INPUT_SECONDS" in failed["error"]["message"]
    status, answer = upload(node, b"x" * 200_000, start=0, end=1)
    assert (status, answer["error"]["code"]) == (413, "INPUT_TOO_LARGE")
    assert not list((node.folder / "uploads").glob("*"))


@pytest.fixture(scope="module")
def bombs(tmp_path_factory) -> Path:
    """Small files with huge pictures: an honest one, one whose header lies, one that grows in the middle."""
    root = tmp_path_factory.mktemp("bombs")
    black = ("-f", "lavfi", "-i", "color=black:s=12000x12000:r=4:d=1")
    huge = ffmpeg(*black, "-c:v", "libx264", "-preset", "ultrafast", "-g", "4", to=root / "huge.mp4")
    mkv = ffmpeg("-i", huge, "-c", "copy", to=root / "true.mkv").read_bytes()
    sides = b"\xb0\x82\x2e\xe0\xba\x82\x2e\xe0"
    assert mkv.count(sides) == 1
    (root / "liar.mkv").write_bytes(mkv.replace(sides, b"\xb0\x82\x00\xa0\xba\x82\x00\x78"))
    small = video(root / "small.h264", *H264, seconds=2, rate="8", sound=False)
    grown = ffmpeg("-i", huge, "-c", "copy", "-bsf:v", "h264_mp4toannexb", to=root / "large.h264")
    (root / "both.h264").write_bytes(small.read_bytes() + grown.read_bytes())
    ffmpeg("-framerate", "8", "-i", root / "both.h264", "-c", "copy", to=root / "grows.avi")
    ffmpeg("-i", huge, "-c", "copy", to=root / "huge.ts")
    video(root / "fast.mp4", *H264, size="640x480", rate="500", seconds=1, sound=False)
    video(root / "large.mp4", *H264, size="1920x1080", seconds=1, sound=False)
    assert huge.stat().st_size < 1_000_000
    return root


def test_a_small_file_with_huge_pictures_is_refused_and_takes_no_memory(make_node, bombs: Path) -> None:
    node = make_node("--pool", "clips=1", app=APP, OSTLER_CLIPS_ROOTS=str(bombs), OSTLER_CLIPS_MAX_PIXEL_RATE="1e8")
    for name, start, end in [("huge.mp4", 0, 0.9), ("huge.ts", 0, 0.9), ("liar.mkv", 0.1, 0.9)]:
        failed = node.wait_job(cut(node, name, start, end))
        assert (failed["status"], failed["error"] and failed["error"]["code"]) == ("failed", "INPUT_TOO_LARGE"), name
        assert "12000 x 12000 = 144.0 million pixels, more than the 36 million" in failed["error"]["message"]
        assert "OSTLER_CLIPS_MAX_PIXELS" in failed["error"]["message"]
    assert node.wait_job(cut(node, "grows.avi", 0.1, 2.9))["status"] == "failed"
    [worker] = node.workers()
    peak = int(Path(f"/proc/{worker['pid']}/status").read_text().partition("VmHWM:")[2].split()[0]) // 1024
    assert peak < 1000
    failed = node.wait_job(cut(node, "fast.mp4", 0, 0.9))
    assert (failed["status"], failed["error"]["code"]) == ("failed", "INPUT_TOO_LARGE")
    assert "OSTLER_CLIPS_MAX_PIXEL_RATE" in failed["error"]["message"]


def test_a_cut_has_a_limit_of_memory_and_its_worker_is_as_before_afterwards(make_node, bombs: Path) -> None:
    node = make_node("--pool", "clips=1", app=APP, OSTLER_CLIPS_ROOTS=str(bombs), OSTLER_CLIPS_MAX_MEMORY_MB="200")
    failed = node.wait_job(cut(node, "large.mp4", 0.1, 0.9))
    assert (failed["status"], failed["error"]["code"], failed["attempt"]) == ("failed", "INPUT_TOO_LARGE", 1)
    assert "more than the 200 MB of memory that OSTLER_CLIPS_MAX_MEMORY_MB allows" in failed["error"]["message"]
    [worker] = node.workers()
    limits = Path(f"/proc/{worker['pid']}/limits").read_text().splitlines()
    assert next(line for line in limits if line.startswith("Max data size")).split()[3] == "unlimited"


def test_without_roots_the_answer_says_how_to_set_them(make_node) -> None:
    node = make_node("--pool", "clips=0", app=APP)
    status, code, message = refused(node, "/etc/passwd")
    assert (status, code) == (422, "VALIDATION")
    assert "OSTLER_CLIPS_ROOTS=" in message


def test_a_wrong_setting_is_refused_at_the_start(tmp_path: Path) -> None:
    wrong = {"MAX_SECONDS": "many", "ROOTS": "relative/path", "HTTP": "yes", "FFMPEG": "/no/ffmpeg"}
    nodes = {name: Node(tmp_path / name, APP, **{f"OSTLER_CLIPS_{name}": value}) for name, value in wrong.items()}
    for node in nodes.values():
        node.start_process()
    for name, node in nodes.items():
        assert node.wait() == 2
        assert f"OSTLER_CLIPS_{name}" in node.log()


# ---- results over HTTP


def test_ranges_of_a_result(node: Node) -> None:
    job = cut(node, "plain.mp4", 0, 1)
    node.wait_job(job)
    path = f"/api/v1/clips/{job}/result"
    status, headers, whole = fetch(node, path)
    size, tag = len(whole), headers["etag"]
    assert (status, headers["accept-ranges"], headers["content-length"]) == (200, "bytes", str(size))
    for value, piece in {"bytes=0-0": whole[:1], "bytes=10-19": whole[10:20], "bytes=-7": whole[-7:], f"bytes={size - 3}-": whole[-3:], "bytes=5-99999999": whole[5:]}.items():  # fmt: skip
        status, headers, data = fetch(node, path, Range=value)
        assert (status, data, headers["content-length"]) == (206, piece, str(len(piece))), value
        first = size - len(piece) if value.endswith("-") or "=-" in value else int(value[6:].partition("-")[0])
        assert headers["content-range"] == f"bytes {first}-{first + len(piece) - 1}/{size}"
    for value in (f"bytes={size}-", "bytes=-0"):
        status, headers, data = fetch(node, path, Range=value)
        assert (status, headers["content-range"]) == (416, f"bytes */{size}")
        assert b'"error"' in data
    assert fetch(node, path, If_None_Match=tag)[0] == 304
    assert fetch(node, path, Range="bytes=0-1", If_Range=tag)[0] == 206
    assert fetch(node, path, Range="bytes=0-1", If_Range='"other"')[0] == 200
    status, headers, data = fetch(node, path, "HEAD")
    assert (status, headers["content-length"], data) == (200, str(size), b"")


def test_what_is_not_there_is_404_and_what_was_there_is_410(node: Node) -> None:
    def ask(path: str) -> tuple[int, str, str]:
        status, answer = node.get(path)
        return status, answer["error"]["code"], answer["error"]["message"]

    assert ask("/api/v1/clips/999999")[:2] == (404, "NOT_FOUND")
    assert ask("/api/v1/clips/999999/result")[:2] == (404, "NOT_FOUND")
    assert node.post("/api/v1/pools/clips/pause")[0] == 200
    try:
        job = cut(node, "plain.mp4", 0, 1)
        status, code, message = ask(f"/api/v1/clips/{job}/result")
        assert (status, code) == (404, "NOT_READY")
        assert f"job {job} has no clip, it is queued" in message
    finally:
        assert node.post("/api/v1/pools/clips/resume")[0] == 200
    assert node.wait_job(job)["status"] == "done"
    assert node.get(f"/api/v1/clips/{job}")[1]["result"]["key"] == f"{job}/clip.mp4"
    (node.folder / "results" / str(job) / "clip.mp4").unlink()
    assert ask(f"/api/v1/clips/{job}/result")[:2] == (410, "EXPIRED")


def test_a_result_older_than_its_time_is_410(make_node, videos: Path) -> None:
    node = make_node("--pool", "clips=1", app=APP, OSTLER_CLIPS_ROOTS=str(videos), OSTLER_CLIPS_RESULT_TTL="0.001")
    job = cut(node, "plain.mp4", 2, 3)
    node.wait_job(job)
    until(lambda: time.time() * 1000 > node.job(job)["finished_at"] + 1, "the time to pass")
    status, answer = node.get(f"/api/v1/clips/{job}/result")
    assert (status, answer["error"]["code"]) == (410, "EXPIRED")


def test_results_elsewhere_are_served_in_ranges_too(make_node, videos: Path, tmp_path: Path) -> None:
    """Through fsspec, as a bucket would be."""
    elsewhere = {"OSTLER_RESULTS": f"local://{tmp_path}/bucket", "OSTLER_CLIPS_ROOTS": str(videos)}
    node = make_node("--pool", "clips=1", app=APP, **elsewhere)
    job = cut(node, "plain.mp4", 2, 3)
    assert node.wait_job(job)["status"] == "done"
    whole = (tmp_path / "bucket" / str(job) / "clip.mp4").read_bytes()
    assert fetch(node, f"/api/v1/clips/{job}/result")[2] == whole
    assert fetch(node, f"/api/v1/clips/{job}/result", Range="bytes=100-199")[::2] == (206, whole[100:200])


# ---- uploads


def test_an_upload_is_cut_and_deleted_when_its_job_has_ended(node: Node, videos: Path) -> None:
    for content, status in [((videos / "plain.mp4").read_bytes(), "done"), (b"no video at all", "failed")]:
        code, job = upload(node, content, start=1, end=2.5)
        assert code == 201, job
        ended = node.wait_job(job["id"])
        assert ended["status"] == status
        kept = node.folder / "uploads"
        until(lambda: not list(kept.iterdir()), "the upload to be deleted")
    assert ended["error"]["code"] == "UNREADABLE_SOURCE"


def test_an_upload_is_kept_while_its_job_waits(make_node, videos: Path) -> None:
    node = make_node("--pool", "clips=1", app=APP)
    assert node.post("/api/v1/pools/clips/pause")[0] == 200
    _, job = upload(node, (videos / "plain.mp4").read_bytes(), start=2, end=3)
    _, doomed = upload(node, (videos / "plain.mp4").read_bytes(), start=2, end=3)
    assert node.post(f"/api/v1/jobs/{doomed['id']}/cancel")[1]["status"] == "cancelled"
    files = node.folder / "uploads"
    until(lambda: len(list(files.glob("*.source"))) == 1, "the upload of the cancelled job to be swept")
    assert node.post("/api/v1/pools/clips/resume")[0] == 200
    assert node.wait_job(job["id"])["status"] == "done"


@pytest.mark.parametrize(
    ("fields", "with_file", "says"),
    [
        ({"start": 1}, True, "no 'end'"),
        ({"start": "x", "end": 2}, True, "must be a number"),
        ({"start": 3, "end": 2}, True, "not after its start"),
        ({"start": "nan", "end": 2}, True, "must be numbers"),
        ({"start": 1, "end": 2}, False, "no file"),
        ({"start": 1, "end": 2, "more": "y" * 2000}, True, "too long"),
    ],
)
def test_forms_that_cannot_be_taken_leave_nothing(node: Node, fields, with_file, says) -> None:
    status, answer = upload(node, b"v" * 5000 if with_file else None, **fields)
    assert (status, answer["error"]["code"]) == (422, "VALIDATION"), answer
    assert says in answer["error"]["message"]
    until(
        lambda: not (node.folder / "uploads").exists() or not list((node.folder / "uploads").iterdir()), "nothing left"
    )


def test_a_form_that_breaks_off_leaves_nothing(node: Node) -> None:
    body, headers = form(b"v" * 5000, start=1, end=2)
    status, answer = node.post("/api/v1/clips", body[:-10], **headers)
    assert (status, answer["error"]["code"]) == (422, "VALIDATION")
    assert "broke off before its end" in answer["error"]["message"]
    assert list((node.folder / "uploads").glob("*.*")) == []


def test_a_form_of_many_fields_is_refused_before_it_fills_the_memory(node: Node) -> None:
    for count, size, says in [(20, 5, "more than 16 fields"), (2, 900, ""), (10, 1000, "")]:
        fields = {f"f{n}": "x" * size for n in range(count)}
        status, answer = upload(node, None, **fields)
        assert status == (413 if says else 422), answer
        assert says in answer["error"]["message"]
    edge = "b" * 20
    flood = f"--{edge}\r\nX-Fill: {'y' * 4000}\r\nContent-Disposition: form-data; name=file\r\n\r\n" + "z" * 10
    headers = {"Content-Type": f"multipart/form-data; boundary={edge}"}
    body = b"\r\n" * 60_000 + flood.encode()
    status, answer = node.post("/api/v1/clips", body, **headers)
    assert (status, answer["error"]["code"]) == (413, "INPUT_TOO_LARGE"), answer
    assert "more than 65536 bytes besides its file" in answer["error"]["message"]
    assert list((node.folder / "uploads").glob("*.*")) == []


@pytest.mark.parametrize("length", [0, 71, 5000])
def test_a_boundary_that_no_form_has_is_refused(node: Node, length: int) -> None:
    headers = {"Content-Type": f"multipart/form-data; boundary={'b' * length}"}
    status, answer = node.post("/api/v1/clips", b"--b--", **headers)
    assert (status, answer["error"]["code"]) == (422, "VALIDATION"), answer
    assert "boundary of 1 to 70 bytes" in answer["error"]["message"]


def test_a_refused_body_is_answered_and_not_reset(make_node) -> None:
    """The client says `Connection: close` and reads nothing before it has sent everything, as urllib does."""
    node = make_node("--pool", "clips=0", app=APP, OSTLER_CLIPS_MAX_INPUT_MB="1")
    status, answer = upload(node, bytes(40 << 20), start=0, end=1)
    assert (status, answer["error"]["code"]) == (413, "INPUT_TOO_LARGE")
    status, answer = node.post("/api/v1/clips", b'{"source": "' + bytes(40 << 20))
    assert (status, answer["error"]["code"]) == (413, "INPUT_TOO_LARGE")
    status, answer = node.post("/api/v1/jobs", b'{"task": "' + bytes(40 << 20))
    assert (status, answer["error"]["code"]) == (413, "PAYLOAD_TOO_LARGE")


def test_a_large_upload_does_not_go_through_memory(make_node) -> None:
    node = make_node("--pool", "clips=0", app=APP)
    peak = lambda: int(Path(f"/proc/{node.pid}/status").read_text().partition("VmHWM:")[2].split()[0]) // 1024
    before = peak()
    status, job = upload(node, os.urandom(1 << 20) * 80, start=0, end=1)
    assert status == 201
    assert peak() - before < 40
    kept = node.folder / "uploads" / f"{job['args']['source'].removeprefix('upload:')}.source"
    assert kept.stat().st_size == 80 << 20


# ---- crashes and cancels


@pytest.fixture(scope="module")
def slow_node(tmp_path_factory, videos: Path):
    """A node with one worker, whose ffmpeg dawdles until it is told to go."""
    folder = tmp_path_factory.mktemp("clips-slow")
    env = slow_ffmpeg(folder / "bin")
    node = Node(folder / "node", APP, "--pool", "clips=1", OSTLER_CLIPS_ROOTS=str(videos), **env).start()
    yield node
    node.stop()


@pytest.fixture
def slow(slow_node: Node):
    """The slow node, and the file that makes it quick."""
    go = slow_node.folder.parent / "bin" / "go"
    go.unlink(missing_ok=True)
    return slow_node, go


def busy(node: Node, job: int) -> tuple[int, int]:
    """The worker and its ffmpeg, once the cut has begun."""
    until(lambda: node.job(job)["stage"] == "cut", "the cut to begin")
    worker = node.worker(node.job(job)["worker"])["pid"]
    return worker, until(lambda: ffmpeg_of(worker), "ffmpeg to run")


def test_a_worker_killed_in_mid_clip_is_replaced_and_the_clip_finished_once(slow) -> None:
    node, go = slow
    job = cut(node, "plain.mp4", 1, 5)
    worker, child = busy(node, job)
    go.touch()
    os.kill(worker, signal.SIGKILL)
    done = node.wait_job(job)
    assert done["status"] == "done"
    assert (done["attempt"], done["crashes"]) == (2, 1)
    again = ["processing", "source:ready", "uploaded", "done"]
    assert node.events(job) == ["created", "processing", "source:ready", "requeued:crash", *again]
    until(lambda: gone(child), "the ffmpeg of the dead worker to be gone")
    assert f"{job}/clip.mp4" in published(node)
    assert [p.name for p in (node.folder / "results" / str(job)).iterdir() if p.name.endswith(".part")] == []


def test_a_crash_between_publishing_and_done_is_not_cut_again(make_node, videos: Path) -> None:
    app = Path(__file__).with_name("clips_that_die.py")
    node = make_node("--pool", "clips=1", app=app, OSTLER_CLIPS_ROOTS=str(videos))
    job = cut(node, "plain.mp4", 1, 3)
    done = node.wait_job(job)
    expected = ["created", "processing", "source:ready", "uploaded", "requeued:crash", "processing", "done"]
    assert node.events(job) == expected
    assert (done["attempt"], done["result"]["mode"], done["progress"]) == (2, "encode", 100)
    assert done["result"]["bytes"] == (node.folder / "results" / str(job) / "clip.mp4").stat().st_size
    assert fetch(node, f"/api/v1/clips/{job}/result")[0] == 200


def test_a_clip_of_another_cut_under_the_key_is_not_taken_for_this_one(
    node: Node, make_node, videos: Path, tmp_path
) -> None:
    """The database begins anew and numbers its jobs from 1; the results stay."""
    job = cut(node, "plain.mp4", 2, 4)
    node.wait_job(job)
    LocalResults(tmp_path / "kept").put(node.folder / "results" / str(job) / "clip.mp4", "1/clip.mp4", 1)
    anew = make_node(
        "--pool", "clips=1", app=APP, OSTLER_CLIPS_ROOTS=str(videos), OSTLER_RESULTS=str(tmp_path / "kept")
    )
    assert cut(anew, "silent.mp4", 2, 4) == 1
    assert anew.wait_job(1)["status"] == "done"
    assert anew.events(1) == ["created", "processing", "source:ready", "uploaded", "done"]


def test_a_cancel_in_mid_cut_ends_ffmpeg_and_publishes_nothing(slow) -> None:
    node, _ = slow
    job = cut(node, "plain.mp4", 1, 5)
    worker, child = busy(node, job)
    assert node.post(f"/api/v1/jobs/{job}/cancel")[0] == 200
    assert node.wait_job(job)["status"] == "cancelled"
    until(lambda: gone(child), "ffmpeg to be gone")
    assert not gone(worker)  # it heard the cancel by itself, nobody had to kill it
    assert f"{job}/clip.mp4" not in published(node)
    status, answer = node.get(f"/api/v1/clips/{job}/result")
    assert (status, answer["error"]["code"]) == (404, "NOT_READY")


def test_an_ffmpeg_that_was_killed_is_tried_again(slow) -> None:
    """Not the source's fault: the system's memory killer, or an operator."""
    node, go = slow
    job = cut(node, "plain.mp4", 1, 5)
    _, child = busy(node, job)
    go.touch()
    os.kill(child, signal.SIGKILL)
    done = node.wait_job(job)
    assert (done["status"], done["attempt"], done["crashes"]) == ("done", 2, 0)
    assert "requeued:retry" in node.events(job)


def test_an_ffmpeg_that_crashes_or_complains_fails_the_job_with_what_it_said(make_node, videos: Path, tmp_path) -> None:
    tools = tmp_path / "bin"
    path = slow_ffmpeg(tools)
    node = make_node("--pool", "clips=1", app=APP, OSTLER_CLIPS_ROOTS=str(videos), **path)
    for script, says in [
        ("kill -SEGV $$", "SIGSEGV"),
        ("echo first >&2; echo why it failed >&2; exit 1", "why it failed"),
    ]:
        (tools / "ffmpeg").write_text(f"#!/bin/sh\n{script}\n")
        failed = node.wait_job(cut(node, "plain.mp4", 1, 5))
        assert (failed["status"], failed["attempt"], failed["error"]["code"]) == ("failed", 1, "UNREADABLE_SOURCE")
        assert says in failed["error"]["message"]
    (tools / "ffmpeg").write_text(
        "#!/bin/sh\necho 'av_interleaved_write_frame(): No space left on device' >&2\nexit 1\n"
    )
    failed = node.wait_job(cut(node, "plain.mp4", 1, 5))
    assert (failed["status"], failed["attempt"], failed["error"]["code"]) == ("failed", 3, "RETRIES_EXHAUSTED")
    (tools / "ffmpeg").write_text(f'#!/bin/sh\nfor last; do :; done; cp "{videos}/silent.mp4" "$last"\n')
    failed = node.wait_job(cut(node, "plain.mp4", 1, 5))
    assert (failed["status"], failed["attempt"], failed["error"]["code"]) == ("failed", 1, "BAD_OUTPUT")
    assert published(node) == []


# ---- sources by URL


class Shelf(http.server.BaseHTTPRequestHandler):
    """A web server with a video, redirects, and bad manners."""

    video = b""
    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        name = self.path.partition("?")[0]
        if name == "/moved":
            self.send_response(302)
            self.send_header("Location", "/video.mp4")
            self.end_headers()
        elif name == "/round":
            self.send_response(302)
            self.send_header("Location", "/round")
            self.end_headers()
        elif name == "/elsewhere":
            self.send_response(302)
            self.send_header("Location", "file:///etc/passwd")
            self.end_headers()
        elif name == "/missing":
            self.send_error(404)
        elif name == "/busy" and self.asked.count(self.path) == 1:
            self.send_error(503)
        elif name == "/short" and self.asked.count(self.path) == 1:
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.video)))
            self.end_headers()
            self.wfile.write(self.video[:1000])
        elif name == "/endless":
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b"x" * 65536)
            except OSError:
                pass
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.video)))
            self.end_headers()
            self.wfile.write(self.video)

    def log_message(self, *args) -> None: ...


@pytest.fixture(scope="module")
def shelf(videos: Path):
    Shelf.video = (videos / "plain.mp4").read_bytes()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Shelf)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_sources_by_url(make_node, shelf: str) -> None:
    allowed = {"OSTLER_CLIPS_HTTP": "1", "OSTLER_CLIPS_HTTP_PRIVATE": "1", "OSTLER_CLIPS_MAX_INPUT_MB": "2"}
    node = make_node("--pool", "clips=2", app=APP, **allowed)
    named = shelf.replace("127.0.0.1", "localhost")
    wanted = {
        f"{shelf}/video.mp4": ("done", 1, None),
        f"{shelf}/moved": ("done", 1, None),
        f"{named}/video.mp4?a=ü b": ("done", 1, None),
        f"{shelf}/busy": ("done", 2, None),
        f"{shelf}/short": ("done", 2, None),
        f"{shelf}/missing": ("failed", 1, "UNREADABLE_SOURCE"),
        f"{shelf}/round": ("failed", 1, "UNREADABLE_SOURCE"),
        f"{shelf}/elsewhere": ("failed", 1, "VALIDATION"),
        f"{shelf}/endless": ("failed", 1, "INPUT_TOO_LARGE"),
        "http://127.0.0.1:9/refuses": ("failed", 3, "RETRIES_EXHAUSTED"),
    }
    for url in [u for u in wanted if " " in u]:
        assert refused(node, url)[:2] == (422, "VALIDATION")
        wanted[url.replace(" ", "%20")] = wanted.pop(url)
    jobs = {url: cut(node, url, 2, 3) for url in wanted}
    found = {url: node.wait_job(job) for url, job in jobs.items()}
    assert {u: (j["status"], j["attempt"], (j["error"] or {}).get("code")) for u, j in found.items()} == wanted


def test_a_url_into_the_own_network_is_refused_before_anything_is_sent(make_node, shelf: str) -> None:
    node = make_node("--pool", "clips=1", app=APP, OSTLER_CLIPS_HTTP="1")
    Shelf.asked.clear()
    assert refused(node, f"{shelf}/video.mp4")[:2] == (422, "VALIDATION")
    failed = node.wait_job(cut(node, shelf.replace("127.0.0.1", "localhost") + "/video.mp4", 2, 3))
    assert (failed["error"]["code"], failed["attempt"]) == ("VALIDATION", 1)
    assert "OSTLER_CLIPS_HTTP_PRIVATE=1" in failed["error"]["message"]
    assert Shelf.asked == []


# ---- weight


def test_a_worker_of_the_app_carries_no_web_framework_and_no_av() -> None:
    code = "import sys, ostler.apps.clips; print([m for m in ('fastapi', 'starlette', 'av', 'pydantic', 'ssl') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
