"""One decoder for every stored record.

What a record may hold is said once, by the types of its fields: `Moment`, `Count` and the like are numbers with bounds,
and msgspec checks type and bounds of each field while it decodes, before anything is made of them. A field that is
added to a record is checked by that alone. Nested data is looked over first, without recursion: how large it is, and
how deep.

Whatever goes wrong, MemoryError and RecursionError included, becomes a `CorruptRecord` that names kind, id, field and
reason. The stores quarantine what raises it, and go on with the rest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from holdfast.clock import TOO_LATE
from holdfast.errors import CorruptRecord

T = TypeVar("T")

# From 1653 to the end of 9999: every calendar can show it.
EARLIEST, LATEST = -10_000_000_000.0, math.nextafter(TOO_LATE, 0)
_LARGEST_NUMBER = 2**53
_LONGEST_SECONDS = 1e15
DEEPEST = 100
LARGEST_TEXT = 64 * 2**20
_LONGEST_REASON = 500

Moment = Annotated[float, Meta(ge=EARLIEST, le=LATEST)]
Seconds = Annotated[float, Meta(ge=-_LONGEST_SECONDS, le=_LONGEST_SECONDS)]
Count = Annotated[int, Meta(ge=0, le=_LARGEST_NUMBER)]
Number = Annotated[int, Meta(ge=-_LARGEST_NUMBER, le=_LARGEST_NUMBER)]

INVOCATION, RUNNER, EXECUTION, PAUSE, PAYLOAD, PIECE = "invocation", "runner", "execution", "pause", "payload", "piece"
PAGE = "page"  # of the log of a run
RATE = "rate"


def ahead(at: float, seconds: float) -> float:
    """Return the moment `seconds` ahead, or the last moment that can be stored."""
    return min(at + seconds, LATEST)


def corrupt(kind: str, id: object, error: Exception) -> CorruptRecord:
    """Return what to raise for a record that could not be decoded, whatever the reason."""
    if isinstance(error, CorruptRecord):
        return error
    reason = shown(str(error))
    if isinstance(error, KeyError):
        reason = f"the field {reason} is missing"
    elif not reason:
        reason = type(error).__name__
    elif isinstance(error, MemoryError | RecursionError | OverflowError):
        reason = f"{type(error).__name__}: {reason}"
    field = _FIELD.search(reason)
    name = shown(id)
    subject = f"the stored invocation {name}" if kind == INVOCATION else f"the {kind} '{name}'"
    message = f"{subject} cannot be read: {reason}"
    return CorruptRecord(message, kind=kind, id=name, field=field[1] if field else "", reason=reason)


_FIELD = re.compile(r"at `\$\.?([^`]*)`|(?<=field ')\w+")


def shown(value: object) -> str:
    """Return a text that every store can hold and every terminal can show."""
    text = value if isinstance(value, str) else repr(value)
    whole = text[:_LONGEST_REASON].encode("utf-8", "backslashreplace").decode()
    return whole if len(text) <= _LONGEST_REASON else f"{whole}…"


class JsonDecoder(Generic[T]):
    """Decodes JSON of one type that is neither too large nor too deep. Raises any exception."""

    def __init__(self, type: Any) -> None:
        self._decode = msgspec.json.Decoder(type).decode

    def decode(self, data: str | bytes) -> T:
        if len(data) > DEEPEST:
            check_json(data)
        return self._decode(data)  # type: ignore[no-any-return]


def check_json(data: str | bytes) -> None:
    """Raise ValueError for JSON that is too large or too deep. Text without many brackets costs two counts."""
    if len(data) > LARGEST_TEXT:
        raise ValueError(f"it has {len(data):,} characters, and {LARGEST_TEXT:,} are allowed")
    if isinstance(data, str):
        if data.count("{") + data.count("[") > DEEPEST:
            _check_depth(data)
    elif data.count(b"{") + data.count(b"[") > DEEPEST:
        _check_depth(str(data, "utf-8"))


def _check_depth(text: str) -> None:
    depth = 0
    for bracket in _BRACKET.finditer(text):
        mark = bracket[0]
        if mark in "{[":
            depth += 1
            if depth > DEEPEST:
                raise ValueError(f"it is nested more than {DEEPEST} deep")
        elif mark in "}]":
            depth -= 1


_BRACKET = re.compile(r'[\[\]{}]|"(?:[^"\\]|\\.)*+"', re.DOTALL)  # a text is skipped whole, with what is in it
_anything = msgspec.json.Decoder(msgspec.Raw)


def check_body(body: object) -> bytes:
    """Return the body of an entry if it is JSON in UTF-8, neither too large nor too deep."""
    if not isinstance(body, bytes):
        raise TypeError(f"Expected `bytes`, got `{type(body).__name__}` - at `$.body`")
    try:
        check_json(body)
        if not body.isascii():
            str(body, "utf-8")
        _anything.decode(body)
    except Exception as error:
        raise ValueError(f"{shown(str(error)) or type(error).__name__} - at `$.body`") from error
    return body


def check_plain(value: object, field: str) -> None:
    """Raise unless a value of any type is plain data, not too deep. Works without recursion."""
    level: list[object] = [value]
    for _ in range(DEEPEST):
        deeper: list[object] = []
        for each in level:
            if isinstance(each, Mapping):
                deeper += each.keys()
                deeper += each.values()
            elif isinstance(each, list | tuple):
                deeper += each
            elif each is not None and not isinstance(each, str | int | float | bool):
                raise TypeError(f"{type(each).__name__} is no plain value - at `$.{field}`")
        if not deeper:
            return
        level = deeper
    raise ValueError(f"it is nested more than {DEEPEST} deep - at `$.{field}`")
