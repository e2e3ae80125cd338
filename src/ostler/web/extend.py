"""The object that `@app.web` functions receive."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from importlib.resources.abc import Traversable
from typing import Any, Unpack

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ostler.calls.calling import CallOptions
from ostler.calls.client import Caller
from ostler.calls.exchange import Answer
from ostler.config import Settings
from ostler.jobs import results
from ostler.jobs.producer import prepare
from ostler.jobs.results import Results
from ostler.store import now_ms
from ostler.store.rows import JobStatus
from ostler.web import artifacts, pages
from ostler.web.context import Context


class NodeApi:
    """The node, for routes of the app. Ostler's exceptions that a route does not catch become error responses of the API."""

    def __init__(self, context: Context) -> None:
        self._context = context
        # Calls go to this node, also where programs beside it would be told another.
        self._caller = Caller(lambda: dataclasses.replace(context.settings, url=""))

    @property
    def settings(self) -> Settings:
        return self._context.settings

    async def call(self, task: str, model: str | None, payload: Any, **wishes: Unpack[CallOptions]) -> Answer:
        """Call a model of this node, like `app.answer`. Raises CallError."""
        return await self._caller.answer(self._caller.ask(task, model, payload, wishes))

    def stream(
        self, task: str, model: str | None, payload: Any, **wishes: Unpack[CallOptions]
    ) -> AsyncGenerator[Any, None]:
        """Call a model of this node that streams, and yield its items as they arrive."""
        return self._caller.stream(self._caller.ask(task, model, payload, wishes))

    def models(self) -> dict[str, dict[str, Any]]:
        """The models that can be called, by "task:id", as `GET /api/v1/health` shows them."""
        return self._context.models()

    def gpu_lock_held(self) -> bool:
        """With `gpu_exclusive`, whether a call is using the GPUs."""
        return bool(self._context.gpu_lock())

    def page(self, title: str, path: str, folder: Traversable) -> APIRouter:
        """A page of the app's own, in the dashboard's frame and linked from it. `folder` has its module, `page.js`, and perhaps `page.css`
        and other files, which are served below `path`. Include the router in the app's own.
        """
        self._context.pages.append({"title": title, "path": path})
        return pages.app_page(title, path, folder)

    @property
    def results(self) -> Results:
        """Where jobs publish artifacts."""
        return results.connect(self.settings.results, self.settings.data_dir)

    async def artifact(self, request: Request, key: str) -> Response:
        """The answer to a request for an artifact, as `GET /api/v1/artifacts/{key}` gives it: ranges, tags, from wherever it is.

        Raises NotFound, or Unreachable when another node has it and cannot be asked.
        """
        return await artifacts.serve(self._context, request, key)

    async def enqueue(self, task: str, args: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Enqueue a job, and return it as `GET /api/v1/jobs/{id}` shows it."""
        job = prepare(self._context.tasks, task, args, self.settings.max_payload, **options)
        stored, _ = await self._context.intake.enqueue(job)
        return await self.job(stored)

    async def job(self, job: int) -> dict[str, Any]:
        """The job with its timeline. Raises NotFound."""
        return await self._context.glance.call(lambda store: store.jobs.get(job))

    async def jobs(
        self, *, status: str | None = None, task: str | None = None, queue: str | None = None, limit: int = 50
    ) -> list[dict[str, Any]]:
        """The newest jobs, newest first, as `GET /api/v1/jobs` lists them."""
        wanted: dict[str, Any] = {"status": status, "task": task, "queue": queue, "limit": limit}
        return (await self._context.reader.call(lambda store: store.jobs.list(**wanted)))[0]

    async def cancel(self, job: int) -> dict[str, Any]:
        """Cancel a job. Raises NotFound or Conflict."""
        patience = self.settings.store_patience
        found = await self._context.writer.call(lambda store: store.jobs.cancel(job, now_ms()), patience=patience)
        if found == JobStatus.PROCESSING:
            self._context.dispatcher.deadlines.cancel(job)
        return await self.job(job)
