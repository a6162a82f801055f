"""Options that several commands share."""

from __future__ import annotations

import datetime as dt
from typing import Annotated

import typer

from holdfast.errors import UsageError

AsJson = Annotated[bool, typer.Option("--json", help="Answer with one JSON document, errors too.")]
AppOption = Annotated[
    str | None,
    typer.Option(
        "--app",
        metavar="APP",
        help="The app as module:attribute; else as set (HOLDFAST_APP), else the one in this folder.",
    ),
]
UrlOption = Annotated[str | None, typer.Option("--url", help="The store, if there is no app at hand.")]
NameOption = Annotated[str | None, typer.Option("--name", help="The app's name in that store.")]
InvocationId = Annotated[str, typer.Argument(metavar="ID", help="The invocation, or the beginning of its id.")]


def time_given(text: str, option: str, or_else: str = "") -> dt.datetime:
    """The moment that was written; it needs a time zone, since nobody knows whose clock else."""
    try:
        time = dt.datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{option} {text!r} is no time; write it like 2026-11-15T08:00:00Z{or_else}") from None
    if time.tzinfo is None:
        raise UsageError(f"{option} {text!r} has no time zone; write it like 2026-11-15T08:00:00Z{or_else}")
    return time
