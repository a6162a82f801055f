"""Programs that mount the web app: each of the frameworks that people use."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from holdfast.web.asgi import WebApp


def in_fastapi(web: WebApp) -> Any:
    api = FastAPI()

    @api.get("/own")
    async def own() -> str:
        return "the host"

    api.mount("/holdfast", web)
    return api


def in_starlette(web: WebApp) -> Any:
    async def own(request: Request) -> PlainTextResponse:
        return PlainTextResponse("the host")

    return Starlette(
        routes=[Mount("/holdfast", web), Route("/own", own)], middleware=[Middleware(GZipMiddleware, minimum_size=500)]
    )


def in_django(web: WebApp) -> Any:
    """As docs/operations/web.md has it: Starlette's Mount leads to one or the other."""
    import django
    from django.conf import settings
    from django.http import HttpRequest, HttpResponse
    from django.urls import path

    def own(request: HttpRequest) -> HttpResponse:
        return HttpResponse("the host")

    urls = types.ModuleType("tests_web_urls")
    urls.urlpatterns = [path("own", own)]  # type: ignore[attr-defined]
    sys.modules[urls.__name__] = urls
    if not settings.configured:
        settings.configure(ROOT_URLCONF=urls.__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="of a test", LOGGING_CONFIG=None)
        django.setup()
    from django.core.asgi import get_asgi_application

    return Starlette(routes=[Mount("/holdfast", web), Mount("/", get_asgi_application())])


HOSTS: dict[str, Callable[[WebApp], Any]] = {"fastapi": in_fastapi, "starlette": in_starlette, "django": in_django}
