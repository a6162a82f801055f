"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

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
