"""Programs that mount the web app: each of the frameworks that people use."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, AuthenticationBackend, SimpleUser
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from holdfast.web import web_app
from holdfast.web.asgi import ServedApp, WebApp


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

    def log_in(request: HttpRequest, name: str, role: str) -> HttpResponse:
        request.session["user"] = [name, role]
        return HttpResponse("logged in")

    urls = types.ModuleType("tests_web_urls")
    urls.urlpatterns = [path("own", own), path("log-in/<name>/<role>", log_in)]  # type: ignore[attr-defined]
    sys.modules[urls.__name__] = urls
    if not settings.configured:
        settings.configure(
            ROOT_URLCONF=urls.__name__,
            ALLOWED_HOSTS=["*"],
            SECRET_KEY="of a test",
            LOGGING_CONFIG=None,
            MIDDLEWARE=["django.contrib.sessions.middleware.SessionMiddleware"],
            SESSION_ENGINE="django.contrib.sessions.backends.signed_cookies",
        )
        django.setup()
    from django.core.asgi import get_asgi_application

    return Starlette(routes=[Mount("/holdfast", web), Mount("/", get_asgi_application())])


# --- users of the hosts, as each framework knows them


class ByHeader(AuthenticationBackend):
    """Of Starlette and FastAPI: what a login of the host's own would decide, by a cookie."""

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, SimpleUser] | None:
        name, _, role = conn.cookies.get("own-session", "").partition(":")
        return (AuthCredentials([role]), SimpleUser(name)) if name else None


async def user_of_starlette(request: Request) -> tuple[str, str] | None:
    return (request.user.display_name, request.auth.scopes[0]) if request.user.is_authenticated else None


def user_of_django(request: Request) -> tuple[str, str] | None:
    """A plain function, since the ORM of Django blocks."""
    from django.conf import settings
    from django.contrib.sessions.backends.signed_cookies import SessionStore

    found = SessionStore(request.cookies.get(settings.SESSION_COOKIE_NAME)).get("user")
    return None if found is None else (found[0], found[1])


def with_users(host: str, app: ServedApp) -> Any:
    """Return a host that mounts the web app with its own users."""
    if host == "django":
        return in_django(web_app(app, user=user_of_django))
    served = HOSTS[host](web_app(app, user=user_of_starlette))
    served.add_middleware(AuthenticationMiddleware, backend=ByHeader())
    return served


HOSTS: dict[str, Callable[[WebApp], Any]] = {"fastapi": in_fastapi, "starlette": in_starlette, "django": in_django}
