"""JSON as the API writes it: ASCII, so that any text which a job stored can be shown."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response


class JSONResponse(Response):
    """A JSON response. Lone surrogates (from file names) are escaped rather than failing the request."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")
