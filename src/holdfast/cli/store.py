"""The commands about the store itself: ``store prepare``, ``check``, ``keys``, ``backup`` and ``roles``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from typer import Argument, Option

from holdfast.app import App
from holdfast.cli import reach
from holdfast.cli.command import Needs, command
from holdfast.cli.discovery import shared
from holdfast.cli.output import FAILED, Output
from holdfast.cli.progress import walking
from holdfast.codec.sealing import ring_of
from holdfast.errors import UsageError
from holdfast.masking import mask_url
from holdfast.model.names import counted
from holdfast.showing import fields
from holdfast.store.contract import Finding
from holdfast.store.key_use import KeySurvey, KeyUse


@command(Needs.APP)
def prepare(out: Output, app: App) -> None:
    """Create missing parts of the store. Safe to repeat."""
    with walking(out, None, "preparing"):
        reach.time_of(shared(app))  # opening it is what prepares it
    if app.url.startswith("sqlite"):
        for finding in reach.check_store(app, deep=False):
            if finding.subject == "file mode" and finding.advice:
                out.note(f"{finding.detail}; {finding.advice}")
    out.document({"url": mask_url(app.url), "prepared": True})
    out.line(f"{mask_url(app.url)} is ready")


@command(Needs.PLACE)
def check(
    out: Output,
    app: App,
    deep: Annotated[bool, Option("--deep", help="Read everything; takes its time.")] = False,
) -> None:
    """Check the store; fails if something is wrong."""
    with walking(out, app, "reading everything" if deep else "looking"):
        findings = reach.check_store(app, deep=deep)
    well = all(finding.ok for finding in findings)
    out.document({"url": mask_url(app.url), "ok": well, "findings": [fields(finding) for finding in findings]})
    rows = [(f.subject, _state(f), f.detail + (f" → {f.advice}" if f.advice else "")) for f in findings]
    out.table(("subject", "state", "detail"), rows, empty="nothing to look at")
    if not well:
        raise typer.Exit(FAILED)


def _state(finding: Finding) -> str:
    if not finding.checked:
        return "not checked"
    return "ok" if finding.ok else "NOT OK"


@command(Needs.PLACE)
def keys(out: Output, app: App) -> None:
    """Show which encryption keys the stored values need. Reads everything."""
    ring = ring_of(app.settings.encryption_keys, app.settings.encryption_keys_file)
    known = () if ring is None else ring.ids
    used = reach.with_store(app, lambda store: KeySurvey(store, app.name).run(known))
    out.document({"known": list(known), "keys": [fields(use) | {"needed": _needed(use, known)} for use in used]})
    counts = [(use, [str(count) for count in (use.invocations, use.entries, use.pages, use.payloads)]) for use in used]
    rows = [(use.key or "(in the clear)", *numbers, _needed(use, known)) for use, numbers in counts]
    out.table(("key", "calls", "entries", "log pages", "payloads", "needed"), rows, empty="nothing is stored")


def _needed(use: KeyUse, known: tuple[str, ...]) -> str:
    if not use.key:
        return "no key"
    if use.key not in known:
        return "yes, and MISSING here"
    if use.key == known[0]:
        return "yes: it encrypts"
    return "yes: it reads" if use.total else "no: it may be dropped"


@command(Needs.PLACE)
def backup(
    out: Output,
    app: App,
    path: Annotated[Path, Argument(metavar="FILE", help="Where the copy goes.")],
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the file if it is there.")] = False,
) -> None:
    """Copy a SQLite store to a file, while runners work. The copy is checked."""
    if app.url.startswith("mongodb"):
        raise UsageError(
            "a MongoDB database is backed up with its own tools: a snapshot, mongodump --oplog, or your service's "
            "backup. See docs/operations/mongodb.md, Backups"
        )
    target = path.absolute()
    with walking(out, None, "copying"):
        made = reach.back_up_store(app, target, overwrite=overwrite)
    out.document({"path": str(target), **fields(made)})
    out.line(f"{target} has {counted(made.invocations, 'invocation')}, {counted(made.size, 'byte')}; it was checked")


@command(Needs.APP)
def roles(out: Output, app: App) -> None:
    """Print commands that create roles in a MongoDB database.

    The roles are submitter, runner, monitor and admin.
    """
    if not app.url.startswith("mongodb"):
        raise UsageError("roles are for MongoDB; a SQLite file has the permissions of its file system")
    from holdfast.store.mongo.connection import database_name
    from holdfast.store.mongo.roles import ROLES, role_command

    database = database_name(app.url)
    commands = [role_command(role, database) for role in ROLES]
    out.document({"database": database, "commands": commands})
    out.line(f"// in mongosh, as a user with the right to create roles: use {database}")
    for each in commands:
        out.line(f"db.runCommand({msgspec.json.encode(each).decode()})")
