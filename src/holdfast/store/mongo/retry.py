"""Retries of operations while MongoDB is away for a moment.

An error is *transient* or *final*. Transient are a network failure, an election, a node that shuts down, and a dropped
index that is made again. So is a write whose majority did not answer in time: its outcome is unknown, and repeating it
with the same operation id finds out. The pauses between attempts double, with jitter. `Retrier.ask` is the only way
from the store to the driver, and it takes whole units of work, cursors included. Only hints and their stream bypass it
(`holdfast.store.mongo.hints`); a test enumerates the calls.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from bson.errors import BSONError
from pymongo.errors import (
    BulkWriteError,
    ConfigurationError,
    ConnectionFailure,
    CursorNotFound,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
    WaitQueueTimeoutError,
    WriteConcernError,
)

from holdfast.clock import Clock
from holdfast.errors import StoreError, StoreFull, StoreReadOnly, StoreUnauthorised, StoreUnavailable
from holdfast.store.contract import Observe
from holdfast.store.mongo import connection

T = TypeVar("T")

# Server errors that pass by themselves, or after which the outcome is unknown.
TRANSIENT_CODES = frozenset(
    {
        *(6, 7, 89, 202, 9001),  # the network: host unreachable or not found, timeouts, sockets
        *(24, 50, 112, 262, 365),  # load: lock and time limits, write conflicts, a full cache
        *(43, 134, 175, 234, 237, 246),  # cursors, plans, streams and snapshots that are gone or not there yet
        *(91, 11600, 11601, 11602),  # the server shuts down, or an operator ended the operation
        *(133, 150, 189, 10107, 13435, 13436),  # elections: no primary, or not this node
        *(64, 16500),  # the majority did not answer in time; too many requests, on services that speak the protocol
    }
)
BAD_VALUE = 2
NO_SUCH_INDEX = "hint provided does not correspond to an existing index"
_FORBIDDEN = 13  # Unauthorized: this user may not do that
_AUTHENTICATION = frozenset({18, 334})  # AuthenticationFailed, MechanismUnavailable
_FULL = 14031  # OutOfDiskSpace
_HOSTED = 8000  # AtlasError: a hosted MongoDB uses it in place of any of these; only the message shows which
# What is wrong with a document itself: another would fare better.
ABOUT_THE_DOCUMENT = frozenset(
    {
        *(14, 16554, 17043, 28664),  # a field of the wrong type for an update, $add, $setUnion, $concatArrays
        *(10334, 17419, 17420),  # too large, or too large after an update
    }
)
# Rights and space: every document would fare the same.
_ABOUT_EVERYTHING = frozenset({_FORBIDDEN, *_AUTHENTICATION, _FULL, _HOSTED})
DUPLICATE = 11000

READS = frozenset(
    {
        *("lanes", "get", "find", "counts", "get payload", "get piece", "roster", "silent", "owners"),
        *("quarantined", "check", "exists", "waiting keys", "find conflicts"),
        *("queue depths", "entries", "read log", "apps", "sizes"),
    }
)
"""The operations that write nothing."""


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of retrying. Delays and times are in seconds."""

    max_retries: int = 5
    retry_base_delay: float = 0.1
    retry_max_delay: float = 60.0
    retry_max_time: float = 300.0
    retry_indefinitely: bool = False


def is_transient(error: PyMongoError) -> bool:
    if _is_authentication(error):
        return False  # whatever its labels say: the same password is wrong the next time too
    if isinstance(error, BulkWriteError):
        # One of many is enough: asked again, the others are found as they are now.
        return bool((error.details or {}).get("writeConcernErrors")) or bool(_codes(error) & TRANSIENT_CODES)
    if isinstance(error, ConnectionFailure | CursorNotFound | WaitQueueTimeoutError | WriteConcernError):
        return True  # after a WriteConcernError the write may be there: asked again, its operation id decides
    if isinstance(error, OperationFailure):
        known = error.code in TRANSIENT_CODES or error.has_error_label("RetryableWriteError")
        return known or is_missing_index(error)
    return isinstance(error.__cause__, _names_unanswered()) if isinstance(error, ConfigurationError) else False


def _names_unanswered() -> tuple[type[Exception], ...]:
    """Return the errors of a ``mongodb+srv://`` name that is not resolved for the moment. The driver calls each of them
    bad configuration. An unknown name is none of them.
    """
    from dns.exception import Timeout
    from dns.resolver import NoNameservers

    return (Timeout, NoNameservers, OSError)


def _is_unknown_name(error: PyMongoError) -> bool:
    from dns.resolver import NXDOMAIN, NoAnswer

    return isinstance(error.__cause__, NXDOMAIN | NoAnswer)


def is_missing_index(error: PyMongoError) -> bool:
    """Return whether a statement names an index that was dropped. It passes when the index is made again."""
    return isinstance(error, OperationFailure) and error.code == BAD_VALUE and NO_SUCH_INDEX in str(error)


def is_about_the_document(error: PyMongoError) -> bool:
    """Return whether the document is known to be at fault. A validator of the server, or an unknown code, is no reason
    to move it.
    """
    codes = _codes(error) - {DUPLICATE}
    return bool(codes) and codes <= ABOUT_THE_DOCUMENT


def is_about_everything(error: PyMongoError) -> bool:
    """Return whether every other document would be refused too."""
    return is_transient(error) or bool(_codes(error) & _ABOUT_EVERYTHING)


def is_forbidden(error: PyMongoError) -> bool:
    """Return whether this user lacks the right."""
    codes = _codes(error)
    return _FORBIDDEN in codes or (_HOSTED in codes and "not allowed" in str(error).lower())


def _is_authentication(error: PyMongoError) -> bool:
    codes, said = _codes(error), str(error).lower()
    return bool(codes & _AUTHENTICATION) or (_HOSTED in codes and ("bad auth" in said or "authentication" in said))


def _codes(error: PyMongoError) -> set[int | None]:
    if isinstance(error, BulkWriteError):
        return {item.get("code") for item in (error.details or {}).get("writeErrors", [])}
    return {error.code} if isinstance(error, OperationFailure) else set()


class Retrier:
    """Repeats an operation until MongoDB answers, or the policy gives up."""

    def __init__(self, policy: RetryPolicy, clock: Clock, rng: random.Random, observe: Observe, url: str) -> None:
        self._policy = policy
        self._clock = clock
        self._rng = rng
        self._observe = observe
        self._url = url
        self._where = f"{connection.hosts_of(url)}/{connection.database_name(url)}"
        user = connection.user_name(url)
        self._user = f"the user '{user}'" if user else "this user"

    async def ask(self, what: str, attempt: Callable[[bool], Awaitable[T]]) -> T:
        """Return the answer of `attempt`.

        Its argument is True on a repetition: then an earlier try may have been carried out.
        """
        policy, began = self._policy, self._clock.monotonic()
        delay, tries = policy.retry_base_delay, 0
        while True:
            try:
                answer = await attempt(tries > 0)
                if tries:
                    elapsed = self._clock.monotonic() - began
                    self._report("recovered", what=what, tries=tries, seconds=elapsed)
                return answer
            except (BSONError, OverflowError, UnicodeEncodeError) as error:  # too large, or no value for a document
                raise StoreError(f"MongoDB cannot store this ({what}): {error}") from error
            except PyMongoError as error:
                if not is_transient(error):
                    raise self._translated(what, error) from error
                tries += 1
                wait = delay * (0.5 + self._rng.random() / 2)
                elapsed = self._clock.monotonic() - began
                if not policy.retry_indefinitely and (
                    tries > policy.max_retries or elapsed + wait > policy.retry_max_time
                ):
                    self._report("gave_up", what=what, tries=tries, seconds=elapsed, why=text_of(error))
                    raise await self._unavailable(what, tries, elapsed, error) from error
                self._report("retry", **{"what": what, "try": tries, "delay": wait, "why": text_of(error)})
            await asyncio.sleep(wait)
            delay = min(delay * 2, policy.retry_max_delay)

    async def _unavailable(self, what: str, tries: int, elapsed: float, error: PyMongoError) -> StoreUnavailable:
        advice = "" if is_missing_index(error) else " Is it running, and does this host reach it?"
        times = "once" if tries == 1 else f"{tries} times"
        if isinstance(error, ServerSelectionTimeoutError):
            about_tls = connection.tls_advice(str(error))
            advice = about_tls or await connection.wrong_set_name(self._url) or advice
        return StoreUnavailable(
            f"MongoDB at {self._where} did not answer: {what} was tried {times} in {elapsed:.1f} s. "
            f"The last error: {text_of(error)}.{advice}"
        )

    def _report(self, event: str, **facts: object) -> None:
        self._observe(event, {"where": f"MongoDB at {self._where}", **facts})

    def _translated(self, what: str, error: PyMongoError) -> StoreError:
        kind, advice = _meaning(what, error)
        if denied := _DENIED.search(str(error)):
            deed = _DEEDS.get(denied["command"], f"run '{denied['command']}' on")
            what_not = f"{self._user} may not {deed} {denied['collection']}"
            return kind(f"{what_not} in MongoDB at {self._where} ({what}). {advice}")
        message = f"MongoDB at {self._where} refused {what}: {text_of(error)}"
        return kind(f"{message.removesuffix('.')}. {advice}" if advice else message)


# A refusal quotes the whole command with all its options; only its name and its collection are useful.
_DENIED = re.compile(r'not authorized on \S+ to execute command \{ (?P<command>\w+): "(?P<collection>[^"]+)"')
_DEEDS = {
    **dict.fromkeys(("find", "aggregate", "count", "distinct", "getMore", "listIndexes"), "read"),
    **dict.fromkeys(("update", "findAndModify"), "change"),
    **{"insert": "insert into", "delete": "remove from", "createIndexes": "make indexes of", "create": "create"},
}
_ROLES = "holdfast store roles prints what each role needs."


def _meaning(what: str, error: PyMongoError) -> tuple[type[StoreError], str]:
    """Return the class of a refusal, and advice."""
    codes, said = _codes(error), str(error).lower()
    if _is_authentication(error):
        return StoreUnauthorised, "Check the user and its password in the URL, authSource and authMechanism."
    if _FORBIDDEN in codes and "requires authentication" in said:
        return StoreUnauthorised, "Check the user: the URL has no user and password, or they were not used."
    if is_forbidden(error):
        return StoreUnauthorised if what in READS else StoreReadOnly, f"Check the user and its roles; {_ROLES}"
    if _FULL in codes or (_HOSTED in codes and "quota" in said):
        return StoreFull, "Free some space there, and try again."
    if isinstance(error, ConfigurationError) and _is_unknown_name(error):
        return StoreUnavailable, "Check the host's name in the URL: the name server knows no MongoDB by it."
    if isinstance(error, ConfigurationError):
        return StoreUnavailable, "Check the URL's options."
    return StoreError, ""


_TIMEOUTS = re.compile(r" \(configured timeouts:[^)]*\)")


def text_of(error: Exception) -> str:
    """Return the error in one line, without the driver's description of the whole topology."""
    text = _TIMEOUTS.sub("", str(error).partition(", Timeout:")[0].partition(", full error:")[0])
    if isinstance(error, BulkWriteError) and (details := (error.details or {}).get("writeErrors")):
        text = f"{text}: {details[0].get('errmsg')}"
    return f"{type(error).__name__}: {text[:300]}"
