"""A FastAPI app that enqueues jobs and waits for their results: uvicorn --app-dir examples/fastapi_app web:web

It runs beside the node, as a process of its own, in the same working directory. Workers import jobs.py only, so they never load FastAPI.
"""

from typing import Annotated

from fastapi import Body, FastAPI, HTTPException

from jobs import app, count_words
from ostler import JobFailed, JobTimeout, NotFound

web = FastAPI()


@web.post("/words")
async def words(text: Annotated[str, Body(media_type="text/plain")]) -> dict[str, int]:
    """Enqueue a job and wait for its result."""
    job = await count_words.enqueue_async(text=text)
    try:
        return await job.result_async(timeout=30)
    except JobFailed as error:
        raise HTTPException(422, f"{error.code}: {error.message}") from error
    except JobTimeout as error:  # the job keeps running
        raise HTTPException(504, str(error)) from error


@web.post("/jobs", status_code=202)
async def start(text: Annotated[str, Body(media_type="text/plain")]) -> dict[str, int]:
    """Enqueue a job and return at once; the client asks for it later."""
    return {"id": await count_words.enqueue_async(text=text)}


@web.get("/jobs/{number}")
def look(number: int) -> dict[str, object]:
    """How a job is doing. A plain function, which FastAPI runs in a thread, because reading the store blocks."""
    try:
        found = app.find(number).info()
    except NotFound as error:
        raise HTTPException(404, str(error)) from error
    return {name: found[name] for name in ("status", "progress", "result")}
