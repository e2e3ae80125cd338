"""Images as callers send them, decoded within bounds. Pillow is imported when it is used; Python 3.9."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from ostler import InputError
from ostler.apps.models import given

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_SMALLEST = 8  # pixels of a side


def read(payload: Any) -> tuple[Any, Mapping[str, Any]]:
    """The picture as a Pillow image in RGB, upright, and the options beside it; raises InputError.

    The size is read from the head of the file, so a small file with a huge picture is refused before it is decoded.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError  # noqa: PLC0415

    Image.MAX_IMAGE_PIXELS = None  # ours is checked below, without a warning
    data, options = given.file(payload, "image", given.limit("image_bytes"))
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise InputError(f"the image cannot be read: it is none of {', '.join(FORMATS)}, or damaged") from None
    except (OSError, ValueError, SyntaxError) as error:
        raise InputError(f"the image cannot be read: {error}") from None
    _check(*picture.size)
    try:
        picture = ImageOps.exif_transpose(picture)
        if picture.has_transparency_data:  # as it looks on a white page
            seen = picture.convert("RGBA")
            picture = Image.new("RGBA", seen.size, "white")
            picture.alpha_composite(seen)
        return picture.convert("RGB"), options
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError) as error:
        raise InputError(f"the image is damaged or incomplete: {error}") from None


def _check(width: int, height: int) -> None:
    most = given.limit("image_pixels")
    if width * height > most:
        raise InputError(f"the image may have {most:.0f} pixels, found {width} x {height}; scale it down")
    if min(width, height) < _SMALLEST:
        raise InputError(f"the image must have {_SMALLEST} pixels on each side, found {width} x {height}")
