"""Lending clients' connections to workers: who calls one warm model again and again is answered by its worker, without a hop.

A connection is lent after a few calls with the same head, one right after another. While it is lent the plane does not read it, and
`calls/guests.py` answers. It comes back when the worker is to leave, when the client pauses or asks for anything else; what was read of that
comes with it. Guests are in the worker beside the calls that the plane sends there, and are served in turns with them. Those are as few as the
model's room, so when some wait for their place all the time, the plane has its guests back, and everybody stands in one line again.

Only connections that need no token but the workers' own key are lent, so a worker sees nobody else's. What must be seen to for each call is not lent either: priorities,
deadlines and ids that a client gives, models that take turns on the GPU, and those that are killed for a call that was cancelled.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ostler.calls.guests import ANSWERS, CELL, MODEL, RESTS, TIRED
from ostler.plane.call import FOR_WORKERS, Call, failure
from ostler.plane.heads import Seen
from ostler.plane.leases import Key, Line, Place
from ostler.plane.loans import Channel, Loan

if TYPE_CHECKING:
    from ostler.plane.access import Access
    from ostler.plane.calls import Calls

_SHORT = 0.05  # seconds that a call of each guest may take together: so long does a call wait behind them
_PATIENT = 10.0  # seconds that a call may take, at the least: they are looked at once a `_WATCH`
_WATCH = 0.25  # seconds between two looks
_PATIENCE = 4  # looks in a row at which some waited in line, until everybody stands there again
_APART, _LONGEST_APART = 1.0, 64.0  # seconds for which a model that others wanted is lent nothing
_CANCEL_GRACE = 2.0  # seconds in which a cancelled call ends before its client is cut off
_JUDGED = (b"authorization", b"cookie", b"x-request-id", b"expect")  # and all of ours: seen to by the plane alone


class Lender:
    """All connections that are lent."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._loop = asyncio.get_running_loop()
        self._channels: dict[Place, Channel] = {}
        self._watching: asyncio.TimerHandle | None = None

    # ---- lending

    def offer(self, call: Call, place: Place) -> None:
        """A call was answered in that place: lend its client's connection, if it is worth it."""
        request, now = call.request, self._loop.time()
        client, seen = request.asker, request.seen
        before, client.lately = client.lately, (seen, call.key, now)
        if before is None or before[:2] != (seen, call.key) or not client.is_lendable:
            return
        if call.asked - before[2] > TIRED:  # how long the client itself has paused
            return
        line = place.line
        if not place.guests:  # else it waited behind them, and their rows tell
            line.alone = now - call.sent_at
        if not self._suits(call, line, place, now):
            return
        named = MODEL.match(request.replay)
        if named is None or seen is None or not _is_plain(seen, self._calls.access) or not client.rests():
            return
        channel = self._channels.get(place)
        if channel is None:
            channel = Channel(self, place)
            if not channel.is_closed:
                here = {p: c for p, c in self._channels.items() if c.loans or p.line.places.get(p.replica) is p}
                self._channels = {**here, place: channel}
        elif channel.is_open and (cell := channel.free()) is not None:
            self._lend(call, channel, cell, named[1])

    def _suits(self, call: Call, line: Line, place: Place, now: float) -> bool:
        """Whether its model is one to lend to, and nobody else wants it now."""
        return (
            call.target is None
            and call.request.inner == b"/infer"
            and call.request.answer is None  # it came as a whole: its model does not stream
            and not call.kills
            and call.timeout >= _PATIENT
            and (place.guests + 1) * line.alone < _SHORT
            and place.guests
            < line.terms.room + (line.terms.queue if line.terms.workers == 1 else 0)  # else others start
            and line.places.get(place.replica) is place
            and now >= line.apart_until
            and not self._calls.takes_turns(call.key)
        )

    def _lend(self, call: Call, channel: Channel, cell: int, model: bytes) -> None:
        request, client = call.request, call.request.asker
        assert request.seen is not None
        loan = Loan(channel, cell, client, call.timeout, random.getrandbits(64))
        headers = {n.decode(): v.decode("latin-1") for n in FOR_WORKERS if (v := request.get(n)) is not None}
        terms = {
            "head": request.seen.head.decode("latin-1"),
            "path": request.inner.decode("latin-1"),
            "model": model.decode(),
            "headers": {**headers, "x-ostler-deadline-ms": str(int(call.timeout * 1000))},
            "id": loan.id,
        }
        CELL.pack_into(channel.cells, cell * CELL.size, RESTS, 0.0, 0, 0)
        channel.place.guests += 1
        channel.loans[cell] = loan
        client.lend(loan)
        channel.send(["take", cell, terms], client.file)
        if self._watching is None:
            self._watching = self._loop.call_later(_WATCH, self._watch)

    # ---- having them back

    def recall(self, key: Key) -> None:
        """Others want the model: have back what is lent to its workers."""
        for place, channel in [*self._channels.items()] if self._watching is not None else ():  # else nothing is lent
            if channel.loans and place.line.key == key:
                self._part(channel)

    def _part(self, channel: Channel) -> None:
        """Have its guests back, and lend nothing for a while: the longer, the sooner that happens again."""
        line, now = channel.place.line, self._loop.time()
        if now >= line.apart_until:
            again = now - line.apart_until < 2 * line.apart
            line.apart = min(2 * line.apart, _LONGEST_APART) if again else _APART
            line.apart_until = now + line.apart
        for loan in [*channel.loans.values()]:
            loan.recall()

    def rests_in(self, place: Place) -> bool:
        """Whether nobody but guests between two calls is in it."""
        channel = self._channels.get(place)
        if channel is None or not channel.loans or place.line.terms.pinned:
            return False
        return not place.held and all(loan.at()[0] == RESTS for loan in channel.loans.values())

    def recall_all(self) -> None:
        """What may be lent has changed."""
        for channel in [*self._channels.values()]:
            for loan in [*channel.loans.values()]:
                loan.recall()

    def worker_left(self, channel: Channel) -> None:
        """It has closed the channel: it is dead, or about to be. Its guests come back to a plane that knows."""
        if channel.loans:
            self._calls.lose(channel.place)
        channel.close()

    def forget(self, key: Key, replica: int, generation: int) -> None:
        """The worker has gone."""
        for place, channel in [*self._channels.items()]:
            if (place.line.key, place.replica, place.generation) == (key, replica, generation):
                channel.close()

    def drop(self, channel: Channel) -> None:
        """It is closed."""
        if self._channels.get(channel.place) is channel:
            del self._channels[channel.place]

    def told(self, loan: Loan, name: str, rows: list[list[Any]], rest: str = "") -> None:
        """A worker says what its guest has done, and perhaps that it has left."""
        if rows:
            place = loan.channel.place
            loan.served += len(rows)
            place.line.alone = sum(row[1] for row in rows) / len(rows)
            self._calls.count(place, len(rows))
            self._calls.records.lent(place, loan.id, rows)
        if name == "rows":
            return
        client = loan.client
        if name == "unsent":
            client.is_lendable = False  # who reads slowly is not lent again
            if not client.transport.is_closing():
                client.write(rest.encode("latin-1"))
            return
        self._over(loan)
        if name == "back":
            client.is_lendable = client.is_lendable and (loan.served > 0 or not rest)  # who varies is not lent again
            client.take_back(rest.encode("latin-1"))
            return
        state, began, number = loan.at()
        why = loan.verdict
        if why is None and name == "ended":  # its worker was told to, or its model failed in the middle of an answer
            why = self._calls.death_of(loan.channel.place, f"{loan.id}-{number}")
        if began:
            place, took = loan.channel.place, time.monotonic() - began
            self._calls.records.lent_lost(place, f"{loan.id}-{number}", took, why)
        client.end_loan(None if state == ANSWERS else why)

    def lost(self, loan: Loan) -> None:
        """Its worker has gone without a word: what it was at says what its client must be told."""
        state, began, number = loan.at()
        rests = state == RESTS or (state == ANSWERS and loan.is_answered())
        answered = number if rests or not began else number - 1
        # What it had no time to tell of: how long each took is guessed, that they were answered is known.
        self.told(
            loan, "rows", [[n, loan.channel.place.line.alone, 0, 0, 200] for n in range(loan.served + 1, answered + 1)]
        )
        self._over(loan)
        if rests:
            loan.client.take_back(b"")
            return
        why = loan.verdict or self._calls.death_of(loan.channel.place, f"{loan.id}-{number}")
        if began:
            self._calls.records.lent_lost(loan.channel.place, f"{loan.id}-{number}", time.monotonic() - began, why)
        # Half an answer cannot be followed by another.
        loan.client.end_loan(None if state == ANSWERS else why)

    def _over(self, loan: Loan) -> None:
        place = loan.channel.place
        del loan.channel.loans[loan.cell]
        place.guests -= 1
        if loan.holds:
            self._calls.vacate(place)
        else:
            self._calls.look_if_empty(place)

    # ---- what is under way

    def _loans(self) -> Iterable[Loan]:
        return (loan for channel in self._channels.values() for loan in channel.loans.values())

    def _watch(self) -> None:
        """A call that has had all its time is ended with its worker; one that takes long holds a place, so that others wait for it in
        line. Where some wait in line all the time, the guests come back.
        """
        self._watching, now, some = None, time.monotonic(), False
        for place, channel in [*self._channels.items()]:
            some = some or bool(channel.loans)
            channel.waits = channel.waits + 1 if channel.loans and place.line.waits() else 0
            for loan in [*channel.loans.values()]:
                _, began, number = loan.at()
                if began and now - began > loan.timeout and loan.verdict is None:
                    loan.verdict = self._calls.kill_for(place, f"{loan.id}-{number}", loan.timeout)
                if began and now - began > _WATCH and not loan.holds:
                    loan.holds, channel.waits = True, _PATIENCE
                    self._calls.leases.hold(place)
            if channel.waits >= _PATIENCE:
                self._part(channel)
        if some:
            self._watching = self._loop.call_later(_WATCH, self._watch)

    def listing(self, now: float, wall: float) -> list[dict[str, Any]]:
        """Calls under way in connections that are lent, as `Records.listing` has them."""
        shown = []
        for loan in self._loans():
            state, began, number = loan.at()
            if began:
                task, model = loan.channel.place.line.key
                about = {
                    "request": f"{loan.id}-{number}",
                    "task": task,
                    "model": model,
                    "replica": loan.channel.place.replica,
                    "state": "streaming" if state == ANSWERS else "running",
                    "priority": 0,
                    "asked_at": round((wall - (now - began)) * 1000),
                    "waited_ms": 0.0,
                    "running_ms": round((now - began) * 1000, 3),
                    "bytes_in": 0,
                    "bytes_out": 0,
                }
                shown.append(about)
        return shown

    def cancel(self, name: str) -> int:
        """Cancel the call of that id; how many there were."""
        for loan in self._loans():
            _, began, number = loan.at()
            if began and f"{loan.id}-{number}" == name:
                loan.verdict = failure(499, "CANCELLED", f"call {name} was cancelled by an operator", name)
                loan.channel.send(["cancel", loan.cell, name])
                self._loop.call_later(_CANCEL_GRACE, self._cut_off, loan, number)
                return 1
        return 0

    def _cut_off(self, loan: Loan, number: int) -> None:
        """The model does not look whether its call was cancelled: at least its client goes."""
        if loan.channel.loans.get(loan.cell) is loan and loan.at()[2] == number:
            loan.hang_up()
            loan.client.transport.abort()


def _is_plain(seen: Seen, access: Access | None) -> bool:
    """Whether nothing in such a head has to be seen to for each call, or is nobody's business but the plane's. The key that workers call
    models with is theirs already.
    """
    if seen.plain is None or seen.plain[0] is not access:
        headers = seen.fields["headers"]
        names = {name for name, _ in headers}
        if access is not None and access.key and (b"authorization", b"Bearer " + access.key.encode()) in headers:
            names.discard(b"authorization")
        judged = any(name in _JUDGED or name.startswith(b"x-ostler-") for name in names)
        seen.plain = access, not judged and not seen.fields["query"]
    return seen.plain[1]
