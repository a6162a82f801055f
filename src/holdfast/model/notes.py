"""Notes: what the code of an invocation says of itself while it runs. They lie on its record, and are bounded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import index
from typing import Annotated, SupportsIndex

import msgspec

from holdfast.errors import NotEncodable, UsageError
from holdfast.model.decoding import Count, Moment, Number

MAX_ATTRIBUTES = 64
MAX_ATTRIBUTE_CHARACTERS = 256
MAX_MESSAGE_CHARACTERS = 200
MAX_LINES, MAX_LINE_CHARACTERS, MAX_LOG_CHARACTERS, MAX_NAME_CHARACTERS = 200, 500, 32_000, 100
_LARGEST = 2**53  # to which every store counts
Amount = Number | Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]


class CallProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far an attempt has come: `current` of `total`, if that is known; of what, says the `message`."""

    current: Amount = msgspec.field(name="c")
    total: Amount | None = msgspec.field(name="n", default=None)
    message: str = msgspec.field(name="m", default="")
    at: Moment = msgspec.field(name="t", default=0.0)
    attempt: Count = msgspec.field(name="a", default=1)

    @property
    def fraction(self) -> float | None:
        """Return how much is done, from 0 to 1; None without a total."""
        if not self.total:
            return None
        return min(1.0, max(0.0, self.current / self.total))

    def __str__(self) -> str:
        of = "" if self.total is None else f" of {_number(self.total)}"
        part = "" if self.fraction is None else f" ({math.floor(self.fraction * 100)}%)"
        said = f" {self.message}" if self.message else ""
        return f"{_number(self.current)}{of}{said}{part}"


class LogLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line that an attempt has logged."""

    at: Moment = msgspec.field(name="t")
    level: str = msgspec.field(name="l")
    text: str = msgspec.field(name="m")
    logger: str = msgspec.field(name="o", default="")
    attempt: Count = msgspec.field(name="a", default=1)

    @property
    def size(self) -> int:
        return len(self.text) + len(self.logger) + 64


class Notes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What attempts have said: progress, a value for the next attempt (encoded), and the last log lines."""

    progress: CallProgress | None = None
    checkpoint: bytes | None = None
    checkpoint_at: Moment | None = None
    log: tuple[LogLine, ...] = ()


NO_NOTES = Notes()


def progress_of(current: object, total: object, message: object, *, at: float, attempt: int) -> CallProgress:
    """Return the progress that these mean. Raises `UsageError` for what no number is."""
    if not isinstance(message, str):
        raise UsageError(f"progress(message={message!r:.80}): expected a text")
    counted, whole = _counted("current", current), None if total is None else _counted("total", total)
    if whole is not None and whole < 0:
        raise UsageError(f"progress(total={total!r:.80}): expected 0 or more, or None where it is not known")
    said = cut(message, MAX_MESSAGE_CHARACTERS)
    return CallProgress(current=counted, total=whole, message=said, at=at, attempt=attempt)


def _counted(name: str, given: object) -> Amount:
    if isinstance(given, float):
        number: Amount = float(given)
    elif isinstance(given, SupportsIndex) and not isinstance(given, bool):
        number = index(given)
    else:
        raise UsageError(f"progress({name}={given!r:.80}): expected a number")
    if not (abs(number) <= _LARGEST):  # nor is it if it is no number at all
        raise UsageError(f"progress({name}={given!r:.80}): expected a number that can be counted to")
    return number


def _number(number: Amount) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,.10g}"


def cleaned(text: str) -> str:
    """Return a text as every store can hold it: characters that none can are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def cut(text: str, longest: int) -> str:
    """Return a text as it is kept: a long one is cut."""
    return cleaned(text if len(text) <= longest else f"{text[:longest]}…")


def last_lines(lines: Sequence[LogLine], count: int) -> tuple[LogLine, ...]:
    """Return as many of the last lines as are kept."""
    kept: list[LogLine] = []
    size = 0
    for line in reversed(lines[-count:] if count else ()):
        size += line.size
        if size > MAX_LOG_CHARACTERS and kept:
            break
        kept.append(line)
    return tuple(reversed(kept))


def check_attributes(there: Mapping[str, str], changes: Mapping[str, object]) -> None:
    """Raise `UsageError` unless these may be attributes of an invocation."""
    for name, value in changes.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_ATTRIBUTE_CHARACTERS or "=" in name:
            raise UsageError(f"{name!r:.80}: the name of an attribute has 1 to 256 characters and no '='")
        if not isinstance(value, str) or not 0 < len(value) <= MAX_ATTRIBUTE_CHARACTERS:
            raise UsageError(
                f"{name}={value!r:.80}: an attribute is a text of 1 to {MAX_ATTRIBUTE_CHARACTERS} characters"
            )
        if cleaned(name + value) != name + value or "\0" in name + value:  # SQLite cuts texts in JSON at U+0000
            raise NotEncodable(f"{name!r:.80}={value!r:.80}: an attribute has a character that no store can hold")
    if (count := len({*there, *changes})) > MAX_ATTRIBUTES:
        raise UsageError(f"an invocation has at most {MAX_ATTRIBUTES} attributes, and these would be {count}")
