"""A program with flags that make races deterministic: when it is ready, what it does with signals, whether it is well."""

from __future__ import annotations

import argparse
import http.server
import os
import signal
import socket
import sys
import threading
import time

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--http", type=int)
parser.add_argument("--say", default="up")
parser.add_argument("--wait-for")
parser.add_argument("--sick-if")
parser.add_argument("--note-signals")
parser.add_argument("--leave-on")
parser.add_argument("--eat", type=int)
o = parser.parse_args()


def note(number: int, _frame: object) -> None:
    with open(o.note_signals, "a") as file:
        file.write(signal.Signals(number).name + "\n")
    if o.leave_on == signal.Signals(number).name:
        os._exit(0)


if o.note_signals:
    for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
        signal.signal(getattr(signal, name), note)

ballast = bytearray(o.eat * 1_000_000) if o.eat else None
while o.wait_for and not os.path.exists(o.wait_for):
    time.sleep(0.01)
if o.port:
    listener = socket.create_server(("127.0.0.1", o.port))


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(500 if o.sick_if and os.path.exists(o.sick_if) else 200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


if o.http:
    server = http.server.HTTPServer(("127.0.0.1", o.http), Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()

print(o.say)
sys.stdout.flush()
while True:
    time.sleep(1)
