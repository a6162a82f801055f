"""Values as people and programs get to see them: JSON, times, lengths of time, one line of harmless text.

Commands, log lines and the HTTP API share these, so that a time or a value looks the same in all of them. Stored text
comes from anywhere: a reason or an argument may hold line ends, terminal codes or characters that turn the direction
of text. None of that gets through as it is, and no value keeps an answer from being given.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.clock import format_duration
from holdfast.codec.payloads import Placeholder
from holdfast.codec.secret import Secret
from holdfast.masking import is_secret_name, mask_url

_BRIEF = 200  # characters
_DEEPEST = 50
_URL = re.compile(r"[\w.+-]{1,40}://\S+")  # a scheme without a bound would take quadratic time on a long word
_TOKEN = re.compile(r"(hf_[a-z2-7]{8}_)[A-Za-z0-9_-]{43}")
_MAX_BITS = 10_000  # Python refuses to print much longer numbers in decimal
_LONGEST_SHOWN = 2_000


def printable(text: object) -> str:
    """Return the text on one line, with escapes for everything that a terminal would act upon."""
    line = str(text)
    return line if line.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in line)


def _escape(character: str) -> str:
    # Not "unicode_escape": it would escape a backslash too, and é.
    named = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character)
    code = ord(character)
    return named or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def without_secrets(text: str) -> str:
    """Return the text with *** for the passwords of URLs and the secrets of access tokens in it."""
    if "hf_" in text:
        text = _TOKEN.sub(r"\1***", text)
    return _URL.sub(lambda url: mask_url(url[0]), text) if "://" in text else text


def at_least(number: int, most: int) -> str:
    """Return a number that was counted up to `most`, and one more."""
    return f"over {most:,}" if number > most else f"{number:,}"


def indented(text: str, margin: str = "  | ") -> str:
    return "\n".join(f"{margin}{printable(line)}" for line in without_secrets(text).rstrip("\n").split("\n"))


def describe(value: object) -> str:
    """Return `repr`, but never raise, never get too long, and stay on one line."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<a {type(value).__name__} that cannot be shown: {type(error).__name__}>"
    return printable(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}… ({len(text)} characters)")


HIDDEN = Placeholder("***")


def without_named(value: Any, name: object = "", depth: int = 0) -> Any:
    """Return a value with *** for texts and bytes in it whose names say that they are secret, in fields of objects too.
    A value without such names is returned as it is.
    """
    if depth > _DEEPEST:
        return value
    if isinstance(value, str | bytes | bytearray):
        return HIDDEN if value and is_secret_name(name) else value
    fields = _named_parts(value)
    if fields is None:
        return value
    below = {key: without_named(part, name if is_secret_name(name) else key, depth + 1) for key, part in fields.items()}
    changed = {key: part for key, part in below.items() if part is not fields[key]}
    return _with_parts(value, below, changed) if changed else value


def _named_parts(value: Any) -> Mapping[Any, Any] | None:
    """Return the parts of a container or object by key or name; None of any other value."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, msgspec.Struct):
        return {name: getattr(value, name) for name in value.__struct_fields__ if hasattr(value, name)}
    own = getattr(value, "__dict__", None)
    if (
        own
        and not isinstance(value, type)
        and (dataclasses.is_dataclass(value) or hasattr(type(value), "model_fields"))
    ):
        return dict(own)
    return None


def _with_parts(value: Any, below: Mapping[Any, Any], changed: Mapping[Any, Any]) -> Any:
    if isinstance(value, Mapping):
        return dict(below)
    if isinstance(value, tuple) and (replaced := getattr(value, "_replace", None)) is not None:
        return replaced(**changed)
    if isinstance(value, list | tuple):
        return type(value)(below.values())
    try:
        hidden = copy.copy(value)
        for name, part in changed.items():
            if isinstance(value, msgspec.Struct):
                msgspec.structs.force_setattr(hidden, name, part)
            else:
                hidden.__dict__[name] = part
    except Exception:
        return Placeholder(f"<a {type(value).__name__} with secrets>")
    return hidden


def leaves(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the values in containers and in fields of objects, down to a depth."""
    fields = None if depth > _DEEPEST else _named_parts(value)
    if fields is None:
        yield value
    else:
        for part in fields.values():
            yield from leaves(part, depth + 1)


def call_without_named(
    args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call, as they may be shown; `names` are those of its parameters."""
    named = [*names, *[""] * (len(args) - len(names))]
    shown = [without_named(value, name) for value, name in zip(args, named, strict=False)]
    return shown, {name: without_named(value, name) for name, value in kwargs.items()}


def plain(value: Any) -> Any:
    """Return the value in the types of JSON; other types become text."""
    match value:
        case Secret():
            return str(value)
        case None | bool() | str():
            return value
        case int():
            return int(value) if value.bit_length() <= _MAX_BITS else hex(value)
        case float():
            return value if math.isfinite(value) else repr(value)
        case Mapping():
            return {key if isinstance(key, str) else describe(key): plain(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(item) for item in value]
    try:
        return plain(msgspec.to_builtins(value, str_keys=True))
    except Exception:
        return describe(value)


def as_json(value: object, *, indent: int | None = None) -> str:
    """Return a JSON document in ASCII: valid in every locale, and nothing in it can move a cursor or forge a line."""
    return json.dumps(plain(value), ensure_ascii=True, indent=indent)


def value_line(value: object) -> str:
    """Return JSON on one line, for people too: é stays é, but nothing in it acts on a terminal."""
    text = json.dumps(plain(value), ensure_ascii=False)
    return text if text.isprintable() else as_json(value)


def fields(record: Any, *names: str) -> dict[str, Any]:
    """Return these fields of a stored record for a document, all if none is named; times as text."""
    return {name: _field(name, getattr(record, name)) for name in names or record.__struct_fields__}


def _field(name: str, value: object) -> object:
    is_time = name.rpartition("_")[2] in ("at", "until", "since")
    return moment(value) if is_time and isinstance(value, float | int) else value


def error_text(error: BaseException) -> str:
    """Return the message of an error with its notes, which say where it happened."""
    notes = getattr(error, "__notes__", ())
    return " ".join([sentence(str(error)), *notes]) if notes else str(error)


def sentence(text: str) -> str:
    """Return the text with a full stop, so that another sentence can follow."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def brief(text: str, longest: int = _BRIEF) -> str:
    """Cut a text for a list; ``show`` and ``--json`` have the whole."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def moment(at: float) -> str:
    """Return a time as ``2026-11-15T08:00:00.123Z``; a number that is no date stays a number."""
    try:
        time = dt.datetime.fromtimestamp(at, dt.UTC)
    except (ValueError, OverflowError, OSError):
        return f"{at:g}"
    return time.strftime("%Y-%m-%dT%H:%M:%S.") + f"{time.microsecond // 1000:03d}Z"


def length(seconds: float) -> str:
    """Return a duration for people: in its two largest units, and in milliseconds only below a second."""
    if not math.isfinite(seconds):
        return f"{seconds:g}s"
    for small, large in ((60, 3600), (3600, 86_400), (86_400, 86_400 * 100)):  # from an hour on minutes, and so on
        if abs(seconds) >= large:
            seconds = round(seconds / small) * small
    return format_duration(round(seconds) if abs(seconds) >= 1 else seconds)
