"""Pages that are made from the code: `python -m tests.docs.reference` writes them, and a test compares."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import typer
from tests.docs.pages import DOCS

from holdfast.cli import program
from holdfast.model.status import TABLE, Rule
from holdfast.settings import SPECS, Settings
from holdfast.store.mongo import schema
from holdfast.telemetry.logs import ROWS, Level
from holdfast.web.api import ROUTES
from holdfast.web.routing import PREFIX, Act, ApiRoute


def settings_page() -> str:
    """docs/reference/settings.md: the text that is there, with defaults and bounds of holdfast/settings.py."""
    text = (DOCS / "reference" / "settings.md").read_text()
    for row in Settings().explain():
        made = f"| `{row.name}` | {row.shown.replace('(empty)', '')} | {allowed(row.name)} |"
        text = re.sub(rf"^\| `{row.name}` \|[^|]*\|[^|]*\|", lambda _, made=made: made, text, flags=re.MULTILINE)
    return text


def allowed(name: str) -> str:
    """Say what a setting may be. That a length of time may be a duration, the page says once for all."""
    spec = SPECS[name]
    bounds = f" from {spec.low:,.10g} to {spec.high:,.10g}"
    return re.sub(r" from \S+ to [^ ,]+", bounds, spec.allowed().partition(", or a duration")[0])


def logging_page() -> str:
    """docs/reference/logging.md: the text that is there, and the table of holdfast/telemetry/logs.py."""
    head, mark, _ = (DOCS / "reference" / "logging.md").read_text().partition(LOGGING_MARK)
    rows = [
        f"| {f'`holdfast.{row.logger}`' if row.logger else 'several'} | {said(row.level)} | `{plain(row.message)}` |"
        for row in ROWS.values()
    ]
    return "\n".join([head + mark, "", "| logger | level | message |", "|---|---|---|", *rows, ""])


def said(level: Level) -> str:
    if isinstance(level, int):
        return logging.getLevelName(level)
    return f"{said(level.then)} or {said(level.otherwise)}"


def plain(message: str) -> str:
    return re.sub(r"{(\w+)[^}]*}", r"{\1}", message).replace("`", "'")


LOGGING_MARK = "<!-- What follows is made by `python -m tests.docs.reference` from holdfast/telemetry/logs.py. -->"


def mongodb_page() -> str:
    """docs/reference/mongodb.md: the text that is there, and the indexes of holdfast/store/mongo/schema.py."""
    head, mark, _ = (DOCS / "reference" / "mongodb.md").read_text().partition(INDEXES_MARK)
    heading = ["| collection | index | keys | condition | serves |", "|---|---|---|---|---|"]
    rows = [index_row(index) for name in schema.COLLECTIONS for index in schema.INDEXES if index.collection == name]
    return "\n".join([head + mark, "", *heading, *(f"| {' | '.join(row)} |" for row in rows), ""])


INDEXES_MARK = "<!-- What follows is made by `python -m tests.docs.reference` from holdfast/store/mongo/schema.py. -->"


def index_row(index: schema.Index) -> list[str]:
    keys = ", ".join(f"`{name}`" for name, _ in index.keys)
    return [f"`{index.collection}`", f"`{index.name}`", keys, condition(index.options), index.serves]


def condition(options: Mapping[str, Any]) -> str:
    """Say the options of an index in words."""
    words = ["unique"] if options.get("unique") else []
    for name, wanted in options.get("partialFilterExpression", {}).items():
        exists = isinstance(wanted, dict)
        words.append(f"where there is `{name}`" if exists or wanted is True else f"where `{name}` is `{wanted}`")
    if (seconds := options.get("expireAfterSeconds")) is not None:
        words.append(f"TTL {seconds} s")
    return ", ".join(words)


def statuses_page() -> str:
    """docs/reference/statuses.md: the text that is there, and the table of holdfast/model/status.py."""
    head, mark, _ = (DOCS / "reference" / "statuses.md").read_text().partition(STATUSES_MARK)
    rows = [
        f"| `{status}` | {', '.join(f'`{each}`' for each in sorted(rule.next)) or 'final'} | {rules_of(rule)} "
        f"| {f'`{rule.rescued_by}`' if rule.rescued_by else ''} |"
        for status, rule in TABLE.items()
    ]
    heading = ["| status | may become | rules | brought out by |", "|---|---|---|---|"]
    return "\n".join([head + mark, "", *heading, *rows, ""])


def http_page() -> str:
    """docs/reference/http.md: the text that is there, and the table of holdfast/web/api.py."""
    head, mark, _ = (DOCS / "reference" / "http.md").read_text().partition(ROUTES_MARK)
    heading = ["| route | role | does | parameters or body |", "|---|---|---|---|"]
    rows = [
        f"| `{each.method} {PREFIX}{each.path.replace(':path', '')}` | {each.role.name.lower()} | {each.summary} "
        f"| {', '.join(f'`{name}`' for name in asked_by(each))} |"
        for each in ROUTES
    ]
    return "\n".join([head + mark, "", *heading, *rows, ""])


def asked_by(route: ApiRoute) -> list[str]:
    """Return the parameters of a route, or the members of its body without those that all actions have."""
    body = () if route.body is None else route.body.__struct_fields__
    return [*route.query, *(name for name in body if name not in Act.__struct_fields__)]


ROUTES_MARK = "<!-- What follows is made by `python -m tests.docs.reference` from holdfast/web/api.py. -->"
STATUSES_MARK = "<!-- What follows is made by `python -m tests.docs.reference` from holdfast/model/status.py. -->"


def rules_of(rule: Rule) -> str:
    words = {
        "can be claimed": rule.available_for_run,
        "makes the claimer its owner": rule.acquires_ownership,
        "only its owner may leave it": rule.requires_ownership,
        "has no owner": rule.releases_ownership,
        "others may enter it": rule.overrides_ownership,
    }
    return "; ".join(word for word, holds in words.items() if holds)


def commands_page() -> str:
    """docs/reference/commands.md, from the command line's own help."""
    command: Any = typer.main.get_command(program._make())
    sections = [f"## holdfast {name}\n\n```\n{text}\n```\n" for name, text in help_of(command, ())]
    return COMMANDS_HEAD + "\n" + "\n".join(sections)


def help_of(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield each command with its help, without what all share."""
    for name, each in getattr(command, "commands", {}).items():
        if each.hidden:
            continue
        here = (*path, name)
        context = each.make_context("holdfast " + " ".join(here), [], resilient_parsing=True)
        context.terminal_width = context.max_content_width = 100
        text = each.get_help(context).partition("\n  Exit codes:")[0]
        for option in SHARED:
            text = re.sub(rf"^  {option}\b.*\n?(?:   {{6,}}.*\n?)*", "", text, flags=re.MULTILINE)
        yield " ".join(here), re.sub(r"\n*^Options:\n*\Z", "", text.rstrip(), flags=re.MULTILINE).rstrip()
        yield from help_of(each, here)


SHARED = ("--app", "--url", "--name", "--json", "--help")
COMMANDS_HEAD = """\
# Commands

<!-- Made by `python -m tests.docs.reference` from the command line's own help. -->

`--help` of each command prints the same. Most commands also take these options:

| option | meaning |
|---|---|
| `--app APP` | `module:attribute`; otherwise `HOLDFAST_APP`, otherwise the only app in this folder |
| `--url URL` | the store, if no code is to be imported; otherwise `HOLDFAST_URL` |
| `--name NAME` | the app's name in that store |
| `--json` | answer with one JSON document on stdout, errors too: `{"error": {"type": …, "message": …}}` |

An id may be shortened to its beginning. Commands that only look never create a store, and give up after about 5 s if
the store is away.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | it failed, or could not be done |
| 2 | the command was given in a wrong way; nothing was stored |
| 3 | timed out: no result within `--timeout`; the work goes on |
| 4 | there is no such invocation, event, runner or schedule |
| 130 | interrupted |
"""

MADE: dict[str, Callable[[], str]] = {
    "commands.md": commands_page,
    "http.md": http_page,
    "logging.md": logging_page,
    "mongodb.md": mongodb_page,
    "settings.md": settings_page,
    "statuses.md": statuses_page,
}

if __name__ == "__main__":
    for name, make in MADE.items():
        (DOCS / "reference" / name).write_text(make())
