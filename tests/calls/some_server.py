"""A server that knows nothing of Ostler: it says what it was asked."""

from __future__ import annotations

import argparse
import json
import os
import socketserver
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--socket")
parser.add_argument("--model", default="")
parser.add_argument("--garbage", action="store_true")
given = parser.parse_args()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def address_string(self) -> str:
        return "x"

    def _answer(self) -> None:
        if given.garbage:
            self.wfile.write(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path.startswith("/stream"):
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for n in range(3):
                self.wfile.write(b"b\r\ndata: %03d\n\n\r\n" % n)
                self.wfile.flush()
                time.sleep(0.01)
            self.wfile.write(b"0\r\n\r\n")
            return
        told = {
            "pid": os.getpid(),
            "path": self.path,
            "method": self.command,
            "model": given.model,
            "body": body.decode("latin-1"),
            "headers": {k.lower(): v for k, v in self.headers.items()},
        }
        data = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = _answer


if given.socket:

    class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True

    Server(given.socket, Handler).serve_forever()
else:
    ThreadingHTTPServer(("127.0.0.1", given.port), Handler).serve_forever()
