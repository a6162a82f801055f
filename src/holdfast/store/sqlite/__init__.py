"""The SQLite store.

``sqlite:///shop.db`` is a file in the current folder, ``sqlite:////var/lib/shop.db`` an absolute path.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from holdfast.clock import Clock
from holdfast.errors import ConfigurationError, StoreUnavailable
from holdfast.masking import mask_url
from holdfast.store.contract import Observe
from holdfast.store.sqlite.paths import resolved
from holdfast.store.sqlite.schema import OLDEST_SQLITE
from holdfast.store.sqlite.store import SqliteStore


def open_sqlite(url: str, *, clock: Clock, observe: Observe, options: Mapping[str, Any]) -> SqliteStore:
    """Return the store of a ``sqlite:///`` URL. Options: ``synchronous`` ("full" or "normal"),
    ``busy_timeout_seconds``.
    """
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        oldest = ".".join(map(str, OLDEST_SQLITE))
        raise StoreUnavailable(f"Holdfast needs SQLite {oldest} or newer; this Python has {sqlite3.sqlite_version}.")
    return SqliteStore(
        named_by(url),
        clock=clock,
        observe=observe,
        synchronous=options.get("synchronous", "full"),
        busy_timeout_seconds=options.get("busy_timeout_seconds", 10.0),
    )


def path_of(url: str) -> Path:
    """Return the file of a URL, absolute and with its links resolved, so that every process finds the same locks
    beside it.
    """
    return resolved(named_by(url))


def named_by(url: str) -> Path:
    """Return the path in a URL, absolute, as the user wrote it."""
    rest = url.removeprefix("sqlite://")
    if not rest.startswith("/") or rest == "/":
        raise ConfigurationError(
            f"{mask_url(url)!r} names no file. A relative path has three slashes (sqlite:///shop.db), "
            "an absolute one four (sqlite:////var/lib/shop.db)."
        )
    if "?" in rest:
        raise ConfigurationError(
            f"{mask_url(url)!r}: a SQLite URL takes no parameters; "
            "use the settings sqlite_synchronous and sqlite_busy_timeout_seconds."
        )
    path = unquote(rest[1:])
    if path == ":memory:":
        raise ConfigurationError(
            "sqlite:///:memory: would be a file named ':memory:'; for a store in memory use memory://"
        )
    return Path(path).expanduser().absolute()
