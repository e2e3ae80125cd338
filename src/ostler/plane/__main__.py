"""The data plane's process: `python -m ostler.plane RUN_DIRECTORY`, a worker of the node on the node's listening socket."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from typing import Any

from ostler.lifecycle.child import Channel, inherited, leave
from ostler.lifecycle.wire import Frame
from ostler.plane import call_routes, openai
from ostler.plane.call import PATH
from ostler.plane.calls import Calls
from ostler.plane.entry import allow_files, loop_factory
from ostler.plane.forwarding import INNER
from ostler.plane.front import Front
from ostler.plane.plan import Forward, Plan
from ostler.plane.request import Request
from ostler.plane.session_forwarding import INNER as INNER_SESSIONS
from ostler.plane.sessions import PATH as SESSIONS
from ostler.plane.sessions import Sessions
from ostler.plane.upstream import Upstream

LISTEN = "LISTEN"  # the descriptor that the node passes
_LAST = 1.0  # seconds that clients of sessions get to take their close frame when the plane must go
_WORDS = 0.02  # seconds, when the node has died, for what is answered to those in line to go out
NODE = "node.sock"  # the node's own server, in the run directory

log = logging.getLogger("ostler.plane")


class Plane:
    """Serves until it is told to stop: everything goes to the node's own server."""

    def __init__(self, sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self.node = Upstream(NODE)
        self._to_node = Forward(self.node, finishes=False)
        self.front = Front(sock, self.route, files=lambda: len(self.node.links) + len(self.sessions.live))
        self.channel = Channel(self._heard, self._facts, self._orphaned)
        self.calls = Calls(self.channel.send)
        self.sessions = Sessions(self.channel.send, lambda: self.calls.access)
        self.call_routes = call_routes.Routes(self.calls)
        self.openai = openai.Routes(self.calls)
        self._stop = asyncio.Event()

    def route(self, request: Request) -> Plan:
        """What is done with a request."""
        if request.path.startswith(PATH):
            return self.call_routes.route(request)
        if request.path.startswith(SESSIONS):
            return self.sessions.route(request)
        if request.path.startswith(INNER_SESSIONS):
            return self.sessions.asked_by_node(request)
        if request.path.startswith(INNER):
            return self.call_routes.asked_by_node(request)
        if request.path.startswith(openai.PREFIX) and self.openai.has(request.path):
            return self.openai.route(request)
        return self._to_node

    async def run(self) -> None:
        self.channel.open(self._loop)
        self.channel.send("ready", {"pid": os.getpid()})
        await self.calls.known.wait()  # until then connections wait in the socket's line
        await self.front.start()
        await self._stop.wait()
        await self.front.stop()
        self.calls.report(last=True)  # what ended meanwhile
        self.sessions.report()

    def stop(self) -> None:
        """The first time: answer what was asked, then leave. From the second on: now."""
        if self._stop.is_set():
            self.sessions.end_all()
            self.front.abort()  # sessions were told why, and have a moment to read it
            self._loop.call_later(_LAST, lambda: self.front.abort(sessions=True))
        self.sessions.stop()
        self._stop.set()
        self.calls.known.set()

    def _orphaned(self) -> None:
        """The node has died: clients of sessions are told why, and the plane follows it. The guard waits no longer than that, either."""
        self._loop.call_later(_WORDS, leave)
        self.sessions.stop()
        self.sessions.end_all("node-lost", "the node died")

    def _facts(self) -> dict[str, Any]:
        """For the heartbeat; on the channel's own thread."""
        return {"connections": len(self.front.clients)}

    def _heard(self, frame: Frame) -> None:
        """On the loop; what fails there is its business, and not the channel's."""
        self._loop.call_soon(self.heard, frame)

    def heard(self, frame: Frame) -> None:
        """What the node says."""
        if frame == ["stop"]:
            self.stop()
        elif frame[0] == "sessions":
            self.sessions.heard(frame)
        elif frame[0] != "label":
            self.calls.heard(frame)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    allow_files()
    # Sockets are used by their short names: a path of more than 107 bytes cannot be. Only now, for PYTHONPATH may be relative.
    os.chdir(sys.argv[1])
    sock = socket.socket(fileno=inherited(LISTEN))

    async def serve() -> None:
        plane = Plane(sock)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, plane.stop)
        gc.freeze()  # what is loaded stays: collections look at requests alone
        gc.set_threshold(20_000, 20, 20)
        await plane.run()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve())


if __name__ == "__main__":
    main()
