"""The `devl` form, in which Workflow DevKit writes payloads: four letters, then JSON of a flat list of values.

The first value is the whole; values within refer to others by their index. Numbers below zero stand for what JSON does
not have. A list that begins with a text is a value of that type. `loads` reads what can be shown: JSON types, dates,
bytes, big numbers, maps, sets and errors. `dumps` writes JSON types, dates and bytes.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import zlib
from datetime import UTC, datetime
from typing import Any

PREFIX, GZIP = b"devl", b"gzip"
MAX_BYTES = 64 * 2**20
MAX_DEPTH = 200
_SEALED = {b"encr": "it is encrypted", b"encp": "it is encrypted", b"zstd": "it is compressed with zstd"}
_EMPTY = "."  # stands for an empty text, which a type cannot carry
_SAFE = 2**53
_SPECIAL: dict[int, Any] = {-1: None, -2: None, -3: math.nan, -4: math.inf, -5: -math.inf, -6: -0.0}
_BYTES = frozenset({"Uint8Array", "Uint8ClampedArray", "ArrayBuffer"})


def loads(data: bytes) -> Any:
    """Return the value of a payload; undefined is None. Raises ValueError for what is damaged or cannot be shown."""
    if data[:4] == GZIP:
        data = _unpacked(data[4:])
    if data[:4] != PREFIX:
        raise ValueError(f"it is no 'devl' payload: {_SEALED.get(data[:4], f'it begins with {data[:4]!r}')}")
    try:
        values = json.loads(data[4:])
        return _Reader(values).root()
    except (RecursionError, IndexError, TypeError, KeyError, OverflowError, binascii.Error) as error:
        raise ValueError(f"the payload is damaged: {error}") from error


def _unpacked(data: bytes) -> bytes:
    machine = zlib.decompressobj(wbits=31)
    try:
        whole = machine.decompress(data, MAX_BYTES)
    except zlib.error as error:
        raise ValueError(f"the payload is damaged: {error}") from error
    if machine.unconsumed_tail:
        raise ValueError(f"it has more than {MAX_BYTES:,} bytes when unpacked")
    return whole


class _Reader:
    def __init__(self, values: Any) -> None:
        self._values = values
        self._read: dict[int, Any] = {}
        self._under_way: set[int] = set()

    def root(self) -> Any:
        if isinstance(self._values, int):
            return _SPECIAL[self._values]
        if not isinstance(self._values, list) or not self._values:
            raise ValueError("the payload is damaged: it is no list of values")
        return self._at(0)

    def _at(self, index: Any) -> Any:
        if type(index) is not int:
            raise ValueError(f"the payload is damaged: {index!r:.40} is no index")
        if index < 0:
            return _SPECIAL[index]
        if index in self._read:
            return self._read[index]
        if index in self._under_way or len(self._under_way) >= MAX_DEPTH:
            raise ValueError(f"it refers to itself, or is nested more than {MAX_DEPTH} deep")
        self._under_way.add(index)
        value = self._values[index]
        if isinstance(value, dict):
            value = {key: self._at(each) for key, each in value.items()}
        elif isinstance(value, list):
            is_typed = bool(value) and isinstance(value[0], str)
            value = self._typed(value[0], value[1:]) if is_typed else self._list(value)
        self._under_way.discard(index)
        self._read[index] = value
        return value

    def _list(self, value: list[Any]) -> list[Any]:
        if value and value[0] == -7:
            raise ValueError("it has a list with holes, which cannot be shown")
        return [self._at(each) for each in value]

    def _typed(self, name: str, parts: list[Any]) -> Any:
        if name == "Map":
            return self._map(parts)
        if name == "Set":
            return self._set(parts)
        if name == "null":
            return {str(key): self._at(each) for key, each in zip(parts[::2], parts[1::2], strict=True)}
        value: Any = self._carried(parts[0]) if parts else None
        if name == "Date":
            return None if value == _EMPTY else datetime.fromisoformat(value)
        if name == "BigInt":
            return int(value)
        if name == "URL":
            return value
        if name == "Object":
            return value
        if name in _BYTES:
            return (
                value if isinstance(value, bytes) else base64.b64decode("" if value == _EMPTY else value, validate=True)
            )
        if name.endswith(("Error", "Exception")) and isinstance(value, dict):
            return {"name": name, **value}
        raise ValueError(f"it has a value of type {name!r:.60}, which cannot be shown")

    def _set(self, parts: list[Any]) -> Any:
        carried = self._carried(parts[0]) if len(parts) == 1 else None
        return carried if isinstance(carried, list) else [self._at(each) for each in parts]

    def _carried(self, part: Any) -> Any:
        return self._at(part) if type(part) is int else part

    def _map(self, parts: list[Any]) -> Any:
        if len(parts) == 1:
            pairs = self._carried(parts[0])
        else:
            pairs = [[self._at(key), self._at(each)] for key, each in zip(parts[::2], parts[1::2], strict=True)]
        return dict(pairs) if all(isinstance(key, str) for key, _ in pairs) else pairs


def dumps(value: Any) -> bytes:
    """Return the payload of a value. Raises ValueError for what has no place in it."""
    values: list[Any] = []
    root = _Writer(values).put(value)
    flat = root if root < 0 else values
    return PREFIX + json.dumps(flat, ensure_ascii=False, separators=(",", ":")).encode()


class _Writer:
    def __init__(self, values: list[Any]) -> None:
        self._values = values
        self._depth = 0

    def put(self, value: Any) -> int:
        """Append a value, and return its index."""
        if isinstance(value, float) and not math.isfinite(value):
            return -3 if math.isnan(value) else -4 if value > 0 else -5
        index = len(self._values)
        self._values.append(None)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        self._values[index] = self._form(value)
        self._depth -= 1
        return index

    def _form(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | str | float):
            return value
        if isinstance(value, int):
            return value if -_SAFE < value < _SAFE else ["BigInt", self.put(str(value))]
        if isinstance(value, datetime):
            moment = (value if value.tzinfo else value.replace(tzinfo=UTC)).astimezone(UTC)
            return ["Date", self.put(moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"))]
        if isinstance(value, bytes):
            return ["Uint8Array", self.put(base64.b64encode(value).decode() or _EMPTY)]
        if isinstance(value, list | tuple):
            return [self.put(each) for each in value]
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {key: self.put(each) for key, each in value.items()}
        raise ValueError(f"a payload cannot carry {type(value).__name__}: expected JSON types, a datetime or bytes")
