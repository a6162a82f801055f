"""``holdfast world``: the server of a World for Workflow DevKit, and the messages that it delivers."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable
from typing import Annotated

import msgspec
from typer import Argument, Option

from holdfast.app import App
from holdfast.cli import logs
from holdfast.cli.command import AppArgument, AppOption, NameOption, Needs, UrlOption, app_of, command, opened
from holdfast.cli.output import Output
from holdfast.cli.progress import walking
from holdfast.cli.run import LogOptions
from holdfast.model.names import counted
from holdfast.runtime.foreign import MAX_DELIVERIES
from holdfast.showing import brief, length, moment
from holdfast.web import missing_extra
from holdfast.web.reading.world import WorldReading
from holdfast.world.importing import Imported, import_original

LOOPBACK, PORT = "127.0.0.1", 8091
MessageId = Annotated[str, Argument(metavar="ID", help="The message: msg_ and 26 characters.")]


@dataclasses.dataclass
class WhereOptions:
    """Where the server listens."""

    host: Annotated[str, Option(help="Where to listen; other addresses than loopback need world_token.")] = LOOPBACK
    port: Annotated[int, Option(help="Where to listen; 0 for a free port.", min=0, max=65535)] = PORT
    child: Annotated[bool, Option("--child", help="For a parent process: free port, until standard input ends.")] = (
        False
    )


@command(Needs.NOTHING)
def serve(
    out: Output,
    *,
    app: AppArgument = None,
    app_option: AppOption = None,
    url: UrlOption = None,
    name: NameOption = None,
    at: WhereOptions,
    lines: LogOptions,
) -> None:
    """Serve the World of an app to Workflow DevKit, until SIGINT or SIGTERM.

    It stores runs, streams and messages, and delivers the messages to the application. The store is made if it is
    missing. A second signal releases deliveries that are under way.
    """
    try:
        from holdfast.world.serving import WorldServer, stop_on_signals
    except ModuleNotFoundError as error:
        raise missing_extra(error) from error
    app = app_of(app, app_option)
    logs.configure(lines.log_format, lines.log_level)
    with opened(out, Needs.APP, app=app, url=url, name=name) as chosen:
        assert isinstance(chosen, App)
        server = WorldServer(chosen, *((LOOPBACK, 0) if at.child else (at.host, at.port)), is_child=at.child)
        if at.child:
            _stop_with_parent(server.stop)
        with stop_on_signals(lambda again: server.stop(hurry=again)):
            server.serve(lambda address: _show_address(out, address, at.child))


def _show_address(out: Output, address: str, child: bool) -> None:
    if child or out.json:
        print(msgspec.json.encode({"url": address}).decode(), flush=True)
    else:
        out.line(f"the World is at {address}")
        sys.stdout.flush()


def _stop_with_parent(stop: Callable[[], object]) -> None:
    """Stop when standard input ends: the parent process holds its other end."""

    def watch() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        stop()

    threading.Thread(target=watch, name="holdfast-parent", daemon=True).start()


@command(action="world.import", target="source")
def import_runs(
    out: Output,
    app: App,
    source: Annotated[str, Argument(metavar="SOURCE", help="The MongoDB that has the database: mongodb://…")],
    database: Annotated[str, Option(metavar="NAME", help="The database of @workflow-worlds/mongodb.")] = "workflow",
    check: Annotated[bool, Option("--check", help="Say what would be imported, and write nothing.")] = False,
) -> None:
    """Import the runs of @workflow-worlds/mongodb 0.2.x, with events, hooks and streams, open ones too.

    Stop the program that uses that database first. It is not changed. A run that cannot be imported is named, and then
    nothing is imported. To repeat the command is safe.
    """
    with walking(out, app, "reading runs" if check else "importing runs"):
        done = app.runtime.run(_imported(app, source, database, check))
    out.document(msgspec.to_builtins(done))
    would = "can be" if check else "are"
    out.line(f"{counted(done.runs, 'run')} {would} imported, {done.open} of them open, with {done.events} events")
    if done.there:
        out.line(f"{counted(done.there, 'run')} were here already")
    if done.dropped or done.added:
        out.line(f"{done.dropped} events were doubled and are left out, {done.added} were lost and are added")


async def _imported(app: App, source: str, database: str, check: bool) -> Imported:
    return await import_original(await app.runtime.engine(), source, database, check_only=check)


# --- messages


@command()
def messages(
    out: Output,
    app: App,
    run: Annotated[str | None, Option(metavar="RUN", help="Only those of this run: wrun_…")] = None,
    ended: Annotated[bool, Option("--ended", help="Ended ones too.")] = False,
    limit: Annotated[int, Option(min=1, max=1000, help="Show at most this many messages.")] = 50,
) -> None:
    """List the messages of a World, newest first: what is to be delivered, and when; or show or redeliver some."""
    page = app.runtime.run(WorldReading(app.runtime).messages(run=run, ended=ended, limit=limit))
    listed, now = page.messages, page.now
    out.document(page.document())
    rows = [
        (
            each.id,
            each.status,
            each.attempt,
            f"in {length(each.due_at - now)}" if each.status == "waiting" and each.due_at > now else "",
            each.run,
            brief(each.error or each.queue),
        )
        for each in listed
    ]
    out.table(("message", "status", "attempt", "due", "run", "last error, or queue"), rows, empty="no messages")


@command()
def show(out: Output, app: App, id: MessageId) -> None:
    """Show one message: its content, its attempts and its last error."""
    whole = app.runtime.run(WorldReading(app.runtime).message(id))
    each, now, content = whole.message, whole.now, whole.content.value
    out.document(whole.document())
    out.line(f"{each.id} ({each.status})")
    out.line()
    refused = f", and {each.refusals} refused connections in a row" if each.refusals else ""
    out.facts(
        [
            ("run", each.run),
            ("queue", each.queue),
            ("attempt", f"{each.attempt} of {MAX_DELIVERIES}{refused}"),
            ("created", f"{moment(each.created_at)}, {length(max(0.0, now - each.created_at))} ago"),
            ("due", moment(each.due_at) if each.status == "waiting" else ""),
            ("ended", "" if each.ended_at is None else moment(each.ended_at)),
            ("delivered by", f"{each.owner}, since {moment(each.owned_at)}" if each.owner and each.owned_at else ""),
            ("key", each.key),
            ("last sent to", each.sent_to),
            ("last status", "" if each.http_status is None else f"HTTP {each.http_status}"),
            ("last error", each.error),
            ("reason", each.reason),
            ("content", brief(repr(content), 400) if content is not None else "it cannot be read"),
        ]
    )


@command(action="world.redeliver", target="ids")
def redeliver(
    out: Output,
    app: App,
    ids: Annotated[list[str], Argument(metavar="ID", help="Messages: msg_ and 26 characters.")],
) -> None:
    """Deliver messages at once, whatever has become of them.

    An ended message is sent once more. A waiting one is replaced by a message whose attempts count from 1.
    """
    done = [{"id": id, "as": app.runtime.run(_redelivered(app, id))} for id in ids]
    out.document({"messages": done})
    for each in done:
        out.line(f"{each['id']} is delivered again as {each['as']}")


async def _redelivered(app: App, id: str) -> str:
    engine = await app.runtime.engine()
    await WorldReading(app.runtime).message(id)  # which says what to do if there is none
    made: str = await engine.foreign.redeliver(id, str(engine.ids.new()))
    return made


MESSAGES = {"list": messages, "show": show, "redeliver": redeliver}
