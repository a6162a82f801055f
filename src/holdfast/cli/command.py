"""The shared part of all commands: the app and its store, their options, ``--json``, errors and exit codes.

A command is a function of its `Output`, of the app unless it needs none, and of its own options. `command` adds the
options that all have. A dataclass among the parameters is a group of options that several commands share. A command
that works on a store never makes one, and none works on a store that only its own process could see.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.models import ParameterInfo

from holdfast.app import App
from holdfast.cli import completion, reach
from holdfast.cli.audited import WantedAction, audited
from holdfast.cli.discovery import NOT_YET, app_for_tasks, app_to_look_at, shared
from holdfast.cli.output import Output
from holdfast.errors import StoreUnavailable, UsageError
from holdfast.ids import is_id
from holdfast.masking import mask_url

AsJson = Annotated[bool, Option("--json", help="Answer with one JSON document, errors too.")]
AppArgument = Annotated[str | None, Argument(metavar="APP", help="module:attribute; the same as --app.")]
AppOption = Annotated[
    str | None,
    Option("--app", metavar="APP", help="module:attribute; else HOLDFAST_APP, else the only app in this folder."),
]
UrlOption = Annotated[str | None, Option("--url", help="The store, if no code is to be imported; else HOLDFAST_URL.")]
NameOption = Annotated[str | None, Option("--name", help="The app's name in that store.")]
InvocationId = Annotated[
    str,
    Argument(metavar="ID", help="The invocation, or the beginning or end of its id.", autocompletion=completion.ids),
]
Before = Annotated[str | None, Option(metavar="ID", help="Only older ones: the last id of a page.")]
Reason = Annotated[str | None, Option("--reason", help="The reason; kept in the audit record.")]
Yes = Annotated[bool, Option("--yes", help="Do it, without asking.")]


class Needs(Enum):
    """The needs of a command."""

    NOTHING = auto()
    APP = auto()
    PLACE = auto()  # the file, or the server; there may be no store in it yet
    ANY_APP = auto()  # a store that is there, whichever apps it has
    STORE = auto()
    TASKS = auto()  # the user's code
    CODE = auto()  # the user's code, and a store that is there


_OPTIONS: dict[str, tuple[Any, object]] = {
    "app": (AppOption, None),
    "url": (UrlOption, None),
    "name": (NameOption, None),
    "json": (AsJson, False),
}


def app_of(argument: str | None, option: str | None) -> str | None:
    """Return the app that a command is given, as an argument or by --app. Raises `UsageError` if these differ."""
    if argument and option and argument != option:
        raise UsageError(f"the app is named twice: {argument}, and --app {option}")
    return argument or option


def command(
    needs: Needs | Callable[[Mapping[str, Any]], Needs] = Needs.STORE,
    *,
    action: str = "",
    target: str = "",
    find: Callable[[App, str], str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function. Its needs may depend on its options.

    A command that changes something has an `action`, such as ``queue.pause``, and names the parameter with its
    `target`. `find` returns the whole name or id of a target. See `holdfast.cli.audited`.
    """
    unfit = {Needs.NOTHING: {"app", "url", "name"}, Needs.TASKS: {"url", "name"}, Needs.CODE: {"url", "name"}}
    common = [name for name in _OPTIONS if not isinstance(needs, Needs) or name not in unfit.get(needs, ())]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())
        own = own[1 if needs is Needs.NOTHING else 2 :]
        takes_reason = any(each.name == "reason" for each in own)
        groups: dict[str, Any] = {
            each.name: each.annotation for each in own if dataclasses.is_dataclass(each.annotation)
        }

        @functools.wraps(function)
        def obey(context: typer.Context, **given: Any) -> None:
            if context.invoked_subcommand is not None:
                return
            # `holdfast queues --app shop:app pause NAME` means the same as with --app at the end.
            before = context.parent.params if context.parent is not None else {}
            asked = {name: given.pop(name) or before.get(name) for name in common}
            for name, group in groups.items():
                given[name] = group(**{each.name: given.pop(each.name) for each in dataclasses.fields(group)})
            with Output(json=bool(asked.pop("json"))) as out:
                need = needs if isinstance(needs, Needs) else needs(given)
                with opened(out, need, given.get("task") or "", **asked) as app:
                    if not action or app is None:
                        function(*((out,) if app is None else (out, app)), **given)
                        return
                    reason = given.get("reason") if takes_reason else given.pop("reason")
                    wanted = WantedAction(action, target, find, context.command_path, reason or "")
                    with audited(out, app, wanted, given, lambda: _missing(app, Needs.STORE) is None):
                        function(out, app, **given)

        parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
        for each in own:
            parameters += _expanded(each.annotation) if each.name in groups else [each]
        if action and not takes_reason:
            parameters.append(_parameter("reason", Reason, None))
        parameters += [_parameter(name, *_OPTIONS[name]) for name in common]
        for each in parameters:
            _complete(each.name, each.annotation)
        ordered = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
        obey.action = action  # type: ignore[attr-defined]
        obey.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        obey.__annotations__ = {each.name: each.annotation for each in ordered}
        return obey

    return decorate


def _complete(name: str, annotation: Any) -> None:
    """Have the shell offer values for a parameter, if its name says which."""
    for info in typing.get_args(annotation)[1:] if typing.get_origin(annotation) is Annotated else ():
        if isinstance(info, ParameterInfo) and info.autocompletion is None:
            info.autocompletion = completion.BY_NAME.get(name)


def _parameter(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _expanded(group: Any) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(group, include_extras=True)
    return [_parameter(each.name, hints[each.name], each.default) for each in dataclasses.fields(group)]


@contextmanager
def opened(
    out: Output, needs: Needs, task: str = "", app: str | None = None, url: str | None = None, name: str | None = None
) -> Iterator[App | None]:
    """Open the app that a command is about, and close it afterwards."""
    if needs is Needs.NOTHING:
        yield None
    elif needs is Needs.TASKS:
        if url or name:
            raise UsageError("another call needs the code of its task: give --app, not --url and --name")
        with app_for_tasks(out, app, task) as chosen:
            yield chosen
    elif needs is Needs.CODE:
        with app_with_code(out, app) as chosen:
            yield chosen
    else:
        choice = app_to_look_at(out, app, url, name)
        with choice.app as chosen:
            if needs is Needs.APP:
                yield chosen
                return
            with reach.brief_retries(shared(chosen)):
                if (missing := _missing(chosen, needs)) is not None:
                    raise StoreUnavailable(f"there is no store {missing}{choice.if_missing}")
                if choice.is_by_url and needs is Needs.STORE:
                    reach.refuse_unknown_name(chosen)
                yield chosen


@contextmanager
def app_with_code(out: Output, reference: str | None) -> Iterator[App]:
    """Open an app with its tasks, to look into a store that is there. Raises `StoreUnavailable` if it is not."""
    with app_for_tasks(out, reference) as app, reach.brief_retries(app):
        if (missing := _missing(app, Needs.STORE)) is not None:
            raise StoreUnavailable(f"there is no store {missing}{NOT_YET}")
        yield app


def _missing(app: App, needs: Needs) -> str | None:
    """Return where a store should be and is not. Opening it would create one."""
    if app.url.startswith("sqlite://"):
        from holdfast.store.sqlite import path_of  # here, because it loads sqlite3, and --help does not need that

        path = path_of(app.url)
        return None if path.exists() else f"at {path}"
    if app.url.startswith("mongodb") and needs is not Needs.PLACE and not reach.store_exists(app):
        from holdfast.store.mongo.connection import database_name  # here, because it loads the driver

        return f"in the database '{database_name(app.url)}' of {mask_url(app.url)}"
    return None


def time_given(text: str, option: str, or_else: str = "") -> dt.datetime:
    """Read a time. It needs a time zone, because it may be meant for another machine's clock."""
    try:
        time = dt.datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{option} {text!r} is no time; write it like 2026-11-15T08:00:00Z{or_else}") from None
    if time.tzinfo is None:
        raise UsageError(f"{option} {text!r} has no time zone; write it like 2026-11-15T08:00:00Z{or_else}")
    return time


def page_given(before: str | None) -> str | None:
    """Return the id after which a page begins. Raises `UsageError`."""
    if before is not None and not is_id(before):
        raise UsageError(f"--before {before!r} is no id; give the last id of the page before")
    return before
