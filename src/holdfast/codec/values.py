"""Values to what msgspec reads and writes natively plus extensions, and back: one writer and one reader."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.msgpack import Ext

from holdfast.codec.classes import BUILTIN_BASES, Shape, fields_of, is_model, put_together, take_apart, type_name
from holdfast.codec.extensions import LEAF_READERS, LEAF_WRITERS, Code, Refused, pack
from holdfast.codec.payloads import Large, Shelf
from holdfast.codec.secret import Secret
from holdfast.errors import NotDecodable

MAX_DEPTH = 200
PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_SURROGATE = "contains a lone surrogate, which UTF-8 cannot hold; store bytes, or decode with errors='replace'"


class Opaque(NamedTuple):
    """A value as it is written, for code that need not know its class."""

    code: int
    data: bytes


class Writer:
    """Turn values into what msgspec writes natively, plus `Ext`."""

    def __init__(self, shapes: dict[type, Shape], *, careful: bool) -> None:
        self.careful = careful
        self.shapes = shapes
        self.containers: dict[type, Callable[[Any, int], Any]] = {
            list: self.items,
            dict: self._dict,
            tuple: lambda value, depth: Ext(Code.TUPLE, pack(self.items(value, depth))),
            set: self._set,
            frozenset: self._set,
            Secret: lambda value, depth: Ext(Code.SECRET, pack([self.plain(value.reveal(), depth)])),
        }

    def plain(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return self._checked(value) if self.careful else value
        if kind is Large:
            return value.ext
        if kind is Opaque:
            return Ext(value.code, value.data)
        if kind in LEAF_WRITERS:
            code, payload_of = LEAF_WRITERS[kind]
            try:
                return Ext(code, payload_of(value))
            except UnicodeEncodeError:
                raise Refused(_SURROGATE) from None
        write = self.containers.get(kind)
        if write is None:
            if kind not in self.shapes:
                raise Refused(_why_unsupported(kind))
            write = self._enum if issubclass(kind, enum.Enum) else self._object
        if depth >= MAX_DEPTH:
            raise Refused(f"is nested more than {MAX_DEPTH} levels deep; flatten it", too_deep=True)
        return write(value, depth + 1)

    def _checked(self, value: Any) -> Any:
        if type(value) is int and not -(2**63) <= value < 2**64:
            return Ext(Code.BIGINT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
        if type(value) is str and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise Refused(_SURROGATE) from None
        return value

    def items(self, values: Sequence[Any], depth: int) -> Sequence[Any]:
        if not self.careful and PLAIN.issuperset(map(type, values)):
            return values
        done: list[Any] = []
        try:
            for item in values:
                done.append(self.plain(item, depth))
        except Refused as refused:
            refused.steps.append((values, f"[{len(done)}]"))
            raise
        return done

    def _dict(self, value: dict[Any, Any], depth: int) -> object:
        if not self.careful and PLAIN.issuperset(map(type, value)) and PLAIN.issuperset(map(type, value.values())):
            return value
        keys, items, key = [], [], None
        try:
            for key, item in value.items():
                keys.append(self.plain(key, depth))
                items.append(self.plain(item, depth))
        except Refused as refused:
            shown = f"{key!r:.80}" if type(key) in PLAIN else f"<{type(key).__name__}>"
            refused.steps.append((value, f"[{shown}]" if len(keys) > len(items) else f"[key {shown}]"))
            raise
        if PLAIN.issuperset(map(type, keys)):
            return dict(zip(keys, items, strict=True))
        return Ext(Code.MAP, pack([part for pair in zip(keys, items, strict=True) for part in pair]))

    def _set(self, value: set[Any] | frozenset[Any], depth: int) -> object:
        try:
            packed = sorted([pack(self.plain(item, depth)) for item in value])
        except Refused as refused:
            refused.steps.append((value, "{…}"))
            raise
        return Ext(Code.SET if type(value) is set else Code.FROZENSET, pack([msgspec.Raw(item) for item in packed]))

    def _enum(self, value: enum.Enum, _depth: int) -> object:
        cls = type(value)
        if not isinstance(value, enum.Flag) and cls.__members__.get(value.name) is not value:
            raise Refused(f"is not a declared member of {type_name(cls)}")
        return Ext(
            Code.ENUM, pack((self.shapes[cls].name, value.value if isinstance(value, enum.Flag) else value.name))
        )

    def _object(self, value: Any, depth: int) -> object:
        shape, name, fields = self.shapes[type(value)], "", dict[str, Any]()
        try:
            raw, state = take_apart(value, shape.defaults)
            for name, item in raw.items():
                fields[name] = self.plain(item, depth)
            name = ""  # extra and private attributes carry their names as dict keys
            state = state and [self.plain(item, depth) for item in state]
        except Refused as refused:
            refused.steps.append((value, name and f".{name}"))
            raise
        return Ext(Code.OBJECT, pack((shape.name, fields, state)))


def _why_unsupported(cls: type) -> str:
    name = type_name(cls)
    if issubclass(cls, BaseException):
        return f"is the exception {name}; an exception is raised, not stored: store its text or its args"
    if fields_of(cls) is not None:
        return f"is a {name}, which is not registered; call app.register({cls.__name__}), or annotate the task with it"
    for base in cls.__mro__[1:]:
        if base in BUILTIN_BASES or base in LEAF_WRITERS:
            return f"is a {name}, which would come back as a plain {base.__name__}; convert it to {base.__name__}"
    return f"is of the type {name}, which cannot be stored; pass plain data, a dataclass, or an id to look it up by"


class Reader:
    """One decoding. msgspec calls `hook` for each extension; what that holds is decoded from its payload in turn."""

    __slots__ = ("depth", "shapes", "shelf")

    def __init__(self, shapes: dict[str, Shape], shelf: Shelf | None = None) -> None:
        self.shapes, self.shelf, self.depth = shapes, shelf, 0

    def hook(self, code: int, data: memoryview) -> object:
        leaf = LEAF_READERS.get(code)
        if leaf is not None:
            return leaf(data)
        if self.depth >= MAX_DEPTH:
            raise NotDecodable(f"nested more than {MAX_DEPTH} levels deep")
        self.depth += 1
        body = msgspec.msgpack.decode(data, ext_hook=self.hook)
        self.depth -= 1
        build = _CONTAINER_READERS.get(code)
        if build is None or type(body) is not list:
            raise NotDecodable(f"extension {code} is unknown or damaged; was it written by a newer Holdfast?")
        return build(self, body)

    def enum(self, body: list[Any]) -> object:
        name, member = body
        cls = self._shape(name, is_enum=True).cls
        if type(member) is int and issubclass(cls, enum.Flag):
            return cls(member)
        if member not in cls.__members__:
            raise NotDecodable(f"{name} has no member {member!r:.80}")
        return cls.__members__[member]

    def object(self, body: list[Any]) -> object:
        name, fields, state = body
        shape = self._shape(name, is_enum=False)
        for unknown in fields.keys() - shape.defaults:
            raise NotDecodable(f"{name} has no field {unknown!r:.80}, but the stored value has")
        for field, default in shape.defaults.items():
            if default is None and field not in fields:
                raise NotDecodable(f"{name} needs the field {field!r}, which the stored value lacks; give it a default")
        if state is not None and not is_model(shape.cls):
            raise NotDecodable(f"{name} was a pydantic model when it was stored, and is none now")
        return put_together(shape, fields, state)

    def payload(self, body: list[Any]) -> Any:
        """Return a value that is stored apart. It holds no further references."""
        index, is_value = body
        if self.shelf is None or type(index) is not int:
            raise NotDecodable("stored bytes refer to a payload where there can be none")
        data = self.shelf.find(index)
        if is_value or isinstance(data, str):
            return data
        inner = type(self)(self.shapes)
        inner.depth = self.depth
        return msgspec.msgpack.decode(data, ext_hook=inner.hook)

    def _shape(self, name: str, *, is_enum: bool) -> Shape:
        shape = self.shapes.get(name)
        if shape is None:
            raise NotDecodable(f"the class {name!r:.80} is not registered; call app.register() with it before reading")
        if issubclass(shape.cls, enum.Enum) is not is_enum:
            raise NotDecodable(f"{name} was an enum when it was stored and is none now, or the other way round")
        return shape


_CONTAINER_READERS: dict[int, Callable[[Reader, list[Any]], object]] = {
    Code.TUPLE: lambda _, body: tuple(body),
    Code.SET: lambda _, body: set(body),
    Code.FROZENSET: lambda _, body: frozenset(body),
    Code.MAP: lambda _, body: dict(zip(body[::2], body[1::2], strict=True)),
    Code.ENUM: Reader.enum,
    Code.OBJECT: Reader.object,
    Code.PAYLOAD: Reader.payload,
    Code.SECRET: lambda _, body: Secret(*body),
}


def is_call(value: Any) -> bool:
    """Return whether a decoded value has the form of a call's arguments."""
    if type(value) is not list or [type(part) for part in value] != [list, dict]:
        return False
    return {str}.issuperset(map(type, value[1]))
