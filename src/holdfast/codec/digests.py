"""One name for equal values.

Encoded bytes are exact, and keep what equality ignores: the order of a dict's keys. Here it is taken out, at every
depth, before the bytes are hashed, so that equal values of the same types have the same digest in every process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.msgpack import Ext

from holdfast.codec.extensions import LEAF_READERS, Code, pack


def digest_of(encoded: Iterable[bytes]) -> str:
    """The SHA-256 of encoded values, in hexadecimal."""
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
    """Any dict, whatever its keys, as a sorted one."""
    return Ext(Code.MAP, b"".join(sorted(pack(_ordered(key)) + pack(_ordered(value)) for key, value in pairs)))
