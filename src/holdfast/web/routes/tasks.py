"""Tasks over HTTP: what the code declares, and which runners know it."""

from __future__ import annotations

from holdfast.web.reading.tasks import TaskReading
from holdfast.web.routing import ApiRoute, Asked, Render


async def list_tasks(asked: Asked) -> Render:
    return (await asked.runtime.arun(TaskReading(asked.runtime).all())).document


async def show_task(asked: Asked) -> Render:
    return (await asked.runtime.arun(TaskReading(asked.runtime).one(asked.path["name"]))).document


ROUTES = (
    ApiRoute("GET", "/tasks", list_tasks, "list tasks with their options, and the runners that know them"),
    ApiRoute("GET", "/tasks/{name}", show_task, "show one task"),
)
