"""The program of a model's process: `PYTHON worker.py TARGET TASK MODEL_ID SOCKET OPTIONS`, run by path in any environment from Python 3.9.

OPTIONS is JSON, as `model.launch` writes it, or comes in the variable OSTLER_MODEL.

It only sets the import path. In another environment a stand-in for `ostler` comes first (`standin/`), which needs nothing installed.
Everything else is in running.py, which Python compiles once.
"""

import gc
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
ROOT = os.path.dirname(os.path.dirname(HERE))  # noqa: PTH120


def prepare() -> "dict[str, object]":
    """The options that the node gave; afterwards `ostler` can be imported."""
    given = os.environ.pop("OSTLER_MODEL", "{}")
    options: dict[str, object] = json.loads(sys.argv.pop() if len(sys.argv) > 5 else given)
    # This script's own folder is first on the path: its files would hide modules of the same names.
    if sys.path and os.path.abspath(sys.path[0]) == HERE:  # noqa: PTH100
        del sys.path[0]
    if options.get("foreign"):
        sys.path.insert(0, os.path.join(HERE, "standin"))  # noqa: PTH118
        for name in ("PYTHONPATH", "PYTHONHOME"):  # this interpreter was told to ignore them; its children shall too
            os.environ.pop(name, None)
        os.environ["PYTHONNOUSERSITE"] = "1"
    elif ROOT not in sys.path:
        sys.path.append(ROOT)
    return options


if __name__ == "__main__":
    gc.disable()  # until the model is loaded: modules are no garbage, and looking for some in them costs a tenth of the start
    given = prepare()
    from ostler.calls.running import main

    main(sys.argv[1:], given)
