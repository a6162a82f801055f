"""``holdfast cancel``."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.choosing import looked_at
from holdfast.cli.naming import find_id
from holdfast.cli.options import AppOption, AsJson, NameOption, UrlOption
from holdfast.cli.output import Output
from holdfast.lifecycle.status import Status

_SAID = {
    Status.CANCELLED: "is cancelled",
    Status.CANCELLING: "is asked to end",
}


def cancel(
    ids: Annotated[list[str], typer.Argument(metavar="ID", help="Invocations; the beginning of an id will do.")],
    reason: Annotated[str, typer.Option(help="Why; kept with them.")] = "",
    by: Annotated[str | None, typer.Option(help="Who asks; else user@host.")] = None,
    children: Annotated[
        bool | None, typer.Option("--children/--no-children", help="And what they submitted; else as they declare.")
    ] = None,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """End invocations: those that wait at once, those that run after they have cleaned up. Safe to repeat."""
    with Output(json=json) as out, looked_at(out, app, url, name) as chosen:
        found = [find_id(chosen, id) for id in ids]
        ends = {id: chosen.invocation(id).cancel(reason, by=by, children=children) for id in found}
        if json:
            return out.document({"invocations": [{"id": id, "status": status.value} for id, status in ends.items()]})
        for id, status in ends.items():
            out.line(f"{id} {_SAID.get(status, f'had ended before: {status}')}")
