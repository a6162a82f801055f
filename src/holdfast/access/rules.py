"""Decisions of access: the form of tokens and cookies, and which of them are valid. Pure: random bytes are handed in.

A token is ``hf_ID_SECRET``; the store has its digest. A session is the cookie alone. It carries the proof of the token:
a digest that only a login with the token itself can make, and whose own digest the store has. It is signed, so its end
cannot be changed. So neither the tokens nor the sessions follow from what is in the store.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from holdfast.clock import TOO_LATE
from holdfast.model.decoding import Moment

VIEWER, OPERATOR, ADMIN = "viewer", "operator", "admin"
ROLES = (VIEWER, OPERATOR, ADMIN)
SECRET_BYTES, ID_BYTES = 32, 5
SETTING = "api_token"  # the id of the token in the settings
NEW_KEY_SECONDS = 30 * 86_400.0

_TOKEN = re.compile(r"hf_(?P<id>[a-z2-7]{8})_(?P<secret>[A-Za-z0-9_-]{43})")
_COOKIE = re.compile(
    r"(?P<token>[a-z2-7]{8}|api_token)\.(?P<id>[a-z2-7]{8})\.(?P<end>[1-9][0-9]{0,11})\.(?P<proof>[A-Za-z0-9_-]{43})\."
    r"(?P<key>[a-z2-7]{8})\.(?P<mac>[A-Za-z0-9_-]{43})"
)

# --- tokens


def new_id(random_bytes: bytes) -> str:
    assert len(random_bytes) == ID_BYTES
    return base64.b32encode(random_bytes).decode().lower()


def token_text(id: str, random_bytes: bytes) -> str:
    """Return a token. Its id leads to its record; its secret is 256 random bits."""
    assert len(random_bytes) == SECRET_BYTES
    return f"hf_{id}_{_text(random_bytes)}"


def id_in(token: str) -> str | None:
    """Return the id in a token; None for a text that is none."""
    found = _TOKEN.fullmatch(token)
    return None if found is None else found["id"]


def digest_of(secret: str) -> str:
    """Return what the store has of a secret. A secret of 256 random bits needs no slow hash."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def proof_of(token: str) -> str:
    """Return what a session carries of its token."""
    return _text(hmac.digest(token.encode("utf-8", "surrogatepass"), b"a session of holdfast", "sha256"))


def is_secret_of(given: str, digest: str) -> bool:
    """Return whether a secret has this digest, in a time that says nothing about either."""
    return hmac.compare_digest(digest_of(given), digest)


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A token, without what lets a request in."""

    id: str = ""
    name: str
    role: str
    digest: str
    proof_digest: str
    created_at: Moment
    created_by: str = ""
    expires_at: Moment
    used_at: Moment | None = None  # to the hour


def check_token(record: TokenRecord) -> None:
    """Raise ValueError for a role that this version does not know."""
    if record.role not in ROLES:
        raise ValueError(f"{record.role!r:.40} is no role - at `$.role`")


# --- sessions


class SigningKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key that signs sessions. `secret` is 32 random bytes as text."""

    id: str
    secret: str
    made_at: Moment


class KeyRing(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of an app, newest first."""

    keys: tuple[SigningKey, ...] = ()


class Session(NamedTuple):
    """What a valid cookie says."""

    token: str  # the id of its token
    id: str
    ends_at: float
    proof: str


def new_key(random_id: bytes, random_bytes: bytes, now: float) -> SigningKey:
    return SigningKey(id=new_id(random_id), secret=_text(random_bytes), made_at=now)


def is_new_key_due(ring: KeyRing, now: float) -> bool:
    return not ring.keys or ring.keys[0].made_at + NEW_KEY_SECONDS <= now


def with_key(ring: KeyRing, key: SigningKey, session_seconds: float) -> KeyRing:
    """Return the keys with a new one, and without those whose last session has ended."""
    kept = [
        old
        for newer, old in zip(ring.keys, ring.keys[1:], strict=False)
        if newer.made_at + session_seconds > key.made_at
    ]
    return KeyRing(keys=(key, *ring.keys[:1], *kept))


def cookie_text(key: SigningKey, app: str, session: Session) -> str:
    signed = f"{session.token}.{session.id}.{int(session.ends_at)}.{session.proof}.{key.id}"
    return f"{signed}.{_mac(key, 'session', app, signed)}"


def session_in(cookie: str, ring: KeyRing, app: str, now: float) -> Session | None:
    """Return the session of a cookie, if one of the keys has signed it and it has not ended. Its token is for the
    caller to check.
    """
    found = _COOKIE.fullmatch(cookie)
    if found is None:
        return None
    signed, _, mac = cookie.rpartition(".")
    key = next((key for key in ring.keys if key.id == found["key"]), None)
    if key is None or not hmac.compare_digest(_mac(key, "session", app, signed), mac):
        return None
    ends_at = float(found["end"])
    return Session(found["token"], found["id"], ends_at, found["proof"]) if now < ends_at < TOO_LATE else None


def csrf_text(key: SigningKey, app: str, subject: str) -> str:
    """Return the token that pages of a session send with a change. `subject` is the cookie, or the user of a host."""
    return f"{key.id}.{_mac(key, 'csrf', app, subject)}"


def is_csrf(given: str, ring: KeyRing, app: str, subject: str) -> bool:
    wanted = [csrf_text(key, app, subject) for key in ring.keys]
    return any(hmac.compare_digest(given.encode("utf-8", "surrogatepass"), each.encode()) for each in wanted)


def _mac(key: SigningKey, purpose: str, app: str, text: str) -> str:
    message = "".join(f"{len(part)}:{part}" for part in (purpose, app, text)).encode("utf-8", "surrogatepass")
    return _text(hmac.digest(key.secret.encode(), message, "sha256"))


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


# --- proxies


class TrustedProxy:
    """The proxy of the settings: the addresses that it has, and the headers in which it names the user."""

    def __init__(self, networks: str, user_header: str, role_header: str, role: str) -> None:
        self._networks = [ipaddress.ip_network(each.strip()) for each in networks.split(",") if each.strip()]
        self._user_header, self._role_header, self._role = user_header.lower(), role_header.lower(), role

    @property
    def is_set(self) -> bool:
        return bool(self._networks and self._user_header)

    def is_at(self, address: str) -> bool:
        """Return whether a connection comes from the proxy."""
        try:
            given = ipaddress.ip_address(address)
        except ValueError:
            return False
        mapped = getattr(given, "ipv4_mapped", None)
        return any((mapped or given) in network for network in self._networks)

    def user(self, address: str, headers: Mapping[str, str]) -> tuple[str, str] | None:
        """Return name and role of the user that the proxy names; None without one, or from another address. A role that
        is none is the empty text.
        """
        if not self.is_set or not self.is_at(address):
            return None
        name = headers.get(self._user_header, "").strip()
        if not name:
            return None
        role = headers.get(self._role_header, "").strip().lower() if self._role_header else ""
        return name, (role if role in ROLES else "") if role else self._role

    def is_named_twice(self, values: Callable[[str], Sequence[str]]) -> bool:
        """Return whether a header is there twice: one of them is the client's own."""
        return any(len(values(name)) > 1 for name in (self._user_header, self._role_header) if name)

    def source(self, address: str, forwarded: Iterable[str]) -> str:
        """Return the address behind the proxy: the last one in X-Forwarded-For that is not a proxy itself."""
        for each in [*reversed([part.strip() for line in forwarded for part in line.split(",")])]:
            if not self.is_at(address):
                return address
            address = each or address
        return address
