"""Playlists of what a search found: M3U, and smart playlists for Navidrome, which search by the written tags themselves. Pure."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from ostler.apps.music.search import Query

FIELD = "ostlertags"  # what docs/music.md has Navidrome call our tags


def m3u(tracks: Iterable[Mapping[str, Any]], *, relative: bool) -> bytes:
    """An extended M3U in UTF-8. Paths are written byte by byte, absolute or from the library's root.

    A path with a line break in it cannot be written in this format, and is left out.
    """
    lines = [b"#EXTM3U"]
    for track in tracks:
        path = track["raw"] if relative else os.path.join(track["root"], track["raw"])  # noqa: PTH118  bytes
        if b"\n" in path or b"\r" in path:
            continue
        if path.startswith(b"#"):  # or it would be a comment
            path = b"./" + path
        lines += [f"#EXTINF:{round(track['duration'] or -1)},{_title(track)}".encode("utf-8", "replace"), path]
    return b"\n".join(lines) + b"\n"


def _title(track: Mapping[str, Any]) -> str:
    title = track["title"] or track["path"].rpartition("/")[2]
    return " ".join(f"{track['artist']} - {title}".split() if track["artist"] else title.split())


def smart(name: str, query: Query) -> bytes:
    """A smart playlist (.nsp) of Navidrome: it follows the tags in the files, so tracks that come later are in it too.

    Scores are not in the files: a tag counts there where it was written.
    """
    wanted: list[dict[str, Any]] = [{"contains": {FIELD: tag}} for tag, _ in query.tags]
    wanted += [{"notContains": {FIELD: tag}} for tag in query.without]
    wanted += [
        {"any": [{"contains": {name: word}} for name in ("title", "artist", "album", "filepath")]}
        for word in query.text.split()
    ]
    made = {"name": name, "comment": "made by Ostler", "all": wanted, "sort": "random", "limit": query.limit}
    return json.dumps(made, indent=2, ensure_ascii=False).encode()
