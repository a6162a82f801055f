"""Sealed values: encrypted bytes that say which key opens them, and fit one place only.

A sealed value begins as a value with payloads does, with `MARK`, and has its own bit in the count. So a store sees
which payloads it refers to, and a reader without the key sees which key it lacks. What follows is AES-256-GCM. The
place (app, id, field) and all that stands before the ciphertext are authenticated: a value that was changed, or moved
to another place, is not opened.

The nonce is a keyed digest of place and value. So the same value in the same place gives the same bytes: a store that
compares bodies, or recognises a repeated write, goes on working. The first byte of that digest chooses one of 256 keys
that are derived from the key of the user, which allows 2^36 values for each key of the user. See
docs/decisions/0022-encryption-and-secrets.md.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.codec.extensions import pack
from holdfast.codec.payloads import HEAD, MARK, REFERENCE, SEALED, Reference, split
from holdfast.errors import ConfigurationError, MissingExtra, NotDecodable, ValueEncrypted

KEY_BYTES = 32
_FORMAT = 1
_NONCE_BYTES = 13  # the first chooses the key
_BROKEN = HEAD.pack(MARK[0], 0xFFFF)  # what a value begins with that was not opened, though its key is there
_KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,32}")


class Place(NamedTuple):
    """Where a sealed value belongs."""

    app: str
    id: str
    field: str


class SealedHead(NamedTuple):
    """The parts of a sealed value that can be read without its key."""

    key: str
    references: tuple[Reference, ...]
    start: int  # of nonce and ciphertext


NO_HEAD = SealedHead("", (), 0)


def is_sealed(data: bytes | None) -> bool:
    return data is not None and len(data) > HEAD.size and data[:1] == MARK and bool(data[1] & 0x80)


def head_of(data: bytes) -> SealedHead | None:
    """Return the unencrypted head of a sealed value; None if the value is not sealed, or damaged."""
    if not is_sealed(data):
        return None
    if data.startswith(_BROKEN):
        return head_of(data[len(_BROKEN) :])
    _, count = HEAD.unpack_from(data)
    end = HEAD.size + (count & ~SEALED) * REFERENCE.size
    if len(data) < end + 2 or data[end] != _FORMAT:
        return None
    start = end + 2 + data[end + 1]
    items = REFERENCE.iter_unpack(memoryview(data)[HEAD.size : end])
    key = bytes(data[end + 2 : start]).decode("ascii", "replace")
    return SealedHead(key, tuple(Reference(digest.hex(), size) for digest, size in items), start)


def why_sealed(data: bytes) -> str:
    """Return why sealed bytes cannot be read here."""
    head = head_of(data)
    if data.startswith(_BROKEN) or head is None:
        return "damaged: the encrypted value was changed, or belongs to another place"
    return f"encrypted with the key '{head.key}'"


def refuse_sealed(data: bytes) -> None:
    """Raise `NotDecodable` or `ValueEncrypted` for a value that is still sealed."""
    if is_broken(data):
        raise NotDecodable(f"stored bytes cannot be read: they are {why_sealed(data)}")
    if is_sealed(data):
        raise ValueEncrypted(f"the value is {why_sealed(data)}, which this process lacks: see encryption_keys")


def is_broken(data: bytes | None) -> bool:
    """Return whether a value was not opened though its key is there."""
    return is_sealed(data) and data is not None and (data.startswith(_BROKEN) or head_of(data) is None)


class CipherKeys:
    """The keys of an app. The first one encrypts; all of them are tried for reading, by their ids."""

    def __init__(self, keys: Sequence[tuple[str, bytes]]) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ModuleNotFoundError as error:
            raise MissingExtra(
                "encryption_keys needs the package 'cryptography', which is not installed: "
                "pip install 'holdfast[encryption]'"
            ) from error
        self._cipher: Callable[[bytes], Any] = AESGCM
        self._invalid = InvalidTag
        self._keys = dict(keys)
        self.ids = tuple(self._keys)
        self.current = self.ids[0]
        self._nonce_keys = {id: _derived(key, "nonce") for id, key in keys}
        self._name_key = _derived(self._keys[self.current], "payload names")
        self._ciphers: dict[tuple[str, int], Any] = {}

    def __repr__(self) -> str:
        return f"<CipherKeys {', '.join(self.ids)}>"

    def beginning_with(self, id: str) -> CipherKeys:
        """Return the same keys, with this key as the encrypting key."""
        if id == self.current:
            return self
        return CipherKeys([(id, self._keys[id]), *((other, key) for other, key in self._keys.items() if other != id)])

    def name_payload(self, app: str, data: bytes) -> str:
        """Return the name under which an app stores a payload: without the key it reveals nothing of the payload or of
        other apps.
        """
        return hmac.digest(self._name_key, hashlib.sha256(data).digest() + app.encode(), "sha256").hex()

    def seal(self, data: bytes, place: Place) -> bytes:
        """Return a value encrypted for its place. What this process could not open stays as it is."""
        if data[:1] == MARK:
            if is_sealed(data):
                return data.removeprefix(_BROKEN)
            references, body = split(data)
            return self.seal_parts(references, bytes(body), place)
        return self.seal_parts((), data, place)

    def seal_parts(self, references: Sequence[Reference], body: bytes, place: Place) -> bytes:
        id = self.current.encode()
        start = HEAD.pack(MARK[0], SEALED | len(references)) + _packed(references)
        head = start + bytes((_FORMAT, len(id))) + id
        context = pack((head, *place))
        keyed = hashlib.blake2b(context, key=self._nonce_keys[self.current], digest_size=_NONCE_BYTES)
        keyed.update(body)
        nonce = keyed.digest()
        return head + nonce + bytes(self._of(self.current, nonce[0]).encrypt(nonce[1:], body, context))

    def open(self, data: bytes, place: Place) -> bytes:
        """Return the value. Without its key it stays sealed; if it does not fit its place, it is marked as broken."""
        if data[:1] != MARK or not is_sealed(data):
            return data
        opened = self.open_parts(data, place)
        if isinstance(opened, bytes):
            return opened
        return with_references(*opened)

    def open_parts(self, data: bytes, place: Place) -> tuple[tuple[Reference, ...], bytes] | bytes:
        """Return references and body of a sealed value; or the bytes to keep in its place."""
        head = head_of(data)
        if data.startswith(_BROKEN):
            return data
        if head is None:
            return _BROKEN + data
        if head.key not in self._keys:
            return data
        nonce = data[head.start : head.start + _NONCE_BYTES]
        try:
            cipher, context = self._of(head.key, nonce[0]), pack((data[: head.start], *place))
            body = cipher.decrypt(nonce[1:], data[head.start + _NONCE_BYTES :], context)
        except (self._invalid, IndexError, ValueError):
            return _BROKEN + data
        return head.references, body

    def _of(self, id: str, number: int) -> Any:
        cipher = self._ciphers.get((id, number))
        if cipher is None:
            cipher = self._ciphers[id, number] = self._cipher(_derived(self._keys[id], f"values {number}"))
        return cipher


def with_references(references: Sequence[Reference], body: bytes) -> bytes:
    """Return a value in the form of the codec: the references, then the rest."""
    if not references:
        return body
    return HEAD.pack(MARK[0], len(references)) + _packed(references) + body


def _packed(references: Sequence[Reference]) -> bytes:
    return b"".join(REFERENCE.pack(bytes.fromhex(each.digest), each.size) for each in references)


def _derived(key: bytes, purpose: str) -> bytes:
    return hmac.digest(key, f"holdfast 1 {purpose}".encode(), "sha256")


# --- keys as users give them


def parse_keys(text: str) -> list[tuple[str, bytes]]:
    """Return the keys in a text: ``id:base64``, newest first, with commas, blanks or line ends between them. Lines that
    begin with ``#`` are comments. Raises `ValueError`, whose text has nothing of a key.
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    keys: dict[str, bytes] = {}
    for number, item in enumerate(re.split(r"[\s,]+", "\n".join(lines).strip()), 1):
        id, separator, encoded = item.partition(":")
        if not separator or not _KEY_ID.fullmatch(id):
            raise ValueError(f"key {number} is not of the form id:key, with an id of letters, digits and ._-")
        try:
            key = base64.b64decode(encoded.translate(_URL_SAFE), validate=True)
        except (binascii.Error, ValueError):
            raise ValueError(f"the key '{id}' is not in base64") from None
        if len(key) != KEY_BYTES:
            raise ValueError(f"the key '{id}' has {len(key)} bytes, and needs {KEY_BYTES}")
        if id in keys:
            raise ValueError(f"there are two keys '{id}'")
        keys[id] = key
    return list(keys.items())


_URL_SAFE = str.maketrans("-_", "+/")


def ring_of(keys: str, file: str) -> CipherKeys | None:
    """Return the keys of the settings; None if there are none. Raises `ConfigurationError`."""
    if keys and file:
        raise ConfigurationError("encryption_keys and encryption_keys_file are both given; use one of them.")
    if not keys and not file:
        return None
    try:
        found = parse_keys(keys or Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "no text" if isinstance(error, UnicodeError) else error
        where = "encryption_keys" if keys else f"encryption_keys_file {file}"
        raise ConfigurationError(f"{where}: {why}. A key is 32 random bytes: openssl rand -base64 32") from None
    return CipherKeys(found)
