"""The commands, put together."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer import Option

from holdfast._version import __version__
from holdfast.cli import (
    access,
    apps,
    archive,
    audit,
    completion,
    config,
    dev,
    doctor,
    events,
    groups,
    hooks,
    invocations,
    limits,
    logs,
    monitor,
    queues,
    replays,
    run,
    runners,
    schedules,
    services,
    stats,
    status,
    store,
    streams,
    submit,
    tasks,
    top,
    triggers,
    workflow,
    world,
)
from holdfast.cli.output import DONE, INTERRUPTED, MISUSED, Output

# The base of everything that is wrong with a command line. Typer exports only this one descendant, and has its own
# copy of click or the installed one, depending on its version.
_Misuse: type[Exception] = typer.BadParameter.__mro__[1]

# A line with \b alone keeps the lines of a paragraph as they are.
_EXIT_CODES = """\b
Exit codes:
  0    done
  1    it failed, or could not be done
  2    the command was given in a wrong way; nothing was stored
  3    timed out: no result within --timeout; the work goes on
  4    no such invocation, step, hook, stream, event, runner or schedule
  130  interrupted"""
_THE_APP = """\b
The app of a command is the first of these that there is:
  --app shop:app           module:attribute
  --url, --name            a store: no code is imported
  HOLDFAST_URL=…           the same, unless the command needs tasks
  HOLDFAST_APP=shop:app    the setting, in the environment
  app = "shop:app"         the setting, under [tool.holdfast] in pyproject.toml
  the only app that the modules of this folder make"""
_JSON = """\b
With --json the answer is one JSON document on stdout. So is an error,
{"error": {"type": ..., "message": ...}}, and stderr has notes and logs only."""


def _version(wanted: bool) -> None:
    if wanted:
        print(f"holdfast {__version__}")
        raise typer.Exit


def _start(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    logs.configure()


_Commands = Mapping[str, Callable[..., None]]
_COMMANDS: _Commands = {
    "dev": dev.dev,
    "run": run.run,
    "submit": submit.submit,
    "wake": invocations.wake,
    "cancel": invocations.cancel,
    "ps": invocations.ps,
    "show": invocations.show,
    "why": invocations.why,
    "history": invocations.history,
    "rerun": archive.rerun,
    "purge": archive.purge,
    "streams": streams.streams,
    "tasks": tasks.tasks,
    "apps": apps.apps,
    "triggers": triggers.triggers,
    "services": services.services,
    "stats": stats.stats,
    "audit": audit.audit,
    "top": top.top,
    "doctor": doctor.doctor,
    "monitor": monitor.monitor,
    "config": config.config,
}
# A group is its help, or the command that it is by itself; and its commands.
_GROUPS: dict[str, tuple[str | Callable[..., None], _Commands]] = {
    "archive": (archive.archive, archive.COMMANDS),
    "runners": (runners.runners, {"drain": runners.drain, "stop": runners.stop}),
    "groups": (groups.groups, {"show": groups.show, "cancel": groups.cancel}),
    "queues": (queues.queues, {"pause": queues.pause, "resume": queues.resume}),
    "limits": (
        limits.limits,
        {"list": limits.limits, "show": limits.show, "set": limits.set_limit, "clear": limits.clear},
    ),
    "schedules": (schedules.schedules, schedules.COMMANDS),
    "events": (events.events, {"show": events.show, "emit": events.emit}),
    "hooks": (hooks.hooks, {"list": hooks.hooks, "show": hooks.show, "resume": hooks.resume}),
    "workflow": (
        "Look into runs of workflows; check, replay or fork them.",
        {
            "steps": workflow.steps,
            "events": workflow.events,
            "check": replays.check,
            "replay": replays.replay,
            "fork": workflow.fork,
        },
    ),
    "world": (
        "Serve a World for Workflow DevKit; look at its messages.",
        {"serve": world.serve, "import": world.import_runs},
    ),
    "access": ("Make, list and revoke tokens of pages and API.", {"open": access.open_again}),
    "status": ("Draw the statuses of invocations and their changes.", {"render": status.render}),
    "store": (
        "Create, check or back up the store; print its database roles.",
        {
            "prepare": store.prepare,
            "check": store.check,
            "keys": store.keys,
            "backup": store.backup,
            "roles": store.roles,
        },
    ),
}


# Groups within groups, each with the command that it is by itself.
_INNER: dict[str, dict[str, tuple[Callable[..., None], _Commands]]] = {
    "world": {"messages": (world.messages, world.MESSAGES)},
    "access": {"token": (access.tokens, access.COMMANDS)},
}


def _make() -> typer.Typer:
    program = _group(
        "Durable background tasks and workflows for Python: nothing lost, nothing stuck, everything explained.",
        _COMMANDS,
        "\n\n".join((_THE_APP, _JSON, _EXIT_CODES)),
        completes=True,
    )
    program.callback()(_start)
    program.command(hidden=True)(run.worker)
    program.command("dev-pages", hidden=True)(dev.pages)
    for name, (itself, commands) in _GROUPS.items():
        group = _group(itself if isinstance(itself, str) else itself.__doc__ or "", commands)
        if isinstance(itself, str):
            group.callback()(lambda: None)  # without a callback, a group of one command is no group
        else:
            group.callback(invoke_without_command=True, no_args_is_help=False, epilog=_EXIT_CODES)(itself)
        for inner, (alone, within) in _INNER.get(name, {}).items():
            below = _group(alone.__doc__ or "", within)
            below.callback(invoke_without_command=True, no_args_is_help=False, epilog=_EXIT_CODES)(alone)
            group.add_typer(below, name=inner)
        program.add_typer(group, name=name)
    return program


def _group(summary: str, commands: _Commands, epilog: str = _EXIT_CODES, *, completes: bool = False) -> typer.Typer:
    # Plain help and plain tracebacks: rich would triple the time that --help takes, and would show the values of
    # local variables, which may be secrets.
    group = typer.Typer(
        help=summary,
        epilog=epilog,
        no_args_is_help=True,
        add_completion=completes,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    for name, command in commands.items():
        group.command(name, epilog=_EXIT_CODES)(command)
    return group


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with one of the codes that ``holdfast --help`` lists."""
    _tolerate_any_text()
    if completion.VARIABLE in os.environ:
        completion.complete(_command())
    try:
        code = _obey(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()  # here, where a broken pipe can still be handled
    except BrokenPipeError:
        # `holdfast ps | head -1`: the reader has seen enough. Python would complain when it flushes at exit.
        _discard_the_rest()
        code = DONE
    sys.exit(code)


@functools.cache
def _command() -> Any:
    return typer.main.get_command(_make())


def _obey(arguments: list[str]) -> int:
    command = _command()
    try:
        with command.make_context("holdfast", arguments) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except _Misuse as error:
        return _usage_error(error, arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    return DONE


def _usage_error(error: Any, arguments: list[str]) -> int:
    """Print an error of the command line itself. There is no `Output` yet, so ``--json`` is looked for here."""
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "No such command 'list'" in error.format_message() and ours[0] != "list":
        error.message += f" `holdfast {ours[0]}` alone lists them."
    if "--json" in ours:
        facts = {"type": "UsageError", "message": error.format_message()}
        Output(json=True).document({"error": facts})
    else:
        error.show()
    return MISUSED


def _tolerate_any_text() -> None:
    """Write characters that the terminal's encoding lacks as escapes, so that no answer is lost."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard_the_rest() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a stream without a file, as in a test
            os.dup2(nowhere, stream.fileno())
