"""Decisions of the web app: whom the API answers, which addresses are safe, how many webhooks are too many. Pure."""

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


class Refusal(NamedTuple):
    """Why a request is not answered: the status of HTTP, and what to do."""

    status: int
    why: str


# --- the API


def refuse(headers: Mapping[str, str], *, token: str, is_local: bool) -> Refusal | None:
    """Return why a request to the API is refused; None if it is not.

    With a token, each request has to carry it. Without one, only the own server on a loopback address answers, and only
    programs of this machine and pages of that server: a page of another site must not reach it, by a form, a script or
    a name that leads to this machine.
    """
    if token:
        given = _BEARER.fullmatch(headers.get("authorization", ""))
        if given is not None and is_same(given["token"], token):
            return None
        return Refusal(401, "give the token of the setting api_token: 'Authorization: Bearer TOKEN'")
    if not is_local:
        return Refusal(403, "the API is off: set api_token (HOLDFAST_API_TOKEN) in the process that serves this app")
    host = headers.get("host", "")
    if not names_this_machine(host):
        return Refusal(403, "the Host header does not name this machine: use http://127.0.0.1 or http://localhost")
    origin = headers.get("origin")
    if origin is not None and origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
        return Refusal(403, "the request comes from a page of another site: set api_token, and send it")
    if headers.get("sec-fetch-site", "none").lower() not in _OWN_PAGES:
        return Refusal(403, "the request comes from a page of another site: set api_token, and send it")
    return None


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

    def take(self, key: str, now: float) -> float:
        """Take one request. Return 0, or after how many seconds there is one to take."""
        before = self._levels.pop(key, None)  # and in again, at the end: the oldest are forgotten
        if before is None:
            left = self._burst
            while len(self._levels) >= self._most:
                del self._levels[next(iter(self._levels))]
        else:
            left = min(self._burst, before.left + max(0.0, now - before.at) * self._rate)
        taken = left >= 1.0
        self._levels[key] = _Level(left - 1.0 if taken else left, now)
        return 0.0 if taken else (1.0 - left) / self._rate
