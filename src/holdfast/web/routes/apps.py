"""The apps of the store, the settings of this one, what is wrong with it, and the state machine, over HTTP."""

from __future__ import annotations

import asyncio

from holdfast.masking import mask_url
from holdfast.web.principals import Role
from holdfast.web.reading.apps import AppReading, statuses_document
from holdfast.web.reading.diagnosis import DiagnosisReading
from holdfast.web.requests import Parameter
from holdfast.web.routing import ApiRoute, Asked, Render


async def list_apps(asked: Asked) -> Render:
    return (await asked.runtime.arun(AppReading(asked.runtime).some())).document


async def show_settings(asked: Asked) -> Render:
    return AppReading(asked.runtime).settings().document


async def diagnose(asked: Asked) -> Render:
    found = await asyncio.to_thread(DiagnosisReading(asked.runtime, None).diagnose)  # the file is the command's
    return lambda: {"url": mask_url(asked.runtime.url), **found.document()}


async def list_statuses(asked: Asked) -> Render:
    return lambda: statuses_document(asked.query["format"])


_APPS = "list the apps of the store, and count what each has there; a number over 10,000 is a lower bound"
_FORMAT = Parameter("of the drawing", choices=("mermaid", "svg", "text"), default="mermaid")
ROUTES = (
    ApiRoute("GET", "/apps", list_apps, _APPS, role=Role.ADMIN),
    ApiRoute("GET", "/config", show_settings, "show every setting without secrets, and what set it", role=Role.ADMIN),
    ApiRoute("GET", "/doctor", diagnose, "say what is wrong with the app, and what to do", role=Role.ADMIN),
    ApiRoute("GET", "/statuses", list_statuses, "list the statuses, and draw their changes", {"format": _FORMAT}),
)
