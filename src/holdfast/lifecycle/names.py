"""What a queue, a tag, a task or an app may be called, and how many of a thing are named."""

from __future__ import annotations

from holdfast.errors import UsageError

_FORBIDDEN = frozenset("|,\0\n\r\t ")


def valid_name(what: str, name: str) -> str:
    """Queue, tag and task names end up in one string (the lane) and in file and log lines, so a few characters are
    kept out.
    """
    if not isinstance(name, str) or not name or len(name) > 200 or _FORBIDDEN & set(name) or not name.isprintable():
        raise UsageError(
            f"{name!r} is no name for a {what}: 1 to 200 characters, without spaces, commas and vertical bars"
        )
    return name


def counted(number: int, what: str) -> str:
    """``1 byte``, ``2 bytes``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
