"""Where sources come from, and what is allowed: a path under a root, an upload, or a URL where URLs are switched on."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from urllib.parse import urlsplit

from ostler import Job
from ostler.apps.clips.rules import PREFIX, Refused, Rules

UPLOAD = "upload:"
_TOKEN = re.compile(r"[0-9a-f]{32}")


def check(source: str, rules: Rules, data: Path) -> None:
    """Refuse a source that can be known to be wrong before anything is stored."""
    if _is_url(source):
        from ostler.apps.clips import fetch  # noqa: PLC0415  ssl and http only where a URL is used

        fetch.check(source, rules)
    else:
        local(source, rules, data)


def get(job: Job, rules: Rules, source: str) -> Path:
    """A local, readable file with the source's bytes, within the size limit. Raises Refused, or OSError that may pass."""
    if _is_url(source):
        from ostler.apps.clips import fetch  # noqa: PLC0415

        return fetch.download(source, rules, job.scratch / "source", job.check)
    return local(source, rules, Path(os.environ.get("OSTLER_DATA") or ".ostler"))


def local(source: str, rules: Rules, data: Path) -> Path:
    """The resolved path of an upload or of a file under a root, after all rules."""
    if source.startswith(UPLOAD):
        places, hint = (
            [upload_path(data, source.removeprefix(UPLOAD))],
            "uploads are deleted when their job has ended; send it again",
        )
    else:
        places, hint = _under_a_root(source, rules.roots), "it was deleted or moved, or its name is another"
    path, found = next(((p, s) for p in places if (s := _look(p, source))), (places[0], None))
    if found is None:
        raise Refused("UNREADABLE_SOURCE", f"there is no file {source}; {hint}")
    if not stat.S_ISREG(found.st_mode):
        raise Refused("VALIDATION", f"{source} is {_kind(found.st_mode)}, not a file; name a video file")
    if not os.access(path, os.R_OK):
        raise Refused("UNREADABLE_SOURCE", f"{source} may not be read by the node's user; change its permissions")
    rules.check_size(found.st_size, source)
    return path


def uploads(data: Path) -> Path:
    """The directory of the uploads."""
    return data.resolve() / "uploads"


def upload_path(data: Path, token: str) -> Path:
    """Where an upload is; the token cannot name anything else."""
    if not _TOKEN.fullmatch(token):
        raise Refused("VALIDATION", f"{token!r} is not an upload; send the file with the request instead")
    return uploads(data) / f"{token}.source"


def _is_url(source: str) -> bool:
    if "://" not in source:
        return False
    scheme = urlsplit(source).scheme
    if scheme not in ("http", "https"):
        raise Refused(
            "VALIDATION", f"sources of the kind {scheme}:// are not taken; use a path, an upload or http(s)://"
        )
    return True


def _under_a_root(source: str, roots: tuple[Path, ...]) -> list[Path]:
    """Where the source may be, with all symlinks resolved, as far as that is under a root; a relative one may be in each root.

    The rule is judged before the file is looked at, so the answer does not tell what exists elsewhere.
    """
    if not roots:
        raise Refused(
            "VALIDATION",
            f"no directory is open for sources: start the node with {PREFIX}ROOTS=/directory/of/videos "
            f"(several are separated by {os.pathsep!r}), or upload the file",
        )
    candidates = [_resolved(root / source, source) for root in roots]  # an absolute source replaces the root
    allowed = [path for path in candidates if any(path.is_relative_to(root) for root in roots)]
    if not allowed:
        raise Refused(
            "VALIDATION",
            f"{source} is not under {' or '.join(map(str, roots))}; only files there are taken ({PREFIX}ROOTS)",
        )
    return allowed


def _look(path: Path, source: str) -> os.stat_result | None:
    """What is there; None when nothing is. Trouble of the disk passes as OSError."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:
        raise Refused(
            "UNREADABLE_SOURCE", f"{source} may not be read by the node's user; change its permissions"
        ) from None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise Refused("VALIDATION", f"{source!r:.100}… is not a usable path: it is too long") from None


def _resolved(path: Path, source: str) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name too long, a NUL
        raise Refused("VALIDATION", f"{source!r:.200} is not a usable path: {error}") from None


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
