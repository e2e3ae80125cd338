"""Where a worker's browsers live, and as whom: a directory of their own, another user where the node is root, few variables.

A client of Playwright's server can have its driver read and write files, so the driver runs as that user, too.
"""

from __future__ import annotations

import os
import pwd
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostler import ConfigError
from ostler.apps.browsers.given import PREFIX
from ostler.lifecycle import family

# The mark of the worker's family goes along, so that whatever a browser starts can be found again. Secrets of the node do not.
_PASSED = ("PATH", "LANG", "LANGUAGE", "TZ", "DISPLAY", "OSTLER_FAMILY", "NODE_EXTRA_CA_CERTS")
_PASSED_ALL = ("LC_", "FONTCONFIG_", "SSL_CERT_")
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")


@dataclass(frozen=True, slots=True)
class Place:
    """A directory, and the user and group that own it; None: the worker's own."""

    folder: Path
    uid: int | None = None
    gid: int | None = None

    @classmethod
    def make(cls, scratch: Path, worker: str, user: str) -> Place:
        """Below the worker's scratch; raises ConfigError where the user is none."""
        folder = scratch / "b"
        folder.mkdir(0o700)
        if os.geteuid() != 0:
            return cls(folder)
        uid, gid = _user(user, worker)
        if uid == 0:
            return cls(folder)
        os.chown(folder, uid, gid)
        return cls(folder, uid, gid)

    @property
    def is_root(self) -> bool:
        return self.uid is None and os.geteuid() == 0

    def sub(self, name: str) -> Path:
        """A directory in it, with the same owner."""
        path = self.folder / name
        path.mkdir(0o700)
        if self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid)
        return path

    def remove(self, name: str) -> None:
        family.remove(self.folder / name)

    def as_user(self) -> dict[str, Any]:
        """For the call that starts a process."""
        return {} if self.uid is None else {"user": self.uid, "group": self.gid, "extra_groups": []}

    def variables(self, home: Path | None = None) -> dict[str, str]:
        """The environment of a process here."""
        passed = {
            name: value
            for name, value in os.environ.items()
            if name in _PASSED or name.startswith(_PASSED_ALL) or name.lower() in _PROXIES
        }
        where = str(home or self.folder)
        return {**passed, "HOME": where, "TMPDIR": where}

    def check(self, *programs: Path) -> None:
        """See that the user can get to the programs; raises ConfigError."""
        if self.uid is None:
            return
        for program in programs:
            for path in (*reversed(program.parents), program):
                if not self._passes(path.stat()):
                    raise ConfigError(
                        f"browsers run as the user {self.uid}, who cannot get to {program}: {path} is closed to others. "
                        f"Install it elsewhere, open that directory (chmod o+x), or name another user with {PREFIX}USER"
                    )

    def _passes(self, found: os.stat_result) -> bool:
        if found.st_uid == self.uid:
            return bool(found.st_mode & stat.S_IXUSR) or stat.S_ISREG(found.st_mode)
        if found.st_gid == self.gid:
            return bool(found.st_mode & stat.S_IXGRP) or stat.S_ISREG(found.st_mode)
        return bool(found.st_mode & (stat.S_IROTH if stat.S_ISREG(found.st_mode) else stat.S_IXOTH))


def _user(given: str, worker: str) -> tuple[int, int]:
    """Uid and gid of a name, a number, or one for this worker out of FIRST-LAST."""
    first, dash, last = given.partition("-")
    if dash and first.isdigit() and last.isdigit() and int(first) <= int(last):
        uid = int(first) + zlib.crc32(worker.encode()) % (int(last) - int(first) + 1)
        return uid, uid
    try:
        found = pwd.getpwuid(int(given)) if given.isdigit() else pwd.getpwnam(given)
    except KeyError:
        if given.isdigit():
            return int(given), int(given)
        raise ConfigError(f"{PREFIX}USER is {given!r}, and there is no such user on this machine") from None
    return found.pw_uid, found.pw_gid
