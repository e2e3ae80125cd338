"""Models that somebody else's program serves over HTTP (`app.server`): how it is found and started."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from ostler.calls.model import ModelSpec
from ostler.calls.replica import model_of
from ostler.errors import NotFound
from ostler.lifecycle.listening import Listening
from ostler.lifecycle.worker import Slot


class Program(Listening):
    """One declared server."""

    def __init__(self, spec: ModelSpec, run: Path, interpreter: Callable[[str | None], Path]) -> None:
        super().__init__(spec.name, run, (*spec.argv, *spec.variables.values()), spec.ready)
        self._spec, self._interpreter = spec, interpreter

    def fills(self, slot: Slot) -> Mapping[str, str]:
        return {"model": model_of(slot), **super().fills(slot)}

    def argv(self, slot: Slot) -> list[str]:
        """Its program is looked for in its environment first."""
        return [self.found(model_of(slot)) or self._spec.argv[0], *self._spec.argv[1:]]

    def found(self, model: str) -> str | None:
        """The program's path; None when there is none. Raises where its environment is not built."""
        name, options = self._spec.argv[0], self._spec.options(model)
        if options.env is not None:
            folder = self._interpreter(options.env).parent
            if os.sep not in name and (inside := shutil.which(name, path=str(folder))):
                return inside
        return shutil.which(name, path=self._spec.variables.get("PATH"))

    def check(self, model: str) -> None:
        """Raise NotFound when it cannot be started as it is declared."""
        if "{" not in self._spec.argv[0] and self.found(model) is None:
            raise NotFound(f"there is no program {self._spec.argv[0]!r} on this machine, or it may not be executed")
        self.check_socket()
