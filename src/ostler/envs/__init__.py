"""Virtual environments for jobs and models that cannot share the node's own: described, built, looked at, run in.

On disk, in `env_dir` (default: `envs` in the data directory):

    minilm -> minilm.builds/3    the current build; replaced in one step when the next one is complete
    minilm.builds/3/             a virtual environment and its stamp, `ostler-env.json`
    minilm.builds/lock           held while it is built or removed, by the builder and the installer that it started
    minilm.builds/build.log      what the last build printed
    minilm.builds/failed.json    why it failed, or that it broke off

A virtual environment cannot be moved, so each build is made where it stays, under a number of its own. Workers run in the numbered
directory: one that is running keeps its environment while the next is built, and an old build is deleted when no process uses it.
"""

from ostler.envs.build import build, remove
from ostler.envs.run import command, isolated, variables
from ostler.envs.state import Environment, interpreter, listing, look, shown

__all__ = [
    "Environment",
    "build",
    "command",
    "interpreter",
    "isolated",
    "listing",
    "look",
    "remove",
    "shown",
    "variables",
]
