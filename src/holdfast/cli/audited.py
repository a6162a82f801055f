"""The audit record of commands: stored before the action of a command, and its outcome after it.

A command that asks first is recorded once the user has agreed. A command that may make the store, such as a first
``submit``, is recorded when it is done, if there is no store yet: a wrong command shall not make one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import typer

from holdfast.access.audit import DONE, FAILED, Action, AuditLog, AuditRecord, said_of, twin_of
from holdfast.app import App
from holdfast.cli.output import Output
from holdfast.runtime.engine import Engine
from holdfast.runtime.queues import user_and_host

VIA = "command line"
_ONLY_LOOKS = ("dry_run", "check")  # options with which a command changes nothing


class WantedAction(NamedTuple):
    """The action of a command: its name, and the parameter with its target."""

    name: str
    target: str
    find: Callable[[App, str], str] | None
    command: str  # holdfast queues pause
    reason: str


@contextlib.contextmanager
def audited(
    out: Output, app: App, wanted: WantedAction, given: Mapping[str, Any], has_store: Callable[[], bool]
) -> Iterator[None]:
    """Record what is done in this block."""
    if any(given.get(name) for name in _ONLY_LOOKS):
        yield
        return
    act = _Act(app, wanted, given, has_store)
    out.agreed, out.did = act.begin, act.done
    if given.get("yes", True):
        act.begin()
    try:
        yield
    except typer.Exit as end:
        act.end(FAILED if end.exit_code else DONE)
        raise
    except Exception as error:
        act.end(FAILED, said_of(error, wanted.name))
        raise
    act.end(DONE)


class _Act:
    """The action of one command."""

    def __init__(self, app: App, wanted: WantedAction, given: Mapping[str, Any], has_store: Callable[[], bool]) -> None:
        self._app, self._has_store = app, has_store
        self._wanted, self._given = wanted, given
        self._begun: AuditRecord | None = None
        self._found: dict[str, str] = {}  # whole names and ids, by the words of the user
        self._is_late = self._is_over = False

    def begin(self) -> None:
        """Store the record. Raises `StoreError`."""
        if self._begun is not None:
            return
        if self._has_store():
            self._begun = self._store(self._action())
        else:
            self._is_late = True

    def done(self, detail: str) -> None:
        """Store the outcome, although more follows in this command."""
        self.end(DONE, detail)

    def end(self, outcome: str, detail: str = "") -> None:
        if self._is_late and outcome == DONE:
            self._begun, self._is_late = self._store(self._action()), False
        if self._begun is not None and not self._is_over:
            self._is_over, begun = True, self._begun
            for word, name in self._found.items():  # the word may be a secret, as tokens of hooks are
                detail = detail.replace(word, name)
            self._app.runtime.run(_log(self._app.runtime.ready()).end(begun, outcome, detail))

    def _store(self, action: Action) -> AuditRecord:
        return self._app.runtime.run(_log(self._app.runtime.ready()).begin(action))

    def _action(self) -> Action:
        wanted, words = self._wanted, self._words()
        find = wanted.find
        self._found = {word: find(self._app, word) if find is not None else word for word in words}
        found = list(self._found.values())
        options = [] if words else self._filter()
        return Action(
            who=user_and_host(),
            via=VIA,
            source=socket.gethostname(),
            name=wanted.name,
            targets=found or ([" ".join(option.removeprefix("--") for option in options)] if options else []),
            reason=wanted.reason,
            twin=twin_of(wanted.command, found or options),
        )

    def _words(self) -> list[str]:
        """Return what the user has named."""
        value = self._given.get(self._wanted.target)
        return [value] if isinstance(value, str) else list(value or ())

    def _filter(self) -> list[str]:
        """Return the options by which a command that names nothing finds what it changes."""
        group, search = self._given.get("filter"), self._given.get("search")
        options = [f"--search={search}"] if search else []
        if group is None or not dataclasses.is_dataclass(group):
            return options
        for each in dataclasses.fields(group):
            value = getattr(group, each.name)
            for one in value if isinstance(value, list | tuple) else [value]:
                if one is True:
                    options.append(f"--{each.name.replace('_', '-')}")
                elif one not in (None, False):
                    options.append(f"--{each.name.replace('_', '-')}={one}")
        return options


def _log(engine: Engine) -> AuditLog:
    return engine.part(AuditLog)
