"""Pages about hooks. Below ``/hooks/`` are the webhooks, so one hook is at ``/hook/``."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.web.pages.page import Context, WebPage
from holdfast.web.requests import Parameter
from holdfast.web.routing import Asked
from holdfast.workflows.hooks_resuming import not_found


async def hooks(asked: Asked) -> Callable[[], Context]:
    page = await asked.runtime.arun(asked.reading.hooks(run=asked.query["run"], before=asked.query["before"], limit=50))
    return lambda: page.document() | {"schemas": {each.name: dict(each.schema) for each in page.hooks}}


async def hook(asked: Asked) -> Callable[[], Context]:
    found = await asked.runtime.arun(asked.reading.hook(asked.path["name"]))
    if found is None:
        raise not_found("")
    return lambda: {"found": found.document()}


_QUERY = {"run": Parameter("only those of this run", "id"), "before": Parameter("the last name of the page before")}
PAGES = (
    WebPage("/hooks", "Hooks", "hooks.html", hooks, _QUERY, nav="hooks", topics=("hooks",)),
    WebPage("/hook/{name}", "Hook", "hook.html", hook, nav="hooks", topics=("hooks",)),
)
