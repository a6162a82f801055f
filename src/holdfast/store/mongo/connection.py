"""Clients: one per connection settings, event loop and process.

A client belongs to the loop and to the process that made it: a forked child finds another pid and makes its own.
Clients are counted; the last `release` closes. Nothing is connected before the first operation, and a failed first
connection leaves nothing behind that would be remembered.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from pymongo import AsyncMongoClient
from pymongo.errors import ConfigurationError as DriverConfigurationError
from pymongo.errors import InvalidURI
from pymongo.uri_parser import parse_uri

from holdfast.errors import ConfigurationError

DEFAULT_DATABASE = "holdfast"

# What a URL may override. Write concern, read concern and read preference are the store's, and it may not.
_DEFAULTS: Mapping[str, Any] = {
    "appname": "holdfast",
    "maxPoolSize": 100,
    "serverSelectionTimeoutMS": 5_000,
    "connectTimeoutMS": 5_000,
    "socketTimeoutMS": 20_000,
}


class Shared:
    """A client and how many stores use it. It keeps the loop alive, so that no other one gets the same id."""

    def __init__(self, client: AsyncMongoClient[dict[str, Any]]) -> None:
        self.client = client
        self.loop = asyncio.get_running_loop()
        self.users = 0


_clients: dict[tuple[str, int, int], Shared] = {}


def _key(url: str) -> tuple[str, int, int]:
    return (url, id(asyncio.get_running_loop()), os.getpid())


def acquire(url: str) -> AsyncMongoClient[dict[str, Any]]:
    """The client for this URL on this loop in this process."""
    key = _key(url)
    if key not in _clients:
        _clients[key] = Shared(_make(url))
    shared = _clients[key]
    shared.users += 1
    return shared.client


async def release(url: str) -> None:
    key = _key(url)
    shared = _clients.get(key)
    if shared is None:
        return
    shared.users -= 1
    if shared.users <= 0:
        del _clients[key]
        await shared.client.close()


def _make(url: str) -> AsyncMongoClient[dict[str, Any]]:
    lower = url.lower()
    options = {name: value for name, value in _DEFAULTS.items() if f"{name.lower()}=" not in lower}
    try:
        return AsyncMongoClient(url, tz_aware=True, **options)
    except (InvalidURI, DriverConfigurationError, ValueError, OSError) as error:  # the last: a TLS file is missing
        raise ConfigurationError(f"this MongoDB URL cannot be used: {_without_secrets(str(error), url)}") from None


def database_name(url: str) -> str:
    """The database that the URL names, else `holdfast`."""
    path = url.partition("://")[2].partition("?")[0].partition("/")[2]
    if "@" in path:
        # The driver would take the rest of the password for the database, and messages would show it.
        raise ConfigurationError("this MongoDB URL cannot be used: a '/' in a user name or password is written %2F")
    if url.startswith("mongodb+srv://"):
        # Parsing one would ask the name server; its path is all that is wanted here.
        return unquote(path).partition(".")[0] or DEFAULT_DATABASE
    try:
        return parse_uri(url, validate=False, warn=False)["database"] or DEFAULT_DATABASE
    except (InvalidURI, DriverConfigurationError, ValueError) as error:
        raise ConfigurationError(f"this MongoDB URL cannot be used: {_without_secrets(str(error), url)}") from None


def _without_secrets(message: str, url: str) -> str:
    """The driver may quote the URL, and with it the password."""
    secret = url.partition("://")[2].rpartition("@")[0]
    return message.replace(secret, "***") if secret else message
