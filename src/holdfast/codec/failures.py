"""Exceptions to records and back.

Builtin exceptions, Holdfast's own and registered ones are rebuilt. Any other becomes a `TaskFailed`, which has the
text. Like objects, errors are rebuilt from their state: what their `__init__` takes is seldom what they keep.
"""

from __future__ import annotations

import builtins
import contextlib
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

import holdfast.errors
from holdfast.codec.classes import stored_name
from holdfast.errors import HoldfastError, InvocationError, NotDecodable, NotEncodable, TaskFailed

MAX_ERROR_TEXT_BYTES = 32 * 1024
_NOTE = "Remote traceback:"
# These would end the caller's process, or be taken for the end of its generator or coroutine: TaskFailed instead.
_NEVER_REBUILT = (StopIteration, StopAsyncIteration, GeneratorExit, KeyboardInterrupt, SystemExit)
_BUILTIN_ERRORS: dict[str, type[Exception]] = {
    f"builtins:{cls.__name__}": cls
    for cls in vars(builtins).values()
    if isinstance(cls, type) and issubclass(cls, Exception) and not issubclass(cls, _NEVER_REBUILT)
}
# A task that waits for another may let any of these through. A TaskFailed then comes back as it was first raised,
# not as the failure of a failure. The base is never raised itself.
_OWN_ERRORS: dict[str, type[Exception]] = {
    stored_name(cls): cls
    for cls in vars(holdfast.errors).values()
    if isinstance(cls, type) and issubclass(cls, HoldfastError) and cls is not HoldfastError
}
# What users of these may rely on. State that lacks it is damaged, or older than the attribute.
_PROMISED: dict[type[Exception], set[str]] = {
    NotEncodable: {"path"},
    InvocationError: {"invocation_id"},
    TaskFailed: {"type_name", "message", "remote_traceback"},
}


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An exception as it is stored. `data`: args and attributes, if the class is registered and they can be stored."""

    type_name: str
    message: str
    traceback: str
    data: bytes | None
    bases: tuple[str, ...] = ()  # what else it is: an `except` of any of these would have caught it

    def __str__(self) -> str:
        """Return ``ValueError: no card``: builtin classes and our own need no module."""
        name = self.type_name.removeprefix("builtins:").removeprefix("holdfast.errors:")
        return f"{name}: {self.message}" if self.message else name


class KnownErrors:
    """The exception classes that can be rebuilt, by each of their names."""

    def __init__(self) -> None:
        self.by_name = _BUILTIN_ERRORS | _OWN_ERRORS
        self.names: dict[type, str] = {}

    @staticmethod
    def admits(cls: type) -> bool:
        return issubclass(cls, Exception) and not issubclass(cls, _NEVER_REBUILT)

    def add(self, cls: type[Exception], name: str) -> None:
        self.by_name[name], self.names[cls] = cls, name

    def to_record(self, error: BaseException, encode: Callable[[object], bytes]) -> ErrorRecord:
        cls, data = type(error), None
        name = self.names.get(cls) or stored_name(cls)
        if self.by_name.get(name) is cls:
            with contextlib.suppress(Exception):  # then only its text is kept
                data = encode(_state_of(error))
        trace = _clip(lambda: "".join(traceback.format_exception(error)))
        return ErrorRecord(
            type_name=_clip(lambda: name),
            message=_clip(lambda: str(error)),
            traceback=trace,
            data=data,
            bases=tuple(stored_name(base) for base in cls.__mro__[1:] if base not in _EVERY_ERROR),
        )

    def from_record(
        self, record: ErrorRecord, decode: Callable[[bytes], Any], invocation_id: str | None
    ) -> BaseException:
        cls = self.by_name.get(record.type_name)
        with contextlib.suppress(Exception):
            if cls is not None and (record.data is not None or cls is _builtin_base(cls)):
                # A builtin's text is all that callers use of it, if its args could not be stored.
                args, state = decode(record.data) if record.data is not None else ([record.message], None)
                return _rebuilt(cls, args, state, record.traceback)
        return TaskFailed(record.type_name, record.message, record.traceback, invocation_id=invocation_id)


_EVERY_ERROR = (Exception, BaseException, object)


def _builtin_base(cls: type) -> Any:
    return next(base for base in cls.__mro__ if _BUILTIN_ERRORS.get(f"builtins:{base.__name__}") is base)


def _state_of(error: BaseException) -> list[Any]:
    """Return args and attributes by the builtin base: the file name of an OSError, for instance, is not in its args."""
    _, args, *rest = _builtin_base(type(error)).__reduce__(error)
    state = dict(rest[0] or {}) if rest else {}
    if "__notes__" in state:  # those of an earlier hop are in the traceback's text; kept here, they would pile up
        state["__notes__"] = [note for note in state["__notes__"] if not str(note).startswith(_NOTE)]
    return [list(args), state]


def _rebuilt(cls: type[Exception], args: list[Any], state: Any, remote_traceback: str) -> Exception:
    base = _builtin_base(cls)
    error: Exception = base.__new__(cls, *args)
    base.__init__(error, *args)
    base.__setstate__(error, state)
    if isinstance(error, HoldfastError):
        _check_promises(error)
    error.add_note(f"{_NOTE}\n{remote_traceback}")
    return error


def _check_promises(error: HoldfastError) -> None:
    for cls, attributes in _PROMISED.items():
        if isinstance(error, cls) and not attributes <= vars(error).keys():
            raise NotDecodable(f"the stored {type(error).__name__} lacks some of {sorted(attributes)}")


def _clip(produce: Callable[[], str]) -> str:
    """Return the text, valid in UTF-8 and of at most `MAX_ERROR_TEXT_BYTES`: its head and tail are kept."""
    try:
        raw = produce().encode("utf-8", "backslashreplace")
    except BaseException as error:  # what an exception says of itself is user code
        return f"<no text: making it raised {type(error).__name__}>"
    if len(raw) <= MAX_ERROR_TEXT_BYTES:
        return raw.decode()
    half = MAX_ERROR_TEXT_BYTES // 2 - 50
    head, tail = raw[:half].decode("utf-8", "ignore"), raw[-half:].decode("utf-8", "ignore")
    return f"{head}\n… {len(raw) - 2 * half} bytes left out …\n{tail}"
