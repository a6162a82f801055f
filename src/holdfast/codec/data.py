"""Values as data: what is stored can be looked into, compared and passed on by somebody who lacks its classes.

An object or a member of an enum stays as it was written, and is written like that again; its fields can be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.codec.extensions import Code
from holdfast.codec.values import Opaque, Reader


class DataReader(Reader):
    """Leaves objects and members of enums closed."""

    __slots__ = ()

    def hook(self, code: int, data: memoryview) -> object:
        return Opaque(code, bytes(data)) if code in _CLOSED else super().hook(code, data)


_CLOSED = frozenset({Code.OBJECT, Code.ENUM})
MISSING = object()


def at_path(value: Any, path: str) -> Any:
    """What is there: names and numbers with dots between them, such as ``order.lines.0.price``; else `MISSING`."""
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
    """The fields of an object; none of what is no object."""
    if value.code != Code.OBJECT:
        return {}
    body = msgspec.msgpack.decode(value.data, ext_hook=DataReader({}).hook)
    known = isinstance(body, list) and len(body) == 3 and isinstance(body[1], dict)
    return body[1] if known else {}


def is_within(wanted: Mapping[str, Any], value: Any) -> bool:
    """Whether the value has these, by path. True and 1 are not the same here, as they are not in JSON."""
    return all(is_same(at_path(value, path), each) for path, each in wanted.items())


def is_same(one: Any, other: Any) -> bool:
    return (isinstance(one, bool) == isinstance(other, bool)) and bool(one == other)
