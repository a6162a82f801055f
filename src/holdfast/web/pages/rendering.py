"""Draw pages: templates, what all of them know, and the files that they load.

Everything in a template is escaped; none marks data as safe (a test looks for that). A page and its files come with a
policy that allows this server's own files and nothing inline.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Callable
from importlib import resources
from typing import Any, NamedTuple
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
            common = _common(engine.app, page, asked, now) | {"has_code": self._runtime.has_code}
            return self._templates.get_template(page.template).render({**common, **make()})

        return Response(await asyncio.to_thread(draw), media_type="text/html", headers=PAGE_HEADERS)

    async def login(self, request: Request, status: int, **context: str) -> Response:
        """Return the page on which to log in."""
        common = {"app_name": self._runtime.name, "url": _linker(request)}
        text = self._templates.get_template("login.html").render({**common, **context})
        return Response(text, status, media_type="text/html", headers=PAGE_HEADERS)

    async def problem(self, request: Request, problem: Problem) -> Response:
        """Return the page for a problem: what it is, and what to do; nothing of an error that is not the user's."""
        facts = {
            **_frame(self._runtime.name, request, ProblemPage(_TITLES.get(problem.status, "A problem"))),
            "now": self._runtime.clock.now(),
            "status": problem.status,
            "text": problem.detail if problem.status < 500 else _SAID.get(problem.status, _SAID[500]),
            "is_passing": problem.status in (429, 503),
        }
        text = await asyncio.to_thread(lambda: self._templates.get_template("problem.html").render(facts))
        headers = PAGE_HEADERS | problem.headers
        return Response(text, status_code=problem.status, media_type="text/html", headers=headers)

    def static(self, request: Request, name: str) -> Response:
        """Return one of the files that pages load, or 304 if the browser has it. Raises `Problem`."""
        kind = table.FILES.get(name)
        if kind is None:
            raise not_found()
        if request.method not in ("GET", "HEAD"):
            raise Problem(405, "MethodNotAllowed", "this address takes GET", headers={"allow": "GET"})
        data, tag = _file(name)
        headers = {"x-content-type-options": "nosniff", "cache-control": "no-cache", "etag": tag}
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=kind, headers=headers)


class ProblemPage(NamedTuple):
    """What the frame knows of a page that is none of the table."""

    title: str
    nav: str = ""


_TITLES = {
    401: "Log in first",
    403: "Not allowed",
    404: "Not found",
    405: "Not here",
    429: "Too many requests",
    503: "The store does not answer",
    507: "The store is full",
}
_SAID = {
    500: "The server failed to answer. Its log says why.",
    503: "The server cannot reach its store. Accepted calls are kept, and continue when the store is back.",
    507: "The store cannot take more. Free some space for it.",
}


@functools.cache
def _file(name: str) -> tuple[bytes, str]:
    """Return a static file of the package, and its tag."""
    data = resources.files("holdfast.web.pages").joinpath("static", name).read_bytes()
    return data, f'"{hashlib.sha256(data).hexdigest()[:20]}"'


def wants_page(request: Request) -> bool:
    """Return whether a browser asks for something to show, and not a program for data."""
    return "text/html" in request.headers.get("accept", "")


def _frame(app: str, request: Request, page: WebPage | ProblemPage) -> dict[str, Any]:
    """Return what the frame of a page knows about any request."""
    return {
        "page": page,
        "root": _root(request),
        "url": _linker(request),
        "navigation": table.NAVIGATION,
        "topics": [],
        "csrf": "",
        "app_name": app,
        "principal": None,
    }


def _common(app: str, page: WebPage, asked: Asked, now: float) -> dict[str, Any]:
    """Return what every template knows."""
    return _frame(app, asked.request, page) | {
        "query": asked.query,
        "topics": [each.format_map(asked.path) for each in page.topics],
        "csrf": asked.principal.csrf,
        "navigation": table.navigation_for(asked.principal.role),
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

    def url(path: str, /, *parts: str, **query: Any) -> str:
        given = [(name, each) for name, value in query.items() for each in _listed(value)]
        place = root + quote(path, safe="/%") + "/".join(quote(part, safe="") for part in parts)
        return place + (f"?{urlencode(given)}" if given else "")

    return url


def _listed(value: Any) -> list[Any]:
    """Return the values of a parameter, without those that are not given."""
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
