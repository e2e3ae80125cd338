"""What callers send, checked: texts, options, and the bytes of an image or a recording. Standard library, Python 3.9.

Every refusal is an InputError that says what was found and what is allowed. Nothing here decodes a picture or a sound.
"""

from __future__ import annotations

import base64
import binascii
import math
import os
from collections.abc import Mapping
from typing import Any

from ostler import Body, ConfigError, InputError

TEXTS = 256  # in one call
LETTERS = 100_000  # of one text, and of all messages of a chat
ALL_LETTERS = 1_000_000  # of all texts of a call
LIMITS = {"image_bytes": 20e6, "image_pixels": 25e6, "audio_bytes": 60e6, "audio_seconds": 600.0}


def limit(name: str) -> float:
    """OSTLER_MODELS_<NAME>, or its default. Raises ConfigError; the app looks at all of them when it is loaded."""
    variable = f"OSTLER_MODELS_{name.upper()}"
    try:
        found = float(os.environ.get(variable) or LIMITS[name])
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise ConfigError(f"{variable} must be a number above 0, found {os.environ.get(variable)!r}")
    return found


def mapping(payload: Any, example: str) -> Mapping[str, Any]:
    """The payload, when it is an object."""
    if not isinstance(payload, Mapping):
        kind = f"{len(payload)} bytes" if isinstance(payload, Body) else f"a {type(payload).__name__}"
        raise InputError(f"the payload must be a JSON object such as {example}, found {kind}")
    return payload


def texts(value: Any, name: str = "texts") -> list[str]:
    """A list of texts that are not empty; one text is a list of one."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not found:
        raise InputError(f'"{name}" must be a text or a list of texts, found {_shown(value)}')
    if len(found) > TEXTS:
        raise InputError(f'"{name}" may have {TEXTS} texts, found {len(found)}; send the rest in another call')
    checked = [text(one, f"{name}[{number}]") for number, one in enumerate(found)]
    if (letters := sum(map(len, checked))) > ALL_LETTERS:
        raise InputError(f'"{name}" may have {ALL_LETTERS} characters in all, found {letters}')
    return checked


def text(value: Any, name: str) -> str:
    """One text that is neither empty nor too long."""
    if not isinstance(value, str):
        raise InputError(f'"{name}" must be a text, found {_shown(value)}')
    if not value.strip():
        raise InputError(f'"{name}" is empty')
    if len(value) > LETTERS:
        raise InputError(f'"{name}" may have {LETTERS} characters, found {len(value)}')
    return value


def number(options: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    """A number in its bounds; absent or null is the default."""
    value = options.get(name)
    if value is None:
        return default
    if isinstance(value, str):  # a form has texts only
        try:
            value = float(value)
        except ValueError:
            raise InputError(f'"{name}" must be a number from {low:g} to {high:g}, found {_shown(value)}') from None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InputError(f'"{name}" must be a number from {low:g} to {high:g}, found {_shown(value)}')
    return float(value)


def whole(options: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    """A whole number in its bounds."""
    value = number(options, name, default, low, high)
    if value != int(value):
        raise InputError(f'"{name}" must be a whole number, found {value!r}')
    return int(value)


def file(payload: Any, name: str, most: float) -> tuple[memoryview, Mapping[str, Any]]:
    """The bytes of a file, and the options beside it: a raw body, a form with one file, or JSON with base64."""
    options: Mapping[str, Any]
    if isinstance(payload, Body):
        data, options = payload.view, payload.fields
    else:
        options = mapping(payload, f'{{"{name}": "…base64…"}}')
        data = memoryview(_decoded(options.get(name), name, most))
    if not data:
        raise InputError(f"there is no {name}: send the file as the body, as a part of a form, or as base64 in JSON")
    if len(data) > most:
        raise InputError(f"the {name} may have {most:.0f} bytes, found {len(data)}")
    return data, options


def _decoded(value: Any, name: str, most: float) -> bytes:
    if not isinstance(value, str):
        raise InputError(f'"{name}" must be the file in base64, found {_shown(value)}')
    if value.startswith("data:"):
        value = value.partition(",")[2]
    if len(value) > most * 4 / 3 + 1000:
        raise InputError(f"the {name} may have {most:.0f} bytes, found about {len(value) * 3 // 4}")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f'"{name}" is not base64: {error}') from None


def _shown(value: Any) -> str:
    """A value as an error shows it: short, and never with control characters."""
    if isinstance(value, (list, tuple, dict)):
        return f"{'an empty' if not value else 'a'} {type(value).__name__}"
    return repr(value)[:80]
