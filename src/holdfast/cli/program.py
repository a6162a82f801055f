"""The commands, put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from holdfast._version import __version__
from holdfast.cli import logs, looking, running, submitting, tending


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
    def group(summary: str) -> typer.Typer:
        return typer.Typer(
            help=summary,
            no_args_is_help=True,
            add_completion=False,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
        )

    program = group("Durable background tasks for Python: nothing lost, nothing stuck, everything explained.")
    program.callback()(_start)
    commands: list[Callable[..., None]] = [
        running.run,
        submitting.submit,
        submitting.wake,
        looking.ps,
        looking.show,
        looking.history,
        looking.runners,
        tending.config,
    ]
    for command in commands:
        program.command()(command)
    status = group("The state machine.")
    status.callback()(lambda: None)
    status.command("render")(tending.render)
    program.add_typer(status, name="status")
    store = group("The store itself.")
    store.command("prepare")(tending.prepare)
    store.command("check")(tending.check)
    program.add_typer(store, name="store")
    return program


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 done, 1 it could not be done, 2 it was asked for in a wrong way."""
    _make()(args=None if arguments is None else list(arguments), prog_name="holdfast")
