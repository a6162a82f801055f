"""All pages, the navigation, and the files that pages load."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.web.pages import overview
from holdfast.web.pages.page import PageTable, WebPage

STATIC = "/static/"
FILES = {"app.css": "text/css", "app.js": "text/javascript", "icon.svg": "image/svg+xml"}
"""The files that pages load, by name. No other file is ever served."""


class NavigationEntry(NamedTuple):
    """An entry of the navigation."""

    name: str
    path: str
    title: str


NAVIGATION = (NavigationEntry("overview", "/", "Overview"),)

PAGES: tuple[WebPage, ...] = (*overview.PAGES,)
TABLE = PageTable(PAGES)
