"""``holdfast hooks``: hooks of workflows that wait for a payload, and payloads for them."""

from __future__ import annotations

import re
from typing import Annotated

from typer import Argument, Option

from holdfast.app import App
from holdfast.cli import reach
from holdfast.cli.command import command
from holdfast.cli.output import Output
from holdfast.errors import UsageError
from holdfast.model.names import counted
from holdfast.runtime.converting import strictly
from holdfast.runtime.engine import Engine
from holdfast.showing import brief, length, moment, value_line
from holdfast.web.reading.model import ReadModel, WholeHook
from holdfast.workflows.hooks_records import CHOSEN, DERIVED, RANDOM, name_of, valid_token
from holdfast.workflows.hooks_resuming import Sent, not_found, resumed

_NAME = re.compile(r"[0-9a-f]{64}")
_SECRET = "(secret)"
_LONGEST_SHOWN = 40
_SAID_OF_TOKENS = {
    CHOSEN: "chosen by the code",
    DERIVED: "derived of hook_secret: only its hash is stored",
    RANDOM: "random: it lies in the log of the run, since hook_secret is not set",
}

Token = Annotated[
    str, Argument(metavar="TOKEN", help="The token, or the name of the hook: 64 letters and digits, as listed.")
]


@command()
def hooks(
    out: Output,
    app: App,
    run: Annotated[str | None, Option(metavar="ID", help="Only those of this run.")] = None,
    limit: Annotated[int, Option(min=1, max=10_000, help="Show at most this many hooks.")] = 50,
    before: Annotated[str | None, Option(metavar="NAME", help="The last name of the page before.")] = None,
) -> None:
    """List the hooks of workflows; or show or resume one.

    Tokens that are secrets are not shown; such a hook is known by its name.
    """
    if before is not None and not _NAME.fullmatch(before):
        raise UsageError(f"--before {before!r:.80} is no name of a hook; give the last one of the page before")
    page = app.runtime.run(ReadModel(app.runtime).hooks(run=run, limit=limit, before=before))
    found, now = page.hooks, reach.time_of(app)
    out.document(page.document())
    rows = [
        (
            brief(each.token or _SECRET, _LONGEST_SHOWN),
            f"{each.task} {each.run}",
            each.call,
            length(max(0.0, now - each.created_at)) if each.is_open else "ended",
            each.type or "any",
            each.name,
        )
        for each in found
    ]
    out.table(
        ("token", "run", "call", "since", "type", "name"), rows, empty="no hooks: no workflow waits for a payload"
    )
    if page.before is not None:
        out.aside(f"note: there may be more: --before {page.before}")


@command()
def show(out: Output, app: App, token: Token) -> None:
    """Show one hook: its run, its type, and payloads that its run has not taken yet."""
    whole = _found(app, token)
    found, status, waiting = whole
    out.document(whole.document())
    now = reach.time_of(app)
    out.line(f"the hook {found.token or _SECRET}, {found.call} of {found.task} {found.run}")
    out.line()
    out.facts(
        [
            ("name", found.name),
            ("token", _SAID_OF_TOKENS[found.origin]),
            ("created", f"{moment(found.created_at)}, {length(max(0.0, now - found.created_at))} ago"),
            ("run", f"{found.run} ({status})"),
            ("type", found.type or "any"),
            ("metadata", "" if found.metadata is None else value_line(found.metadata)),
            ("webhook", ", ".join([*found.methods, *([f"verified by {found.verify}"] if found.verify else [])])),
            ("ended", "" if found.ended_at is None else moment(found.ended_at)),
            ("token kept", "" if found.keep_until is None else f"until {moment(found.keep_until)}"),
            ("not taken yet", f"{counted(len(waiting), 'payload')}: {', '.join(waiting)}" if waiting else ""),
        ]
    )


def _target(app: App, text: str) -> str:
    """Return the name of a hook, for the audit record: its token may be a secret."""
    return text if _is_name(app, text) else name_of(valid_token(text))


@command(action="hook.resume", target="token", find=_target)
def resume(
    out: Output,
    app: App,
    token: Token,
    payload: Annotated[str, Argument(metavar="JSON", help="The payload; a text needs its quotes.")] = "null",
    resume_id: Annotated[
        str | None, Option(metavar="ID", help="Names the payload: repeated with the same id, it is delivered once.")
    ] = None,
) -> None:
    """Give a payload to a hook. Prints the id of its run.

    The payload is checked against the type of the hook first.
    """
    try:
        value = strictly(payload)
    except ValueError:
        raise UsageError(
            f'{payload[:80]!r} is no JSON; write \'{{"by": "me"}}\', or \'"text"\' with both quotes'
        ) from None
    if _is_name(app, token):
        run = _resume_named(app, token, value, resume_id)
    else:
        run = app.resume_hook(token, value, resume_id).id
    out.document({"run": run, "resume_id": resume_id})
    out.line(run)


def _is_name(app: App, text: str) -> bool:
    return _NAME.fullmatch(text) is not None and _looked_up(app, name_of(text)) is None


def _found(app: App, text: str) -> WholeHook:
    found = _looked_up(app, name_of(valid_token(text)))
    if found is None and _NAME.fullmatch(text):
        found = _looked_up(app, text)
    if found is None:
        raise not_found(text)
    return found


def _looked_up(app: App, name: str) -> WholeHook | None:
    return app.runtime.run(ReadModel(app.runtime).hook(name))


def _resume_named(app: App, name: str, value: object, resume_id: str | None) -> str:
    engine: Engine = app.runtime.ready()
    return app.runtime.run(resumed(engine, name, Sent(engine, value), resume_id)).run
