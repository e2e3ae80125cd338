"""docs/sessions.md says what the code does."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from ostler.plane.session import CODES
from ostler.sessions.shown import REASONS
from ostler.sessions.spec import SessionOptions
from ostler.web.session_metrics import SessionMetrics

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "sessions.md").read_text()
SCRIPT = (DOCS.parent / "src/ostler/web/dashboard/sessionlist.js").read_text()


def section(title: str) -> str:
    return re.split(r"^## ", TEXT.partition(f"\n## {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def rows(title: str) -> dict[str, list[str]]:
    """The table of a section, by the names in its first column."""
    found = {}
    for line in section(title).splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]
        for name in re.findall(r"`([\w-]+)`", cells[0]):
            found[name] = cells[1:]
    return found


def test_every_option_is_in_it_with_its_default() -> None:
    said = rows("Options")
    for field in dataclasses.fields(SessionOptions):
        default = said[field.name][0]
        if field.default in ("", (), None) or field.name == "serves":
            continue
        value = str(field.default).lower() if isinstance(field.default, bool) else field.default
        assert default.strip("`") == (str(value) if isinstance(value, str) else f"{value:g}"), field.name


def test_every_reason_is_in_it_with_its_close_code_and_on_the_dashboard() -> None:
    said = rows("Why sessions end")
    assert tuple(said) == REASONS
    for reason, code in CODES.items():
        assert said[reason][0] == str(code), reason
    shown = SCRIPT.partition("export const REASONS = {")[2].partition("};")[0]
    assert tuple(re.findall(r'^  "?([\w-]+)"?: "', shown, re.MULTILINE)) == REASONS


def test_every_metric_of_sessions_is_documented() -> None:
    text = (DOCS / "operations.md").read_text()
    source = Path(SessionMetrics.__module__.replace(".", "/"))
    code = (DOCS.parent / "src" / f"{source}.py").read_text()
    names = set(re.findall(r'"(ostler_session\w+)"', code))
    assert len(names) > 8
    for name in names:
        assert name in text, name
