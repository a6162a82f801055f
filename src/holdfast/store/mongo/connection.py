"""Clients: one per connection settings, event loop and process; apps of a process share a loop (`runtime.app_runtime`).

A client belongs to the loop and to the process that made it: a forked child finds another pid and makes its own.
Clients are counted; the last `release` closes. Nothing is connected before the first operation, and a failed first
connection leaves nothing behind.

The URL is checked before the driver gets it: the driver only warns of an unknown option or an unusable value and goes
on without it, so that a misspelt ``tls`` would be found in production. No message quotes a possible password or a part
of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import os
import re
import warnings
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import quote_plus, unquote_plus

from bson.codec_options import CodecOptions, DatetimeConversion
from pymongo import AsyncMongoClient, MongoClient
from pymongo.common import URI_OPTIONS_VALIDATOR_MAP
from pymongo.errors import ConfigurationError as DriverConfigurationError
from pymongo.errors import InvalidURI, PyMongoError
from pymongo.uri_parser import validate_options
from pymongo.uri_parser_shared import URI_OPTIONS

from holdfast.errors import ConfigurationError

T = TypeVar("T")

DEFAULT_DATABASE = "holdfast"
_ASK_MILLISECONDS = 500
_RELEASE_SECONDS = 5.0

# What a URL may override. Write concern, read concern and read preference are the store's, and it may not.
_DEFAULTS: Mapping[str, Any] = {
    "appname": "holdfast",
    "maxPoolSize": 100,
    "serverSelectionTimeoutMS": 5_000,
    "connectTimeoutMS": 5_000,
    "socketTimeoutMS": 20_000,
}


# A text that is not UTF-8, or a date beyond all calendars, would make the driver refuse a whole answer: one damaged
# document would hide all others. So it is read as far as it goes, and the decoder of records judges it.
LENIENT: CodecOptions[dict[str, Any]] = CodecOptions(
    tz_aware=True, unicode_decode_error_handler="backslashreplace", datetime_conversion=DatetimeConversion.DATETIME_AUTO
)


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
    """Return the client for this URL on this loop in this process."""
    key = _key(url)
    if key not in _clients:
        _clients[key] = Shared(_make(url))
    shared = _clients[key]
    shared.users += 1
    return shared.client


def acquired(url: str) -> AsyncMongoClient[dict[str, Any]]:
    """Return the client of this loop that the caller has acquired before."""
    return _clients[_key(url)].client


async def release(url: str) -> None:
    key = _key(url)
    shared = _clients.get(key)
    if shared is None:
        return
    shared.users -= 1
    if shared.users <= 0:
        del _clients[key]
        await shared.client.close()


async def release_elsewhere(url: str, loop: asyncio.AbstractEventLoop) -> None:
    """Release the client of another loop. A loop that is closed has let go of it."""
    shared = _clients.get((url, id(loop), os.getpid()))
    if shared is None or loop is asyncio.get_running_loop():
        return await release(url)
    if loop.is_running():
        with contextlib.suppress(TimeoutError, RuntimeError):  # it has just ended
            releasing = asyncio.run_coroutine_threadsafe(release(url), loop)
            await asyncio.wait_for(asyncio.wrap_future(releasing), _RELEASE_SECONDS)
            return
    _clients.pop((url, id(loop), os.getpid()), None)


@asynccontextmanager
async def borrowed(url: str) -> AsyncIterator[AsyncMongoClient[dict[str, Any]]]:
    """Yield the client, and release it afterwards."""
    client = acquire(url)
    try:
        yield client
    finally:
        await release(url)


def named(url: str, application: str) -> str:
    """Return the URL with this name of the application."""
    head = url.partition("?")[0]
    options = [f"{name}={value}" for name, value in _pairs(url) if name.lower() != "appname"]
    return f"{head}{'' if '/' in _rest(head) else '/'}?" + "&".join([*options, f"appName={quote_plus(application)}"])


def make_blocking(url: str) -> MongoClient[dict[str, Any]]:
    """Return a client for threads. The caller closes it."""
    return _made(MongoClient, url)


def _make(url: str) -> AsyncMongoClient[dict[str, Any]]:
    return _made(AsyncMongoClient, url)


def _made(kind: Callable[..., T], url: str) -> T:
    _refuse_oddhosts_of(url)
    given = _checked_options(url)
    defaults = {name: value for name, value in _DEFAULTS.items() if name.lower() not in given}
    try:
        return kind(url, tz_aware=True, **defaults)
    except (InvalidURI, DriverConfigurationError, ValueError, OSError) as error:
        raise _unusable(_quotable(str(error), url)) from None


def database_name(url: str) -> str:
    """Return the database that the URL names, else `holdfast`.

    The driver's parser is not used: it asks the name server about a ``mongodb+srv://`` URL.
    """
    path = _rest(url).partition("?")[0].partition("/")[2]
    if "@" in path:
        # The driver would take the rest of the password for the database, and messages would show it.
        raise _unusable("a '/' in a user name or password is written %2F")
    name = unquote_plus(path).partition(".")[0]
    if re.search(r"[/\\ \"$]", name):
        raise _unusable("the name of a database has no slash, blank, quote or dollar sign")
    return name or DEFAULT_DATABASE


def user_name(url: str) -> str:
    """Return the user that the URL names; empty if it names none, or not plainly."""
    user = re.fullmatch(r"([\w.%+-]+)(?::[^:@/?]*)?@[^@]*", _rest(url))
    return unquote_plus(user[1]) if user else ""


async def wrong_set_name(url: str) -> str:
    """Return advice if the server belongs to another replica set than the URL says, else an empty text.

    The driver drops such a server and goes on looking, so the server is asked here, without a password.
    """
    given = next((unquote_plus(value) for name, value in _pairs(url) if name.lower() == "replicaset"), None)
    host = hosts_of(url).partition(",")[0]
    if given is None or not url.startswith("mongodb://"):
        return ""
    tls = "&".join(f"{name}={value}" for name, value in _pairs(url) if name.lower().startswith(("tls", "ssl")))
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(
        f"mongodb://{host}/?{tls}",
        directConnection=True,
        serverSelectionTimeoutMS=_ASK_MILLISECONDS,
        connectTimeoutMS=_ASK_MILLISECONDS,
    )
    try:
        async with client:
            found = (await client.admin.command("hello")).get("setName")
    except (PyMongoError, OSError):
        return ""
    if found is None:
        return f" The server at {host} belongs to no replica set: leave replicaSet={given} out of the URL."
    if found != given:
        return f" The replica set at {host} is called {found}, and the URL says replicaSet={given}."
    return ""


# --- TLS

_UNCHECKED = frozenset({"tlsinsecure", "tlsallowinvalidcertificates", "tlsallowinvalidhostnames"})
_CERTIFICATES = {  # what OpenSSL says of a certificate, and what to do
    "has expired": "The certificate of the server has expired: renew it.",
    "not yet valid": "The certificate of the server is not valid yet: compare the clocks of both hosts.",
    "mismatch": "The certificate of the server is for another host: name the server as its certificate does.",
    "issuer": "Name the CA of the server's certificate in the URL: tlsCAFile=….",
    "self-signed": "Name the CA of the server's certificate in the URL: tlsCAFile=….",
}


def unchecked_option(url: str) -> str:
    """Return the option by which any server is taken for the right one; empty if the URL has none."""
    return next((_spelled(name) for name, value in _pairs(url) if _is_unchecked(name, value)), "")


def _is_unchecked(name: str, value: str) -> bool:
    return name.lower() in _UNCHECKED and unquote_plus(value) == "true"


def tls_advice(said: str) -> str:
    """Return what to do about a certificate that was refused, or a server without TLS; empty if it is another error."""
    if said.startswith("SSL handshake failed"):
        return " What listens there may have no TLS."
    _, refused, why = said.lower().partition("certificate verify failed: ")
    return next((f" {advice}" for reason, advice in _CERTIFICATES.items() if refused and reason in why), "")


# --- looking a URL over


def _rest(url: str) -> str:
    return url.partition("://")[2]


def hosts_of(url: str) -> str:
    """Return the hosts of a URL, for messages: no user, no password, no options."""
    return re.split(r"[/?]", _rest(url))[0].rpartition("@")[2]


def _unusable(why: str) -> ConfigurationError:
    return ConfigurationError(f"this MongoDB URL cannot be used: {why}{'' if why.endswith('?') else '.'}")


def _refuse_oddhosts_of(url: str) -> None:
    """Refuse hosts that may be a user and a password without their "@": the driver would quote them."""
    if any("%" in host for host in hosts_of(url).split(",") if not host.startswith("[") and not host.endswith(".sock")):
        raise _unusable("a host's name has no '%'; after a user name and password there is an '@' before the hosts")


def _quotable(message: str, url: str) -> str:
    """Return the driver's message, unless it contains a part of a possible secret."""
    userinfo = _rest(url).rpartition("@")[0]
    options = [value for name, value in _pairs(url) if name.lower() in _SECRET or "@" in value]
    secrets = {userinfo, *userinfo.split(":")[1:], *options} - {""}
    if any(secret in message or unquote_plus(secret) in message for secret in secrets):
        return "it is written mongodb://user:password@host:port/database?option=value&option=value"
    return message.rstrip(".")


_KNOWN = frozenset(URI_OPTIONS_VALIDATOR_MAP)
_SPELLED = {name.lower(): name for name in URI_OPTIONS}  # the driver knows the others in small letters only
_SECRET = frozenset({"authmechanismproperties", "tlscertificatekeyfilepassword"})
_UNNAMED = (
    "it has an option that is not known, or whose value is not allowed. It is not named here, because it may be part "
    "of a password or of a secret option: there '@', '/', '?', '&' and '=' are written %40, %2F, %3F, %26 and %3D"
)


def _pairs(url: str) -> list[tuple[str, str]]:
    """Return the options as they are written."""
    query = _rest(url).partition("?")[2]
    pieces = [piece.partition("=") for piece in query.split("&" if "&" in query else ";")] if query else []
    return [(name, value) for name, _, value in pieces]


def _checked_options(url: str) -> set[str]:
    """Return the names of the URL's options, in small letters. Raises for the first that the driver would leave out."""
    pairs = _pairs(url)
    # Before an "@", and behind a secret, what looks like an option may be a piece of a secret.
    doubtful = any("@" in name or ("@" in value and name.lower() != "appname") for name, value in pairs)
    seen: set[str] = set()
    for name, value in pairs:
        option = name.lower()
        if complaint := _complaint(name, value, seen):
            raise _unusable(_UNNAMED if doubtful else complaint)
        seen.add(option)
        doubtful = doubtful or option in _SECRET
    return seen


def _complaint(name: str, value: str, seen: set[str]) -> str:
    """Return the fault of an option and the allowed values, or an empty text."""
    option = name.lower()
    if not name or "=" in value:
        return "options are written name=value, with '&' between them"
    if option not in _KNOWN:
        near = difflib.get_close_matches(option, _KNOWN, n=1)
        known = ", ".join(sorted(map(_spelled, _KNOWN), key=str.lower))
        return f"there is no option {name}. " + (f"Did you mean {_spelled(near[0])}?" if near else f"There are {known}")
    if option in seen and option != "readpreferencetags":
        return f"the option {name} is given twice"
    refusal = _refusal(name, value if option == "authmechanismproperties" else unquote_plus(value))
    if refusal and option in _SECRET:
        return f"the value of {name} is not allowed; it is written NAME:value,NAME:value"
    return f"the option {name} does not take this value: {refusal}" if refusal else ""


def _refusal(option: str, value: str) -> str:
    """Return why the driver does not take this value, or an empty text."""
    try:
        if option.lower() != "compressors":
            validate_options({option: value})
            return ""
        with warnings.catch_warnings(record=True) as warned:  # the only one of which it warns in any case
            warnings.simplefilter("always")
            validate_options({option: value})
        return f"{warned[0].message} There are zlib, zstd and snappy" if warned else ""
    except OSError as error:
        return f"{error.strerror}: {value}"
    except (ValueError, TypeError, KeyError, DriverConfigurationError) as error:
        return str(error).rstrip(".")


def _spelled(option: str) -> str:
    return _SPELLED.get(option, option)
