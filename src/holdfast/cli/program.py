"""The commands, put together."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer

from holdfast._version import __version__
from holdfast.cli import (
    archive,
    cancelling,
    events,
    fleet,
    logs,
    looking,
    queues,
    running,
    schedules,
    submitting,
    tending,
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
  4    there is no such invocation, event, runner or schedule
  130  interrupted"""
_THE_APP = """\b
The app of a command is the first of these that there is:
  --app shop:app           module:attribute
  --url, --name            a store, for commands that need no tasks
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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Tell the version and exit.")
    ] = False,
) -> None:
    logs.configure()


def _make() -> typer.Typer:
    """All commands. A callback, even one that does nothing, keeps a group with one command a group."""

    # Plain help and plain tracebacks: rich would triple the time that --help takes, and would show the values of
    # local variables, which may be secrets.
    def group(summary: str, epilog: str = _EXIT_CODES) -> typer.Typer:
        return typer.Typer(
            help=summary,
            epilog=epilog,
            no_args_is_help=True,
            add_completion=False,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
        )

    program = group(
        "Durable background tasks for Python: nothing lost, nothing stuck, everything explained.",
        "\n\n".join((_THE_APP, _JSON, _EXIT_CODES)),
    )
    program.callback()(_start)
    commands: list[Callable[..., None]] = [
        running.run,
        submitting.submit,
        submitting.wake,
        cancelling.cancel,
        looking.ps,
        looking.show,
        looking.why,
        looking.history,
        archive.archive,
        archive.rerun,
        archive.purge,
        events.triggers,
        fleet.services,
        tending.config,
    ]
    for command in commands:
        program.command(epilog=_EXIT_CODES)(command)
    program.command(hidden=True)(running.worker)
    runners = group(fleet.runners.__doc__ or "")
    runners.callback(invoke_without_command=True, no_args_is_help=False, epilog=_EXIT_CODES)(fleet.runners)
    runners.command("drain", epilog=_EXIT_CODES)(fleet.drain)
    runners.command("stop", epilog=_EXIT_CODES)(fleet.stop)
    program.add_typer(runners, name="runners")
    listed = group(queues.queues.__doc__ or "")
    listed.callback(invoke_without_command=True, no_args_is_help=False, epilog=_EXIT_CODES)(queues.queues)
    listed.command("pause", epilog=_EXIT_CODES)(queues.pause)
    listed.command("resume", epilog=_EXIT_CODES)(queues.resume)
    program.add_typer(listed, name="queues")
    timetable = group(schedules.schedules.__doc__ or "")
    timetable.callback(invoke_without_command=True, no_args_is_help=False, epilog=_EXIT_CODES)(schedules.schedules)
    for name, command in schedules.COMMANDS.items():
        timetable.command(name, epilog=_EXIT_CODES)(command)
    program.add_typer(timetable, name="schedules")
    told = group(events.events.__doc__ or "")
    told.callback(invoke_without_command=True, no_args_is_help=False, epilog=_EXIT_CODES)(events.events)
    for name, command in events.COMMANDS.items():
        told.command(name, epilog=_EXIT_CODES)(command)
    program.add_typer(told, name="events")
    status = group("The state machine.")
    status.callback()(lambda: None)
    status.command("render", epilog=_EXIT_CODES)(tending.render)
    program.add_typer(status, name="status")
    store = group("The store itself.")
    store.command("prepare", epilog=_EXIT_CODES)(tending.prepare)
    store.command("check", epilog=_EXIT_CODES)(tending.check)
    store.command("backup", epilog=_EXIT_CODES)(tending.backup)
    store.command("roles", epilog=_EXIT_CODES)(tending.roles)
    program.add_typer(store, name="store")
    return program


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with one of the codes that ``holdfast --help`` lists."""
    _tolerate_any_text()
    try:
        code = _obey(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()  # here, where a reader who has gone away can still be taken for what it is
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
        return _misused(error, arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    return DONE


def _misused(error: Any, arguments: list[str]) -> int:
    """An error of the command line itself. It has no `Output` yet, so what the answer has to be like is read here."""
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
    """A character that the terminal's encoding lacks is written as an escape: no answer is lost for its sake."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _discard_the_rest() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a stream without a file, as in a test
            os.dup2(nowhere, stream.fileno())
