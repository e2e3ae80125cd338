"""The no-op of benchmarks/calls_app.py on mosec (a Rust server with Python workers): one worker.

python benchmarks/calls_mosec.py --port PORT
"""

from __future__ import annotations

import shutil

from mosec import Server, Worker, runtime

runtime.get_mosec_path = lambda: shutil.which("mosec")  # where `pip install --target` has put it


class Noop(Worker):
    def forward(self, data):
        return {"result": data["payload"], "model": "noop"}


if __name__ == "__main__":
    server = Server()
    server.append_worker(Noop, num=1)
    server.run()
