"""Which stages of its life an invocation has reached, by an event of the engine. And which values a program may get."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from holdfast.codec import ErrorRecord
from holdfast.errors import UsageError
from holdfast.model.changes import Change
from holdfast.model.records import InvocationRecord
from holdfast.model.status import FINAL, Status
from holdfast.telemetry import events as e

STAGES = ("submitted", "started", "retried", "succeeded", "failed", "last_failure", "finalised")


class LifecycleEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of a listener: an invocation has reached a stage of its life.

    `at` is when, in seconds since the epoch. `attempt` counts starts. `error_type` and `error` describe a failure,
    `due_at` is the time of the next attempt. `is_stored` is False for an attempt of `try_here`, until it is retried.
    """

    stage: str
    invocation_id: str
    app: str
    task: str
    queue: str
    status: str
    attempt: int
    at: float
    why: str = ""
    error_type: str = ""
    error: str = ""
    due_at: float | None = None
    attributes: Mapping[str, str] = msgspec.field(default_factory=dict)
    is_stored: bool = True


_AFTER = {
    Status.SUCCESS: ("succeeded", "finalised"),
    Status.FAILED: ("failed", "last_failure", "finalised"),
    Status.RETRY: ("failed", "retried"),
    Status.CANCELLED: ("finalised",),
    Status.CONCURRENCY_CONTROLLED_FINAL: ("finalised",),
}
KINDS: Mapping[type[e.Event], frozenset[str]] = {
    e.Submitted: frozenset(STAGES) - {"started", "retried", "succeeded"},
    **dict.fromkeys((e.Started, e.StartedHere), frozenset({"started"})),
    e.Refused: frozenset({"finalised"}),
    **dict.fromkeys((e.Settled, e.RanHere), frozenset(STAGES) - {"submitted", "started"}),
    **dict.fromkeys((e.Failed, e.Recovered), frozenset({"failed", "last_failure", "finalised"})),
    e.Retried: frozenset({"failed", "retried"}),
}
"""The stages that an event of the engine may mean."""


def lifecycle_events(event: e.Event) -> Iterator[LifecycleEvent]:
    """Yield the stages that an event of telemetry reports to listeners, in order."""
    match event:
        case e.Submitted(records):
            for record in records:
                yield _of_record("submitted", record)
                if record.status in FINAL:  # a trigger could not make the call, and it is stored as failed
                    yield from (_of_record(stage, record) for stage in _AFTER.get(record.status, ()))
        case e.Started(records):
            is_stored = not isinstance(event, e.StartedHere)
            yield from (_of_record("started", record, is_stored=is_stored) for record in records)
        case e.Refused(records):
            for record in records:
                yield from (_of_record(stage, record) for stage in _AFTER.get(record.status, ()))
        case e.Settled(record, change):
            for stage in _AFTER.get(change.target, ()):
                yield _of_change(stage, record, change, is_stored=not isinstance(event, e.RanHere))


def _of_record(stage: str, record: InvocationRecord, *, is_stored: bool = True) -> LifecycleEvent:
    is_start = stage in ("submitted", "started")
    return LifecycleEvent(
        stage=stage,
        invocation_id=record.id,
        app=record.app,
        task=record.task,
        queue=record.queue,
        status=record.status.value,
        attempt=record.attempt,
        at=record.created_at if stage == "submitted" else record.changed_at,
        why=record.reason,
        attributes=record.attributes,
        is_stored=is_stored,
        **_error(None if is_start else record.error),
    )


def _of_change(stage: str, record: InvocationRecord, change: Change, *, is_stored: bool) -> LifecycleEvent:
    error = change.error if isinstance(change.error, ErrorRecord) else None
    if change.target is Status.RETRY and change.errors is not UNSET:
        error = change.errors[-1].error
    return LifecycleEvent(
        stage=stage,
        invocation_id=record.id,
        app=record.app,
        task=record.task,
        queue=record.queue if change.queue is UNSET else change.queue,
        status=change.target.value,
        attempt=record.attempt,
        at=change.at,
        why=change.why,
        due_at=None if change.due_at is UNSET else change.due_at,
        attributes=record.attributes if change.attributes is UNSET else change.attributes,
        is_stored=is_stored,
        **_error(error),
    )


def _error(error: ErrorRecord | None) -> dict[str, Any]:
    return {} if error is None else {"error_type": error.type_name, "error": error.message}


# --- commands

_PLACE = re.compile(r"\{(\w+)\}")
_WHOLE = re.compile(r"\{(\w+)\}\Z")
MAX_ARGUMENT_BYTES = 100_000  # Linux refuses more than 131,072


class CommandTemplate(msgspec.Struct, frozen=True):
    """A command of an allow-list: the program and its arguments, some with places for values."""

    name: str
    words: tuple[str, ...]

    @property
    def places(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for word in self.words for name in _PLACE.findall(word)))

    def filled(self, values: Mapping[str, object]) -> list[str]:
        """Return the words of a call. Raises `UsageError` for a value that is missing, unknown or refused."""
        places = self.places
        for name in values:
            if name not in places:
                known = ", ".join(places) or "none"
                raise UsageError(f"the command '{self.name}' has no place {name!r}; it has: {known}")
        if missing := [name for name in places if name not in values]:
            raise UsageError(f"the command '{self.name}' needs {missing[0]}=")
        words: list[str] = []
        for word in self.words:
            if (whole := _WHOLE.match(word)) and isinstance(values[whole[1]], list | tuple):
                given = values[whole[1]]
                assert isinstance(given, Sequence)
                words += [self._value(whole[1], each) for each in given]
                continue
            words.append(_PLACE.sub(lambda found: self._text(found[1], values[found[1]]), word))
            if whole:
                self._value(whole[1], values[whole[1]])
            elif word[:1] == "{" and words[-1][:1] == "-":
                raise UsageError(f"{words[-1]!r:.80} would be read as an option of '{self.name}'")
        return words

    def _value(self, name: str, value: object) -> str:
        text = self._text(name, value)
        if text.startswith("-"):
            raise UsageError(
                f"{name}={text!r:.80} would be read as an option of '{self.name}'. Declare a command with the option"
            )
        return text

    def _text(self, name: str, value: object) -> str:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise UsageError(f"{name}={value!r:.80}: a command takes texts and numbers")
        text = str(value)
        if "\0" in text:
            raise UsageError(f"{name}= contains a NUL character, which no argument of a program can")
        try:
            size = len(text.encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError:
            raise UsageError(f"{name}= contains half a character, which no argument of a program can") from None
        if size > MAX_ARGUMENT_BYTES:
            raise UsageError(f"{name}= is longer than the {MAX_ARGUMENT_BYTES:,} bytes that an argument may have")
        return text


def templates_of(allow: Mapping[str, Iterable[str]]) -> dict[str, CommandTemplate]:
    """Return the commands of an allow-list. Raises `UsageError`."""
    if not isinstance(allow, Mapping) or not allow:
        raise UsageError(
            'a shell task needs its commands: shell_task(allow={"backup": ["pg_dump", "--file={path}", "{database}"]})'
        )
    made = {}
    for name, words in allow.items():
        if isinstance(words, str) or not isinstance(words, Iterable):
            raise UsageError(f"allow[{name!r}]: expected the words of the command in a list; no shell splits a text")
        listed = tuple(words)
        if not isinstance(name, str) or not listed or not all(isinstance(word, str) for word in listed):
            raise UsageError(f"allow[{name!r}]={listed!r:.80}: expected a program and its arguments, as texts")
        if not listed[0] or _PLACE.search(listed[0]):
            raise UsageError(f"allow[{name!r}]: the program itself is fixed; {listed[0]!r} leaves it to the caller")
        made[name] = CommandTemplate(name, listed)
    return made
