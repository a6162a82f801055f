"""What a page is: a path, a template, and a view that asks the read model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.web.principals import Role
from holdfast.web.problems import Problem, not_found
from holdfast.web.requests import Parameter
from holdfast.web.routing import Asked, parts_of, pattern_of

Context = Mapping[str, Any]
View = Callable[[Asked], Awaitable[Callable[[], Context]]]


class WebPage(NamedTuple):
    """A line of the table. The view runs on the server's loop and asks the read model; the function that it returns
    makes the context of the template, on a thread, since values may run user code when they are decoded.
    """

    path: str
    title: str
    template: str
    view: View
    query: Mapping[str, Parameter] = {}
    role: Role = Role.VIEWER
    nav: str = ""  # the entry of the navigation that it belongs to
    topics: tuple[str, ...] = ()  # of the live feed: on their news the page reloads itself


class PageTable:
    """Find the page for a request. The first line that fits a path is taken."""

    def __init__(self, pages: Sequence[WebPage]) -> None:
        self._patterns = [(pattern_of(each.path), each) for each in pages]

    def find(self, method: str, path: str) -> tuple[WebPage, dict[str, str]]:
        """Return the page of a path, and the parts of the path. Raises `Problem`: 404 or 405."""
        for pattern, page in self._patterns:
            if (found := pattern.fullmatch(path)) is not None:
                if method not in ("GET", "HEAD"):
                    raise Problem(405, "MethodNotAllowed", "this address takes GET", headers={"allow": "GET"})
                return page, parts_of(found)
        raise not_found()
