"""Stored values as data, for code that lacks their classes: read, compare, pass on, digest, check for damage.

An object or a member of an enum stays as it was written, and is written like that again; its fields can be read.

Encoded bytes are exact, and keep what equality ignores: the order of a dict's keys. A digest takes that out, at every
depth, so equal values of the same types have the same digest in every process.

Damaged are bytes that no code can read. Bytes that only this code cannot read may be read by other code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from holdfast.codec.extensions import LEAF_READERS, Code, pack
from holdfast.codec.payloads import split
from holdfast.codec.sealing import is_broken, is_sealed, why_sealed
from holdfast.codec.values import Opaque, Reader, is_call


class DataReader(Reader):
    """Leaves objects and members of enums closed."""

    __slots__ = ()

    def hook(self, code: int, data: memoryview) -> object:
        return Opaque(code, bytes(data)) if code in _CLOSED else super().hook(code, data)


_CLOSED = frozenset({Code.OBJECT, Code.ENUM})
MISSING = object()


def at_path(value: Any, path: str) -> Any:
    """Return the value at a path, names and numbers with dots (``order.lines.0.price``); `MISSING` if there is none."""
    for name in path.split(".") if path else ():
        if isinstance(value, Opaque):
            value = fields_of(value)
        if isinstance(value, Mapping):
            value = value.get(name, MISSING)
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes) and name.isdecimal():
            value = value[int(name)] if int(name) < len(value) else MISSING
        else:
            return MISSING
        if value is MISSING:
            return MISSING
    return value


def fields_of(value: Opaque) -> Mapping[str, Any]:
    """Return the fields of an object; nothing for other values."""
    if value.code != Code.OBJECT:
        return {}
    body = msgspec.msgpack.decode(value.data, ext_hook=DataReader({}).hook)
    known = isinstance(body, list) and len(body) == 3 and isinstance(body[1], dict)
    return body[1] if known else {}


def without_classes(value: Any) -> Any:
    """Return objects as mappings of their fields, and members of enums as what they are called."""
    match value:
        case Opaque(code=Code.OBJECT):
            return without_classes(fields_of(value))
        case Opaque(data=data):
            return msgspec.msgpack.decode(data)[1]
        case Mapping():
            return {key: without_classes(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(without_classes(item) for item in value)
        case set() | frozenset():
            return [without_classes(item) for item in value]
    return value


def is_within(wanted: Mapping[str, Any], value: Any) -> bool:
    """Return whether the value has these values, by path. True and 1 differ here, as they do in JSON."""
    return all(is_same(at_path(value, path), each) for path, each in wanted.items())


def is_same(one: Any, other: Any) -> bool:
    return (isinstance(one, bool) == isinstance(other, bool)) and bool(one == other)


# --- digests


def digest_of(encoded: Iterable[bytes]) -> str:
    """Return the SHA-256 of encoded values, in hexadecimal."""
    return hashlib.sha256(pack([_canonical(data) for data in encoded])).hexdigest()


def _canonical(data: bytes | memoryview) -> bytes:
    return pack(_ordered(msgspec.msgpack.decode(data, ext_hook=_opened)))


def _opened(code: int, data: memoryview) -> Ext:
    if code in LEAF_READERS:
        return Ext(code, bytes(data))
    if code == Code.MAP:
        flat = msgspec.msgpack.decode(data, ext_hook=_opened)
        return _map(zip(flat[::2], flat[1::2], strict=True))
    return Ext(code, _canonical(data))


def _ordered(value: Any) -> Any:
    if type(value) is dict:
        return _map(value.items())
    return [_ordered(item) for item in value] if type(value) is list else value


def _map(pairs: Iterable[tuple[Any, Any]]) -> Ext:
    """Return a dict with any keys as a sorted map."""
    return Ext(Code.MAP, b"".join(sorted(pack(_ordered(key)) + pack(_ordered(value)) for key, value in pairs)))


# --- damage


def damage_of(data: bytes, *, of_call: bool = False) -> str:
    """Return why no code can read these stored bytes, or "" if no damage is visible."""
    if is_sealed(data):
        return why_sealed(data) if is_broken(data) else ""
    try:
        _, body = split(data)
        value = msgspec.msgpack.decode(body, ext_hook=_skim)  # the structure, without classes and payloads
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "they are not the arguments of a call" if of_call and not is_call(value) else ""


def _skim(code: int, data: memoryview) -> None:
    if code not in LEAF_READERS and len(data) > 0:
        msgspec.msgpack.decode(data, ext_hook=_skim)
