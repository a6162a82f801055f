"""Values as people and programs get to see them: JSON, times, lengths of time, one line of harmless text.

Commands, log lines and the HTTP API share these, so that a time or a value looks the same in all of them. Stored text
comes from anywhere: a reason or an argument may hold line ends, terminal codes or characters that turn the direction
of text. None of that gets through as it is, and no value keeps an answer from being given.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.clock import format_duration
from holdfast.masking import mask_url

_BRIEF = 200  # characters
_URL = re.compile(r"[\w.+-]{1,40}://\S+")  # a scheme without a bound would take quadratic time on a long word
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
    """Return the text with *** for the passwords of URLs in it."""
    return _URL.sub(lambda url: mask_url(url[0]), text) if "://" in text else text


def indented(text: str, margin: str = "  | ") -> str:
    return "\n".join(f"{margin}{printable(line)}" for line in without_secrets(text).rstrip("\n").split("\n"))


def describe(value: object) -> str:
    """Return `repr`, but never raise, never get too long, and stay on one line."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<a {type(value).__name__} that cannot be shown: {type(error).__name__}>"
    return printable(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}… ({len(text)} characters)")


def plain(value: Any) -> Any:
    """Return the value in the types of JSON; other types become text."""
    match value:
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
