"""The no-op of benchmarks/calls_app.py on LitServe: one API server, one worker.

python benchmarks/calls_litserve.py PORT
"""

from __future__ import annotations

import sys

import litserve as ls


class Noop(ls.LitAPI):
    def setup(self, device):
        self.model = lambda payload: payload

    def decode_request(self, request):
        return request["payload"]

    def predict(self, x):
        return self.model(x)

    def encode_response(self, output):
        return {"result": output, "model": "noop"}


if __name__ == "__main__":
    server = ls.LitServer(Noop(), accelerator="cpu", workers_per_device=1, fast_queue="fast" in sys.argv)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="error")
