"""The design that Ostler's calls began from, rebuilt as the baseline: a FastAPI application with a coordinator that holds one
asyncio.Lock for the whole call, and sends it by urllib in a thread to a FastAPI worker on a TCP port.

    python benchmarks/calls_seed.py PORT            the application
    python benchmarks/calls_seed.py worker ID PORT  its worker
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from urllib import request as urlrequest

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel


class InferRequest(BaseModel):
    payload: dict[str, Any]
    request_id: str


class InferResponse(BaseModel):
    result: dict[str, Any]
    request_id: str
    processing_time_ms: int
    model: str


# ---- the worker


class BaseWorker:
    def __init__(self, model_id: str, port: int, idle_timeout: int = 60) -> None:
        self.model_id, self.port, self.idle_timeout = model_id, port, idle_timeout
        self._last_active = time.time()
        self._model: Any = None

    async def load_model(self) -> None:
        self._model = object()

    async def infer(self, request: dict[str, Any]) -> dict[str, Any]:
        return request

    async def _idle_watchdog(self) -> None:
        while True:
            await asyncio.sleep(1)
            if time.time() - self._last_active >= self.idle_timeout:
                os._exit(0)


def worker(model_id: str, port: int) -> None:
    own, app = BaseWorker(model_id, port), FastAPI()
    kept: set[asyncio.Task[None]] = set()

    @app.on_event("startup")
    async def begin() -> None:
        await own.load_model()
        kept.add(asyncio.create_task(own._idle_watchdog()))

    @app.get("/healthz")
    async def healthz() -> dict[str, Any]:
        return {"status": "ok", "model": model_id, "ready": own._model is not None}

    @app.post("/infer")
    async def infer(request: InferRequest) -> InferResponse:
        start = time.time()
        result = await own.infer(request.payload)
        own._last_active = time.time()
        spent = int((own._last_active - start) * 1000)
        return InferResponse(result=result, request_id=request.request_id, processing_time_ms=spent, model=model_id)

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False)


# ---- the main process


class WorkerState(Enum):
    STARTING, READY, BUSY, TERMINATED = range(4)


@dataclass
class WorkerHandle:
    model_key: str
    port: int
    proc: subprocess.Popen[bytes]
    state: WorkerState = WorkerState.STARTING
    last_active: float = field(default_factory=time.time)

    def is_alive(self) -> bool:
        return self.proc.poll() is None


class WorkerCoordinator:
    def __init__(self, worker_startup_timeout: int = 120) -> None:
        self._gpu_lock = asyncio.Lock()
        self._workers: dict[str, WorkerHandle] = {}
        self._startup = worker_startup_timeout

    async def infer(self, task: str, model_id: str, payload: dict[str, Any]) -> dict[str, Any]:
        async with self._gpu_lock:
            worker = await self._ensure_worker(task, model_id)
            return await self._send_request(worker, payload)

    async def _ensure_worker(self, task: str, model_id: str) -> WorkerHandle:
        key = f"{task}:{model_id}"
        worker = self._workers.get(key)
        if worker and not worker.is_alive():
            self._workers.pop(key)
            worker = None
        if worker is None:
            worker = self._workers[key] = await self._spawn_worker(key, model_id)
        return worker

    async def _spawn_worker(self, key: str, model_id: str) -> WorkerHandle:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        argv = [sys.executable, __file__, "worker", model_id, str(port)]
        worker = WorkerHandle(key, port, subprocess.Popen(argv))
        until = time.time() + self._startup
        while time.time() < until:
            try:
                await asyncio.to_thread(urlrequest.urlopen, f"http://127.0.0.1:{port}/healthz", timeout=2)
            except OSError:
                await asyncio.sleep(0.2)
            else:
                worker.state = WorkerState.READY
                return worker
        raise TimeoutError(key)

    async def _send_request(self, worker: WorkerHandle, payload: dict[str, Any]) -> dict[str, Any]:
        url = f"http://127.0.0.1:{worker.port}/infer"
        data = json.dumps({"payload": payload, "request_id": str(uuid.uuid4())}).encode()

        def _do_request() -> Any:
            headers = {"Content-Type": "application/json"}
            req = urlrequest.Request(url, data=data, headers=headers, method="POST")
            with urlrequest.urlopen(req, timeout=300) as resp:
                return json.loads(resp.read().decode())

        worker.state = WorkerState.BUSY
        found: dict[str, Any] = await asyncio.to_thread(_do_request)
        worker.state, worker.last_active = WorkerState.READY, time.time()
        return found


class CallRequest(BaseModel):
    model: str
    payload: dict[str, Any]


def main(port: int) -> None:
    app, coordinator = FastAPI(), WorkerCoordinator()

    @app.post("/api/noop")
    async def call(request: CallRequest) -> InferResponse:
        return InferResponse(**await coordinator.infer("noop", request.model, request.payload))

    try:
        uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False)
    finally:
        for handle in coordinator._workers.values():
            handle.proc.kill()


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        worker(sys.argv[2], int(sys.argv[3]))
    else:
        main(int(sys.argv[1]))
