"""A request at an upstream: its head and body go there as they come, and the answer comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostler.plane.access import CLIENT_HEADER, PEER_HEADER
from ostler.plane.answer import HOP, Answer, Head, Headers, switching
from ostler.plane.plan import Forward, Refuse, Relay
from ostler.plane.upstream import Link

if TYPE_CHECKING:
    from ostler.plane.client import Client
    from ostler.plane.request import Request

# Never passed on as they are: what is about one connection alone, what frames the body, and what only the plane may say.
OWN = HOP | {b"content-length", PEER_HEADER, CLIENT_HEADER}


class Exchange:
    """What a Forward does: the sink of its link. It is the request's `exchange` until it has ended, failed or was dropped, and exactly one of
    the plan's callbacks comes.
    """

    passes = True  # an answer that is whole in one read is taken as it is
    is_sent = False  # all of the body was handed over
    link: Link | None = None
    _has_begun = False  # the head was sent
    _answer: Answer | None = None  # the request's, once it has begun
    _switch: Head | None = None  # a 101 that makes a session of the connection
    _rest = b""  # … and what came behind it

    def __init__(self, request: Request, client: Client, plan: Forward) -> None:
        self._request, self._client, self.plan = request, client, plan
        self.bodiless, self.upgrades = request.bodiless, request.upgrades

    # ---- the request

    def begin(self) -> None:
        request, plan = self._request, self.plan
        if plan.max_body is not None and max(request.length or 0, request.received) > plan.max_body:
            request.refuse_body(plan.max_body)
            return
        link = plan.upstream.take()
        if link is None:
            plan.upstream.connect(self._connected)
            return
        self.link = link
        if not self._client.is_reading:  # else at the end of this read, with what it brought of the body
            self._client.resume()
            self.push()

    def _connected(self, found: Link | OSError) -> None:
        if self._request.exchange is not self:
            if isinstance(found, Link):
                found.upstream.give(found)
        elif isinstance(found, OSError):
            self._fail(f"cannot connect: {found.strerror or found}", sent=False)
        else:
            self.link = found
            self._client.resume()
            self.push()

    def push(self) -> None:
        """Send what is here of the body, with the head before it; nothing while there is no link."""
        link, request = self.link, self._request
        if link is None:
            return
        if self._has_begun:
            if data := request.hand_on():
                link.write(b"%x\r\n%b\r\n" % (len(data), data) if request.length is None else data)
            if request.is_whole and not self.is_sent:
                self.is_sent = True
                if request.length is None:
                    link.write(b"0\r\n\r\n")
            return
        head = self.plan.head
        if head is None:
            head = self._same_head()
        else:
            request.ask_for_body()
        body = request.hand_on()
        if request.is_whole:
            self.is_sent, request.replay = True, body
            head += (
                b"content-length: %d\r\n\r\n" % len(body) if body or request.method not in ("GET", "HEAD") else b"\r\n"
            ) + body
        elif request.length is not None:
            request.is_repeatable = False
            head += b"content-length: %d\r\n\r\n%b" % (request.length, body)
        else:
            request.is_repeatable = False
            head += b"transfer-encoding: chunked\r\n\r\n" + (b"%x\r\n%b\r\n" % (len(body), body) if body else b"")
        self._has_begun = True
        link.begin(self, head)

    def _same_head(self) -> bytes:
        request = self._request
        out = [request.method.encode(), b" ", request.target, b" HTTP/1.1\r\n"]
        for name, value in request.headers:
            if name in OWN or (name == b"expect" and not request.expects):
                continue
            out += (name, b": ", value, b"\r\n")
        if request.upgrades:
            out += (b"connection: upgrade\r\nupgrade: ", request.get(b"upgrade") or b"", b"\r\n")
        out.append(self._client.introduction)
        return b"".join(out)

    def drop(self, how: str) -> None:
        """Leave the upstream to itself."""
        link, self.link = self.link, None
        request, plan = self._request, self.plan
        request.exchange = None
        if link is not None:
            if plan.lingers:
                link.hang_up(lambda: self._end(how))
                if plan.left is not None:
                    request.told(plan.left, request)
                return
            if self._client.is_tunnel:
                link.close()
            else:
                link.abort()
        self._end(how)

    def _end(self, how: str) -> None:
        if self.plan.ended is not None:
            self._request.told(self.plan.ended, self._request, how)

    # ---- the sink of the link

    def informed(self, status: int) -> None:
        if status == 100:
            self._request.ask_for_body()

    def answered(self, head: Head) -> None:
        request, client = self._request, self._client
        if isinstance(self.plan, Relay) and self._is_taken_over(self.plan, head):
            return
        if head.status == 101:
            request.status = 101
            self._answer = request.answer = Answer(client, switching(head))
            client.tunnel(self.link)
            return
        self._answer = answer = request.begin_answer(head.status, head.headers, measured=head.length is not None)
        if answer.is_events:
            client.streams(request)

    def _is_taken_over(self, plan: Relay, head: Head) -> bool:
        """Whether the answer to a handshake is not for the client as it is."""
        if head.status == 101:
            self._switch = head  # what follows it in the same read comes next, and then `flush`
            return True
        request = self._request
        instead = None if plan.declined is None else request.told(plan.declined, request, head)
        if instead is None:
            return False
        request.abandon(instead)
        return True

    def body(self, data: bytes) -> None:
        if self._answer is None:
            self._rest += data
        else:
            self._request.sent += len(data)
            self._answer.body(data)

    def whole(self, data: bytes, start: int) -> None:
        """The answer has come as a whole, and its head is as a client may have it. Its body begins at `start`."""
        request = self._request
        request.status, request.sent = 200, len(data) - start
        request.keep_or_not()
        if not request.keep:
            data = data[: start - 2] + b"connection: close\r\n\r\n" + data[start:]
        self._client.write(data)
        self.finished([])

    def flush(self) -> None:
        if self._answer is not None:
            self._answer.flush()
        elif self._switch is not None:
            self._do_switch(self._switch)

    def _do_switch(self, head: Head) -> None:
        request, link, plan = self._request, self.link, self.plan
        assert isinstance(plan, Relay)
        self.link = self._switch = request.exchange = None
        request.told(plan.switched, request, head, link, self._rest)

    def finished(self, trailers: Headers) -> None:
        request = self._request
        # They lead back here: what is over is free at once, not when garbage is collected.
        self.link = request.exchange = request.gone = None
        if self._client.is_tunnel:
            self.flush()
            request.is_over = True
            self._client.transport.close()
        else:
            request.close_answer(trailers)
        self._end("done")

    def failed(self, reason: str) -> None:
        request, link = self._request, self.link
        self.link = None
        if request.status:
            request.exchange = None
            request.break_off(reason)
            self._end("cut")
        elif link and link.used and not link.begun and not request.is_retried and request.method in ("GET", "HEAD"):
            request.is_retried = True  # it may have been closed for being idle; asking again does no harm
            self._has_begun = self.is_sent = False
            request.have_again()
            self.plan.upstream.connect(self._connected)
        else:
            self._fail(reason, sent=True)

    def _fail(self, reason: str, *, sent: bool) -> None:
        """No byte of an answer has gone to the client."""
        request, plan = self._request, self.plan
        request.exchange = None
        if sent:
            request.have_again()
        refusal = Refuse(502, "BAD_UPSTREAM", f"no answer to {request.method} {request.path}: {reason}")
        instead = refusal if plan.failed is None else request.told(plan.failed, request, reason, sent)
        if isinstance(instead, Forward) and not request.is_repeatable:
            if instead.ended is not None:
                request.told(instead.ended, request, "refused")
            instead = refusal
        request.go(refusal if instead is None else instead)

    def full(self) -> None:
        self._client.pause()

    def drained(self) -> None:
        self._client.resume()
