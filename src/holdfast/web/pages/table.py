"""All pages, the navigation, and the files that pages load."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.web.pages import (
    archive,
    audit,
    events,
    hooks,
    invocation,
    invocations,
    overview,
    queues,
    runners,
    schedules,
    store,
    tasks,
    world,
)
from holdfast.web.pages.page import PageTable, WebPage
from holdfast.web.principals import Role

STATIC = "/static/"
FILES = {
    "app.css": "text/css",
    "icon.svg": "image/svg+xml",
    **dict.fromkeys(
        ("app.js", "actions.js", "keys.js", "live.js", "times.js", "search.js", "stream.js", "tables.js"),
        "text/javascript",
    ),
}
"""The files that pages load, by name. No other file is ever served."""


class NavigationEntry(NamedTuple):
    """An entry of the navigation."""

    name: str
    path: str
    title: str


PAGES: tuple[WebPage, ...] = (
    *overview.PAGES,
    *invocations.PAGES,
    *invocation.PAGES,
    *tasks.PAGES,
    *queues.PAGES,
    *schedules.PAGES,
    *events.PAGES,
    *hooks.PAGES,
    *world.PAGES,
    *archive.PAGES,
    *audit.PAGES,
    *runners.PAGES,
    *store.PAGES,
)
TABLE = PageTable(PAGES)

_ORDER = (
    NavigationEntry("overview", "/", "Overview"),
    NavigationEntry("invocations", "/invocations", "Invocations"),
    NavigationEntry("tasks", "/tasks", "Tasks"),
    NavigationEntry("queues", "/queues", "Queues and limits"),
    NavigationEntry("schedules", "/schedules", "Schedules"),
    NavigationEntry("runners", "/runners", "Runners"),
    NavigationEntry("events", "/events", "Events"),
    NavigationEntry("hooks", "/hooks", "Hooks"),
    NavigationEntry("world", "/world", "World runs"),
    NavigationEntry("archive", "/archive", "Archive"),
    NavigationEntry("audit", "/audit", "Audit"),
    NavigationEntry("store", "/store", "Store"),
)
_ROLES = {page.path: page.role for page in PAGES}
NAVIGATION = tuple(entry for entry in _ORDER if entry.path in _ROLES)


def navigation_for(role: Role) -> tuple[NavigationEntry, ...]:
    """Return the entries whose pages a role may see."""
    return tuple(entry for entry in NAVIGATION if _ROLES[entry.path] <= role)
