"""Draw pages: templates, what all of them know, and the files that they load.

Everything in a template is escaped; none marks data as safe (a test looks for that). A page and its files come with a
policy that allows this server's own files and nothing inline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib import resources
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import Response

from holdfast.runtime.app_runtime import AppRuntime
from holdfast.web.pages import table
from holdfast.web.pages.filters import FILTERS, command, harmless
from holdfast.web.pages.page import WebPage
from holdfast.web.principals import Role
from holdfast.web.problems import Problem, not_found
from holdfast.web.routing import Asked

PAGE_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
}


class PageRenderer:
    """The templates of one web app."""

    def __init__(self, runtime: AppRuntime) -> None:
        self._runtime = runtime
        self._templates = Environment(
            loader=PackageLoader("holdfast.web.pages"),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=harmless,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= FILTERS
        self._templates.globals["command"] = command

    async def answer(self, page: WebPage, asked: Asked) -> Response:
        """Return a page as a response."""
        engine = await self._runtime.aready()
        make, now = await page.view(asked), engine.store.now()

        def draw() -> str:
            common = _common(engine.app, page, asked, now)
            return self._templates.get_template(page.template).render({**common, **make()})

        return Response(await asyncio.to_thread(draw), media_type="text/html", headers=PAGE_HEADERS)

    async def login(self, request: Request, status: int, **context: str) -> Response:
        """Return the page on which to log in."""
        common = {"app_name": self._runtime.name, "url": _linker(request)}
        text = self._templates.get_template("login.html").render({**common, **context})
        return Response(text, status, media_type="text/html", headers=PAGE_HEADERS)

    def static(self, method: str, name: str) -> Response:
        """Return one of the files that pages load. Raises `Problem`."""
        kind = table.FILES.get(name)
        if kind is None:
            raise not_found()
        if method not in ("GET", "HEAD"):
            raise Problem(405, "MethodNotAllowed", "this address takes GET", headers={"allow": "GET"})
        data = resources.files("holdfast.web.pages").joinpath("static", name).read_bytes()
        headers = {"x-content-type-options": "nosniff", "cache-control": "no-cache"}
        return Response(data, media_type=kind, headers=headers)


def _common(app: str, page: WebPage, asked: Asked, now: float) -> dict[str, Any]:
    """Return what every template knows."""
    return {
        "page": page,
        "root": _root(asked.request),
        "url": _linker(asked.request),
        "query": asked.query,
        "navigation": table.NAVIGATION,
        "topics": [each.format_map(asked.path) for each in page.topics],
        "csrf": asked.principal.csrf,
        "app_name": app,
        "principal": asked.principal,
        "may_operate": asked.principal.role >= Role.OPERATOR,
        "may_administer": asked.principal.role >= Role.ADMIN,
        "now": now,
    }


def _root(request: Request) -> str:
    return str(request.scope.get("root_path", "")).rstrip("/")


def _linker(request: Request) -> Callable[..., str]:
    """Return what makes the address of a page, or of a file, from its path."""
    root = _root(request)

    def url(path: str, **query: Any) -> str:
        given = [(name, each) for name, value in query.items() for each in _listed(value)]
        return f"{root}{quote(path)}" + (f"?{urlencode(given)}" if given else "")

    return url


def _listed(value: Any) -> list[Any]:
    """Return the values of a parameter, without those that are not given."""
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
