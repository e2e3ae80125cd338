"""What is done with a request. A plan is given by the route when the head is complete, or later by `Request.go`:

    Forward   stream the body to an upstream and the answer back      Peek    decide when the first bytes of the body are here
    Reply     answer at once                                          Serve   a coroutine answers, or returns another plan
    Refuse    answer with an error                                    None    nothing yet: `go` follows
    Relay     a Forward whose 101 makes a session of the connection

Forward, Peek, Reply and Refuse run in callbacks; only Serve costs a task.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ostler.plane.answer import Head
from ostler.plane.upstream import Link, Upstream

if TYPE_CHECKING:
    from ostler.plane.request import Request


@dataclass(slots=True)  # not frozen: that would make it three times as expensive, and there is one for each call
class Forward:
    """Stream to the upstream. `head` None: the client's own, told for whom it is; else the request line and headers, each with its
    line end, without those that frame the body.

    Exactly one of the callbacks comes. `failed(request, reason, sent)`: no byte of the answer has gone to the client; what it
    returns is done instead (None: 502; LATER: `go` follows); another Forward where `Request.is_repeatable` is not true answers 502, too. `sent` False: the upstream has not seen the request. `ended(request, how)`:
    `done`, `left` (the client has gone), `cut` (the answer broke off in the middle) or `refused` (the body was too large).
    """

    upstream: Upstream
    head: bytes | None = None
    failed: Callable[[Request, str, bool], Plan] | None = None
    ended: Callable[[Request, str], None] | None = None
    max_body: int | None = None
    stall: float | None = None  # seconds for which a client may take nothing of an answer that waits for it
    lingers: bool = False  # who is left in the middle is over when the upstream has closed the connection, too
    left: Callable[[Request], None] | None = None  # … and this is called when it is left
    finishes: bool = True  # False: an event stream that ends when the plane is asked to stop


@dataclass(slots=True)
class Relay(Forward):
    """Pass a handshake on. After a 101 the connections are those of a session: `switched(request, head, link, rest)` takes both, and none
    of the callbacks of a Forward comes; `rest` has come behind the head. Any other answer is for the client, unless `declined(request,
    head)` knows something else to do.
    """

    switched: Callable[[Request, Head, Link, bytes], None] = lambda *_: None
    declined: Callable[[Request, Head], Plan] | None = None


@dataclass(frozen=True, slots=True)
class Peek:
    """Call `then` when the body is whole or `size` bytes of it are here: see `Request.begun` and `Request.is_whole`."""

    then: Callable[[Request], Plan]
    size: int = 65_536


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Refuse:
    status: int
    code: str
    message: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Serve:
    """A coroutine that answers by itself (`reply`) and returns None, or returns another plan. It is
    cancelled when the client goes away. One that neither answers nor returns a plan has somebody else call `go`.
    """

    handler: Callable[[Request], Awaitable[Plan]]


@dataclass(frozen=True, slots=True)
class Later:
    """Nothing yet: `Request.go` follows. Where None means something else."""


LATER = Later()

Plan = Forward | Peek | Reply | Refuse | Serve | Later | None
