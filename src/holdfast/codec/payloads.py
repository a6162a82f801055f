"""Large values: a value that is too large for a record is stored apart, named by its content.

The bytes of a value above a limit become a *payload*, and the record keeps a reference. A payload is named by the
SHA-256 of its bytes: the same bytes are stored once however many calls share them, and a reader can detect damage.
Bytes with references begin with a byte that MessagePack never uses, then the names and sizes; so a store knows the
references of a record without decoding it.

Each large argument of a call is stored apart by itself, so a fan-out over a common argument shares it. A large `bytes`
is its own payload, without a copy.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.msgpack import Ext

from holdfast.codec.extensions import Code, Refused, pack
from holdfast.errors import NotDecodable

_MARK = 0xC1
MARK = bytes([_MARK])  # what bytes that refer to payloads begin with
HEAD = struct.Struct(">BH")
REFERENCE = struct.Struct(">32sQ")
SEALED = 0x8000  # in the count: what follows the references is encrypted, see `holdfast.codec.sealing`


class Reference(NamedTuple):
    """What a record keeps of a payload."""

    digest: str  # SHA-256 of its bytes, in hexadecimal; with encryption a keyed digest
    size: int


class SizeLimits(NamedTuple):
    """Above `inline` bytes a value is stored apart; above `max_bytes` it is refused."""

    inline: int
    max_bytes: int


NamePayload = Callable[[bytes], str]
"""Names a payload by its bytes, where that is not done by SHA-256."""


class Payload(NamedTuple):
    """Bytes that are stored beside the records that refer to them."""

    digest: str
    data: bytes

    @classmethod
    def of(cls, data: bytes, name_of: NamePayload | None = None) -> Payload:
        return cls(hashlib.sha256(data).hexdigest() if name_of is None else name_of(data), data)

    @property
    def reference(self) -> Reference:
        return Reference(self.digest, len(self.data))


class Packed(NamedTuple):
    """An encoded value, and the payloads it refers to."""

    data: bytes
    payloads: tuple[Payload, ...] = ()


Payloads = Mapping[str, bytes]
"""The payloads at hand, by digest."""


def references(data: bytes | None) -> tuple[Reference, ...]:
    """Return the references of encoded bytes. Damaged and sealed bytes have none: decoding them raises."""
    return () if data is None else split(data)[0]


def split(data: bytes) -> tuple[tuple[Reference, ...], bytes | memoryview]:
    """Return the references of encoded bytes, and the bytes proper."""
    if len(data) < HEAD.size or data[0] != _MARK:
        return (), data
    _, count = HEAD.unpack_from(data)
    end = HEAD.size + count * REFERENCE.size
    if not count or count & SEALED or len(data) < end:
        return (), memoryview(data)
    items = REFERENCE.iter_unpack(memoryview(data)[HEAD.size : end])
    return tuple(Reference(digest.hex(), size) for digest, size in items), memoryview(data)[end:]


Seen = dict[int | str, Payload]
"""Payloads by the identity of their bytes (which a payload keeps, so that it stays theirs) and by their digest."""


class Large:
    """Stand for a value that is stored apart, while the values around it are encoded."""

    __slots__ = ("ext",)

    def __init__(self, ext: Ext) -> None:
        self.ext = ext


class Spill:
    """Collect the payloads of one value or call. The calls of one fan-out share `seen`: the same bytes are hashed once,
    and equal bytes are kept once.
    """

    def __init__(self, limits: SizeLimits, seen: Seen | None = None, name_of: NamePayload | None = None) -> None:
        self.limit, self._max_bytes = limits
        self._name_of = name_of
        self._seen = {} if seen is None else seen
        self._index: dict[str, int] = {}
        self._payloads: list[Payload] = []

    def bytes_put_out(self, value: Any) -> Any:
        """Return the value, or a `Large` in its place if it is large bytes."""
        return self.put_out(value, is_value=True) if type(value) is bytes and len(value) > self.limit else value

    def put_out(self, data: bytes, *, is_value: bool = False) -> Large:
        """Store encoded bytes apart, or bytes that are the value themselves."""
        if len(data) > self._max_bytes:
            text = f"takes {len(data):,} bytes, more than payload_limit allows ({self._max_bytes:,})"
            raise Refused(f"{text}; store it elsewhere and pass its name, or raise the setting")
        payload = self._seen.get(id(data)) or self._met(Payload.of(data, self._name_of))
        index = self._index.setdefault(payload.digest, len(self._payloads))
        if index == len(self._payloads):
            self._payloads.append(payload)
        return Large(Ext(Code.PAYLOAD, pack((index, is_value))))

    def _met(self, payload: Payload) -> Payload:
        known = self._seen.setdefault(payload.digest, payload)
        if known is payload:  # the bytes of an equal payload are not kept, so their identity may be reused
            self._seen[id(payload.data)] = payload
        return known

    def packed(self, body: bytes) -> Packed:
        """Return the bytes to store: the references, then the rest."""
        if not self._payloads:
            return Packed(body)
        head = HEAD.pack(_MARK, len(self._payloads))
        items = [REFERENCE.pack(bytes.fromhex(payload.digest), len(payload.data)) for payload in self._payloads]
        return Packed(b"".join((head, *items, body)), tuple(self._payloads))


class Placeholder(str):
    """A text in the place of a value that was not fetched; shown without quotes, since it is no value."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Shelf:
    """The payloads of one decoding, by the numbers of their references."""

    __slots__ = ("_payloads", "_references", "describe")

    def __init__(self, references: Sequence[Reference], payloads: Payloads, *, describe: bool = False) -> None:
        self._references = references
        self._payloads = payloads
        self.describe = describe

    def find(self, index: int) -> bytes | str:
        """Return the payload; with `describe`, a text in the place of a payload that was not fetched."""
        if not 0 <= index < len(self._references):
            raise NotDecodable(f"stored bytes refer to a payload {index}, and name {len(self._references)}")
        digest, size = self._references[index]
        data = self._payloads.get(digest)
        if data is not None:
            return data
        if self.describe:
            return Placeholder(f"<payload of {size:,} bytes, {digest[:12]}…>")
        raise NotDecodable(f"the payload {digest} of {size:,} bytes is not in the store")
