"""Decisions of the web app: which requests are of our own pages, which addresses are safe, how many requests are too
many. Pure.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping
from typing import NamedTuple

_AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::(?P<port>[0-9]{1,5}))?")
_BEARER = re.compile(r"Bearer +(?P<token>[\x21-\x7e]+) *", re.IGNORECASE)
_OWN_PAGES = ("same-origin", "none")  # of Sec-Fetch-Site; "none" is a user that typed the address


# --- the sender of a request


def bearer_in(headers: Mapping[str, str]) -> str | None:
    """Return what a request gives as its token; None if it gives none. What is malformed is the empty text."""
    given = headers.get("authorization", "")
    if given[:6].lower() != "bearer":
        return None
    found = _BEARER.fullmatch(given)
    return "" if found is None else found["token"]


def is_of_own_page(headers: Mapping[str, str], allowed_hosts: str = "") -> bool:
    """Return whether no page of another site has caused a request: by a form, a script, or a name that leads here."""
    host, origin = headers.get("host", "").lower(), headers.get("origin")
    if origin is not None:
        place = re.fullmatch(r"https?://(.+)", origin.lower())
        is_own = place is not None and place[1] == host
        if not is_own and not (allowed_hosts != "*" and place is not None and is_allowed_host(place[1], allowed_hosts)):
            return False
    return headers.get("sec-fetch-site", "none").lower() in _OWN_PAGES


def is_allowed_host(authority: str, allowed: str) -> bool:
    """Return whether a Host header is one of the names of a setting."""
    if allowed == "*":
        return True
    found = _AUTHORITY.fullmatch(authority)
    names = {each.strip().strip("[]").lower() for each in allowed.split(",") if each.strip()}
    return found is not None and found["host"].strip("[]").lower() in names


def is_same(given: str, wanted: str) -> bool:
    """Compare secrets in a time that says nothing about them, not even their length."""
    digests = [hashlib.sha256(each.encode("utf-8", "surrogatepass")).digest() for each in (given, wanted)]
    return hmac.compare_digest(*digests)


def names_this_machine(authority: str) -> bool:
    """Return whether a Host header is a name of this machine that no other can take."""
    found = _AUTHORITY.fullmatch(authority)
    return found is not None and is_loopback(found["host"].strip("[]"))


def is_loopback(host: str) -> bool:
    """Return whether only programs of this machine reach this address."""
    if host.lower() == "localhost" or host.lower().endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# --- rates


def source_of(client: str | None) -> str:
    """Return what counts as one source of requests: an address, or a network of IPv6, of which one client has many
    addresses.
    """
    try:
        address = ipaddress.ip_address(client or "")
    except ValueError:
        return client or "unknown"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


class _Level(NamedTuple):
    left: float
    at: float


class Buckets:
    """Token buckets by key: `rate` requests per second, and `burst` at once. Only the last `most` keys are known."""

    def __init__(self, rate: float, burst: float, most: int = 10_000) -> None:
        self._rate, self._burst, self._most = rate, burst, most
        self._levels: dict[str, _Level] = {}

    def __len__(self) -> int:
        return len(self._levels)

    def wait(self, key: str, now: float) -> float:
        """Return 0, or after how many seconds there is a request to take; take none."""
        before = self._levels.get(key)
        left = self._burst if before is None else self._now(before, now)
        return 0.0 if left >= 1.0 else (1.0 - left) / self._rate

    def _now(self, before: _Level, now: float) -> float:
        return min(self._burst, before.left + max(0.0, now - before.at) * self._rate)

    def take(self, key: str, now: float) -> float:
        """Take one request. Return 0, or after how many seconds there is one to take."""
        before = self._levels.pop(key, None)  # and in again, at the end: the oldest are forgotten
        if before is None:
            left = self._burst
            while len(self._levels) >= self._most:
                del self._levels[next(iter(self._levels))]
        else:
            left = self._now(before, now)
        taken = left >= 1.0
        self._levels[key] = _Level(left - 1.0 if taken else left, now)
        return 0.0 if taken else (1.0 - left) / self._rate


class TokenGuesses:
    """Bounds wrong tokens of each source: `burst` at once, and `rate` per second. A source that has given more is
    answered only if the token is one that was right from there before: others are not compared, so that a guess says
    nothing.
    """

    def __init__(self, rate: float = 0.5, burst: float = 30.0, most: int = 10_000) -> None:
        self._wrong = Buckets(rate, burst, most)
        self._right: dict[tuple[str, str], None] = {}  # sources and digests, the oldest first
        self._most = most

    def may_compare(self, source: str, digest: str, now: float) -> bool:
        return self._wrong.wait(source, now) == 0.0 or (source, digest) in self._right

    def was_right(self, source: str, digest: str) -> None:
        if (source, digest) not in self._right:
            while len(self._right) >= self._most:
                del self._right[next(iter(self._right))]
            self._right[source, digest] = None

    def was_wrong(self, source: str, now: float) -> float:
        """Count a wrong token. Return 0, or after how many seconds the source may try again."""
        return self._wrong.take(source, now)
