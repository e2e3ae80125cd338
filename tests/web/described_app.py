"""Jobs, a schedule, a model and a session pool, so that every route has something to show."""

from __future__ import annotations

from typing import Any

from websockets.asyncio.server import ServerConnection, unix_serve

from ostler import Fail, Job, Ostler

app = Ostler()


@app.job(queue="work")
def add(job: Job, a: int, b: int = 1) -> int:
    print("adding")
    return a + b


@app.job(queue="work")
def fail(job: Job) -> None:
    raise Fail("it cannot be done")


@app.job(queue="work")
def publish(job: Job) -> None:
    file = job.scratch / "report"
    file.write_text("text")
    job.publish(file, "report.txt")


@app.job(queue="work", cron="0 3 * * *")
def nightly(job: Job) -> None: ...


@app.model("echo", models=["plain"], memory_mb=20)
class Echo:
    def load(self, model_id: str) -> None: ...

    def infer(self, payload: object) -> object:
        return {"echo": payload}

    def embed(self, texts: list[str], options: dict[str, Any]) -> list[list[float]]:
        return [[0.0] for _ in texts]


async def talk(connection: ServerConnection) -> None:
    async for message in connection:
        await connection.send(message)


@app.sessions("talk", workers=1, slots=2, lifetime=0)
async def talks(worker: Any) -> Any:
    async with unix_serve(talk, worker.socket):
        yield worker.socket
