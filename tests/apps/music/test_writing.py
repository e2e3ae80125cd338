"""Our tags in audio files: written whole or not at all, and nothing else in the file changes."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import random
import signal
import stat
import struct
import subprocess
import sys
from pathlib import Path

import mutagen
import mutagen.mp4
import pytest
from mutagen.id3 import APIC, COMM, ID3, TIT2, TXXX, TYER

from ostler.apps.music import formats, id3, writing
from tests.apps.music import sounds
from tests.users import NOBODY, as_root

TAGS = {"tags": ["jazz", "Hip-Hop", "chanson française", "音楽"], "model": ["MSD_musicnn"]}
ABOUT = {"title": "Tïtle", "artist": "Some; One", "album": "All"}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def leftovers(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name.startswith(".ostler-")]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sounds")
    return {kind: sounds.save(folder / f"a.{kind}", **ABOUT) for kind in sounds.KINDS}


def copy(original: Path, to: Path) -> Path:
    to.write_bytes(original.read_bytes())
    return to


@pytest.mark.parametrize("kind", sounds.KINDS)
def test_tags_are_written_and_erased_and_all_else_stays(kind: str, originals: dict[str, Path], tmp_path: Path) -> None:
    path = copy(originals[kind], tmp_path / f"a.{kind}")
    path.chmod(0o640)
    os.utime(path, ns=(1_000_000_000, 2_000_000_001))
    before, sound = digest(path), writing.packets(path)
    with path.open("rb") as file:
        others = formats.others(formats.load(file, formats.kind(file)), formats.kind(file), "ostler:")

    made = writing.write(path, TAGS)

    assert (made.before, made.after, made.changed) == ({}, TAGS, True)
    assert writing.ours(path) == TAGS
    assert writing.packets(path) == sound
    with path.open("rb") as file:
        assert formats.others(formats.load(file, formats.kind(file)), formats.kind(file), "ostler:") == others
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.stat().st_mtime_ns == 2_000_000_001
    told = writing.read(path)
    assert (told.title, told.artist, told.album) == tuple(ABOUT.values())
    assert told.duration == pytest.approx(2, abs=0.3)
    assert not leftovers(tmp_path)

    assert writing.write(path, {}).before == TAGS
    assert digest(path) == before, "what is left is byte for byte what was there"


@pytest.mark.parametrize("kind", sounds.KINDS)
def test_the_second_write_replaces_the_first_and_can_be_undone(
    kind: str, originals: dict[str, Path], tmp_path: Path
) -> None:
    path = copy(originals[kind], tmp_path / f"a.{kind}")
    writing.write(path, TAGS)
    second = writing.write(path, {"tags": "rock"})
    assert (second.before, writing.ours(path)) == (TAGS, {"tags": ["rock"]})
    inode = path.stat().st_ino
    assert not writing.write(path, {"tags": ["rock"]}).changed
    assert path.stat().st_ino == inode, "nothing to change: nothing is written"
    writing.write(path, second.before)
    assert writing.ours(path) == TAGS


@pytest.mark.parametrize("kind", sounds.KINDS)
def test_a_file_without_any_tags_is_tagged_and_cleaned(kind: str, tmp_path: Path) -> None:
    path = sounds.save(tmp_path / f"a.{kind}")
    sound = writing.packets(path)
    writing.write(path, TAGS)
    assert writing.ours(path) == TAGS
    writing.write(path, {})
    assert (writing.ours(path), writing.packets(path)) == ({}, sound)


def test_a_wrong_suffix_does_not_matter(originals: dict[str, Path], tmp_path: Path) -> None:
    for kind in sounds.KINDS:
        path = copy(originals[kind], tmp_path / ("a.mp3" if kind != "mp3" else "a.flac"))
        writing.write(path, TAGS)
        assert writing.ours(path) == TAGS


def test_no_byte_of_other_id3_frames_changes(tmp_path: Path) -> None:
    """Old versions, doubled frames, frames that nobody knows, an ID3v1 tag that says something else: all of it stays."""
    path = sounds.save(tmp_path / "a.mp3")
    unknown = b"XYZQ" + struct.pack(">I", 5) + b"\0\0" + b"\x01\xff\xfe\x00a"
    twice = b"TIT2" + struct.pack(">I", 4) + b"\0\0" + b"\0one" + b"TIT2" + struct.pack(">I", 4) + b"\0\0" + b"\0two"
    body = twice + unknown + b"TYER" + struct.pack(">I", 5) + b"\0\0" + b"\x001999" + b"\0" * 300
    tag = b"ID3\x03\0\0" + bytes((0, 0, len(body) >> 7, len(body) & 127)) + body
    v1 = b"TAG" + b"another title".ljust(30, b"\0") + b"\0" * 95
    audio = path.read_bytes()[id3.length(path.read_bytes()[:10]) :]
    path.write_bytes(tag + audio + v1)
    before = digest(path)

    writing.write(path, TAGS)
    data = path.read_bytes()
    assert data.endswith(body + audio + v1)
    assert data[3] == 3, "the version stays"
    assert writing.ours(path) == TAGS
    writing.write(path, {})
    assert digest(path) == before


def test_frames_that_another_program_moved_are_still_found_and_replaced(tmp_path: Path) -> None:
    path = sounds.save(tmp_path / "a.mp3", **ABOUT)
    writing.write(path, TAGS)
    tags = ID3(path)
    tags.add(TXXX(encoding=3, desc="before all others", text="x"))
    tags.add(APIC(encoding=3, mime="image/png", type=3, desc="", data=b"\x89PNG" * 100))
    tags.save(path)  # in its own order
    writing.write(path, {"tags": ["rock"]})
    assert writing.ours(path) == {"tags": ["rock"]}
    assert len(ID3(path).getall("APIC")) == 1
    writing.write(path, {})
    assert [f.desc for f in ID3(path).getall("TXXX")] == ["before all others"]


@pytest.mark.parametrize("version", [2, 3, 4])
def test_every_version_of_id3_takes_tags(version: int, tmp_path: Path) -> None:
    path = sounds.save(tmp_path / "a.mp3")
    data = path.read_bytes()
    audio = data[id3.length(data[:10]) :]
    if version == 2:
        frame = b"TT2\0\0\x04\0one"
        path.write_bytes(b"ID3\x02\0\0\0\0\0" + bytes((len(frame),)) + frame + audio)
    else:
        made = io.BytesIO()
        tags = ID3()
        tags.add(TIT2(encoding=0, text="one"))
        tags.add(TYER(encoding=0, text="1999"))
        tags.save(made, v2_version=version)
        path.write_bytes(made.getvalue() + audio)
    writing.write(path, TAGS)
    assert writing.ours(path) == TAGS
    assert writing.read(path).title == "one"
    assert path.read_bytes().endswith(audio)


def test_an_old_tag_at_the_end_is_copied_to_the_front_so_that_players_still_see_it(tmp_path: Path) -> None:
    path = sounds.save(tmp_path / "a.mp3")
    data = path.read_bytes()
    v1 = b"TAG" + b"old title".ljust(30, b"\0") + b"old artist".ljust(30, b"\0") + b"\0" * 64 + b"\xff"
    path.write_bytes(data[id3.length(data[:10]) :] + v1)
    writing.write(path, TAGS)
    assert (writing.read(path).title, writing.ours(path)) == ("old title", TAGS)
    assert path.read_bytes().endswith(v1)


def test_covers_and_comments_stay(tmp_path: Path) -> None:
    path = sounds.save(tmp_path / "a.mp3", **ABOUT)
    tags = ID3(path)
    tags.add(APIC(encoding=3, mime="image/png", type=3, desc="front", data=os.urandom(50_000)))
    tags.add(COMM(encoding=3, lang="eng", desc="", text="mine"))
    tags.save(path)
    before = path.read_bytes()
    writing.write(path, TAGS)
    assert path.read_bytes().endswith(before[10:])
    flac = sounds.save(tmp_path / "a.flac", **ABOUT)
    found = mutagen.File(flac)
    picture = mutagen.flac.Picture()
    picture.data, picture.mime = os.urandom(5000), "image/png"
    found.add_picture(picture)
    found.save()
    writing.write(flac, TAGS)
    assert mutagen.File(flac).pictures[0].data == picture.data


_SMALL = """
import sys
from ostler.apps.music import memory, writing
writing.limited_memory = lambda: memory.limited_memory(8)
for path in sys.argv[1:]:
    try:
        print(writing.write(path, {"tags": "jazz"}))
    except writing.Unwritable as error:
        print(error)
"""


def test_a_picture_too_large_for_memory_is_refused_and_the_file_stays(tmp_path: Path) -> None:
    mp3, m4a = sounds.save(tmp_path / "a.mp3"), sounds.save(tmp_path / "a.m4a")
    picture, tags, atoms = b"\x89PNG" * (4 << 20), ID3(), mutagen.mp4.MP4(m4a)
    tags.add(APIC(encoding=3, mime="image/png", type=3, desc="", data=picture))
    tags.save(mp3)
    atoms["covr"] = [mutagen.mp4.MP4Cover(picture)]
    atoms.save(m4a)
    before = digest(mp3), digest(m4a)
    # In a process of its own, which has no memory left over.
    argv = [sys.executable, "-c", _SMALL, mp3, m4a]
    said = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert ["too large" in line for line in said] == [True, True], said
    assert (digest(mp3), digest(m4a)) == before and not leftovers(tmp_path)
    assert writing.write(mp3, TAGS).changed and writing.write(m4a, TAGS).changed


def test_what_is_not_text_is_refused_and_the_file_stays(tmp_path: Path) -> None:
    path = sounds.save(tmp_path / "a.flac", title="caf\xe9")
    path.write_bytes(path.read_bytes().replace("caf\xe9".encode(), b"caf\xe9!"))
    before = digest(path)
    with pytest.raises(formats.Unwritable, match="UTF-8"):
        writing.write(path, TAGS)
    assert (digest(path), leftovers(tmp_path)) == (before, [])


def test_a_wav_file_of_unknown_length_is_refused_because_its_sound_would_change(tmp_path: Path) -> None:
    path = sounds.save(tmp_path / "a.wav")
    data = bytearray(path.read_bytes())
    at = data.index(b"data")
    data[4:8] = data[at + 4 : at + 8] = b"\xff" * 4  # as a recorder that streams writes it
    path.write_bytes(data)
    with pytest.raises(formats.Unwritable, match="stream"):
        writing.write(path, TAGS)
    assert (path.read_bytes(), leftovers(tmp_path)) == (bytes(data), [])


@pytest.mark.parametrize(
    "content", [b"", b"just text\n" * 50, b"RIFF1234AVI ", b"OggS" + b"\0" * 100, b"fLaC", b"ID3\x04"]
)
def test_what_is_no_audio_file_is_refused_with_a_reason(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.mp3"
    path.write_bytes(content)
    with pytest.raises(formats.Unwritable):
        writing.write(path, TAGS)
    assert path.read_bytes() == content
    assert writing.read(path) == writing.Described()


def test_a_symbolic_link_is_followed_and_a_hard_link_keeps_the_old_content(tmp_path: Path) -> None:
    path = sounds.save(tmp_path / "a.flac")
    (tmp_path / "links").mkdir()
    link, other = tmp_path / "links" / "l.flac", tmp_path / "links" / "o.flac"
    link.symlink_to(path)
    other.hardlink_to(path)
    before = digest(path)
    made = writing.write(link, TAGS)
    assert link.is_symlink() and writing.ours(path) == TAGS
    assert made.changed and digest(other) == before
    assert not leftovers(tmp_path / "links")


def test_names_that_are_no_text_and_names_as_long_as_can_be(tmp_path: Path) -> None:
    original = sounds.save(tmp_path / "a.opus")
    for name in (b"t\xff\xe9.opus", b"x" * 250 + b".opus"):
        path = os.path.join(os.fsencode(tmp_path), name)
        Path(os.fsdecode(path)).write_bytes(original.read_bytes())
        writing.write(path, TAGS)
        assert writing.ours(path) == TAGS


def test_extended_attributes_are_kept(tmp_path: Path) -> None:
    path = sounds.save(tmp_path / "a.flac")
    try:
        os.setxattr(path, "user.rating", b"5")
    except OSError:
        pytest.skip("this file system has no extended attributes")
    writing.write(path, TAGS)
    assert os.getxattr(path, "user.rating") == b"5"


def test_a_read_only_file_is_left_alone_also_by_root(tmp_path: Path) -> None:
    path = sounds.save(tmp_path / "a.flac")
    path.chmod(0o444)
    before = digest(path)
    with pytest.raises(PermissionError):
        writing.write(path, TAGS)
    assert digest(path) == before


@as_root
def test_owners_are_kept_and_others_files_and_read_only_directories_are_left_alone(tmp_path: Path) -> None:
    path = sounds.save(tmp_path / "a.flac")
    os.chown(path, NOBODY, NOBODY)
    writing.write(path, TAGS)
    assert (path.stat().st_uid, path.stat().st_gid) == (NOBODY, NOBODY)

    os.chown(path, 0, 0)
    path.chmod(0o666)
    (tmp_path / "closed").mkdir(mode=0o755)
    closed = copy(path, tmp_path / "closed" / "a.flac")
    closed.chmod(0o666)
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.stat().st_uid == os.geteuid() and folder != Path("/") and folder.is_relative_to("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)
    tmp_path.chmod(0o777)
    before = digest(path)
    for target in (path, closed):  # would become nobody's; cannot have a draft beside it
        assert _as_nobody(target) == "PermissionError"
        assert (digest(target), leftovers(target.parent)) == (before, [])


def _as_nobody(path: Path) -> str:
    """What a write by another user raises. In a fork, which has all modules already."""
    reading, writing_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            writing.write(path, {"tags": "x"})
            said = "nothing"
        except BaseException as error:
            said = type(error).__name__
        os.write(writing_end, said.encode())
        os._exit(0)
    os.close(writing_end)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.parametrize("kind", ["mp3", "flac", "m4a"])
def test_a_full_disk_leaves_the_old_file_and_no_draft(kind: str, tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: the write fails in the middle, as it does on a full one."""
    path = sounds.save(tmp_path / f"a.{kind}")
    before = digest(path)
    code = (
        "import resource, sys; from ostler.apps.music import writing\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({path.stat().st_size // 2},) * 2)\n"
        "try: writing.write(sys.argv[1], {'tags': 'x'})\n"
        "except OSError as error: print(error.errno)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(errno.EFBIG), done.stderr
    assert (digest(path), leftovers(tmp_path)) == (before, [])


@as_root
def test_a_disk_that_is_really_full_leaves_the_old_file_and_the_next_try_succeeds(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        for kind in ("wav", "flac", "m4a", "mp3"):
            path = sounds.save(disk / f"a.{kind}")
            before, filler = digest(path), disk / "filler"
            with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
                while True:
                    file.write(b"x" * 4096)
            with pytest.raises(OSError) as caught:
                writing.write(path, TAGS)
            assert caught.value.errno == errno.ENOSPC
            assert (digest(path), leftovers(disk)) == (before, [])
            filler.unlink()
            assert writing.write(path, TAGS).changed
            path.unlink()
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_file_that_changes_meanwhile_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sounds.save(tmp_path / "a.flac")
    real = formats.rewritten

    def slow(*arguments: object) -> None:
        real(*arguments)
        with path.open("ab") as file:
            file.write(b"somebody else was here")

    monkeypatch.setattr(formats, "rewritten", slow)
    with pytest.raises(writing.Changed, match="changed"):
        writing.write(path, TAGS)
    assert path.read_bytes().endswith(b"somebody else was here")
    assert not leftovers(tmp_path)


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    path = sounds.save(tmp_path / "a.flac")
    with writing._draft(os.fsencode(path)):
        with pytest.raises(writing.Changed, match="another process"):
            writing.write(path, TAGS)
        assert writing.sweep(tmp_path, older_than=0) == 0, "it is being written"
    assert writing.write(path, TAGS).changed


def test_a_file_system_without_locks_and_attributes_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sounds.save(tmp_path / "a.flac")

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    monkeypatch.setattr(os, "listxattr", unsupported)
    assert writing.write(path, TAGS).changed
    assert (writing.ours(path), leftovers(tmp_path)) == (TAGS, [])


def test_drafts_of_dead_processes_are_swept_and_those_of_the_living_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, living, mine = tmp_path / ".ostler-1.part", tmp_path / ".ostler-2.part", tmp_path / ".other.part"
    for path in (dead, living, mine):
        path.write_bytes(b"x")
    with living.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with monkeypatch.context() as patch:
            patch.setattr(writing, "_has_locks", lambda _: False)
            assert writing.sweep(tmp_path) == 0, "too new, where there are no locks"
        assert writing.sweep(tmp_path) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [".ostler-2.part", ".other.part"]


_KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from ostler.apps.music import decode, formats, id3, writing

folder, kinds, seed = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3])
own = {{module.__file__ for module in (formats, id3, writing)}}

def lines(path, tags, stop):
    # Runs a write; before the line number `stop` of our code it kills itself. Returns how many lines a whole write has.
    count = 0
    def each(frame, event, argument):
        nonlocal count
        count += 1
        if count == stop:
            os.kill(os.getpid(), signal.SIGKILL)
        return each
    sys.settrace(lambda frame, event, argument: each if frame.f_code.co_filename in own else None)
    writing.write(path, tags)
    sys.settrace(None)
    return count

for kind in kinds:
    path = os.path.join(folder, "a." + kind)
    whole = lines(path, {{"tags": ["old"] * 3}}, 0)
    print("whole", kind, whole, flush=True)
for line in sys.stdin:
    kind, stop, tag = line.split()
    child = os.fork()
    if not child:
        try:
            lines(os.path.join(folder, "a." + kind), {{"tags": [tag] * 3}}, int(stop))
        finally:
            os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.timeout(300)
def test_a_hundred_kills_at_any_step_leave_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    """Real SIGKILLs, spread over all lines of a write: before the draft, while it is written, around the rename."""
    kinds = ["mp3", "flac", "ogg", "m4a"]
    for kind in kinds:
        sounds.save(tmp_path / f"a.{kind}", **ABOUT)
    sound = {kind: writing.packets(tmp_path / f"a.{kind}") for kind in kinds}
    code = _KILLED.format(root=str(Path(__file__).parents[3]))
    child = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path, ",".join(kinds), "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    whole = {}
    for _ in kinds:
        _, kind, count = child.stdout.readline().split()
        whole[kind] = int(count)
    chance, outcomes, drafts = random.Random(1), {"old": 0, "new": 0}, 0
    for number in range(100):
        kind = kinds[number % len(kinds)]
        path = tmp_path / f"a.{kind}"
        old = writing.ours(path)["tags"][0]
        # Evenly over the write, and the last steps, where the rename is, more often than that.
        last = number % 3 == 0
        stop = whole[kind] - chance.randrange(16) if last else chance.randint(1, whole[kind])
        child.stdin.write(f"{kind} {max(1, stop)} new{number}\n")
        child.stdin.flush()
        code = int(child.stdout.readline())
        found = writing.ours(path)
        assert found in ({"tags": [old] * 3}, {"tags": [f"new{number}"] * 3}), f"torn at line {stop} of {whole[kind]}"
        assert code in (-signal.SIGKILL, 0)
        assert writing.packets(path) == sound[kind]
        assert (writing.read(path).title, path.stat().st_mode & 0o777) == (ABOUT["title"], 0o644)
        outcomes["old" if found["tags"][0] == old else "new"] += 1
        drafts += len(leftovers(tmp_path))
        if number % 2:
            assert writing.sweep(tmp_path, older_than=0) <= len(kinds)
            assert not leftovers(tmp_path)
    with child:
        child.stdin.close()
        assert child.wait(timeout=30) == 0
    assert min(outcomes.values()) >= 10 and drafts > 10, (outcomes, drafts)
    for kind in kinds:  # and after all that a write does what it should, over the drafts that are left
        writing.write(tmp_path / f"a.{kind}", TAGS)
    assert not leftovers(tmp_path)
