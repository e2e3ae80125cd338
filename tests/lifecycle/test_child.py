"""The worker's end of the control channel, in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from ostler.lifecycle.child import CONTROL
from ostler.lifecycle.wire import Frames

# The main thread takes the socket for itself in the moment after the side thread has seen that it may read.
_LISTENS = (
    "import time; from ostler.lifecycle.child import Channel\n"
    "channel = Channel(lambda frame: None); channel._reading.acquire(); channel.open(); time.sleep(600)"
)


def test_heartbeats_go_on_when_the_main_thread_begins_to_listen_just_as_the_side_thread_would() -> None:
    ours, theirs = socket.socketpair()
    env = {**os.environ, CONTROL: f"{theirs.fileno()}:0.01"}
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-c", _LISTENS], env=env, pass_fds=[theirs.fileno()], start_new_session=True
        )
        try:
            ours.settimeout(60)
            frames, beats = Frames(), 0
            while beats < 3:
                beats += sum(frame[0] == "beat" for frame in frames.feed(ours.recv(1 << 16)))
        finally:
            child.kill()
            child.wait()
