"""Lending a client's connection to its worker: while a client talks much, its bytes go to the worker and back without a hop.

A worker that can take connections says so in its endpoint (`lends`, the path of a Unix socket). The relay passes it the client's socket and
stops reading. Everything else stays with the relay: limits, pings, ends and their reasons. It has the connection back when the client
rests, and looks at what the system knows of it meanwhile. The bytes' own way between relay and worker (a splice's) stays open, and its end is the worker's.

    relay → worker   take (with the socket): so many bytes have gone your way; the next ones of the client are yours to read
    worker → relay   took: so many bytes have gone your way; what comes next is held here until you say go    (or: no)
    relay → worker   go: the client has all of them
    relay → worker   back: you may keep it no longer
    worker → relay   gave: it is yours again. Also unasked: when the client ends, or a close frame comes from either side
    worker → relay   stuck, unstuck: a frame may be half written
    relay → worker   over: the session has ended, and nothing more is said of it

Each names the session and the number of the loan: [verb, session, number, …]. Standard library alone: the data plane and a worker's own door both use it.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Callable
from typing import Any

from ostler import tcp
from ostler.sessions.frames import LONGEST_REASON, Closed
from ostler.sessions.passage import Passage
from ostler.sessions.splice import Splice

OFFERED, TAKEN, LENT, RECALLED, LOST = "offered", "taken", "lent", "recalled", "lost"
_WATCH = 0.5  # seconds between two looks at a connection that is lent
_RESTS = 1.0  # seconds without a byte after which it comes back
_PATIENCE = 10.0  # seconds for a worker to take it, or to give it back
_LOST = 1.0  # seconds in which a worker that has broken off may be said to have died, and of what
_AGAIN = 0.01
_HEADER = 13  # bytes of a frame's header that is not whole
_LONG_AGO = 10**9  # ms
_numbers = itertools.count(1)


class Lenders:
    """All that is lent, by worker."""

    def __init__(self) -> None:
        self._known: dict[str, _Lender] = {}

    def way(self, path: str, session: str) -> Callable[[Splice], None]:
        """How a splice whose client is busy offers its connection to the worker that takes them there."""

        def offer(splice: Splice) -> None:
            try:
                lender = self._known.get(path) or _Lender(path, self._forget)
            except (
                OSError,
                TypeError,
                ValueError,
            ):  # it has gone, has no room, or named no path: this session stays as it is
                splice.lend = None
                return
            self._known[path] = lender
            lender.offer(session, splice)

        return offer

    def _forget(self, path: str) -> None:
        self._known.pop(path, None)


class _Lender:
    """The way to one worker."""

    def __init__(self, path: str, forget: Callable[[str], None]) -> None:
        self._path, self._forget = path, forget
        self._loans: dict[str, Loan] = {}
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(path)
        except OSError:
            sock.close()
            raise
        self._passage = Passage(sock, self._heard, self._ended, takes_files=False)

    def offer(self, session: str, splice: Splice) -> None:
        if tcp.look(splice.client.file) is tcp.NOTHING:  # not TCP, or a system that does not tell
            splice.lend = None
            return
        loan = self._loans[session] = Loan(self, session, splice)
        loan.offer()

    def send(self, *message: object, file: int | None = None) -> None:
        self._passage.send(message, file)

    def over(self, loan: Loan) -> None:
        if self._loans.get(loan.session) is loan:
            del self._loans[loan.session]

    def _heard(self, message: Any) -> None:
        match message:
            case [str(verb), str(session), int(number), *told]:
                if (loan := self._loans.get(session)) is not None and loan.number == number:
                    loan.told(verb, told)

    def _ended(self) -> None:
        self._forget(self._path)
        for loan in [*self._loans.values()]:
            loan.lost()


class Loan:
    """One connection, from the offer until it is back."""

    def __init__(self, lender: _Lender, session: str, splice: Splice) -> None:
        self.session, self.number = session, next(_numbers)
        self.state = OFFERED
        self._lender, self._splice = lender, splice
        self._went = 0  # bytes that the worker had sent its own way
        self._is_stuck = self._asks = False
        self._seen = tcp.look(splice.client.file)
        self._read, self._written = self._seen.read, self._seen.written  # what is counted already
        self._began = self._moved = self._taken = splice.time()
        self._active = splice.client.active, splice.worker.active

    def offer(self) -> None:
        """From now on the client is the worker's to read."""
        splice = self._splice
        splice.loan = self
        splice.client.pause()
        self._send("take", splice.client.count - splice.kept, file=splice.client.file)
        splice.look_by(self._began + _WATCH)

    def _send(self, verb: str, *more: object, file: int | None = None) -> None:
        self._lender.send(verb, self.session, self.number, *more, file=file)

    # ---- what the worker says

    def told(self, verb: str, given: list[Any]) -> None:
        match [verb, *given]:
            case ["took", int(went)] if self.state == OFFERED:
                self.state, self._went = TAKEN, went
                self.passed()
            case ["no"] if self.state == OFFERED:
                self._splice.lend = None
                self._have_back()
            case ["stuck" | "unstuck"]:
                self._is_stuck = verb == "stuck"
            case ["gave", dict(how)] if self.state != OFFERED:
                self._gave(how)

    def passed(self) -> None:
        """Has the client all that went the other way? Then the worker may write to it."""
        splice = self._splice
        if self.state != TAKEN or splice.worker.count < self._went or self._asks:
            return
        if splice.client.transport.get_write_buffer_size():
            self._asks = True
            splice.later(_AGAIN, self._ask)
            return
        self.state = LENT
        self._seen = tcp.look(splice.client.file)
        self._written = self._seen.written
        self._send("go")

    def _ask(self) -> None:
        self._asks = False
        self.passed()

    def _gave(self, how: dict[str, Any]) -> None:
        """As its client left it. What is said of it is the worker's word, and does harm to this session alone."""
        splice, client = self._splice, self._splice.client
        assert client.track is not None
        now, (heard, said) = splice.time(), self._active
        self._count()
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            client.track.resume(max(0, int(how["left"])), bytes.fromhex(how["head"])[:_HEADER])
            rest = min(int(how["rest"]), _LONG_AGO) / 1000
            client.active = now - rest if rest >= 0 else heard
            splice.worker.active = max(said, client.active)
        client.heard = max(client.heard, now - self._seen.heard)
        self._have_back()
        match how.get("closed"):
            case [int(code), str(text)] if client.track.closed is None and 0 <= code < 65_536:
                client.track.closed = Closed(code, text.encode(errors="replace").decode()[:LONGEST_REASON])
                splice.said_close(client)
        self._ask_again()

    def _ask_again(self) -> None:
        """A close frame of the worker's may have come by the other way, before it was known that the client had sent one."""
        if (track := self._splice.worker.track) is not None and track.closed is not None:
            self._splice.said_close(self._splice.worker)

    @property
    def tells_more(self) -> bool:
        """Whether the worker has yet to say how its client left."""
        return self.state in (LENT, RECALLED)

    def _have_back(self) -> None:
        self._lender.over(self)
        splice, splice.loan = self._splice, None
        splice.client.row = splice.worker.row = 0
        splice.client.resume()
        splice.look_by(splice.time())

    # ---- meanwhile

    def may_write(self) -> bool:
        """Whether a frame of the relay's own can be put between two of the worker's. Where one is half written, there is no room for more: so
        that is known before the worker has said it.
        """
        return not self._is_stuck and (not self.tells_more or tcp.has_room(self._splice.client.file))

    def recall(self) -> None:
        """Have it back, as soon as a frame that is half written is whole."""
        if self.state == LENT:
            self.state, self._began = RECALLED, self._splice.time()
            self._send("back")

    def look(self, now: float) -> float:
        """What the system knows of it, and what follows. When to look again."""
        splice, limits = self._splice, self._splice.limits
        before, seen = self._seen, self._count()
        if (before.read, before.written) != (seen.read, seen.written):
            self._moved = now
        if before.acknowledged != seen.acknowledged or not seen.unacknowledged:
            self._taken = now
        splice.client.active = max(splice.client.active, now - seen.heard)
        splice.worker.active = max(splice.worker.active, now - seen.sent)
        rests = now - self._moved >= _RESTS or (limits.idle and now - self._began >= limits.idle)
        if rests or splice.closer is not None or tcp.has_left(splice.client.file):
            self.recall()
        if now - self._taken >= limits.slow:
            splice.finish("slow", f"ostler: the client took nothing for {limits.slow:g} s", 1008)
        elif self._is_late(now):
            splice.finish("worker", "ostler: the worker does not give the connection back", 1011)
        return now + _WATCH

    def _is_late(self, now: float) -> bool:
        """Whether a worker had all the time that it needs to answer: a large frame takes its time."""
        waits = self.state in (OFFERED, TAKEN, RECALLED) and not self._seen.unacknowledged
        return waits and now - max(self._began, self._moved) >= _PATIENCE

    def _count(self) -> tcp.Seen:
        """Look, and add what has gone by since."""
        self._seen = seen = tcp.look(self._splice.client.file)
        if self.tells_more and seen is not tcp.NOTHING:
            self._splice.lent_in += max(0, seen.read - self._read)
            self._splice.lent_out += max(0, seen.written - self._written)
            self._read, self._written = seen.read, seen.written
        return seen

    def end(self) -> None:
        """The session is over."""
        self._send("over")
        self._count()
        self._lender.over(self)
        self._splice.loan = None

    def lost(self) -> None:
        """The worker's process has gone, or is about to. It may still say why, on the bytes' own way."""
        if self.state != LOST:
            self.state = LOST
            self._ask_again()
            self._splice.later(_LOST, self._splice.break_off)
