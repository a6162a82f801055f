"""Which app a command is about, and whether the command may have it.

In this order: the app that is named on the command line, the store that is named there, the app that the setting `app`
names, the only one in this folder. Commands that need no tasks make do with the store of the settings after that. A
command that only looks never makes a store, and none works on a store that only its own process could see.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import typer

from holdfast.app import App
from holdfast.cli.discovery import Found, discover, find_app, none_found, only_of
from holdfast.cli.output import Output
from holdfast.cli.reach import impatient, is_made
from holdfast.cli.shown import sentence, told
from holdfast.errors import AppNotFound, ConfigurationError, StoreUnavailable, UsageError
from holdfast.masking import mask_url
from holdfast.settings import SPECS, Settings

_NO_APP = (
    "; no app was found here. Go to the folder of your code, or name the app (--app shop:app) "
    "or its store (--url sqlite:////path/to/shop.db)."
)
_NOT_YET = " yet: the first submit makes it, and so do holdfast run and holdfast store prepare."
_WRONG_URL = ". Is the URL right? holdfast store prepare would make a store there."


class _Choice(NamedTuple):
    app: App
    if_missing: str
    """How the sentence "there is no store at …" goes on."""


@contextmanager
def opened(out: Output, reference: str | None, url: str | None = None, name: str | None = None) -> Iterator[App]:
    """The app for a command that needs no tasks, closed afterwards."""
    with _chosen(out, reference, url, name).app as app:
        yield app


@contextmanager
def looked_at(
    out: Output, reference: str | None, url: str | None = None, name: str | None = None, *, made: bool = True
) -> Iterator[App]:
    """The same for a command that only looks, and does not wait for long: the store must be there.

    Raises `StoreUnavailable` if it is not. Without `made`, a database in which there is none will do.
    """
    choice = _chosen(out, reference, url, name)
    with shared(choice.app) as app, impatient(app):
        missing = _missing_file(app.url) or (_missing_database(app) if made else None)
        if missing is not None:
            raise StoreUnavailable(f"there is no store {missing}{choice.if_missing}")
        yield app


class Given(NamedTuple):
    """The options that all commands have in common."""

    json: bool
    app: str | None
    url: str | None
    name: str | None


def given(
    context: typer.Context, json: bool, app: str | None, url: str | None = None, name: str | None = None
) -> Given:
    """Of a subcommand: ``holdfast queues --app shop:app pause NAME`` means the same as with --app at the end."""
    before: dict[str, Any] = context.parent.params if context.parent is not None else {}
    return Given(
        json or bool(before.get("json")),
        app or before.get("app"),
        url or before.get("url"),
        name or before.get("name"),
    )


@contextmanager
def subcommand(
    context: typer.Context, app: str | None, url: str | None, name: str | None, json: bool
) -> Iterator[tuple[Output, App]]:
    """What a subcommand prints to, and the app that it looks at."""
    of = given(context, json, app, url, name)
    with Output(json=of.json) as out, looked_at(out, of.app, of.url, of.name) as chosen:
        yield out, chosen


def app_for_work(out: Output, reference: str | None, task: str = "") -> App:
    """The app for a command that needs its tasks. Of several in this folder, the one that `task` belongs to."""
    if reference:
        return shared(find_app(reference))
    named = _named_by_setting()
    if named is not None:
        return shared(named)
    found = discover(Path.cwd())
    if not found.apps:
        raise none_found(found)
    return shared(_of_several(found, task) or _told(out, found))


def shared(app: App) -> App:
    """The app, if other processes can see what it stores."""
    if app.url.partition("://")[0] == "memory":
        raise ConfigurationError(
            f"the app '{app.name}' is on {mask_url(app.url)}, and a memory store lives in one process only: this "
            "command would have an empty one of its own. Give the app a store that processes share, such as "
            "sqlite:///shop.db."
        )
    return app


def _chosen(out: Output, reference: str | None, url: str | None, name: str | None) -> _Choice:
    if reference and (url or name):
        raise UsageError("give either --app, which knows its store, or --url and --name")
    if reference:
        return _Choice(find_app(reference), _NOT_YET)
    if url or name:
        return _Choice(App(url, name=name), _WRONG_URL if url else _NO_APP)
    named = _named_by_setting()
    if named is not None:
        return _Choice(named, _NOT_YET)
    found = discover(Path.cwd())
    if found.apps:
        return _Choice(_told(out, found), _NOT_YET)
    if found.broken:
        # Its store may be another than the settings' one: to answer from there would be to answer wrongly.
        raise none_found(found)
    return _Choice(App(), _NO_APP)


def _named_by_setting() -> App | None:
    """The app that the setting `app` names. Raises what is wrong with the settings, before any code is imported."""
    # The others get their defaults here: whether their values are allowed is for the app to say, as it may have
    # keywords that win. A name that is no setting is wrong for every app.
    others = {name: spec.default for name, spec in SPECS.items() if name != "app"}
    folder = Path.cwd()
    reference, source = Settings.load(others, environ=os.environ, folder=folder).origin("app")
    if not isinstance(reference, str) or not reference:
        return None
    if source.startswith("pyproject.toml"):
        folder = next((f for f in (folder, *folder.parents) if (f / "pyproject.toml").is_file()), folder)
    try:
        return find_app(reference, folder)
    except AppNotFound as error:
        error.add_note(f"(The setting app = {reference!r} comes from: {source}.)")
        raise


def _of_several(found: Found, task: str) -> App | None:
    """Of several apps the one that declares the task of that name, else the one made in the module it begins with."""
    if len(found.apps) < 2 or ":" not in task:
        return None
    declaring = [
        app for app in found.apps.values() if any(task in known.definition.names for known in app.tasks.values())
    ]
    module = task.partition(":")[0]
    beside = [app for reference, app in found.apps.items() if reference.partition(":")[0] == module]
    return next((apps[0] for apps in (declaring, beside) if len(apps) == 1), None)


def _told(out: Output, found: Found) -> App:
    app = only_of(found.apps, "this folder")
    for error in found.broken:
        out.note(f"{sentence(told(error))} It was left out.")
    return app


def _missing_file(url: str) -> str | None:
    """The file of a SQLite URL if it is not there. Of other stores only their server knows."""
    if not url.startswith("sqlite://"):
        return None
    from holdfast.store.sqlite import path_of  # here, because it loads sqlite3, and --help does not need that

    path = path_of(url)
    return None if path.exists() else f"at {path}"


def _missing_database(app: App) -> str | None:
    """The database of a MongoDB URL if Holdfast was never there: to open it would be to make one."""
    if not app.url.startswith("mongodb"):
        return None
    from holdfast.store.mongo.connection import database_name  # here, because it loads the driver

    return None if is_made(app) else f"in the database '{database_name(app.url)}' of {mask_url(app.url)}"
