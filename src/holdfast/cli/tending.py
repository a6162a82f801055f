"""The commands around the work itself: ``status render``, ``store prepare|check|backup|roles`` and ``config``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from holdfast.cli.choosing import looked_at, opened, shared
from holdfast.cli.options import AppOption, AsJson, NameOption, UrlOption
from holdfast.cli.output import FAILED, Output
from holdfast.cli.reach import backed_up, looked_over, with_store
from holdfast.errors import ConfigurationError, UsageError
from holdfast.lifecycle.names import counted
from holdfast.masking import mask_url
from holdfast.store.contract import Store


class DiagramFormat(StrEnum):
    SVG = "svg"
    MERMAID = "mermaid"
    TEXT = "text"


_SUFFIXES = {
    ".svg": DiagramFormat.SVG,
    ".mmd": DiagramFormat.MERMAID,
    ".mermaid": DiagramFormat.MERMAID,
    ".txt": DiagramFormat.TEXT,
}
_DOCUMENTED = (Path("docs/state-machine.svg"), Path("docs/state-machine.mmd"))


def render(
    format: Annotated[DiagramFormat | None, typer.Option(help="Else as the file's name says, else text.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it there instead of here.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail if the file (else those in docs) is stale.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Draw the state machine from its table."""
    from holdfast.lifecycle import diagram

    with Output(json=json) as out:
        if check:
            if format is not None and output is None:
                raise UsageError("--check with --format needs --output: the file to compare with")
            return _check(out, [output] if output else list(_DOCUMENTED), format)
        kind = _format_of(output, format)
        text = diagram.render(kind.value)
        if output is not None:
            _write(output, text)
        if json:
            where = {"text": text} if output is None else {"output": str(output)}
            return out.document({"format": kind, **where})
        if output is None:
            print(text, end="")  # as it is: it is ours, and its line ends are wanted
        else:
            out.line(f"wrote {output}")


def _format_of(output: Path | None, format: DiagramFormat | None) -> DiagramFormat:
    if format is not None or output is None:
        return format or DiagramFormat.TEXT
    if output.suffix not in _SUFFIXES:
        raise UsageError(f"the name '{output}' does not tell the format; give --format svg, mermaid or text")
    return _SUFFIXES[output.suffix]


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}.") from error


def _check(out: Output, paths: list[Path], format: DiagramFormat | None) -> None:
    from holdfast.lifecycle import diagram

    states: dict[str, str] = {}
    for path in paths:
        expected = diagram.render(_format_of(path, format).value).encode()
        try:
            states[str(path)] = "fresh" if path.read_bytes() == expected else "stale"
        except OSError as error:
            states[str(path)] = f"not readable ({error.strerror})"
    fresh = all(state == "fresh" for state in states.values())
    if out.json:
        out.document({"fresh": fresh, "files": states})
    else:
        for path_text, state in states.items():
            advice = "" if state == "fresh" else f"; run: holdfast status render --output {path_text}"
            out.line(f"{path_text} is {state}{advice}")
    if not fresh:
        raise typer.Exit(FAILED)


def prepare(app: AppOption = None, url: UrlOption = None, name: NameOption = None, json: AsJson = False) -> None:
    """Create what is missing in the store. Safe to repeat."""
    with Output(json=json) as out, opened(out, app, url, name) as chosen:
        shared(chosen)
        with_store(chosen, _nothing)  # opening it is what prepares it
        if json:
            return out.document({"url": mask_url(chosen.url), "prepared": True})
        out.line(f"{mask_url(chosen.url)} is ready")


async def _nothing(store: Store) -> None:
    pass


def check(
    deep: Annotated[bool, typer.Option("--deep", help="Read everything; takes its time.")] = False,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """Look the store over; fails if something is not well."""
    with Output(json=json) as out, looked_at(out, app, url, name, made=False) as chosen:
        findings = looked_over(chosen, deep=deep)
        well = all(finding.ok for finding in findings)
        if json:
            facts = [msgspec.structs.asdict(finding) for finding in findings]
            out.document({"url": mask_url(chosen.url), "ok": well, "findings": facts})
        else:
            rows = [(f.subject, "ok" if f.ok else "NOT OK", f.detail, f.advice) for f in findings]
            out.table(("subject", "state", "detail", "advice"), rows, empty="nothing to look at")
        if not well:
            raise typer.Exit(FAILED)


def backup(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Where the copy goes.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
    app: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    json: AsJson = False,
) -> None:
    """Copy a SQLite store to a file, while runners work; the copy is checked."""
    with Output(json=json) as out, looked_at(out, app, url, name, made=False) as chosen:
        if chosen.url.startswith("mongodb"):
            raise UsageError(
                "a MongoDB database is backed up with its own tools: a snapshot, mongodump --oplog, or your service's "
                "backup. See docs/operating-mongodb.md, Backups"
            )
        target = path.absolute()
        made = backed_up(chosen, target, overwrite=overwrite)
        if json:
            return out.document({"path": str(target), **msgspec.structs.asdict(made)})
        out.line(
            f"{target} has {counted(made.invocations, 'invocation')}, {counted(made.size, 'byte')}; it was checked"
        )


def roles(app: AppOption = None, url: UrlOption = None, name: NameOption = None, json: AsJson = False) -> None:
    """Print the commands that create Holdfast's roles in a MongoDB database: submitter, runner, monitor, admin."""
    with Output(json=json) as out, opened(out, app, url, name) as chosen:
        if not chosen.url.startswith("mongodb"):
            raise UsageError("roles are for MongoDB; a SQLite file belongs to whoever may read it")
        from holdfast.store.mongo.connection import database_name
        from holdfast.store.mongo.roles import ROLES, role_command

        database = database_name(chosen.url)
        commands = [role_command(role, database) for role in ROLES]
        if json:
            return out.document({"database": database, "commands": commands})
        out.line(f"// in mongosh, as somebody who may create roles: use {database}")
        for command in commands:
            out.line(f"db.runCommand({msgspec.json.encode(command).decode()})")


def config(app: AppOption = None, url: UrlOption = None, name: NameOption = None, json: AsJson = False) -> None:
    """Tell every setting, and where its value comes from."""
    with Output(json=json) as out, opened(out, app, url, name) as chosen:
        rows = chosen.settings.explain()
        where = {"name": chosen.name, "url": mask_url(chosen.url)}
        if json:
            return out.document({"app": where, "settings": [row._asdict() for row in rows]})
        out.table(("name", "value", "source", "meaning"), [(r.name, r.shown, r.source, r.doc) for r in rows])
        out.line(f"so the app '{where['name']}' is on {where['url']}")
