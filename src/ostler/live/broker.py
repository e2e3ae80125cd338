"""The broker: the newest state of every object, numbered by change, and the clients that follow it.

A client is a place in that numbering, not a buffer: when its socket has room it is given the newest state of everything
that changed since. So a slow client skips what is outdated anyway, costs no memory, and holds up nobody. A client that
comes back names the last number it saw and goes on from there. Only where an object was forgotten in the meantime (ended
jobs are, after a while) the gap cannot be told: then it gets a `resync` and everything anew.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

from ostler.live import states, topics
from ostler.live.topics import Pattern
from ostler.store import now_ms

_SENDING = 0.001  # seconds: the most that sending to one client is taken to cost
KEEP_ALIVE = b": keep-alive\n\n"
PING = b": keep-alive\nevent: ping\ndata: {}\n\n"  # an EventSource does not show comments to its page


class Entry(NamedTuple):
    seq: int
    topic: str
    frame: bytes
    passing: bool  # for those who were there; no part of a snapshot


class Group:
    """Clients that follow the same patterns; what they get is put together once for all of them."""

    def __init__(self, patterns: frozenset[Pattern]) -> None:
        self.patterns = patterns
        self.clients: set[Client] = set()
        self.matched: dict[str, bool] = {}
        self.made: tuple[int, int, bytes] = (-1, -1, b"")  # from, to, frames

    def wants(self, topic: str) -> bool:
        found = self.matched.get(topic)
        if found is None:
            found = self.matched[topic] = topics.matches(self.patterns, topic)
        return found


class Client:
    """One who follows. `take` gives what it has not seen; `wake` is set when there is something."""

    def __init__(self, broker: Broker, group: Group, seen: int | None, greeting: bytes, *, ping: bool) -> None:
        self._broker, self.group = broker, group
        self._sign = PING if ping else KEEP_ALIVE
        self._seen = seen  # None: nothing yet, the next take is a snapshot
        self._greeting = greeting
        self._new = True
        self._quiet = self._due = False  # nothing said since the last tick; a keep-alive is to be sent
        self.wake = asyncio.Event()
        self.closed = False

    def take(self) -> bytes:
        """Everything that changed since the last take, the newest state of each object, in order; empty when nothing did."""
        self.wake.clear()
        data, self._greeting = self._greeting, b""
        if self._seen is not None and self._broker.has_forgotten(self.group, self._seen):
            data += self._broker.resync_frame("more was missed than can be told")
            self._seen, self._new = None, True
        data += self._broker.frames(self.group, self._seen or 0)
        if self._new:
            data += self._broker.live_frame()
        self._seen, self._new = self._broker.seq, False
        if data:
            self._quiet = self._due = False
        elif self._due:
            self._due, data = False, self._sign
        return data

    def tick(self) -> None:
        """Called once per keep-alive interval: say something if nothing was said since."""
        if self._quiet:
            self._due = True
            self.wake.set()
        self._quiet = True

    def close(self) -> None:
        self.closed = True
        self.wake.set()


class Broker:
    """Holds the state, numbers the changes, wakes the clients. Runs on the node's loop."""

    def __init__(self, epoch: str, node: str, keepalive: float = 15.0) -> None:
        self.epoch, self.node, self.started_at, self.keepalive = epoch, node, now_ms(), keepalive
        self.seq = 0
        self.closed = False
        self.spent = 0.0  # seconds that sending has cost since `flush`; whoever publishes paces itself by it
        self._entries: dict[str, Entry] = {}  # by object, in the order of their numbers
        self._values: dict[str, Any] = {}
        self._forgotten: dict[str, int] = {}  # topic -> the last number that nobody can be told any more
        self._groups: dict[frozenset[Pattern], Group] = {}
        self._woken: set[Group] = set()

    # ---- those who publish

    def publish(self, topic: str, kind: str, name: str, value: Any, *, key: str = "") -> bool:
        """The object's state now. Sent only if it differs from the last; `key` tells objects of one topic apart."""
        key = f"{topic}#{key}"
        if key in self._values and self._values[key] == value:
            return False
        self.seq += 1
        event = states.envelope(topic, kind, now_ms(), name, value)
        self._values[key] = value
        self._entries.pop(key, None)
        self._entries[key] = Entry(self.seq, topic, self._frame(event), kind == "resync")
        for group in self._groups.values():
            if group.wants(topic):
                self._woken.add(group)
        return True

    def forget(self, topic: str, key: str) -> None:
        """Drop an object from memory. Who has not seen its last state yet is told to resync."""
        entry = self._entries.pop(f"{topic}#{key}", None)
        self._values.pop(f"{topic}#{key}", None)
        if entry is not None:
            self._forgotten[topic] = max(self._forgotten.get(topic, 0), entry.seq)

    def missed(self, topic: str, why: str) -> None:
        """More of this topic changed than is told: say so, instead of dropping it silently."""
        self.publish(topic, "resync", "stream", {"reason": why, "after": self.seq}, key="resync")

    def flush(self) -> int:
        """Wake all clients that have something to take; how many."""
        woken, self._woken = self._woken, set()
        self.spent = 0.0
        count = 0
        for group in woken:
            for client in group.clients:
                client.wake.set()
            count += len(group.clients)
        return count

    def sent(self, took: float) -> None:
        """A client was sent something. What took long was no work but waiting for a slow one, which must not pace the others."""
        self.spent += min(took, _SENDING)

    # ---- those who follow

    def follow(self, patterns: frozenset[Pattern], last_id: str | None, *, ping: bool = False) -> Client:
        """A new client; with the id of the last event that it saw, it goes on from there."""
        group = self._groups.get(patterns)
        if group is None:
            group = self._groups[patterns] = Group(patterns)
        seen, greeting = self._place(last_id)
        client = Client(self, group, seen, greeting, ping=ping)
        group.clients.add(client)
        return client

    def _place(self, last_id: str | None) -> tuple[int | None, bytes]:
        if not last_id:
            return None, b""
        epoch, _, number = last_id.strip().rpartition("-")
        if epoch != self.epoch:
            return None, self.resync_frame("the node was started anew")
        if not number.isascii() or not number.isdigit() or len(number) > 18 or int(number) > self.seq:
            return None, self.resync_frame("that id was never given")
        return int(number), b""

    def leave(self, client: Client) -> None:
        group = client.group
        group.clients.discard(client)
        # Who leaves twice must not take away the group that others have made since.
        if not group.clients and self._groups.get(group.patterns) is group:
            del self._groups[group.patterns]

    def wanted(self, topic: str) -> bool:
        """Whether anybody follows this topic."""
        return any(group.wants(topic) for group in self._groups.values())

    @property
    def clients(self) -> int:
        return sum(len(group.clients) for group in self._groups.values())

    def tick(self) -> None:
        """Once per keep-alive interval."""
        for group in self._groups.values():
            for client in group.clients:
                client.tick()

    def close(self) -> None:
        """End all streams: the node stops."""
        self.closed = True
        for group in list(self._groups.values()):
            for client in list(group.clients):
                client.close()

    # ---- frames

    def frames(self, group: Group, since: int) -> bytes:
        """What changed after `since`, for one group; put together once for all of its clients that are at the same place."""
        start, end, made = group.made
        if (start, end) == (since, self.seq):
            return made
        found = []
        for entry in reversed(self._entries.values()):
            if entry.seq <= since:
                break
            if group.wants(entry.topic) and not (entry.passing and since == 0):
                found.append(entry.frame)
        made = b"".join(reversed(found))
        # Kept for the others of the group; where there are none, a thousand groups would each keep theirs for nothing.
        group.made = (since, self.seq, made) if len(group.clients) > 1 else (-1, -1, b"")
        return made

    def has_forgotten(self, group: Group, since: int) -> bool:
        return any(seq > since and group.wants(topic) for topic, seq in self._forgotten.items())

    def live_frame(self) -> bytes:
        """After a snapshot, or after what was missed: from here on it is live."""
        stream = {"node": self.node, "epoch": self.epoch, "started_at": self.started_at, "keepalive": self.keepalive}
        return self._frame(states.envelope("stream", "live", now_ms(), "stream", stream))

    def resync_frame(self, why: str) -> bytes:
        """Forget what you have; the whole state follows."""
        return self._frame(states.envelope("stream", "resync", now_ms(), "stream", {"reason": why}), numbered=False)

    def _frame(self, event: dict[str, Any], *, numbered: bool = True) -> bytes:
        head = f"id: {self.epoch}-{self.seq}\n" if numbered else ""
        return f"{head}data: {json.dumps(event, separators=(',', ':'))}\n\n".encode()
