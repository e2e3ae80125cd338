"""One GPU operation at a time (`gpu_exclusive`): a call has its turn before it asks for a worker, and keeps it to its end.

So the load that it causes and the call itself are one operation, as under seed 003's lock. Pure: nothing here knows a clock or a socket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Turns:
    """Who has the turn, and who waits for it, first come first served."""

    def __init__(self) -> None:
        self.holder: object | None = None
        self._line: deque[tuple[object, Callable[[], None]]] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def ask(self, who: object, then: Callable[[], None]) -> bool:
        """Whether it is `who`'s turn now; if not, `then` is called when it is."""
        if self.holder is None:
            self.holder = who
            return True
        self._line.append((who, then))
        return False

    def over(self, who: object) -> None:
        """It has had its turn, or does not want one any more. A second time does nothing."""
        if self.holder is who:
            self.holder = None
            if self._line:
                self.holder, then = self._line.popleft()
                then()
        elif self._line:
            self._line = deque(waiting for waiting in self._line if waiting[0] is not who)
