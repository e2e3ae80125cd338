"""The handshake of a session with its worker: begun ahead while the node is asked, or afterwards; over HTTP, or without, for plain TCP."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ostler.plane.ahead import Ahead
from ostler.plane.answer import Head, switching
from ostler.plane.plan import LATER, Plan, Relay
from ostler.plane.relay import SESSION, dial, switching_raw
from ostler.plane.request import Request
from ostler.plane.upstream import Upstream
from ostler.sessions.selection import Worker

if TYPE_CHECKING:
    from ostler.plane.session import Session

HEAD = 5.0  # seconds that a worker gets to answer


class Handshake:
    """One session's. It ends by one call of the session: `join`, `try_next`, `client_gone` or `over`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._endpoint: dict[str, Any] = {}
        self._ahead: Ahead | None = None

    def begin_ahead(self, worker: Worker, request: Request) -> None:
        """While the node is asked: where the worker's endpoint is every session's, its handshake can begin."""
        terms, endpoint = self._session.terms, worker.endpoint
        if endpoint.get("opens") or terms.get("redirect") or terms.get("protocol") == "tcp" or not endpoint["address"]:
            return
        head = self._session.wish.handshake(request, endpoint.get("path") or "/", self._session.id)
        self._ahead = Ahead(endpoint["address"], head + b"\r\n")

    def drop(self) -> None:
        """What was begun ahead is of no use."""
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None

    def begin(self, request: Request, endpoint: dict[str, Any]) -> None:
        """The node has consented, and the worker told it this endpoint."""
        self._endpoint = endpoint
        if self._ahead is not None and self._is_own(endpoint):
            self._session.state = "dialling"
            self._session.wait(HEAD, self._late)
            request.gone = lambda _: self._answered("left")
            self._ahead.then(self._met)
        else:
            self.drop()
            request.go(self.dial(request))

    def _is_own(self, endpoint: dict[str, Any]) -> bool:
        """Whether that is the endpoint of the worker itself."""
        own = self._worker.endpoint
        return all(not endpoint.get(name) or endpoint[name] == own.get(name) for name in ("address", "path"))

    @property
    def _worker(self) -> Worker:
        assert self._session.worker is not None
        return self._session.worker

    def _met(self) -> None:
        """What was begun ahead has come to an end. If it failed it is tried in the ordinary way, which knows what to do."""
        ahead, request, self._ahead = self._ahead, self._session.request, None
        if ahead is None or request is None:
            return
        request.gone = None
        if ahead.head is None:
            request.go(self.dial(request))
        else:
            head, transport, rest = ahead.take()
            self._switched(request, head, transport, rest)

    def dial(self, request: Request) -> Plan:
        """Connect to the worker."""
        session, own = self._session, self._worker.endpoint
        session.state = "dialling"
        address = self._endpoint.get("address") or own["address"]
        if session.terms.get("protocol") == "tcp":
            return self._dial_raw(request, address)
        upstream = Upstream(address)
        upstream.closed = True  # its connections are used once
        session.wait(HEAD, self._late)
        path = self._endpoint.get("path") or own.get("path") or "/"
        return Relay(
            upstream,
            session.wish.handshake(request, path, session.id),
            failed=lambda _, reason, __: session.try_next(reason),
            ended=lambda _, how: self._answered(how),
            switched=lambda request, head, link, rest: self._switched(request, head, link.hand_over(), rest),
            declined=self._answers,
        )

    def _dial_raw(self, request: Request, address: str) -> Plan:
        """Not a Serve: its task is cancelled before it begins when the client leaves at that moment, and the slot would be lost."""
        session = self._session
        session.wait(None)
        request.gone = lambda _: self._answered("left")
        id_, dialling = session.id, asyncio.get_running_loop().create_task(dial(address, HEAD))

        def dialled(_: object) -> None:
            if dialling.cancelled():  # the plane's process ends
                return
            error = dialling.exception()
            if session.state != "dialling" or session.id != id_ or session.request is not request:
                if error is None:  # it is over, or tried elsewhere
                    dialling.result()[0].abort()
                return
            request.gone = None
            if error is not None:
                request.go(session.try_next(f"cannot connect: {error}"))
                return
            transport, early = dialling.result()
            early.release()
            session.join(request, transport, switching_raw(request, id_), early)

        dialling.add_done_callback(dialled)
        return LATER

    def _late(self) -> None:
        if self._session.request is not None:
            reason = f"it did not answer the handshake within {HEAD:g} s"
            self._session.request.abandon(self._session.try_next(reason))

    def _answers(self, _: Request, head: Head) -> Plan:
        """An answer that is no 101: the client gets it, unless the worker itself is in trouble."""
        self._session.wait(None)
        if head.status >= 500:
            return self._session.try_next(f"it answered the handshake with {head.status}")
        self._session.state = f"answered {head.status}"
        return None

    def _answered(self, how: str) -> None:
        """… and has got it, or has left meanwhile."""
        session = self._session
        if how == "late" or session.worker is None:
            return
        session.wait(None)
        if session.state == "dialling":
            session.client_gone("client", "the client left during the handshake", 1006)
        else:  # a session to which a client could not come back still waits for one that can
            session.client_gone("refused", f"the worker {session.state} to the handshake", 0)

    def _switched(self, request: Request, head: Head, worker: asyncio.Transport, rest: bytes) -> None:
        session = self._session
        session.join(request, worker, switching(head, [(SESSION, session.id.encode())]), rest)
