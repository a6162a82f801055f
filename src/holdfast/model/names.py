"""Rules for the names of queues, tags, tasks and apps; numbers with their nouns."""

from __future__ import annotations

from holdfast.errors import UsageError

_FORBIDDEN = frozenset("|,\0\n\r\t ")


def valid_name(what: str, name: str) -> str:
    """Return a name of a queue, tag or task. A few characters are refused, since names end up in lanes, files and log
    lines.
    """
    if not isinstance(name, str) or not name or len(name) > 200 or _FORBIDDEN & set(name) or not name.isprintable():
        raise UsageError(
            f"{name!r} is no name for a {what}: 1 to 200 characters, without spaces, commas and vertical bars"
        )
    return name


def unversioned(name: str) -> str:
    """Return the name of a workflow without its version: ``shop:checkout`` of ``shop:checkout@2``."""
    return name.partition("@")[0]


CORE = "~core"


def core_app(app: str) -> str:
    """Return the app of an app's core tasks: a separate one, so that no list and no count has them."""
    return app + CORE


def is_core(app: str) -> bool:
    return app.endswith(CORE)


def counted(number: int, what: str) -> str:
    """Return a number with its noun: ``1 byte``, ``2 bytes``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def valid_key(name: str, key: str) -> str:
    """Return a caller's key. It has to be a text that every store can hold."""
    if not isinstance(key, str) or not 0 < len(key) <= 1000:
        raise UsageError(f"{name}={key!r:.80}: expected a text of 1 to 1,000 characters")
    if any("\ud800" <= character <= "\udfff" for character in key):
        raise UsageError(f"{name}={key!r:.80}: it contains a lone surrogate, which UTF-8 cannot hold")
    return key
