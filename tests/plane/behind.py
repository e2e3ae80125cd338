"""`ostler` for tests, with every node behind the data plane, whether its app needs one or not."""

from __future__ import annotations

from ostler import runtime
from ostler.cli import main

runtime.Node.has_plane = property(lambda node: True)  # type: ignore[method-assign, assignment]

if __name__ == "__main__":
    main()
