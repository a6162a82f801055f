"""``holdfast access``: tokens of the HTTP API and of its pages."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from holdfast.access.rules import ROLES, TokenRecord
from holdfast.access.tokens import AccessTokens
from holdfast.app import App
from holdfast.cli import reach
from holdfast.cli.command import command
from holdfast.cli.output import Output
from holdfast.clock import parse_duration
from holdfast.errors import UsageError
from holdfast.runtime.queues import user_and_host
from holdfast.showing import fields, length, moment

_LONGEST_SECONDS = 3_650 * 86_400.0


@command()
def tokens(out: Output, app: App) -> None:
    """List the tokens; or make or revoke one.

    "used" is to the hour. Expired tokens are listed for another month.
    """
    found = reach.with_engine(app, lambda engine: engine.part(AccessTokens).list())
    now = reach.time_of(app)
    out.document({"tokens": [_facts(each, now) for each in found]})
    rows = [
        (
            each.name,
            each.role,
            each.id,
            "expired" if each.expires_at <= now else f"in {length(each.expires_at - now)}",
            "" if each.used_at is None else f"{length(max(0.0, now - each.used_at))} ago",
            f"{moment(each.created_at)} by {each.created_by}",
        )
        for each in found
    ]
    out.table(("name", "role", "id", "expires", "used", "made"), rows, empty="no tokens: holdfast access token create")


@command(action="token.create", target="token_name")
def create(
    out: Output,
    app: App,
    token_name: Annotated[str, Argument(metavar="NAME", help="Its user: ci, or ann. It is in the audit record.")],
    role: Annotated[str, Option(help="viewer: reads; operator: pauses, cancels, reruns; admin: all.")] = "viewer",
    expires: Annotated[str, Option(metavar="DURATION", help="How long it is good, up to 3650d.")] = "90d",
) -> None:
    """Make a token, and print it. Nothing shows it again.

    Programs send it as 'Authorization: Bearer TOKEN'; people log in with it.
    """
    seconds = parse_duration(expires)
    if not 60 <= seconds <= _LONGEST_SECONDS:
        raise UsageError(f"--expires {expires}: expected a time from 1m to 3650d")
    if role not in ROLES:
        raise UsageError(f"--role {role!r:.40}: expected {', '.join(ROLES)}")
    by = user_and_host()
    record, text = reach.with_engine(
        app, lambda engine: engine.part(AccessTokens).create(token_name, role, seconds, by)
    )
    out.document(_facts(record, record.created_at) | {"token": text})
    out.line(text)
    out.aside(f"the token of {record.name}, {record.role}, until {moment(record.expires_at)}; it is not shown again")


@command(action="token.revoke", target="token")
def revoke(out: Output, app: App, token: Annotated[str, Argument(metavar="NAME", help="Its name, or its id.")]) -> None:
    """End a token and the sessions that were begun with it, within 5 s."""
    record, is_last = reach.with_engine(app, lambda engine: engine.part(AccessTokens).revoke(token))
    out.document({"id": record.id, "name": record.name, "revoked": True, "last": is_last})
    out.line(f"the token of {record.name} is revoked; servers refuse it within 5 s")
    if is_last:
        out.aside(
            "it was the last one, and pages and API stay closed. To get in, make another: holdfast access token "
            "create; or let programs of this machine in without: holdfast access open"
        )


@command(action="access.open")
def open_again(out: Output, app: App) -> None:
    """Let programs of this machine in without a token again, once the last one is gone.

    It is for 'holdfast monitor' on a loopback address: any user of this machine is an admin there. Other addresses,
    and apps with tokens, api_token or a proxy, stay as they are.
    """
    reach.with_engine(app, lambda engine: engine.part(AccessTokens).open())
    out.document({"open": True})
    out.line("programs of this machine are let in without a token, within 5 s")


def _facts(record: TokenRecord, now: float) -> dict[str, object]:
    names = ("id", "name", "role", "created_at", "created_by", "expires_at", "used_at")
    return fields(record, *names) | {"expired": record.expires_at <= now}


COMMANDS = {"list": tokens, "create": create, "revoke": revoke}
