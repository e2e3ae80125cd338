"""A worker that speaks the control channel and nothing of jobs: what a tenant of the tests runs."""

from __future__ import annotations

import os
import sys
import threading

from ostler.lifecycle.child import Channel

stop = threading.Event()


def heard(frame: list) -> None:
    if frame[0] == "stop":
        stop.set()
    elif frame[0] == "die":
        os._exit(9)
    else:
        channel.send("echo", frame)


channel = Channel(heard, facts=lambda: {"sessions": 3})
channel.open()
channel.send("ready", {"endpoint": sys.argv[1], "slot": os.environ["OSTLER_COMPONENT"]})
stop.wait()
