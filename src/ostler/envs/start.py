"""Run as a script by the interpreter of another environment: start.py MODULE ARGS. It is as if that environment were active.

Any Python 3 can read this file, so that one which is too old can say so.
"""

import os
import runpy
import sys


def main() -> None:
    """Check the Python, put the environment's programs first on PATH, then be that module."""
    if sys.version_info < (3, 11):  # noqa: UP036
        version = ".".join(str(part) for part in sys.version_info[:3])
        text = "jobs need Python 3.11 or later, and environment {} has {}: {}\n"
        sys.stderr.write(text.format(os.environ.get("OSTLER_ENV", ""), version, sys.executable))
        sys.exit(70)  # child.APP_LOAD
    os.environ["VIRTUAL_ENV"] = sys.prefix
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])  # noqa: PTH120
    if os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):  # noqa: PTH120
        sys.path[0] = os.getcwd()  # noqa: PTH109  as for `python -m`
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
