"""Values as people and programs get to see them.

What is stored comes from anywhere: a reason or an argument may hold line ends, terminal codes or characters that turn
the direction of text. Nothing of that reaches a terminal or a log as it is, and no value, however odd, may keep a
command from answering.
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
_URL = re.compile(r"[\w.+-]+://\S+")
_MOST_BITS = 10_000  # Python refuses to print much longer numbers in decimal
_LONGEST_SHOWN = 2_000


def printable(text: object) -> str:
    """The text on one line, with escapes for everything that a terminal would act upon instead of showing it."""
    line = str(text)
    return line if line.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in line)


def _escape(character: str) -> str:
    # Not "unicode_escape": it would escape a backslash too, and é.
    named = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character)
    code = ord(character)
    return named or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def without_secrets(text: str) -> str:
    """The text with *** for the passwords of URLs in it."""
    return _URL.sub(lambda url: mask_url(url[0]), text) if "://" in text else text


def described(value: object) -> str:
    """`repr`, but it never raises, ends somewhere, and stays on one line."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<a {type(value).__name__} that cannot be shown: {type(error).__name__}>"
    return printable(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}… ({len(text)} characters)")


def plain(value: Any) -> Any:
    """The value in the words of JSON; what JSON has no word for becomes text."""
    match value:
        case None | bool() | str():
            return value
        case int():
            return int(value) if value.bit_length() <= _MOST_BITS else hex(value)
        case float():
            return value if math.isfinite(value) else repr(value)
        case Mapping():
            return {key if isinstance(key, str) else described(key): plain(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(item) for item in value]
    try:
        return plain(msgspec.to_builtins(value, str_keys=True))
    except Exception:
        return described(value)


def as_json(value: object, *, indent: int | None = None) -> str:
    """One JSON document. Pure ASCII: valid in every locale, and nothing in it can move a cursor or forge a line."""
    return json.dumps(plain(value), ensure_ascii=True, indent=indent)


def value_line(value: object) -> str:
    """JSON on one line, for people too: é stays é, but nothing in it acts on a terminal."""
    text = json.dumps(plain(value), ensure_ascii=False)
    return text if text.isprintable() else as_json(value)


def told(error: BaseException) -> str:
    """What an error says, and then what was noted about it on its way: where it happened."""
    notes = getattr(error, "__notes__", ())
    return " ".join([sentence(str(error)), *notes]) if notes else str(error)


def sentence(text: str) -> str:
    """The text with a full stop, so that another sentence can follow."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def brief(text: str) -> str:
    """For a table, of which one line is to stay one line: the whole is told by ``show`` and with ``--json``."""
    return text if len(text) <= _BRIEF else f"{text[: _BRIEF - 1]}…"


def moment(at: float) -> str:
    """A time as ``2026-11-15T08:00:00.123Z``; a number that is no date stays a number."""
    try:
        time = dt.datetime.fromtimestamp(at, dt.UTC)
    except (ValueError, OverflowError, OSError):
        return f"{at:g}"
    return time.strftime("%Y-%m-%dT%H:%M:%S.") + f"{time.microsecond // 1000:03d}Z"


def length(seconds: float) -> str:
    """A length of time for people: in its two largest units, and in milliseconds only below a second."""
    if not math.isfinite(seconds):
        return f"{seconds:g}s"
    for small, large in ((60, 3600), (3600, 86_400), (86_400, 86_400 * 100)):  # from an hour on minutes, and so on
        if abs(seconds) >= large:
            seconds = round(seconds / small) * small
    return format_duration(round(seconds) if abs(seconds) >= 1 else seconds)
