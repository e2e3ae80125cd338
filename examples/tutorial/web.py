"""The web front, and everything it needs: ostler up web.py"""

import asyncio
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import highlights  # noqa: F401  declares the model
from reader import app, report

from ostler import Job

if TYPE_CHECKING:
    from fastapi import APIRouter

    from ostler.web.extend import NodeApi

PAGE = Path(__file__).with_name("page.html")


@app.web
def routes(node: "NodeApi") -> "APIRouter":
    from fastapi import APIRouter, Request  # imported here, because workers do not need FastAPI
    from fastapi.responses import FileResponse

    router = APIRouter(prefix="/reader")
    uploads = node.settings.data_dir / "uploads"
    uploads.mkdir(exist_ok=True)

    @router.get("", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE)

    @router.post("/texts", status_code=201)
    async def upload(request: Request, title: str = "Untitled") -> dict[str, int]:
        path = uploads / f"{uuid.uuid4().hex}.txt"
        with path.open("wb") as file:
            async for chunk in request.stream():
                file.write(chunk)
        job = await report.enqueue_async(path=str(path), title=title)
        return {"job": job.id}

    @router.get("/texts/{job}/highlights")
    async def best_sentences(job: int) -> list[str]:
        path = Path((await node.job(job))["args"]["path"])
        text = await asyncio.to_thread(path.read_text, errors="replace")
        found: list[str] = (await node.call("highlights", None, {"text": text})).result
        return found

    return router


@app.job(queue="reader", cron="0 4 * * *")
def delete_uploads(job: Job, days: int = 7) -> int:
    """Every night, delete the uploads that are older than a week."""
    uploads = app.settings().data_dir / "uploads"
    old = [path for path in uploads.glob("*.txt") if time.time() - path.stat().st_mtime > days * 86_400]
    for path in old:
        path.unlink(missing_ok=True)
    return len(old)
